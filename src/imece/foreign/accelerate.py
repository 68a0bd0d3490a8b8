"""Reads Accelerate's configuration, as `accelerate config` writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.foreign import deepspeed
from imece.foreign.reading import AUTO, Reading, Value, from_json, text_of
from imece.foreign.settings import Dtype, Settings

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
_DTYPES: dict[str, Dtype] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
_FSDP = {
    "FULL_SHARD": "zero3",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "replicate",
    "HYBRID_SHARD": "hybrid",
    "HYBRID_SHARD_ZERO2": "hybrid_zero2",
}
_ON_ONE_HOST = {"hybrid": "zero3", "hybrid_zero2": "zero2"}  # if all ranks are on one host
_NUMBERED = dict(enumerate(_FSDP, 1))  # strategies of FSDP by number
_AHEAD = "the next unit is always gathered ahead; gathers_in_flight= says how many"
_NEEDLESS = {
    "fsdp_config.fsdp_backward_prefetch": _AHEAD,
    "fsdp_config.fsdp_forward_prefetch": _AHEAD,
    "fsdp_config.fsdp_limit_all_gathers": "two gathers in flight; gathers_in_flight= says how many",
    "fsdp_config.fsdp_use_orig_params": "parameters always keep their names and are the optimizer's own",
    "fsdp_config.fsdp_sync_module_states": "rank 0's values always count",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "a model on the meta device is filled unit by unit",
    "fsdp_config.fsdp_state_dict_type": "checkpoints are sharded, and load at any number of ranks",
    "fsdp_config.fsdp_version": "there is one engine",
    "same_network": "hosts are found by --rendezvous",
    "rdzv_backend": "imece launch has a rendezvous of its own",
    "main_training_function": "the script is run as a whole",
    "debug": "calls of ranks are always checked against each other",
    "downcast_bf16": "of TPUs",
    "tpu_use_cluster": "of TPUs",
    "tpu_use_sudo": "of TPUs",
    "tpu_env": "of TPUs",
    "deepspeed_config.zero3_init_flag": "a model on the meta device is filled unit by unit",
    "deepspeed_config.zero3_save_16bit_model": "state dicts, and imece export, write whole weights",
    "deepspeed_config.deepspeed_multinode_launcher": "imece launch is given on each host",
}
_LEFT = {
    "enable_cpu_affinity": "imece launch shares the cores out, and binds nothing",
    "fp8_config": "torchao's float8 layers in your model do it",
    "parallelism_config": deepspeed.OTHER_AXES,
    "megatron_lm_config": "imece.init({...}) names the axes: docs/model-parallel.md",
    "tp_config": deepspeed.OTHER_AXES,
    "ipex_config": "Intel's extension of torch is not used",
    "mpirun_config": "imece launch starts the ranks; mpirun can too",
    "tpu_name": "of TPUs",
    "tpu_zone": "of TPUs",
    "tpu_vm": "of TPUs",
    "command_file": "of TPUs",
    "commands": "of TPUs",
    "deepspeed_config.deepspeed_hostfile": "imece launch is given on each host",
    "deepspeed_config.deepspeed_exclusion_filter": "imece launch is given on each host",
    "deepspeed_config.deepspeed_inclusion_filter": "imece launch is given on each host",
    "deepspeed_config.deepspeed_moe_layer_cls_names": "units= of imece.parallelize says what is one unit",
    "deepspeed_config.offload_optimizer_nvme_path": "nothing is swapped to NVMe",
    "deepspeed_config.offload_param_nvme_path": "nothing is swapped to NVMe",
}
_FEW = (
    "zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
    "gradient_clipping",
)  # fmt: skip
_OF_DEEPSPEED = (  # what counts of the settings that a file of DeepSpeed gives
    "strategy", "dtype", "autocast", "reduce", "quantised_gradients", "offload", "micro_batch",
    "accumulation", "global_batch", "clip", "scaler", "optimizer", "schedule",
)  # fmt: skip
_KNOWN = ("compute_environment", "distributed_type", "mixed_precision", "num_processes", "num_machines")


def is_accelerate(content: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a file of Accelerate."""
    return "distributed_type" in content or "compute_environment" in content


