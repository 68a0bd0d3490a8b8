"""Reading DeepSpeed's configuration."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

import imece
from imece.cli.convert import script
from imece.errors import UserError
from imece.foreign.deepspeed import _USUAL
from imece.foreign.settings import OptimizerSettings, ScalerSettings, ScheduleSettings, Settings
from imece.foreign.training import train_toml

# As the documentation of Hugging Face's Trainer has them, of each kind of value one at least.
WHOLE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "train_batch_size": "auto",
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zero_quantized_gradients": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": 3e-5, "betas": [0.9, 0.95], "eps": "1e-8", "weight_decay": 0.1, "bias_correction": True
        },
    },
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 900, "warmup_num_steps": 100}},
    "sparse_attention": {"mode": "fixed"},
    "bananas": 1,
}  # fmt: skip


def read(ranks: int | None = None, **content: Any) -> Settings:
    return imece.read_settings({"zero_optimization": {}} | content, ranks)


def fates(settings: Settings) -> dict[str, str]:
    return {each.name: each.fate for each in settings.values}


def test_a_whole_one() -> None:
    found = imece.read_settings(WHOLE, ranks=8)
    assert (found.source, found.strategy, found.dtype, found.reduce) == ("DeepSpeed", "zero3", "bf16", None)
    assert (found.micro_batch, found.accumulation, found.global_batch) == (2, 4, 64)
    assert found.offload == "optimizer" and found.clip == 0.5 and found.ranks == 8
    assert found.optimizer == OptimizerSettings("AdamW", 3e-5, (0.9, 0.95), 1e-8, 0.1)
    assert found.schedule == ScheduleSettings("cosine", 100, 900, 1e-4)
    bf16 = imece.MixedPrecision(torch.bfloat16, torch.bfloat16)
    assert found.arguments() == {
        "strategy": "zero3", "precision": bf16, "wire": "int8", "offload": "optimizer"
    }  # fmt: skip
    assert 'wire = "int8"' in train_toml(found)


def test_each_value_has_one_fate_in_the_order_of_the_file() -> None:
    values = imece.read_settings(WHOLE, ranks=8).values
    assert [each.name for each in values] == [
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size",
        "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "bf16.enabled", "fp16.enabled",
        "fp16.loss_scale", "zero_optimization.stage", "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.zero_quantized_gradients", "optimizer.type", "optimizer.params.lr",
        "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
        "optimizer.params.bias_correction", "scheduler.type", "scheduler.params.total_num_steps",
        "scheduler.params.warmup_num_steps", "sparse_attention.mode", "bananas",
    ]  # fmt: skip
    left = {each.name: each.text for each in values if each.fate == "left out"}
    assert left == {
        "optimizer.params.bias_correction": "an argument of torch.optim.AdamW, if it has it",
        "sparse_attention.mode": "attention is the model's own",
        "bananas": "not known",
    }


@pytest.mark.parametrize(("stage", "strategy"), list(enumerate(["replicate", "zero1", "zero2", "zero3"])))
def test_stages(stage: int, strategy: str) -> None:
    assert read(zero_optimization={"stage": stage}).strategy == strategy


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 3, "mics_shard_size": 8}, "hybrid"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "hybrid"),
        ({"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1}, "zero3"),
        ({"stage": 2, "mics_shard_size": 8}, "zero2"),
    ],
)
def test_shards_within_a_host(zero: dict[str, Any], strategy: str) -> None:
    assert read(zero_optimization=zero).strategy == strategy


@pytest.mark.parametrize(
    ("ranks", "strategy", "hosts"), [(None, "hybrid", 1), (2, "zero3", 1), (4, "zero3", 1), (8, "hybrid", 2)]
)
def test_ranks_of_a_host_say_how_many_there_are(ranks: int | None, strategy: str, hosts: int) -> None:
    found = read(ranks, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4})
    assert (found.strategy, found.hosts, found.host_rank) == (strategy, hosts, 0 if hosts > 1 else None)


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/fast"}}, "optimizer"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "parameters"),
        ({"offload_param": {"device": "none"}}, None),
        ({"cpu_offload": True}, "optimizer"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, None),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "optimizer",
        ),
    ],
)
def test_offload(zero: dict[str, Any], offload: str | None) -> None:
    assert read(zero_optimization={"stage": 3, **zero}).offload == offload


@pytest.mark.parametrize(
    ("content", "dtype", "arguments"),
    [
        ({}, "fp32", {"strategy": "zero2"}),
        (
            {"fp16": {"enabled": True}, "communication_data_type": "fp32"},
            "fp16",
            {"strategy": "zero2", "precision": imece.MixedPrecision(torch.float16, torch.float32)},
        ),
        (
            {"communication_data_type": "bf16"},
            "fp32",
            {"strategy": "zero2", "precision": imece.MixedPrecision(None, torch.bfloat16)},
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "bf16",
            {"strategy": "zero2", "precision": imece.MixedPrecision(None, torch.bfloat16)},
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "bf16",
            {"strategy": "zero2", "precision": imece.MixedPrecision(torch.bfloat16, torch.float32)},
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            "bf16",
            {"strategy": "zero2", "precision": imece.MixedPrecision(torch.bfloat16, torch.bfloat16)},
        ),
    ],
)
def test_dtypes(content: dict[str, Any], dtype: str, arguments: dict[str, Any]) -> None:
    found = imece.read_settings({"zero_optimization": {"stage": 2}, **content})
    assert found.dtype == dtype and found.arguments() == arguments


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 2}}, "torch.autocast in bf16"),
        ({"bf16": {"enabled": True}}, "torch.autocast in bf16"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "parameters in bf16"),
    ],
)
def test_the_report_and_the_script_agree_on_autocast(content: dict[str, Any], said: str) -> None:
    found = imece.read_settings(content)
    assert said in next(each.text for each in found.values if each.name.endswith(".enabled"))
    wanted = "# forward and loss in torch.autocast(mesh.device.type, torch.bfloat16)"
    assert (wanted in script(found)) == (said == "torch.autocast in bf16")


def test_bf16_on_the_wire_of_whole_models() -> None:
    found = read(communication_data_type="bf16")
    assert found.arguments() == {"strategy": "replicate", "wire": "bf16"}
    assert 'wire = "bf16"' in train_toml(found)


@pytest.mark.parametrize(
    ("content", "ranks", "batch"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, (2, 4, 64)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (2, 4, 64)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, None, (2, None, 64)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 2, (3, 5, 30)),
        ({"train_micro_batch_size_per_gpu": 3}, 2, (3, 1, 6)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}, 2, (3, None, None)),
        ({"train_batch_size": "auto"}, 2, (None, None, None)),
    ],
)
def test_batches(content: dict[str, Any], ranks: int | None, batch: tuple[int | None, ...]) -> None:
    found = read(ranks, **content)
    assert (found.micro_batch, found.accumulation, found.global_batch) == batch


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ({"type": "Adam", "params": {}}, "AdamW"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"type": "Muon", "params": {"lr": 0.02}}, "Muon"),
        ({"type": "Lamb", "params": {"lr": 0.02}}, None),
        ({}, None),
    ],
)
def test_optimizers(optimizer: dict[str, Any], name: str | None) -> None:
    found = read(optimizer=optimizer)
    assert (found.optimizer.name if found.optimizer else None) == name
    assert name is None or hasattr(torch.optim, name)
    if name is None and optimizer:
        assert set(fates(found).values()) == {"left out"}


ADAM = ((0.9, 0.999), 1e-8)


@pytest.mark.parametrize(
    ("kind", "params", "settings"),
    [
        ("AdamW", {"lr": 3e-4}, OptimizerSettings("AdamW", 3e-4, *ADAM, 0.0)),
        ("Adam", {"eps": None, "weight_decay": 0.1}, OptimizerSettings("AdamW", 1e-3, *ADAM, 0.1)),
        ("AdamW", {"torch_adam": True}, OptimizerSettings("AdamW", 1e-3, *ADAM, 0.01)),
        ("AdamW", dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"), OptimizerSettings("AdamW")),
        ("Muon", {"betas": [0.8, 0.9]}, OptimizerSettings("Muon", 0.02, weight_decay=0.0)),
        ("Adagrad", {}, OptimizerSettings("Adagrad", 1e-2, None, 1e-10, 0.0)),
        ("SGD", {"momentum": 0.9}, OptimizerSettings("SGD", 1e-3, weight_decay=0.0)),
    ],
)
def test_what_deepspeed_takes_where_a_file_says_nothing(
    kind: str, params: dict[str, Any], settings: OptimizerSettings
) -> None:
    """Not what torch does; and nothing of what a Trainer says."""
    assert read(optimizer={"type": kind, "params": params}).optimizer == settings


@pytest.mark.parametrize(
    ("kind", "params", "settings", "said"),
    [
        (
            "WarmupCosineLR",
            {"total_num_steps": 100},
            ScheduleSettings("cosine", 1000, 100, 1e-4),
            "cosine after a warm-up of 1,000 steps in a line; DeepSpeed's is logarithmic, unless warmup_type",
        ),
        (
            "WarmupDecayLR",
            {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"},
            ScheduleSettings("linear", 10, 100, 0.0),
            "linear after a warm-up of 10 steps in a line",
        ),
        (
            "WarmupLR",
            {"warmup_num_steps": "auto", "warmup_type": "linear"},
            ScheduleSettings("constant"),
            "constant after a warm-up of its Trainer's steps in a line",
        ),
    ],
)
def test_schedules(kind: str, params: dict[str, Any], settings: ScheduleSettings, said: str) -> None:
    found = read(scheduler={"type": kind, "params": params})
    assert found.schedule == settings
    told = {each.name: each for each in found.values}
    assert told["scheduler.type"].text.startswith(said)
    assert "left out" not in fates(found).values()
    other = read(scheduler={"type": kind, "params": {**params, "warmup_type": "log"}})
    assert fates(other)["scheduler.params.warmup_type"] == "left out"


@pytest.mark.parametrize(
    ("kind", "params", "lr"),
    [
        ("WarmupLR", {"warmup_max_lr": 3e-4}, 3e-4),
        ("WarmupLR", {}, 1e-5),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 1e-5),
        ("WarmupDecayLR", {"warmup_max_lr": 3e-4}, 3e-4),
        ("WarmupDecayLR", {}, 1e-3),
        ("WarmupCosineLR", {"warmup_max_lr": 3e-4}, 1e-5),
    ],
)
def test_a_scheduler_that_says_the_rate_is_followed(kind: str, params: dict[str, Any], lr: float) -> None:
    """As in DeepSpeed, where these write over that of the optimizer."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-5}}
    found = read(optimizer=optimizer, scheduler={"type": kind, "params": {"total_num_steps": 9, **params}})
    assert found.optimizer is not None and found.optimizer.lr == lr
    assert fates(found)["optimizer.params.lr"] == ("taken" if lr == 1e-5 else "needless")
    without = read(scheduler={"type": kind, "params": params})
    assert without.optimizer is None and fates(without).get("scheduler.params.warmup_max_lr") != "taken"


