"""Reads DeepSpeed's configuration: https://www.deepspeed.ai/docs/config-json/ ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from imece.errors import UserError
from imece.foreign.reading import Reading
from imece.foreign.settings import Dtype, OptimizerSettings, ScalerSettings, ScheduleSettings, Settings
from imece.listing import many

_STAGES = ("replicate", "zero1", "zero2", "zero3")
_DTYPES: dict[str, Dtype] = {
    "fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16",
}  # fmt: skip
_OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "muon": "Muon", "adagrad": "Adagrad", "sgd": "SGD"}
_ADAM: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_USUAL: Mapping[str, Mapping[str, Any]] = {
    "AdamW": _ADAM,
    "Adam": _ADAM,
    "Muon": {"lr": 0.02, "weight_decay": 0.0},
    "Adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "SGD": {"lr": 1e-3, "weight_decay": 0.0},
}
"""DeepSpeed's defaults where they differ from torch's, under torch's names."""
_TORCH_DECAY = 0.01  # default of torch's own AdamW
_WARMUP, _LEAST = 1000, 1e-4  # DeepSpeed's defaults: steps of warm-up, and the share where a cosine ends
_PEAK, _DECAYS_FROM = "scheduler.params.warmup_max_lr", 1e-3  # the latter: default of WarmupDecayLR
_ZERO = "zero_optimization"
_MARKS = (_ZERO, "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "bfloat16", "fp16")
"""Every file of DeepSpeed has one of these keys."""

_OWN_SIZES = "imece sizes its buckets itself; bucket_cap_mb= of imece.parallelize changes it"
_BY_UNIT = "units of the model are gathered, used and freed in turn; units= and gathers_in_flight= change it"
_POWER, _GROWS_AFTER = 16, 1000  # DeepSpeed's defaults for fp16: log2 of the first loss scale; steps
_MOST_POWER = 127  # in fp32
_SCALER = (
    "initial_scale_power", "loss_scale_window", "loss_scale", "hysteresis", "consecutive_hysteresis",
    "min_loss_scale",
)  # fmt: skip
_OWN_DTYPES = {
    "bf16.bf16_master_weights_and_grads": "masters are in fp32",
    "bf16.bf16_optimizer_states": "what optimizers keep of masters is in fp32",
    "fp16.fp16_master_weights_and_grads": "masters are in fp32",
    "fp16.auto_cast": "inputs are yours to cast",
}
_NEEDLESS = {
    "contiguous_gradients": "gradients always lie in flat buckets",
    "reduce_scatter": "sharded gradients are always reduce-scattered",
    "allgather_partitions": "whole parameters are always all-gathered in place",
    "use_multi_rank_bucket_allreduce": "a bucket is cut evenly between the ranks",
    "overlap_comm": "gradients leave while backward goes on; overlap= of imece.parallelize changes it",
    "round_robin_gradients": "every rank has an equal part of each bucket",
    "compute_grad_norm": "model.clip_grad_norm_ returns the norm",
    "load_from_fp32_weights": "checkpoints have the fp32 masters",
    "elastic_checkpoint": "every checkpoint loads at any number of ranks",
    "ignore_unused_parameters": "unused parameters are found by themselves",
    "legacy_stage1": "there is one kind of it",
    "memory_efficient_linear": "autograd is torch's own",
    "override_module_apply": "modules are changed by parallelize alone",
    "stage3_gather_16bit_weights_on_model_save": "imece export, and state dicts, write whole weights",
    "gather_16bit_weights_on_model_save": "imece export, and state dicts, write whole weights",
    "stage3_gather_fp16_weights_on_model_save": "imece export, and state dicts, write whole weights",
    "log_trace_cache_warnings": "there is no trace of modules",
    "enable_sanity_checks": "calls of ranks are always checked against each other",
    "sub_group_size": "each bucket is stepped by itself",
    "pipeline_loading_checkpoint": "checkpoints are read piece by piece",
    "parameter_alignment": "shards are always aligned",
}
_SIZES = ("reduce_bucket_size", "allgather_bucket_size")
_GATHERS = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
    "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential", "partition_stream_chunk_size",
)  # fmt: skip
_WITHIN = {"zero_hpz_partition_size": "a second copy", "mics_shard_size": "all shards"}
_REFUSED = {
    "zero_quantized_weights": "weights travel in their own dtype",
    "zero_quantized_nontrainable_weights": "weights travel in their own dtype",
    "zeropp_loco_param": "what rounding to int8 loses is not kept for later steps",
    "mics_hierarchical_params_gather": "shards within a host are gathered in one call",
    "zenflow": "there is no such optimizer here",
    "leaf_module": "units= of imece.parallelize says which modules are gathered as one",
    "save_muon_momentum_buffer_in_memory": "Muon's state is in memory, and in checkpoints",
}
_ELSEWHERE = {
    "steps_per_print": "print in your loop; imece train shows every step",
    "wall_clock_breakdown": "imece bench step, and a run's metrics, have the time of each phase",
    "dump_state": "imece doctor --attach shows what ranks do",
    "memory_breakdown": "imece bench memory counts every category",
    "flops_profiler": "torch.profiler has it; imece train shows the share of the peak",
    "tensorboard": "imece train writes TensorBoard's files beside its metrics",
    "wandb": "log in your loop",
    "comet": "log in your loop",
    "csv_monitor": "imece train writes metrics.jsonl",
    "comms_logger": "imece doctor --attach shows the last calls of each rank",
    "checkpoint": "imece's own format; docs/training.md",
    "elasticity": "imece launch keeps the global batch when ranks come and go: imece.steps",
    "autotuning": "imece plan chooses",
    "zero_allow_untested_optimizer": "any of torch's optimizers is taken, or refused with the reason",
    "zero_force_ds_cpu_optimizer": "the host's CPUs step what is offloaded with your own optimizer",
    "activation_checkpointing": "it takes effect by calls in the model; so does torch.utils.checkpoint",
    "prescale_gradients": "the mean is taken in the sum",
    "gradient_predivide_factor": "the mean is taken in the sum",
    "disable_allgather": "whole parameters are always all-gathered in place",
    "gradient_allreduce_op": "gradients are means",
    "managed_gradient_accumulation": "model.no_sync() says it in your loop",
    "timers": "imece bench step, and a run's metrics, have the time of each phase",
    "dataloader_drop_last": "an argument of your DataLoader",
    "log_level": "Python's logging",
    "data_types.grad_accum_dtype": "gradients are summed in the dtype of `reduce`",
}
OTHER_AXES = (
    "not by this converter: imece.tensor_parallel, Pipeline and ContextParallel do it, and imece train by "
    "--mesh.tensor, --mesh.pipeline and --mesh.context"
)
_NOT_HERE = {
    "amp": "Apex is not used: torch.autocast",
    "sparse_attention": "attention is the model's own",
    "sparse_gradients": "sparse gradients go over Gloo as they are, and are refused elsewhere",
    "compression_training": "there is none here",
    "data_efficiency": "there is none here",
    "curriculum_learning": "there is none here",
    "hybrid_engine": "there is none here",
    "quantize_training": "there is none here",
    "progressive_layer_drop": "there is none here",
    "eigenvalue": "there is none here",
    "tensor_parallel": "not by this converter: imece.tensor_parallel, or imece train --mesh.tensor",
    "expert_parallel": "there is none here",
    "pipeline": "not by this converter: imece.Pipeline, or imece train --mesh.pipeline",
    "sequence_parallel_size": "not by this converter: imece.ContextParallel, or imece train --mesh.context",
    "aio": "nothing is swapped to NVMe",
    "nebula": "there is none here",
    "datastates_ckpt": "checkpoints are written in the background anyway",
    "seq_parallel_communication_data_type": "keys and values travel in their own dtype",
    "seq_parallel_comm_data_type": "keys and values travel in their own dtype",
    "use_data_before_expert_parallelism": "there is none here",
    "graph_harvesting": "there is none here",
    "vocabulary_size": "it is the model's own",
    "compile": "imece.compile_blocks(model) compiles each block",
}