def read(content: Mapping[str, Any], file: str, ranks: int | None = None) -> Settings:
    """The settings that the file asks for. ranks: replaces the file's num_processes.

    Also reads the file of DeepSpeed that it names. UserError for values that are wrong, a kind of parallelism
    that imece lacks, or a file that cannot be read.
    """
    values = Reading(content, file)
    where = values.word("compute_environment")
    if where not in (None, "LOCAL_MACHINE"):
        raise values.wrong(
            "compute_environment", "LOCAL_MACHINE; what a cloud's own service starts is not read"
        )
    values.needless("compute_environment", "imece launch is given where the ranks are to run")
    kind = _word(values, "distributed_type").upper()
    own = values.whole("num_processes", -1)
    ranks = ranks or (own if own is not None and own > 0 else None) or (1 if kind == "NO" else None)
    values.take("num_processes", "ranks of all hosts together")
    found: dict[str, Any] = {"ranks": ranks}
    word = _word(values, "mixed_precision")
    found["dtype"] = _DTYPES.get(word)
    if found["dtype"] is None:
        raise values.wrong("mixed_precision", "no, fp16, bf16 or fp8")
    found |= _places(values)
    nested: tuple[Value, ...] = ()
    if kind == "FSDP":
        found |= _fsdp(values, found["hosts"])
    elif kind == "DEEPSPEED":
        by_deepspeed = _deepspeed(values, file, ranks, found["hosts"], found["dtype"])
        nested = by_deepspeed.values
        found |= {name: getattr(by_deepspeed, name) for name in _OF_DEEPSPEED}
    elif kind not in _PLAIN:
        raise values.wrong("distributed_type", f"one of {', '.join(_PLAIN)}, FSDP or DEEPSPEED")
    values.take("mixed_precision", "no mixed precision" if word == "no" else f"products in {found['dtype']}")
    values.take("distributed_type", f'strategy "{found.get("strategy", "replicate")}"')
    if _word(values, "dynamo_config.dynamo_backend") != "no":
        found["compile"] = True
        values.take("dynamo_config.dynamo_backend", "imece.compile_blocks(model, backend=...)")
    values.needless("dynamo_config.dynamo_backend", "not asked for")
    values.leave("dynamo_config", "arguments of imece.compile_blocks, or of torch.compile")
    for section, whose in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if kind != whose:
            values.leave(section, f"distributed_type is {kind}")
    for key, text in _NEEDLESS.items():
        values.needless(key, text)
    for key, text in _LEFT.items():
        values.leave(key, text)
    return Settings(file, "Accelerate", (*values.finish(_KNOWN), *nested), **found)


def _word(values: Reading, name: str) -> str:
    """The value in lower case; "no" if there is none. YAML reads an unquoted NO as false."""
    word = (values.word(name) or "no").lower()
    return "no" if word == "false" else word


def _fsdp(values: Reading, hosts: int) -> dict[str, Any]:
    section = "fsdp_config."
    name = f"{section}fsdp_sharding_strategy"
    word = (values.word(name) or "FULL_SHARD").upper().removeprefix("_")
    strategy = _FSDP.get(_NUMBERED[int(word)] if word.isdigit() and int(word) in _NUMBERED else word)
    if strategy is None:
        raise values.wrong(name, f"one of {', '.join(_FSDP)}")
    reshard = f"{section}fsdp_reshard_after_forward"
    after = values.word(reshard)
    if after is not None and after.upper() in _FSDP:  # FSDP1's strategies under FSDP2's name
        strategy, keeps = _FSDP[after.upper()], False
    else:
        keeps = after is not None and not values.flag(reshard)
    alone = ""
    if hosts == 1 and strategy in _ON_ONE_HOST:
        strategy, alone = _ON_ONE_HOST[strategy], ": all ranks are on one host"
    values.take(name, f'strategy "{strategy}"{alone}')
    values.take(reshard, "reshard_after_forward=False" if keeps else f'strategy "{strategy}"{alone}')
    found: dict[str, Any] = {"strategy": strategy, "reshard_after_forward": not keeps}
    offload = f"{section}fsdp_offload_params"
    if values.flag(offload):
        both = strategy in ("zero3", "hybrid")
        found["offload"] = "parameters" if both else "optimizer"
        values.take(offload, f'offload "{found["offload"]}"')
    values.needless(offload, "not asked for")
    recompute = f"{section}fsdp_activation_checkpointing"
    found["recompute"] = bool(values.flag(recompute))
    values.take(
        recompute, "torch.utils.checkpoint around each block" if found["recompute"] else "not asked for"
    )
    policy = f"{section}fsdp_auto_wrap_policy"
    wrap = values.word(policy) or ""
    classes, least = f"{section}fsdp_transformer_layer_cls_to_wrap", f"{section}fsdp_min_num_params"
    if strategy not in ("zero3", "hybrid"):
        values.needless([policy, classes, least], "nothing is gathered by units")
    names, elements = values.word(classes), values.whole(least)
    if wrap == "SIZE_BASED_WRAP" and elements:
        found["unit_elements"] = elements
        values.take(least, f"units={elements}")
    elif names:
        found["unit_classes"] = tuple(name.strip() for name in names.split(",") if name.strip())
        values.take(classes, f"units of the class {names}")
    values.take(
        policy, "units" if found.keys() & {"unit_elements", "unit_classes"} else "units by themselves"
    )
    values.needless([classes, least], f"not of {wrap or 'this policy'}")
    return found