def test_the_scale_of_fp16() -> None:
    said = {"loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 500, "hysteresis": 2}
    found = read(fp16={"enabled": True, **said})
    assert found.scaler == ScalerSettings(256.0, 500)
    torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=500)
    assert [each.name for each in found.values if each.fate == "left out"] == ["fp16.hysteresis"]
    assert read(fp16={"enabled": True}).scaler == ScalerSettings(65536.0, 1000)
    fixed = read(fp16={"enabled": True, "loss_scale": 128, "auto_cast": True})
    assert fixed.scaler == ScalerSettings(128.0, 1000)
    assert fates(fixed)["fp16.loss_scale"] == fates(fixed)["fp16.auto_cast"] == "left out"
    off = read(fp16={"enabled": False, **said})
    assert off.scaler is None and set(fates(off).values()) == {"needless"}


def test_offload_of_a_share_is_told() -> None:
    for ratio, fate in ((1.0, "needless"), (0.3, "left out")):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
        assert fates(read(zero_optimization=zero))["zero_optimization.offload_optimizer.ratio"] == fate


def test_each_argument_is_one_of_torchs() -> None:
    """Or the line for a script would be a mistake."""
    for name, usual in _USUAL.items():
        assert usual.keys() <= inspect.signature(getattr(torch.optim, name)).parameters.keys()


