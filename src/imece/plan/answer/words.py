"""Names of the planner's choices, and their meanings for people who never heard of them."""

from __future__ import annotations

from collections.abc import Iterator

from imece.footprint import Offload
from imece.listing import many
from imece.plan.hardware import Cluster
from imece.plan.memory.held import stage_layers
from imece.plan.setup import Parallel, Setup, Strategy

_HOSTED: dict[Offload, str] = {
    "optimizer": "optimizer in host memory",
    "parameters": "parameters and optimizer in host memory",
}
NAMES: dict[Strategy, str] = {
    "replicate": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "hybrid": "hybrid ZeRO-3",
    "hybrid_zero2": "hybrid ZeRO-2",
}
ALSO: dict[Strategy, str] = {
    "replicate": "NO_SHARD",
    "zero2": "SHARD_GRAD_OP",
    "zero3": "FULL_SHARD",
    "hybrid": "HYBRID_SHARD",
    "hybrid_zero2": "_HYBRID_SHARD_ZERO2",
}
CAUSES = {  # of exposed communication
    "gradients": "in summing gradients",
    "parameters": "in gathering parameters",
    "tensor": "in sums within layers",
    "context": "in passing keys and values on",
    "pipeline": "in passing activations to the next stage",
}
_KINDS = {  # of memory
    "parameters": "the weights",
    "gradients": "of this step",
    "optimizer": "its moments",
    "masters": "weights in fp32",
    "gathered": "layers being used",
    "communication": "messages on their way",
    "activations": "kept for backward",
    "logits": "one for each word",
    "overhead": "CUDA and libraries",
}
OPTIMIZERS = {"adamw": "AdamW", "adamw-8bit": "8-bit AdamW", "sgd": "SGD", "muon": "Muon"}


def gb(nbytes: float) -> str:
    """31_200_000_000 -> "31.2": GB of 10^9 bytes, with no more digits than are meaningful."""
    number = nbytes / 1e9
    digits = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 0.995 else 2
    if 0 < abs(number) < 0.0095:  # of a small model on this machine
        digits = 4
    return f"{number:,.{digits}f}"


def seconds(number: float) -> str:
    """23.9 -> "23.9 s", 0.214 -> "214 ms"."""
    if abs(number) >= 99.95:
        return f"{number:,.0f} s"
    if abs(number) >= 0.9995:
        return f"{number:.1f} s" if abs(number) >= 9.995 else f"{number:.2f} s"
    return f"{number * 1e3:.0f} ms" if abs(number) >= 0.00995 else f"{number * 1e3:.2f} ms"


def share(part: float, whole: float) -> str:
    """(1, 8) -> "13 %"; less than half a per cent is "under 1 %"."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 0.5 else "under 1 %"


def compared(ratio: float) -> str:
    """How much longer a step is than another: 0.07 -> "7 % slower", -0.07 -> "7 % faster", 1.3 -> "2.3 times
    as long"."""
    if ratio >= 1:
        return f"{1 + ratio:,.1f} times as long"
    return f"{share(abs(ratio), 1.0)} {'slower' if ratio > 0 else 'faster'}"


def device(cluster: Cluster) -> str:
    """The word for a device: "GPU", or "rank" on CPUs."""
    return "rank" if cluster.gpu.is_cpu else "GPU"


def kinds(cluster: Cluster) -> dict[str, str]:
    """Category of memory -> its meaning."""
    return _KINDS | ({"overhead": "libraries"} if cluster.gpu.is_cpu else {})


def strategy_name(parallel: Parallel) -> str:
    """ "TP 2 x PP 4 x ZeRO-1"; "one device" if nothing is parallel."""
    axes = [
        *([f"TP {parallel.tensor}"] if parallel.tensor > 1 else []),
        *([f"CP {parallel.context}"] if parallel.context > 1 else []),
        *([f"PP {parallel.pipeline}"] if parallel.pipeline > 1 else []),
    ]
    if parallel.peers > 1:
        axes.append(NAMES[parallel.strategy])
    return " x ".join(axes) or "one device"


def title(setup: Setup) -> str:
    """ "ZeRO-2 (SHARD_GRAD_OP), micro-batch 1, 16 accumulated, full recomputation"."""
    parallel, recipe = setup.parallel, setup.recipe
    name = strategy_name(parallel)
    if parallel.peers > 1 and parallel.strategy in ALSO:
        name += f" ({ALSO[parallel.strategy]})"
    parts = [name]
    if parallel.interleave > 1:
        parts.append(f"{parallel.interleave} chunks a stage")
    parts.append(f"micro-batch {recipe.micro_batch:,}")
    if recipe.accumulation > 1:
        parts.append(f"{recipe.accumulation:,} accumulated")
    if recipe.recompute != "none":
        parts.append(f"{recipe.recompute} recomputation")
    if recipe.optimizer != "adamw":
        parts.append(OPTIMIZERS[recipe.optimizer])
    if recipe.adapters != "none":
        parts.append({"lora": "LoRA", "qlora": "QLoRA"}[recipe.adapters])
    if recipe.offload:
        parts.append(_HOSTED[recipe.offload])
    if recipe.wire:
        parts.append(_sent(setup))
    return ", ".join(parts)


