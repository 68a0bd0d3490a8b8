"""What data parallelism adds to a step: reducing gradients and gathering parameters, exposed and hidden."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from imece.footprint import DIVIDED
from imece.plan.hardware import Cluster
from imece.plan.memory.held import Held, held, trained_elements
from imece.plan.memory.memory import FOUR_BIT
from imece.plan.setup import WIRE_BYTES, Recipe, Setup
from imece.plan.speed.communication import Group, Op, along, busy_s, collective_s
from imece.plan.speed.compute import stream_s
from imece.plan.speed.manner import Manner
from imece.plan.speed.stage import StageTime
from imece.plan.speed.timeline import exposed_after, exposed_before

_HOST_MEMORY = 410e9  # bytes/s with which a host's CPUs step what is offloaded: 16 x DDR4-3200, as DGX A100
_RANK_MEMORY = 100e9  # of which one rank's CPUs reach this
_HOST_FLOPS = 4e12  # FLOP/s of fp32 products on the same CPUs: assumed, about half of what two EPYC 7742 can
_OFFLOADED = 28  # bytes read and written per parameter
_ADDED = 24  # the same to add the sums of earlier micro-batches, which are first copied aside


@dataclass(frozen=True)
class Synchronisation:
    """Seconds per step."""

    gradients: float  # exposed
    parameters: float  # exposed
    hidden: float


def first_stage(setup: Setup, manner: Manner) -> Held:
    """What a tensor rank of the first stage holds. Its backward ends last, so the step waits for its
    gradients, whichever stage computes longest."""
    return held(setup, 0, manner.stages)


def trained_parameters(setup: Setup, manner: Manner) -> float:
    """Trained parameters of `first_stage`, before data parallelism shards them."""
    return trained_elements(setup, first_stage(setup, manner))


def _held_bytes(setup: Setup, part: Held, in_fp8: bool) -> tuple[float, float]:
    """(bytes of all parameters of `part`, bytes of one layer), as they lie in memory and are gathered.
    in_fp8: layers as they are multiplied."""
    size = setup.recipe.precision.parameters
    in_layers = FOUR_BIT if setup.recipe.adapters == "qlora" else 1 if in_fp8 else size
    layers = (part.layers * part.layer + part.all_experts) * in_layers
    return layers + (part.tables + part.rest) * size, (part.layer + part.experts) * in_layers


class _Gathers(NamedTuple):
    """Gathers of zero3, in forward or backward of one micro-batch."""

    units: int
    unit_bytes: float


def _gathers(setup: Setup, manner: Manner, in_fp8: bool = False) -> tuple[_Gathers, _Gathers]:
    """(in forward, in backward). In forward the root is assumed to come in equal parts with the layers."""
    part = first_stage(setup, manner)
    units = max(1, part.layers)
    whole, layer = _held_bytes(setup, part, in_fp8)
    forward = _Gathers(units, whole / units)
    if not manner.kept_units:
        return forward, forward
    return forward, _Gathers(units - min(manner.kept_units, units), layer)


def synchronise(setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime) -> Synchronisation:
    """Gradients and parameters of the first stage among its data-parallel ranks; and gradients of a tied
    table, first between the first stage and the last, which both have it, and then among these ranks."""
    found = _among_data_ranks(setup, cluster, manner, stage)
    return replace(found, gradients=found.gradients + _tied_s(setup, cluster))


def _tied_s(setup: Setup, cluster: Cluster) -> float:
    parallel, recipe = setup.parallel, setup.recipe
    whole = recipe.accumulates_whole or not DIVIDED[parallel.strategy].gradients
    plain = replace(recipe, wire=None)
    size = _tied_parameters(setup) * _each_gradient(plain) / (1 if whole else _parts(setup))
    if not size:
        return 0.0
    in_one = parallel.ranks <= cluster.gpus_per_host
    return collective_s(cluster, "all_reduce", size, Group(2, 2, 1) if in_one else Group(2, 1, 2))


def _tied_parameters(setup: Setup) -> float:
    """Parameters on one tensor rank whose gradients two stages have."""
    parallel = setup.parallel
    if parallel.pipeline == 1 or not setup.model.tied_head or setup.recipe.adapters != "none":
        return 0.0
    return setup.model.table_parameters / setup.model.table_parts(parallel.tensor)


def _among_data_ranks(setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime) -> Synchronisation:
    parallel = setup.parallel
    ranks = parallel.peers
    if ranks == 1 and setup.recipe.offload != "parameters":
        return Synchronisation(0.0, 0.0, 0.0)
    whole = along(cluster, ranks, parallel.tensor)
    if parallel.strategy == "replicate":
        return _replicated(setup, cluster, manner, stage, whole)
    if parallel.strategy in ("zero1", "zero2"):
        return _stepped_in_parts(setup, cluster, manner, stage, whole)
    inside = along(cluster, parallel.shard, parallel.tensor)
    across = along(cluster, ranks // parallel.shard, parallel.tensor * parallel.shard)
    if parallel.strategy == "hybrid_zero2":
        ours = _stepped_in_parts(setup, cluster, manner, stage, inside)
    else:
        ours = _sharded(setup, cluster, manner, stage, inside if parallel.strategy == "hybrid" else whole)
    if parallel.strategy == "zero3" or across.ranks == 1:
        return ours
    share = trained_parameters(setup, manner) * _each_gradient(setup.recipe) / parallel.shard
    exposed, hidden = _bucketed(setup, cluster, manner, stage, share, across, "all_reduce")
    times = reductions(setup)  # sums over hosts come with those inside
    return Synchronisation(ours.gradients + times * exposed, ours.parameters, ours.hidden + times * hidden)


def _parts(setup: Setup) -> int:
    parallel = setup.parallel
    if parallel.strategy == "replicate":
        return 1
    return parallel.shard if parallel.is_hybrid else parallel.peers


def _gradient_bytes(setup: Setup, manner: Manner) -> float:
    """On their way among the ranks that shard, or all of them."""
    recipe = replace(setup.recipe, wire=None) if setup.parallel.is_hybrid else setup.recipe
    return trained_parameters(setup, manner) * _each_gradient(recipe)


def _each_gradient(recipe: Recipe) -> float:
    """Bytes of a gradient on its way."""
    if recipe.wire is not None:
        return WIRE_BYTES[recipe.wire]
    precision = recipe.precision
    return precision.main_gradients or precision.gradients


def reductions(setup: Setup) -> int:
    """Reductions of all gradients per step: one, or one per micro-batch if nobody keeps gradients whole."""
    each = DIVIDED[setup.parallel.strategy].gradients and not setup.recipe.accumulates_whole
    return setup.recipe.accumulation if each else 1


def _replicated(
    setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime, group: Group
) -> Synchronisation:
    exposed, hidden = _bucketed(
        setup, cluster, manner, stage, _gradient_bytes(setup, manner), group, "all_reduce"
    )
    return Synchronisation(exposed, 0.0, hidden)


def _bucketed(
    setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime, size_bytes: float, group: Group, op: Op
) -> tuple[float, float]:
    """(exposed, hidden) for gradients that leave in buckets during the last micro-batch's backward, except
    those of a tied table, which come after it."""
    if group.ranks == 1:
        return 0.0, 0.0
    if not manner.overlap_gradients:
        return collective_s(cluster, op, size_bytes, group), 0.0
    late_bytes = size_bytes * _tied_parameters(setup) / trained_parameters(setup, manner)
    late = collective_s(cluster, op, late_bytes, group) if late_bytes else 0.0
    size_bytes -= late_bytes
    pieces = max(1, math.ceil(size_bytes / setup.recipe.bucket_bytes))
    one = collective_s(cluster, op, size_bytes / pieces, group)
    exposed = exposed_after(stage.backward_lasts, pieces, one)
    busy = pieces * busy_s(cluster, op, size_bytes / pieces, group)
    exposed, hidden = _with_contention(manner, exposed, pieces * one, busy)
    return exposed + late, hidden


def _with_contention(manner: Manner, exposed: float, whole: float, busy: float) -> tuple[float, float]:
    """(exposed, hidden) including what hidden communication takes from computation, in proportion to its
    bytes."""
    hidden = max(0.0, whole - exposed)
    return exposed + manner.contention * busy * (hidden / whole if whole else 0.0), hidden


def _stepped_in_parts(
    setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime, group: Group
) -> Synchronisation:
    """ZeRO-1 and 2: gradients are reduced to shards, parameters gathered once, after the step."""
    if group.ranks == 1:
        return Synchronisation(0.0, 0.0, 0.0)
    size = _gradient_bytes(setup, manner)
    exposed, hidden = _bucketed(setup, cluster, manner, stage, size, group, "reduce_scatter")
    exposed, hidden = exposed * reductions(setup), hidden * reductions(setup)
    held = trained_parameters(setup, manner) * setup.recipe.precision.parameters
    if not manner.overlap_gathers:
        return Synchronisation(exposed, collective_s(cluster, "all_gather", held, group), hidden)
    units = max(1, first_stage(setup, manner).layers)
    one = collective_s(cluster, "all_gather", held / units, group)
    exposed_gathers = exposed_before(stage.forward_lasts, units, one)
    busy = units * busy_s(cluster, "all_gather", held / units, group)
    gathers, beside = _with_contention(manner, exposed_gathers, units * one, busy)
    return Synchronisation(exposed, gathers, hidden + beside)


def _sharded(
    setup: Setup, cluster: Cluster, manner: Manner, stage: StageTime, group: Group
) -> Synchronisation:
    """ZeRO-3: each layer's parameters are gathered in forward and backward of every micro-batch."""
    offloaded = setup.recipe.offload == "parameters"
    if group.ranks == 1 and not offloaded:
        return Synchronisation(0.0, 0.0, 0.0)
    in_fp8 = setup.recipe.precision.fp8 and manner.gathers_fp8
    forward, backward = _gathers(setup, manner, in_fp8)
    units, gradients = forward.units, _gradient_bytes(setup, manner) / forward.units

    def gather_s(size_bytes: float) -> float:
        found = collective_s(cluster, "all_gather", size_bytes, group)
        return found + size_bytes / group.ranks / cluster.host.rate if offloaded else found

    gather, again = gather_s(forward.unit_bytes), gather_s(backward.unit_bytes)
    all_gathers = forward.units * gather + backward.units * again
    busy_gathers = sum(
        each.units * busy_s(cluster, "all_gather", each.unit_bytes, group) for each in (forward, backward)
    )

    def micro_batches(times: int, scattered: float) -> Synchronisation:
        scatter = collective_s(cluster, "reduce_scatter", scattered, group)
        if manner.overlap_gathers:
            ahead = exposed_before(stage.forward_lasts, units, gather)
            within = exposed_before(stage.backward_lasts, units, again, units - backward.units)
        else:
            ahead, within = forward.units * gather, backward.units * again
        gathers = ahead + within
        if manner.overlap_gradients:  # one network for both: gathers come first
            left = max(0.0, stage.backward_lasts + within - backward.units * again)
            reducing = exposed_after(left, units, scatter)
        else:
            reducing = units * scatter
        busy = busy_gathers + units * busy_s(cluster, "reduce_scatter", scattered, group)
        whole = all_gathers + units * scatter
        exposed, hidden = _with_contention(manner, gathers + reducing, whole, busy)
        return Synchronisation(times * reducing, times * (exposed - reducing), times * hidden)

    times = reductions(setup)
    reduced = micro_batches(times, gradients)
    kept = micro_batches(setup.recipe.accumulation - times, 0.0)
    return Synchronisation(
        reduced.gradients, reduced.parameters + kept.parameters, reduced.hidden + kept.hidden
    )