def _deepspeed(values: Reading, file: str, ranks: int | None, hosts: int, dtype: Dtype) -> Settings:
    """The settings of the DeepSpeed file that it names, or of the few DeepSpeed values that it has itself."""
    section = "deepspeed_config."
    named = values.word(f"{section}deepspeed_config_file")
    if named is not None:
        path, beside = Path(named), Path(file).parent / named
        if beside.exists() and not path.exists():  # Accelerate looks from where it is started
            path = beside
        where = f"{path}, which {file} names"
        inner = from_json(text_of(path, where), where)
        if not isinstance(inner, dict):
            raise UserError(f"{where}: not a configuration of DeepSpeed's")
        values.take(f"{section}deepspeed_config_file", "read as well, below")
        values.leave([f"{section}{key}" for key in _FEW], f"what {named} says counts")
        found = deepspeed.read(inner, str(path), ranks, hosts)
        if dtype == "fp32":
            values.needless("mixed_precision", f"what {named} says counts")
        elif found.dtype != dtype:
            says = {each.name: each.value for each in found.values}.get(f"{dtype}.enabled", AUTO)
            if says != AUTO or found.dtype != "fp32":
                raise UserError(
                    f"{file}: mixed_precision is {dtype}, and {path} says {found.dtype}: choose one"
                )
            return dataclasses.replace(found, dtype=dtype)
        return found
    stage = values.whole(f"{section}zero_stage")
    own: dict[str, Any] = {"zero_optimization": {"stage": 2 if stage is None else stage}}
    values.take(f"{section}zero_stage", "as zero_optimization.stage, below")
    for device, theirs in (
        ("offload_optimizer_device", "offload_optimizer"),
        ("offload_param_device", "offload_param"),
    ):
        word = values.word(f"{section}{device}")
        if word is not None:
            own["zero_optimization"][theirs] = {"device": word}
            values.take(f"{section}{device}", f"as zero_optimization.{theirs}.device, below")
    steps = values.whole(f"{section}gradient_accumulation_steps", 1)
    clip = values.number(f"{section}gradient_clipping")
    for key, number in (("gradient_accumulation_steps", steps), ("gradient_clipping", clip)):
        if number is not None:
            own[key] = number
            values.take(f"{section}{key}", f"as {key}, below")
    if dtype != "fp32":
        own[dtype] = {"enabled": True}
    return deepspeed.read(own, file, ranks, hosts)


def _places(values: Reading) -> dict[str, Any]:
    """Where ranks run: hosts and their meeting point."""
    found: dict[str, Any] = {"hosts": values.whole("num_machines", 1) or 1}
    values.take("num_machines", f"--hosts {found['hosts']}")
    rank = values.whole("machine_rank")
    address, port = values.word("main_process_ip"), values.whole("main_process_port", 1)
    if found["hosts"] > 1:
        found["host_rank"] = rank or 0
        values.take("machine_rank", f"--host-rank {rank or 0}")
        if address is not None:
            found["rendezvous"] = f"{address}:{port or 29400}"
            values.take("main_process_ip", f"--rendezvous {found['rendezvous']}")
            values.take("main_process_port", f"--rendezvous {found['rendezvous']}")
    values.needless(
        ["machine_rank", "main_process_ip", "main_process_port"], "on one host they meet by themselves"
    )
    gpus = values.word("gpu_ids")
    if values.flag("use_cpu"):
        found["visible_gpus"] = ""
        values.take("use_cpu", "CUDA_VISIBLE_DEVICES= before the command")
        values.needless("gpu_ids", "use_cpu")
    elif gpus not in (None, "all"):
        found["visible_gpus"] = gpus
        values.take("gpu_ids", f"CUDA_VISIBLE_DEVICES={gpus} before the command")
    values.take("use_cpu", "GPUs, where there are any")
    values.needless("gpu_ids", "all of them, unless CUDA_VISIBLE_DEVICES says less")
    return found