def meanings(setup: Setup, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(word of the title, its meaning) with the numbers of this plan."""
    parallel, recipe, one = setup.parallel, setup.recipe, device(cluster)
    ranks = parallel.peers
    if ranks > 1:
        yield NAMES[parallel.strategy], _strategy(parallel, cluster)
    if parallel.tensor > 1:
        yield (
            f"TP {parallel.tensor}",
            f"tensor parallelism: {parallel.tensor} {one}s compute each layer together, a part of every "
            "matrix each",
        )
    if parallel.context > 1:
        yield (
            f"CP {parallel.context}",
            f"context parallelism: {parallel.context} {one}s share each sequence, "
            f"{recipe.seq // parallel.context:,} of its {recipe.seq:,} tokens each",
        )
    if parallel.pipeline > 1:
        layers = max(stage_layers(setup, "dealt"))
        yield (
            f"PP {parallel.pipeline}",
            f"pipeline: the layers are dealt to {parallel.pipeline} stages, up to {layers} each, and "
            "micro-batches go from one stage to the next",
        )
    once = f"a {one} computes {many(recipe.micro_batch, 'sequence')} at once"
    groups = f" x {many(parallel.data, one)}" if parallel.data > 1 else ""
    if parallel.ranks > parallel.data:
        groups = f" x {many(parallel.data, 'group')} of {one}s"
    yield (
        f"micro-batch {recipe.micro_batch:,}",
        f"{once}, {_times(recipe.accumulation)} before each update: {recipe.micro_batch:,} x "
        f"{recipe.accumulation:,}{groups} = {many(setup.global_batch, 'sequence')}",
    )
    if recipe.recompute == "full":
        yield (
            "full recomputation",
            "of each layer only the input is kept for backward, which computes the rest again: much less "
            "memory, a third more work",
        )
    if recipe.recompute == "selective":
        yield "selective recomputation", "scores of attention are computed again in backward instead of kept"
    if recipe.optimizer == "adamw-8bit":
        yield "8-bit AdamW", "the optimizer's two moments take 1 byte each instead of 4"
    if recipe.adapters != "none":
        bits = ", kept in 4 bits" if recipe.adapters == "qlora" else ""
        yield (
            {"lora": "LoRA", "qlora": "QLoRA"}[recipe.adapters],
            f"the model is frozen{bits}; beside each matrix two thin ones of rank {recipe.adapter_rank} are "
            "trained",
        )
    if recipe.offload:
        also = "; so do the parts of the parameters, which come for each gather" * (
            recipe.offload == "parameters"
        )
        yield (
            _HOSTED[recipe.offload],
            "masters, summed gradients and the optimizer's state lie in the host's memory, and its CPUs make "
            f"the update{also}",
        )
    if recipe.wire:
        size = "two bytes" if recipe.wire == "bf16" else "one byte"
        yield _sent(setup), f"gradients travel in {size} a number, and are summed in fp32"


def _sent(setup: Setup) -> str:
    return f"{setup.recipe.wire} {'between hosts' if setup.parallel.is_hybrid else 'on the wire'}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _strategy(parallel: Parallel, cluster: Cluster) -> str:
    ranks, part = parallel.peers, f"1/{parallel.shard}"
    who = (
        f"all {ranks:,} {device(cluster)}s"
        if ranks == cluster.gpus
        else f"the {ranks:,} {device(cluster)}s with the same part of the model"
    )
    if parallel.data > 1 and parallel.context > 1:
        who += f" are {parallel.data:,} groups of {parallel.context}, which"
    other = f"{who} work on different sequences" if parallel.data > 1 else f"{who} work together"
    kept = {
        "replicate": "each keeps the whole model, its gradients and the optimizer's state",
        "zero1": f"each keeps all parameters and gradients, but only {part} of the optimizer's state",
        "zero2": f"each keeps all parameters, but only {part} of the gradients and of the optimizer's state",
        "zero3": f"each keeps {part} of parameters, gradients and optimizer state, and gathers a layer when "
        "it is needed",
        "hybrid": f"the {parallel.shard} of a host divide the model among them, each host has all of it",
        "hybrid_zero2": f"the {parallel.shard} of a host divide gradients and optimizer state, each has all "
        "parameters",
    }  # fmt: skip
    return f"{other}; {kept[parallel.strategy]}"