def test_other_kinds_of_parallelism_are_elsewhere() -> None:
    content: dict[str, Any] = {
        "tensor_parallel": {"autotp_size": 2}, "pipeline": {"stages": 2}, "sequence_parallel_size": 2,
    }  # fmt: skip
    texts = [each.text for each in read(**content).values]
    for text, name in zip(texts, ("tensor", "pipeline", "context"), strict=True):
        assert f"--mesh.{name}" in text
        assert [hasattr(imece, each) for each in re.findall(r"imece\.(\w+)", text)] == [True]


def test_what_is_off_was_not_asked_for() -> None:
    content = {"sparse_attention": False, "amp": {"enabled": False}, "elasticity": {"enabled": True}}
    found = imece.read_settings({"zero_optimization": {}, **content})
    assert set(fates(found).values()) == {"needless"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"stage": "three"}}, r"zero_optimization.stage is 'three': a number"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization.stage is 4: 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 1.5}},
            r"zero_optimization.stage is 1.5: a whole number of at least 0",
        ),
        ({"zero_optimization": {"stage": True}}, r"zero_optimization.stage is True: a number"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            r"offload needs a stage of 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
            r"device is 'disk': none, cpu or",
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": "true"}},
            r"bf16 and fp16 are both enabled: choose one",
        ),
        ({"bf16": {"enabled": "maybe"}}, r"bf16.enabled is 'maybe': true or false"),
        ({"gradient_clipping": float("nan")}, r"gradient_clipping is nan: a number"),
        ({"communication_data_type": "int8"}, r"communication_data_type is 'int8': fp32, bf16 or fp16"),
        ({"torch_autocast": {"dtype": "int8"}}, r"torch_autocast.dtype is 'int8': bfloat16 or float16"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
            r"betas is \[0.9\]: a list of 2 numbers",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [True, 0.9]}}},
            r"\[True, 0.9\]: a list of 2 num",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 5000}},
            r"initial_scale_power is 5000: at most 127",
        ),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, r"loss_scale is -1: a number of at least 0"),
        (
            {"zero_optimization": {"stage": {"is": 3}}},
            r"zero_optimization.stage has .*stage.is: a value is wan",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, r"is 0: a whole number of at least 1"),
        ({"train_batch_size": 7}, r"train_batch_size is 7: 2 ranks cannot share it evenly: say others with"),
        ({"zero_optimization": True}, r"zero_optimization is True: a section with values of its own is want"),
        ({"bf16": "yes"}, r"bf16 is 'yes': a section with values of its own is wanted"),
        ({"optimizer": "AdamW"}, r"optimizer is 'AdamW': a section with values of its own is wanted"),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 4}, "ranks": 6},
            r"mics_shard_size is 4: 6 ranks are no whole number of such hosts",
        ),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            r"no number of ranks makes it of train_micro_batch_size_per_gpu 2: change one",
        ),
        (
            {
                "train_batch_size": 12,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            r"12, and micro-batch 2 x 2 accumulated x 2 ranks is 8: it is that with --ranks 3$",
        ),
        (
            {
                "train_batch_size": 30,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 3,
                "ranks": None,
            },
            r"train_batch_size is 30: no number of ranks makes it of train_micro_batch_size_per_gpu 4 x "
            r"gradient_accumulation_steps 3: change one",
        ),
    ],
)
def test_what_cannot_be(content: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(**{"ranks": 2, **content})


@pytest.mark.parametrize("ranks", [0, "2"])
def test_ranks_that_are_no_number(ranks: Any) -> None:
    with pytest.raises(UserError, match=f"ranks={ranks!r}: a whole number, 1 or more"):
        imece.read_settings(WHOLE, ranks)


def test_a_section_that_is_off() -> None:
    found = imece.read_settings({"train_batch_size": 8.0, "zero_optimization": False, "fp16": False})
    assert (found.strategy, found.dtype, found.global_batch) == ("replicate", "fp32", 8)
    assert fates(found)["zero_optimization"] == fates(found)["fp16"] == "needless"


def test_a_near_name() -> None:
    values = read(zero_optimization={"stage": 1, "overlap_com": True}, gradient_cliping=1.0).values
    assert [(each.name, each.text) for each in values if each.fate == "left out"] == [
        ("zero_optimization.overlap_com", "not known; did you mean zero_optimization.overlap_comm?"),
        ("gradient_cliping", "not known; did you mean gradient_clipping?"),
    ]


def test_no_clipping_by_what_is_below_0() -> None:
    assert [read(gradient_clipping=by).clip for by in (-1, 0, 0.5)] == [0, 0, 0.5]


def test_sums_of_gradients_are_told() -> None:
    found = [fates(read(gradient_allreduce_op=how)) for how in ("mean", "sum")]
    assert [each["gradient_allreduce_op"] for each in found] == ["needless", "left out"]


def test_all_of_deepspeeds_own_names_are_known() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = config.DeepSpeedZeroConfig.model_fields
    names = {each for name, field in fields.items() for each in (name, field.alias) if each} - {"stage"}
    found = read(zero_optimization={"stage": 3, **dict.fromkeys(names, 0), "offload_param": {}})
    unknown = [each.name for each in found.values if each.text.startswith("not known")]
    assert not unknown


def test_two_ranks_train_by_it() -> None:
    """As by the arguments that it stands for."""

    def losses(how: dict[str, Any]) -> list[float]:
        imece.init()
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
        made = torch.optim.AdamW(model.parameters(), lr=0.05)
        wrapped, optimizer = imece.parallelize(model, made, **how)
        found = []
        for step in range(3):
            loss = wrapped(torch.full((4, 8), 0.1 * (step + 1), dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    content = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    read_from = imece.read_settings(content, ranks=2).arguments()
    precision = imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16)
    by_it = imece.spawn(lambda: losses(read_from), ranks=2, timeout_s=200)
    by_hand = imece.spawn(
        lambda: losses({"strategy": "zero3", "precision": precision}), ranks=2, timeout_s=200
    )
    assert by_it == by_hand and by_it[0][0] > by_it[0][2]
