"""All ways to train a model on a cluster: what the search tries, before memory and speed are known.

ranks = tensor x context x data x pipeline, tensor innermost: its ranks are neighbours, in a host
if that has several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from imece.errors import UserError
from imece.footprint import DIVIDED, Offload
from imece.listing import many
from imece.observe.units import multiples_near
from imece.plan.answer.words import device
from imece.plan.hardware import Cluster
from imece.plan.models.model import Model
from imece.plan.presets import gpus_with_fp8
from imece.plan.setup import (
    Adapters,
    Attention,
    Optimizer,
    Parallel,
    Precision,
    Recipe,
    Recomputation,
    Setup,
    Strategy,
    Wire,
)
from imece.plan.speed.communication import along

_NUMBERS = (
    "global_batch", "seq", "tensor", "pipeline", "interleave", "context", "micro_batch", "adapter_rank",
)  # fmt: skip
_MOST = 10**12  # of each number in a question
STRATEGIES: tuple[Strategy, ...] = ("replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")
RESERVE = 0.04  # of the memory: median error of the prediction in published runs
# A micro-batch with more sequences and tokens than these gains nothing: products are large enough, and the
# CPU is ahead of the GPU.
_MOST_AT_ONCE, _MOST_TOKENS = 64, 2**18
_LEAST_TOKENS = 1024  # of a sequence, on each rank of a context group
_LONG_SEQ = 8192  # tokens: shorter sequences need not be divided among ranks, if there is one for each
_MOST_CHUNKS = 8  # of the model on a pipeline rank
_MOST_OVER_HOSTS = 8  # ranks that divide matrices, if hosts have one each
_FP8_SIDE = 16  # sides of matrices multiplied in FP8 are multiples of this


@dataclass(frozen=True)
class Question:
    """What is to be trained on what. None: the search tries all values."""

    model: Model
    cluster: Cluster
    global_batch: int  # sequences per step
    seq: int  # tokens per sequence
    strategy: Strategy | None = None
    tensor: int | None = None
    pipeline: int | None = None
    interleave: int | None = None
    context: int | None = None
    micro_batch: int | None = None
    recompute: Recomputation | None = None
    optimizer: Optimizer = "adamw"
    adapters: Adapters = "none"
    adapter_rank: int = 16
    offload: Offload | None = None
    attention: Attention = "flash"
    compiled: bool = False
    precision: Precision = field(default_factory=Precision)
    reserve: float = RESERVE  # part of the memory that a plan leaves free
    wire: Wire | None = None

    @property
    def room_bytes(self) -> int:
        """Bytes of a GPU that a plan may need."""
        return int((1 - self.reserve) * self.cluster.gpu.memory_bytes)


def check(question: Question) -> None:
    """UserError, with the nearest numbers that work, for numbers that cannot be divided."""
    ranks, each = question.cluster.gpus, device(question.cluster)
    for name in _NUMBERS:
        value = getattr(question, name)
        if value is not None and not 1 <= value <= _MOST:
            raise UserError(f"--{name.replace('_', '-')} is {value}: at least 1, and at most {_MOST:.0e}")
    if (
        question.strategy is not None
        and question.strategy.startswith("hybrid")
        and question.cluster.hosts == 1
    ):
        raise UserError(
            f"--strategy {question.strategy} shards inside hosts and replicates between them, but there is "
            f"one host: use {_plain(question.strategy)}, or more --hosts"
        )
    if 0 < (most := question.model.positions) < question.seq:
        learned = "learned " * bool(question.model.learned_positions)
        raise UserError(
            f"--seq {question.seq}: {question.model.name} has {learned}positions for {most:,} tokens, no more"
        )
    if question.precision.fp8 and (why := why_no_fp8(question)) is not None:
        raise UserError(f"--precision fp8: {why}")
    if not 0 <= question.reserve < 1:
        raise UserError(f"--reserve is {question.reserve}: a part of the memory, at least 0 and less than 1")
    _check_axes(question)
    together = (question.tensor or 1) * (question.pipeline or 1) * (question.context or 1)
    if ranks % together:
        raise UserError(
            f"tensor {question.tensor or 1} x pipeline {question.pipeline or 1} x context "
            f"{question.context or 1} "
            f"= {together} does not divide {many(ranks, each)}; the nearest numbers of {each}s are "
            f"{multiples_near(ranks, together)}"
        )
    data = ranks // together
    if (strategy := question.strategy) is not None and not _can_offload(question, strategy, data):
        needs = "zero3 or hybrid" if question.offload == "parameters" else "a sharded strategy, such as zero1"
        raise UserError(f"--offload {question.offload} is for {needs}, not for --strategy {strategy}")
    if not _has_ways(question):
        raise UserError(why_none(question))
    if question.wire is not None and not any(
        can_round(question.cluster, each) for each in arrangements(question)
    ):
        raise UserError(
            f"--wire {question.wire} is for gradients between {each}s equally far from each other, or, in "
            "hybrid strategies, between hosts, and here are none: leave it out"
        )


def why_no_fp8(question: Question) -> str | None:
    """Why products cannot be in FP8, as torchao.float8 makes them of nn.Linear; None if they can."""
    model, gpu = question.model, question.cluster.gpu
    if not gpu.fp8:
        *some, last = gpus_with_fp8()
        return f"{gpu.name} multiplies no FP8; {', '.join(some)} and {last} do"
    if question.adapters != "none":
        return f"torchao makes gradients of frozen matrices too: leave out --adapters {question.adapters}"
    if model.experts:
        return f"torchao multiplies no experts in it, and {model.name} has {model.experts} a layer"
    query, key = model.q_width, model.kv_width
    for side in (question.seq, model.width, query, key, model.mlp_width):
        if side % _FP8_SIDE:
            return f"GPUs multiply sides in it that are multiples of {_FP8_SIDE}, and here one is {side}"
    return None


def arrangements(question: Question) -> list[Parallel]:
    """Every arrangement of the ranks in which the batch can be divided.

    A strategy that is asked for says how ranks share the same part of the model: arrangements in which no
    other rank has it are left out, unless there are no others.
    """
    found = list(_arrangements(question))
    if question.strategy is None:
        return found
    shared = [each for each in found if each.peers > 1 and any(recipes(question, each))]
    return shared or found


def recipes(question: Question, parallel: Parallel) -> Iterator[list[Recipe]]:
    """A list for each way of recomputation, from the smallest micro-batch to the largest."""
    share = question.global_batch // parallel.data
    if question.micro_batch is not None:
        sizes = [question.micro_batch]
    else:
        most = max(_MOST_AT_ONCE, _MOST_TOKENS // question.seq)
        sizes = [size for size in _divisors(share) if size <= most]
    if parallel.interleave > 1:  # as in Megatron-LM: whole rounds of micro-batches
        sizes = [size for size in sizes if share // size % parallel.pipeline == 0]
    base = Recipe(
        question.seq, optimizer=question.optimizer, adapters=question.adapters,
        adapter_rank=question.adapter_rank, offload=question.offload, attention=question.attention,
        compiled=question.compiled, precision=question.precision,
        wire=question.wire if can_round(question.cluster, parallel) else None,
    )  # fmt: skip
    for kind in [question.recompute] if question.recompute else _recomputations(question):
        yield [replace(base, micro_batch=size, accumulation=share // size, recompute=kind) for size in sizes]


def can_round(cluster: Cluster, parallel: Parallel) -> bool:
    """Whether gradients gain by fewer bytes: in hybrid strategies they do between hosts. In others each rank
    sends to all, which is more between hosts than in a ring, unless all ranks are in one, or no two are."""
    group = along(cluster, parallel.peers, parallel.tensor)
    return parallel.is_hybrid or (parallel.peers > 1 and (group.hosts == 1 or group.ranks_per_host == 1))


def setups(question: Question) -> Iterator[list[Setup]]:
    """All setups, in lists that differ only in the micro-batch, the smallest first."""
    for parallel in arrangements(question):
        for line in recipes(question, parallel):
            if line:
                yield [Setup(question.model, parallel, recipe) for recipe in line]


def _arrangements(question: Question) -> Iterator[Parallel]:
    for tensor, context, pipeline, data in _axes(question):
        if question.global_batch % (data * (question.micro_batch or 1)):
            continue
        for chunks in _interleaves(question, pipeline):
            for strategy, shard in _strategies(question, tensor, data * context):
                yield Parallel(
                    strategy=strategy,
                    data=data,
                    shard=shard,
                    tensor=tensor,
                    sequence=question.seq % (tensor * context) == 0,
                    context=context,
                    pipeline=pipeline,
                    interleave=chunks,
                )


def _check_axes(question: Question) -> None:
    model, tensor, pipeline = question.model, question.tensor or 1, question.pipeline or 1
    if not _can_split(model, tensor):
        raise UserError(
            f"--tensor {tensor} cannot divide {model.heads} heads, {model.kv_heads} heads of keys and values "
            f"and an MLP of {model.mlp_width}"
        )
    if pipeline * (question.interleave or 1) > model.layers:
        raise UserError(
            f"--pipeline {pipeline} x --interleave {question.interleave or 1} are more parts than "
            f"{model.name} has layers ({model.layers})"
        )
    if (question.interleave or 1) > 1 and question.pipeline == 1:
        raise UserError(f"--interleave {question.interleave} is for a pipeline, and --pipeline is 1")
    context = question.context or 1
    if question.seq % (2 * context) and context > 1:
        raise UserError(
            f"--seq {question.seq} cannot be divided by 2 x --context {context}: each rank takes a part from "
            f"both ends; the nearest are {multiples_near(question.seq, 2 * context)}"
        )


def why_none(question: Question) -> str:
    """Why there is no arrangement at all, and what would help."""
    if question.strategy is not None and _has_ways(replace(question, strategy=None)):
        return (  # only these restrict the arrangement
            f"--strategy {question.strategy} shards inside hosts and replicates between them, and here no "
            f"host has several {device(question.cluster)}s with a part of the model that other hosts have "
            f"too: use {_plain(question.strategy)}"
        )
    if question.interleave is not None and _has_ways(replace(question, interleave=None)):
        return (
            f"--interleave {question.interleave} needs a pipeline with so many parts of the model on a stage "
            f"and micro-batches in whole rounds of its stages; --global-batch {question.global_batch} gives "
            f"none: say a multiple of {question.cluster.gpus * (question.micro_batch or 1)}, or leave it out"
        )
    micro, batch = question.micro_batch or 1, question.global_batch
    all_of_them = many(question.cluster.gpus, device(question.cluster))
    groups = sorted({data for *_, data in _axes(question)})
    if not groups:
        return (
            f"no arrangement of {all_of_them} is all that is asked for: leave out --tensor, "
            "--pipeline or --context"
        )
    by = many(groups[0], "rank") if len(groups) == 1 else f"any arrangement of {all_of_them}"
    by += f" x micro-batch {micro}" if question.micro_batch else ""
    step = max((data for data in groups if data * micro <= batch), default=groups[0]) * micro
    return f"--global-batch {batch} cannot be divided by {by}; the nearest are {multiples_near(batch, step)}"


def _has_ways(question: Question) -> bool:
    return next(setups(question), None) is not None


def _plain(strategy: Strategy) -> Strategy:
    """The strategy on a single host."""
    return "zero3" if strategy == "hybrid" else "zero2"


def _axes(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """(tensor, context, pipeline, data), for any batch."""
    ranks = question.cluster.gpus
    for tensor in _tensors(question):
        for context in _contexts(question, ranks // tensor):
            for pipeline in _pipelines(question, ranks // tensor // context):
                yield tensor, context, pipeline, ranks // (tensor * context * pipeline)


def _tensors(question: Question) -> list[int]:
    if question.tensor is not None:
        return [question.tensor]
    ranks = question.cluster.gpus_per_host
    if ranks == 1:  # without neighbours in its host: over hosts sums are slow, but other ways may be slower
        ranks = math.gcd(question.cluster.gpus, _MOST_OVER_HOSTS)
    return [n for n in _divisors(ranks) if _can_split(question.model, n) and n & (n - 1) == 0]


def _contexts(question: Question, ranks: int) -> list[int]:
    if question.context is not None:
        return [question.context] if ranks % question.context == 0 else []
    if question.seq < _LONG_SEQ and question.global_batch >= question.cluster.gpus:
        return [1]
    most = question.seq // _LEAST_TOKENS
    return [
        n for n in _divisors(ranks) if n & (n - 1) == 0 and n <= most and question.seq % (2 * n) == 0
    ] or [1]


def _pipelines(question: Question, ranks: int) -> list[int]:
    if question.pipeline is not None:
        return [question.pipeline] if ranks % question.pipeline == 0 else []
    return [n for n in _divisors(ranks) if n <= question.model.layers]


def _interleaves(question: Question, pipeline: int) -> list[int]:
    if pipeline == 1:
        return [1] if question.interleave in (None, 1) else []
    if question.interleave is not None:
        return [question.interleave] if pipeline * question.interleave <= question.model.layers else []
    layers = question.model.layers

    def most(chunks: int) -> int:
        """Layers of the largest stage."""
        return chunks * -(-layers // (pipeline * chunks))

    # Chunks need not be equal: with 126 layers, 16 stages have 7 or 8 each, in one chunk or in 4 of 1 or 2.
    return [1, *(n for n in range(2, min(_MOST_CHUNKS, layers // pipeline) + 1) if most(n) == most(1))]


def _strategies(question: Question, tensor: int, ranks: int) -> Iterator[tuple[Strategy, int]]:
    """(strategy, ranks over which it shards) for `ranks` that hold the same part of the model."""
    inside = max(1, question.cluster.gpus_per_host // tensor)
    for strategy in STRATEGIES if question.strategy is None else (question.strategy,):
        if not _can_offload(question, strategy, ranks):
            continue
        if strategy == "replicate":
            yield strategy, 1
        elif strategy.startswith("hybrid"):
            if 1 < inside < ranks and ranks % inside == 0:
                yield strategy, inside
        elif ranks > 1 or question.strategy is not None or question.offload == "parameters":
            yield strategy, ranks


def _can_offload(question: Question, strategy: Strategy, ranks: int) -> bool:
    """As in data_parallel/sharding/offload.py; but on one GPU every strategy may offload the optimizer."""
    if question.offload == "parameters":
        return DIVIDED[strategy].parameters
    return question.offload is None or DIVIDED[strategy].optimizer or ranks == 1


def _recomputations(question: Question) -> tuple[Recomputation, ...]:
    # Flash attention keeps no scores, which are what selective recomputation drops.
    return ("none", "full") if question.attention == "flash" else ("none", "selective", "full")


def _can_split(model: Model, tensor: int) -> bool:
    fits_keys = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return model.heads % tensor == 0 and fits_keys and all(mlp.width % tensor == 0 for mlp in model.mlps)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