def is_deepspeed(content: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a file of DeepSpeed."""
    return any(mark in content for mark in _MARKS)


def read(
    content: Mapping[str, Any], file: str, ranks: int | None = None, hosts: int | None = None
) -> Settings:
    """The settings that the file asks for, with DeepSpeed's defaults where it says nothing.

    ranks: all ranks, if known; then any two of the three batch sizes give the third. hosts: number of hosts,
    if known; else it follows from `ranks` and the ranks of one host, if the file has those.

    UserError for values that are wrong or contradict each other.
    """
    values = Reading(content, file)
    strategy, hosts = _strategy(values, ranks, hosts)
    scaler = _scaler(values)
    dtype, autocast, reduce = _dtypes(values, strategy)
    offload = _offload(values, strategy)
    name = f"{_ZERO}.zero_quantized_gradients"
    quantised = bool(values.flag(name))
    values.take(name, f"gradients are sent {'in int8' if quantised else 'as they are'}")
    micro, accumulation, batch = _batch(values, ranks)
    clip = values.number("gradient_clipping")
    if not values.has("gradient_clipping"):
        clip = 0.0
    if clip is not None:
        clip = max(clip, 0.0)  # DeepSpeed clips by what is above 0 alone
        values.take("gradient_clipping", f"model.clip_grad_norm_({clip:g})" if clip else "no clipping")
    optimizer = _optimizer(values)
    schedule = _schedule(values)
    if (values.word("gradient_allreduce_op") or "").lower() == "sum":
        values.leave("gradient_allreduce_op", "gradients are means: multiply the loss by the number of ranks")
    for key, text in _ELSEWHERE.items():
        values.needless(key, text)
    for key, text in _NOT_HERE.items():
        values.leave(key, text)
    return Settings(
        file, "DeepSpeed", values.finish(_MARKS), strategy, dtype, autocast, reduce, quantised, offload,
        micro_batch=micro, accumulation=accumulation, global_batch=batch, clip=clip, scaler=scaler,
        optimizer=optimizer, schedule=schedule, ranks=ranks, hosts=hosts, host_rank=0 if hosts > 1 else None,
    )  # fmt: skip


def _strategy(values: Reading, ranks: int | None, hosts: int | None) -> tuple[str, int]:
    """(strategy, number of hosts): 1 host if the number is unknown. If shards stay within a host, the file
    says how many ranks a host has."""
    name = f"{_ZERO}.stage"
    stage = values.whole(name) or 0
    if stage > 3:
        raise values.wrong(name, "0, 1, 2 or 3")
    strategy = _STAGES[stage]
    for key, what in _WITHIN.items():
        size = values.whole(f"{_ZERO}.{key}", -1)
        if stage != 3 or size is None or size <= 1:
            values.needless(f"{_ZERO}.{key}", "not asked for")
            continue
        if hosts is None and ranks is not None:
            hosts = max(1, ranks // size)
            if ranks > size and ranks % size:
                raise values.wrong(f"{_ZERO}.{key}", f"{ranks} ranks are no whole number of such hosts")
        if hosts == 1:
            values.take(f"{_ZERO}.{key}", 'strategy "zero3": all ranks are on one host')
        else:
            strategy = "hybrid"
            values.take(f"{_ZERO}.{key}", f'strategy "hybrid": {what} within a host of {size} ranks')
    values.take(name, f'strategy "{strategy}"')
    for key, text in _NEEDLESS.items():
        values.needless(f"{_ZERO}.{key}", text)
    values.needless([f"{_ZERO}.{key}" for key in _SIZES], _OWN_SIZES)
    values.needless([f"{_ZERO}.{each}{key}" for key in _GATHERS for each in ("stage3_", "")], _BY_UNIT)
    for key, text in _REFUSED.items():
        values.leave(f"{_ZERO}.{key}", text)
    return strategy, hosts or 1


def _dtypes(values: Reading, strategy: str) -> tuple[Dtype, bool, Dtype | None]:
    """(dtype of products and parameters, whether of products alone, dtype of gradients while they are
    summed)."""
    on: list[Dtype] = []
    for section in ("bf16", "bfloat16", "fp16"):
        if values.flag(f"{section}.enabled"):
            dtype = _DTYPES[section]
            on.append(dtype)
            loop = "; in your loop imece.GradScaler" if dtype == "fp16" else ""
            what = f"parameters in {dtype}, their masters in fp32"
            if strategy == "replicate":
                what = f"torch.autocast in {dtype} around forward"
            values.take(f"{section}.enabled", f"{what}{loop}")
        values.needless(f"{section}.enabled", "not asked for")
    for key, text in _OWN_DTYPES.items():
        values.leave(key, text)
    values.needless(("bf16", "bfloat16", "fp16"), "masters and their sums are in fp32")
    name = "torch_autocast.dtype"
    word = values.word(name)
    cast = _DTYPES.get((word or "bfloat16").removeprefix("torch."))
    if cast is None:
        raise values.wrong(name, "bfloat16 or float16")
    autocast = bool(values.flag("torch_autocast.enabled"))
    if autocast:
        on.append(cast)
        values.take("torch_autocast.enabled", f"torch.autocast in {cast} around forward")
        values.take(name, f"torch.autocast in {cast} around forward")
    values.leave("torch_autocast", "torch.autocast decides for each operation")
    if len(set(on)) > 1:
        raise UserError(f"{values.file}: {' and '.join(sorted(set(on)))} are both enabled: choose one")
    name = "communication_data_type"
    word = values.word(name)
    reduce = _DTYPES.get(word or "")
    if word is not None and reduce is None:
        raise values.wrong(name, "fp32, bf16 or fp16")
    values.take(name, f"gradients are summed in {reduce}")
    name = "data_types.grad_accum_dtype"
    if on and reduce is None and strategy != "replicate" and _DTYPES.get(values.word(name) or "") == "fp32":
        reduce = (
            "fp32"  # also where they are added up in no_sync, of which bf16 would round the late ones away
        )
        values.take(name, "gradients are summed in fp32")
    return (on[0] if on else "fp32"), autocast, reduce


def _scaler(values: Reading) -> ScalerSettings | None:
    """The loss scaler of fp16; None if fp16 is off, or if the Trainer decides."""
    on, section = values.flag("fp16.enabled"), "fp16."
    if not on and not values.is_auto("fp16.enabled"):
        values.needless([f"{section}{key}" for key in _SCALER], "not asked for")
        return None
    power = values.whole(f"{section}initial_scale_power")
    if power is not None and power > _MOST_POWER:
        raise values.wrong(f"{section}initial_scale_power", f"at most {_MOST_POWER}")
    first = None
    if not values.is_auto(f"{section}initial_scale_power"):
        first = 2.0 ** (_POWER if power is None else power)
    window = values.whole(f"{section}loss_scale_window", 1)
    after = None if values.is_auto(f"{section}loss_scale_window") else window or _GROWS_AFTER
    fixed = values.number(f"{section}loss_scale")
    if fixed and fixed < 0:
        raise values.wrong(f"{section}loss_scale", "a number of at least 0")
    if fixed:
        first = fixed
        values.leave(
            f"{section}loss_scale", f"imece.GradScaler begins with {fixed:g}, and then finds its own"
        )
    values.take(f"{section}initial_scale_power", f"imece.GradScaler(init_scale={first})")
    values.take(f"{section}loss_scale_window", f"imece.GradScaler(growth_interval={after})")
    values.needless(f"{section}loss_scale", "imece.GradScaler finds it")
    values.leave([f"{section}{key}" for key in _SCALER], "imece.GradScaler halves its scale at each overflow")
    return ScalerSettings(first, after) if on else None


def _offload(values: Reading, strategy: str) -> Literal["optimizer", "parameters"] | None:
    found: Literal["optimizer", "parameters"] | None = None
    for section, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        name = f"{_ZERO}.{section}.device"
        device = values.word(name)
        if device not in (None, "none", "cpu", "nvme"):
            raise values.wrong(name, "none, cpu or nvme")
        if what == "parameters" and strategy not in ("zero3", "hybrid") and device in ("cpu", "nvme"):
            values.leave(name, "DeepSpeed offloads parameters with stage 3 alone")
        elif device in ("cpu", "nvme"):
            found = "parameters" if what == "parameters" else found or "optimizer"
            where = "" if device == "cpu" else ": the host's memory, there is no NVMe here"
            values.take(name, f'offload "{what}"{where}')
        values.needless(name, "not asked for")
        if values.number(f"{_ZERO}.{section}.ratio") not in (None, 1.0):
            values.leave(f"{_ZERO}.{section}.ratio", "all of what is stepped is offloaded")
        values.leave(f"{_ZERO}.{section}.super_offload", "there is none here")
        values.needless(f"{_ZERO}.{section}", "the host's memory is pinned, and moved bucket by bucket")
    old = f"{_ZERO}.cpu_offload"
    if values.flag(old):
        found = found or "optimizer"
        values.take(old, 'offload "optimizer"')
    values.leave([old, f"{_ZERO}.cpu_offload_param", f"{_ZERO}.cpu_offload_use_pin_memory"], "obsolete")
    if found is not None and strategy == "replicate":
        raise UserError(f"{values.file}: offload needs a stage of 1, 2 or 3 in {_ZERO}.stage")
    return found


def _batch(values: Reading, ranks: int | None) -> tuple[int | None, int | None, int | None]:
    """(micro-batch, accumulation, global batch), as far as known: micro * accumulation * ranks = whole."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, accumulation, whole = (values.whole(name, 1) for name in names)
    if micro is not None and not values.has(names[1]) and not values.has(names[2]):
        accumulation = 1  # DeepSpeed's, and by it follows the batch
    said = (micro or 1) * (accumulation or 1)
    if whole is not None and whole % said:
        parts = " x ".join(
            f"{name} {count}" for name, count in zip(names, (micro, accumulation), strict=False) if count
        )
        raise values.wrong(names[2], f"no number of ranks makes it of {parts}: change one")
    if ranks is not None:
        if whole is not None and micro is not None:
            accumulation = accumulation or max(1, whole // (micro * ranks))
        elif whole is not None and accumulation is not None:
            micro = max(1, whole // (accumulation * ranks))
        if micro is not None and accumulation is not None:
            product = micro * accumulation * ranks
            if whole not in (None, product):
                raise UserError(
                    f"{values.file}: train_batch_size is {whole}, and micro-batch {micro} x {accumulation} "
                    f"accumulated x {ranks} ranks is {product}: it is that with --ranks {whole // said}"
                )
            whole = product
        if whole is not None and whole % ranks:
            raise values.wrong(names[2], f"{ranks} ranks cannot share it evenly: say others with --ranks")
    values.take(names[0], "sequences or samples: a micro-batch")
    values.take(names[1], "micro-batches of a rank in a step")
    values.take(names[2], "sequences or samples: all ranks together")
    return micro, accumulation, whole


def _optimizer(values: Reading) -> OptimizerSettings | None:
    kind = values.word("optimizer.type")
    if kind is None:
        values.leave("optimizer", "without a type it says nothing")
        return None
    name = _OPTIMIZERS.get(kind.lower())
    decoupled = values.flag("optimizer.params.adam_w_mode")
    if name == "AdamW" and kind.lower() == "adam" and decoupled is False:
        name = "Adam"
    values.take("optimizer.params.adam_w_mode", f"torch.optim.{name}")
    if name is None:
        values.leave("optimizer", f"torch has no {kind}: make the optimizer yourself, of any kind")
        return None
    usual = dict(_USUAL[name])
    if name == "AdamW" and values.flag("optimizer.params.torch_adam"):
        usual["weight_decay"] = _TORCH_DECAY
    found: dict[str, Any] = {}
    peak = _peak(values)
    if peak is not None:
        values.take(_PEAK, f"torch.optim.{name}(lr=...): that of the scheduler counts, as DeepSpeed has it")
        values.needless("optimizer.params.lr", "that of the scheduler counts, as DeepSpeed has it")
    for key, default in usual.items():
        full = f"optimizer.params.{key}"
        said = values.numbers(full, 2) if key == "betas" else values.number(full)
        found[key] = said if values.has(full) else default
        values.take(full, f"torch.optim.{name}({key}=...)")
    if peak is not None:
        found["lr"] = peak
    unsaid = ", ".join(key for key in usual if not values.has(f"optimizer.params.{key}"))
    values.take("optimizer.type", f"torch.optim.{name}" + (unsaid and f"; {unsaid} as DeepSpeed's"))
    values.needless("optimizer.params.torch_adam", "optimizers are torch's own")
    values.leave("optimizer", f"an argument of torch.optim.{name}, if it has it")
    return OptimizerSettings(name, **found)


def _peak(values: Reading) -> float | None:
    """The learning rate after warm-up, if the scheduler has one: it overrules the optimizer's."""
    kind = values.word("scheduler.type")
    said = values.number(_PEAK) if kind in ("WarmupLR", "WarmupDecayLR") else None
    return _DECAYS_FROM if kind == "WarmupDecayLR" and not values.has(_PEAK) else said


def _schedule(values: Reading) -> ScheduleSettings | None:
    kind = values.word("scheduler.type")
    section = "scheduler.params."
    warmup = values.whole(f"{section}warmup_num_steps")
    steps = values.whole(f"{section}total_num_steps", 1)
    least = values.number(f"{section}cos_min_ratio")
    kinds: dict[str | None, Literal["constant", "cosine", "linear"]] = {
        "WarmupLR": "constant",
        "WarmupCosineLR": "cosine",
        "WarmupDecayLR": "linear",
    }
    if kind not in kinds:
        values.leave("scheduler", "any of torch's schedulers works in your loop; imece train has no such one")
        return None
    if not values.has(f"{section}warmup_num_steps"):
        warmup = _WARMUP
    if kinds[kind] == "linear":
        least = 0.0
    elif not values.has(f"{section}cos_min_ratio"):
        least = _LEAST
    how = "in a line; DeepSpeed's is logarithmic, unless warmup_type is linear"
    if values.word(f"{section}warmup_type") == "linear":
        values.take(f"{section}warmup_type", "so is imece train's")
        how = "in a line"
    values.take("scheduler.type", f"{kinds[kind]} after a warm-up of {_steps(warmup)} {how}")
    values.take(f"{section}warmup_num_steps", "steps of the warm-up")
    if kinds[kind] == "constant":
        steps = least = None
    else:
        values.take(f"{section}total_num_steps", "steps of the run")
    if kinds[kind] == "cosine":
        values.take(f"{section}cos_min_ratio", "where the cosine ends")
    values.leave("scheduler", "imece train warms up in a line from 0 to the optimizer's lr")
    return ScheduleSettings(kinds[kind], warmup, steps, least)


def _steps(count: int | None) -> str:
    return "its Trainer's steps" if count is None else many(count, "step")
