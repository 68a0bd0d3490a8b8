"""Reading Accelerate's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import imece
from imece.errors import UserError
from imece.foreign.settings import Settings
from imece.foreign.training import train_toml

yaml = pytest.importorskip("yaml")

FSDP: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_transformer_layer_cls_to_wrap": "Block, Linear",
        "fsdp_version": 2,
    },
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "use_cpu": False,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)


def of(kind: str, **content: Any) -> Settings:
    return imece.read_settings({"distributed_type": kind, **content})


def test_fsdp() -> None:
    found = imece.read_settings(FSDP)
    assert (found.source, found.strategy, found.dtype, found.recompute) == (
        "Accelerate",
        "zero3",
        "bf16",
        True,
    )
    assert (found.ranks, found.hosts, found.host_rank, found.rendezvous) == (16, 2, 1, "10.0.0.1:29500")
    assert found.unit_classes == ("Block", "Linear")
    assert '\n\n[compute]\ndtype = "bf16"\nrecompute = true\n' in train_toml(found)
    assert {each.fate for each in found.values} == {"taken", "needless"}
    model = nn.Sequential(Block(), Block())
    precision = imece.MixedPrecision(torch.bfloat16, torch.bfloat16)
    arguments = {"strategy": "zero3", "precision": precision, "units": [Block, nn.Linear]}
    assert found.arguments(model) == arguments


def test_classes_are_looked_for_in_the_model() -> None:
    found = imece.read_settings(FSDP)
    with pytest.raises(
        UserError, match=r"names the classes Block, Linear: arguments\(model\) looks for them"
    ):
        found.arguments()
    said = "wants units of the class Block, and Sequential has no such module; it has Linear, Sequential"
    with pytest.raises(UserError, match=said):
        found.arguments(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("fsdp", "arguments"),
    [
        ({}, {"strategy": "zero3"}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"strategy": "zero2"}),
        ({"fsdp_sharding_strategy": 4}, {"strategy": "hybrid"}),
        ({"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2"}, {"strategy": "hybrid_zero2"}),
        ({"fsdp_reshard_after_forward": "NO_SHARD"}, {"strategy": "replicate"}),
        ({"fsdp_reshard_after_forward": False}, {"strategy": "zero3", "reshard_after_forward": False}),
        ({"fsdp_offload_params": True}, {"strategy": "zero3", "offload": "parameters"}),
        (
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1e8},
            {"strategy": "zero3", "units": 100_000_000},
        ),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_min_num_params": 0}, {"strategy": "zero3"}),
    ],
)
def test_kinds_of_fsdp(fsdp: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert of("FSDP", fsdp_config=fsdp, num_machines=2).arguments() == arguments


@pytest.mark.parametrize(
    ("content", "strategy"),
    [
        ({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "zero3"),
        ({"fsdp_config": {"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"}}, "zero2"),
    ],
)
def test_on_one_host_its_ranks_are_all(content: dict[str, Any], strategy: str) -> None:
    assert of("FSDP", **content).strategy == strategy


def test_hosts_are_those_of_its_own_file(tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text(json.dumps({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}))
    for hosts, strategy in ((1, "zero3"), (2, "hybrid")):
        config = {"deepspeed_config_file": str(ds)}
        found = of("DEEPSPEED", deepspeed_config=config, num_machines=hosts, num_processes=8)
        assert (found.strategy, found.hosts) == (strategy, hosts)


def test_other_kinds_of_parallelism_are_elsewhere() -> None:
    for asked in ({"parallelism_config": {"parallelism_config_tp_size": 2}}, {"tp_config": {"tp_size": 2}}):
        assert "--mesh.tensor" in of("MULTI_GPU", **asked).values[-1].text


@pytest.mark.parametrize(
    ("content", "ranks"),
    [
        ({"distributed_type": "NO"}, 1),
        ({"distributed_type": False}, 1),  # NO without quotes
        ({"distributed_type": "MULTI_GPU"}, None),
        ({"distributed_type": "MULTI_GPU", "num_processes": 4}, 4),
        (
            {
                "distributed_type": "MULTI_CPU",
                "num_processes": -1,
                "dynamo_config": {"dynamo_backend": "INDUCTOR"},
            },
            None,
        ),
    ],
)
def test_whole_models(content: dict[str, Any], ranks: int | None) -> None:
    found = imece.read_settings({**content, "mixed_precision": "fp16"})
    assert (found.strategy, found.ranks, found.dtype) == ("replicate", ranks, "fp16")
    assert found.arguments() == {"strategy": "replicate"}
    assert found.compile == ("dynamo_config" in content) == ("compile = true\n" in train_toml(found))


def test_deepspeed_by_its_few_values() -> None:
    few = {
        "zero_stage": 3,
        "offload_param_device": "cpu",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
    }
    found = of("DEEPSPEED", deepspeed_config=few, mixed_precision="bf16", num_processes=2)
    assert (found.strategy, found.offload, found.dtype) == ("zero3", "parameters", "bf16")
    assert (found.accumulation, found.clip) == (4, 1.0)
    assert all(each.fate == "taken" for each in found.values), found.values


def test_deepspeed_by_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 8}))
    file = tmp_path / "acc.yaml"
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    file.write_text(yaml.safe_dump(content))
    found = imece.read_settings(file, ranks=2)
    assert (found.strategy, found.global_batch, found.source) == ("zero1", 8, "Accelerate")
    (tmp_path / "ds.json").unlink()
    with pytest.raises(UserError, match=r"ds.json, which .*acc.yaml names: cannot be read \(No such file"):
        imece.read_settings(file)
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(UserError, match=r"ds.json, which .*acc.yaml names: not JSON"):
        imece.read_settings(file)
    (tmp_path / "ds.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"ds.json, which .*acc.yaml names: not a text file"):
        imece.read_settings(file)


def test_its_file_is_looked_for_where_one_is_and_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    content = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "conf/ds.json"}}
    (tmp_path / "conf/acc.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "conf/ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    monkeypatch.chdir(tmp_path)
    assert imece.read_settings("conf/acc.yaml").strategy == "zero1"
    beside = tmp_path / "conf/conf"
    beside.mkdir()
    (beside / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert imece.read_settings("conf/acc.yaml").strategy == "zero1"  # as Accelerate
    monkeypatch.chdir("/")
    assert imece.read_settings(tmp_path / "conf/acc.yaml").strategy == "zero2"


@pytest.mark.parametrize("auto", [{}, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}])
def test_its_precision_is_that_of_a_file_that_leaves_it_open(tmp_path: Path, auto: dict[str, Any]) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **auto}))
    few = {"deepspeed_config_file": str(tmp_path / "ds.json"), "gradient_clipping": 1.0}
    found = of("DEEPSPEED", deepspeed_config=few, mixed_precision="bf16")
    assert found.arguments()["precision"] == imece.MixedPrecision(torch.bfloat16, torch.bfloat16)
    text = {each.name: each.text for each in found.values}
    assert text["deepspeed_config.gradient_clipping"] == f"what {tmp_path}/ds.json says counts"


def test_its_precision_beside_a_file_that_says_another(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 2, "bf16": {"enabled": True}}))
    config = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    with pytest.raises(UserError, match=r"mixed_precision is fp16, and .*ds.json says bf16: choose one"):
        of("DEEPSPEED", deepspeed_config=config, mixed_precision="fp16")
    found = of("DEEPSPEED", deepspeed_config=config, mixed_precision="no")
    assert found.dtype == "bf16"
    assert {each.name: each.fate for each in found.values}["mixed_precision"] == "needless"


def test_units_of_whole_parameters_are_not_taken() -> None:
    sized = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}
    found = of("FSDP", fsdp_config={"fsdp_sharding_strategy": "SHARD_GRAD_OP", **sized})
    fates = {each.name: each.fate for each in found.values}
    assert {fates[f"fsdp_config.{name}"] for name in sized} == {"needless"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fsdp_config: &a\n  fsdp_version: *a\n", "a section holds itself"),
        ("num_processes: 2\nnum_processes: 4\n", "num_processes is there twice"),
        ("fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n", "fsdp_version is there twice"),
    ],
)
def test_yaml_that_says_no_one_thing(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text(f"distributed_type: FSDP\n{text}")
    with pytest.raises(UserError, match=f"acc.yaml: {said}"):
        imece.read_settings(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type is 'MEGATRON_LM': one of NO, MULTI_CPU"),
        (
            {"compute_environment": "AMAZON_SAGEMAKER"},
            "compute_environment is 'AMAZON_SAGEMAKER': LOCAL_MACHINE",
        ),
        (
            {"distributed_type": "NO", "mixed_precision": "int4"},
            "mixed_precision is 'int4': no, fp16, bf16 or fp8",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 9}},
            "is 9: one of FULL_SHARD",
        ),
        ({"distributed_type": "NO", "num_machines": "two"}, "num_machines is 'two': a number"),
    ],
)
def test_what_cannot_be(content: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        imece.read_settings(content)


def test_what_accelerate_itself_writes(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="FSDP", mixed_precision="bf16", use_cpu=False,
        debug=False, num_processes=4, fsdp_config=FSDP["fsdp_config"],
    )  # fmt: skip
    config.to_yaml_file(str(tmp_path / "written.yaml"))
    found = imece.read_settings(tmp_path / "written.yaml")
    assert (found.strategy, found.ranks) == ("zero3", 4)
    assert not [each.name for each in found.values if each.text.startswith("not known")]