def optimizer_s(setup: Setup, cluster: Cluster, manner: Manner) -> float:
    """Seconds to step the parameters that a rank steps: all that it holds, or its shard; and to add up what
    micro-batches bring, where that is in the host's memory."""
    recipe = setup.recipe
    stepped = trained_parameters(setup, manner) / _parts(setup)
    moved = stepped * manner.optimizer_bytes * _MOVED[recipe.optimizer]
    # Muon multiplies each matrix with its square five times, twice each.
    flops = stepped * setup.model.width * _MUON_FLOPS if recipe.optimizer == "muon" else 0.0
    if recipe.offload:  # in the masters' dtype; back only if parameters do not stay there
        size = recipe.precision.masters or recipe.precision.parameters
        sent = size * (1 if recipe.offload == "parameters" else 2)
        rate = min(_RANK_MEMORY, _HOST_MEMORY / cluster.gpus_per_host)
        products = flops / (_HOST_FLOPS * rate / _HOST_MEMORY)
        through = _OFFLOADED + _ADDED * (reductions(setup) - 1)
        return stepped * (sent / cluster.host.rate + through / rate) + products
    products = flops / (cluster.gpu.peak * cluster.gpu.reachable * cluster.gpu.sustained)
    return stream_s(cluster.gpu, moved) + products


_MUON_FLOPS = 30  # per parameter and row of the matrix's shorter side
_MOVED = {"adamw": 1.0, "adamw-8bit": 0.65, "sgd": 0.5, "muon": 0.8}  # bytes relative to AdamW
