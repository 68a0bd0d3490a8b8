"""strategy="auto" of `parallelize`: collects what is known of a given model, for the planner's rule.

    known        its tensors, its optimizers, the ranks and their hosts, the memory that is still free
    not known    what forward keeps for backward (but see activation_bytes), and so how long a step takes

Rank 0 decides and tells the others. A rank that joins later is alone when it asks; it finds their decision in
the store.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.buckets import default_cap_bytes, filling, gathered, most_under_way, units_at_once
from imece.collectives.shared_memory.segment import available_bytes
from imece.collectives.texts import gather_texts
from imece.data_parallel import arguments
from imece.data_parallel.footprint import LaidOut, optimizer_tensors
from imece.data_parallel.optimizer import is_element_wise, kinds_of
from imece.data_parallel.reducing.way import (
    HIERARCHICAL,
    best_schedule,
    has_spare_core,
    is_over_hosts,
)
from imece.data_parallel.sharding.block_wise import block_of
from imece.data_parallel.sharding.cast import MixedPrecision
from imece.data_parallel.sharding.gathering import GatherOptions
from imece.data_parallel.sharding.meta import is_meta
from imece.data_parallel.sharding.offload import can_offload, pinned_bytes
from imece.data_parallel.sharding.trained import Trained, can_lie_flat
from imece.data_parallel.sharding.units import find_units
from imece.data_parallel.strategy import STRATEGIES, ShardGroups, Strategy, usual_strategy
from imece.device import casts_fast
from imece.footprint import OFFLOADS, Footprint
from imece.footprint import Offload as Hosted
from imece.layout import MIB
from imece.mesh import Mesh

if TYPE_CHECKING:  # no other strategy needs it
    from imece.plan.answer.auto import Asked
    from imece.plan.setup import Strategy as Name

_ADAM = 2  # tensors per parameter that an unknown optimizer is assumed to keep
_MOST_TIMES = 64  # as many ranks at most when looking for a number on which the model fits
_calls = itertools.count()  # numbers the calls of `choose`, in the same order in every process


@dataclass(frozen=True)
class Given:
    """The arguments of `parallelize` that memory depends on."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    ranks: Mesh | dist.ProcessGroup
    device: torch.device
    options: GatherOptions
    precision: MixedPrecision | None
    offload: Hosted | None
    cap_mb: float | None
    activation_bytes: int | None


def choose(given: Given) -> Strategy:
    """The strategy that "auto" stands for. All ranks call this; rank 0 says on stderr what it chose and why.

    ValueError on all ranks if nothing fits: by how much, and what would fit.
    """
    usual, ranks, key = usual_strategy(given.ranks), given.ranks, f"strategy/{next(_calls)}"
    mesh = ranks if isinstance(ranks, Mesh) else None
    if mesh is not None and mesh.world.joining:
        return STRATEGIES[mesh.decided(key) or usual.name]
    group = _group(ranks)
    if group.size() == 1:
        return usual  # there is nobody to share with
    found = _footprints(given, group.size())  # on all ranks, so that all of them raise if the model is wrong
    memory, told = _memory(given, group), ["", ""]
    if group.rank() == 0:
        told = _decide(given, found, memory, usual)
    name, words = gather_texts(told, group, given.device, "strategy of rank 0")[0]
    if not name:
        raise ValueError(words)
    if mesh is not None:
        mesh.decide(key, name)
    if group.rank() == 0:
        print(f"imece: {words}", file=sys.stderr, flush=True)
    return STRATEGIES[name]


def _footprints(given: Given, size: int) -> dict[Name, Footprint]:
    """The footprint of each strategy that is possible."""
    from imece.plan.answer.auto import ORDER

    return {
        name: footprint_of(given, STRATEGIES[name], size, given.offload)
        for name in ORDER
        if can_be(given, STRATEGIES[name], size)
    }


def _decide(given: Given, found: dict[Name, Footprint], memory_bytes: int, usual: Strategy) -> list[str]:
    """(name, why); ("", what is wrong) if nothing fits."""
    from imece.plan.answer.auto import Asked

    if not found:  # the usual strategy then raises and says why
        return [usual.name, f"strategy {usual.name}: there is no other for such a model and optimizer"]
    size = _group(given.ranks).size()
    asked = Asked(found, memory_bytes, usual.name, given.activation_bytes)
    taken = asked.take()
    if taken is None:
        return ["", asked.misses(_would_fit(given, asked, size))]
    return [taken, asked.why(taken)]


def can_be(given: Given, strategy: Strategy, size: int) -> bool:
    """Whether `parallelize` would accept this strategy, memory aside."""
    if not strategy.optimizer:
        return given.precision is None and given.offload is None and not is_meta(given.model)
    if given.offload is not None and not can_offload(given.offload, strategy):
        return False
    try:
        if strategy.hybrid:
            ShardGroups.of(strategy, given.ranks)
        for optimizer in given.optimizers:
            if is_element_wise(optimizer):
                block_of(optimizer)
    except ValueError:
        return False
    return sum(each.numel() for _, each in _trained(given.model)) >= size


def footprint_of(given: Given, strategy: Strategy, size: int, offload: Hosted | None) -> Footprint:
    """Bytes of rank 0 of `size`, without activations; frozen parameters count among the parameters."""
    named = _trained(given.model)
    kept = {id(each) for _, each in named}
    still = [] if not strategy.parameters else _frozen(given.model)
    kept |= {id(each) for _, each in still}
    others = (each for each in (*given.model.parameters(), *given.model.buffers()) if id(each) not in kept)
    rest = sum(each.nbytes for each in others)
    tensors = [optimizer_tensors(each) for each in given.optimizers]
    state = {at: _ADAM if count is None else count for at, count in enumerate(tensors)}
    if not strategy.optimizer:
        whole = sum(each.nbytes for _, each in named)
        kinds = kinds_of(named, given.optimizers, given.model)
        kept_bytes = sum(
            each.nbytes * state.get(kind, 0) for (_, each), kind in zip(named, kinds, strict=True)
        )
        return Footprint(whole + rest, whole, kept_bytes, 0)
    groups, on_cpu = ShardGroups.of(strategy, given.ranks), given.device.type == "cpu"
    in_common, schedule = groups.in_common(given.device), best_schedule(groups.shard, given.device)
    gathers = given.options.wanted(strategy, in_common)
    hierarchical = schedule == HIERARCHICAL
    under_way = most_under_way(
        overlap=has_spare_core(groups.world, given.device),
        over_hosts=is_over_hosts(groups, schedule),
        in_common=in_common,
        replicas=groups.replicas is not None,
    )
    units = find_units(given.model, given.options.units) if gathers else []
    trained = Trained.of(named, given.optimizers, given.model, units)
    precision = given.precision or MixedPrecision()
    gradients_bytes = 0 if on_cpu else precision.gradients_bytes(named)
    cap_bytes = default_cap_bytes(
        over_hosts=hierarchical, on_cpu=on_cpu, borrows=strategy.gradients, gradients_bytes=gradients_bytes
    )
    if given.cap_mb is not None:
        cap_bytes = int(given.cap_mb * MIB)
    shards = groups.shard.size() if strategy.hybrid else size
    laid = trained.lay(shards, None if gathers else cap_bytes)
    numbered = [(*trained.pairs[bucket.group], bucket) for bucket in laid.buckets]
    at_once = units_at_once(over_hosts=hierarchical)
    master = named[0][1].itemsize
    parameter = precision.param.itemsize if precision.param is not None else master
    frozen = Trained.frozen(still, given.model, units, precision.param)
    frozen_laid = frozen.lay(shards, None if gathers else cap_bytes)
    by_unit = [(unit, bucket.numel * parameter) for unit, _, bucket in numbered]
    by_unit += [(frozen.pairs[bucket.group][0], bucket.nbytes) for bucket in frozen_laid.buckets]
    laid_out = LaidOut(
        laid,
        strategy,
        {bucket.index: state.get(kind, 0) * master for _, kind, bucket in numbered},
        parameter_bytes=parameter,
        reduce_bytes=precision.reduce.itemsize if precision.reduce is not None else parameter,
        master_bytes=master,
        filling=filling(numbered, gathers=gathers, most_under_way=under_way) if strategy.gradients else (),
        gathered=gathered(by_unit, given.options.in_flight or at_once) if gathers else 0,
        frozen=frozen_laid,
        offload=offload,
        takes=pinned_bytes,
        casts=gathers and offload is None and parameter != master and casts_fast(given.device),
    )
    found = laid_out.footprint(0)
    return replace(found, parameters=found.parameters + rest)


def _would_fit(given: Given, asked: Asked, size: int) -> list[str]:
    """Changes after which some strategy would fit, in words."""
    said, zero3 = [], STRATEGIES["zero3"]
    for offload in OFFLOADS if given.device.type == "cuda" and given.offload is None else ():
        if not can_be(replace(given, offload=offload), zero3, size):
            continue
        found = footprint_of(given, zero3, size, offload)
        if asked.fits(found):
            said.append(
                f"offload={offload!r} with zero3 fits: {found.total / 1e9:.2f} GB of a GPU and "
                f"{found.host / 1e9:.2f} GB of the host's memory for each rank"
            )
            break
    times = 2
    while times <= _MOST_TIMES:
        more = times * size
        if can_be(given, zero3, more) and asked.fits(footprint_of(given, zero3, more, given.offload)):
            # More ranks on the same CPUs would have no more memory.
            what = "ranks" if given.device.type == "cuda" else f"ranks on {times} times as many hosts"
            return [*said, f"zero3 fits on {more} {what}"]
        times *= 2
    return said


def _trained(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return arguments.trained(model, getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def _frozen(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Frozen parameters that are sharded wherever parameters are."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    named = [(name, each) for name, each in model.named_parameters() if name not in ignored]
    return [(name, each) for name, each in named if not each.requires_grad and can_lie_flat(each)]


def _group(ranks: Mesh | dist.ProcessGroup) -> dist.ProcessGroup:
    return ranks if isinstance(ranks, dist.ProcessGroup) else ranks.data_group


# Memory.


def _memory(given: Given, group: dist.ProcessGroup) -> int:
    """Bytes that the rank with the least memory may use for this model, including those it uses already."""
    device = given.device
    tensors = {id(each): each for each in (*given.model.parameters(), *given.model.buffers())}
    present = sum(each.nbytes for each in tensors.values() if each.device.type == given.device.type)
    # Once all ranks have answered, all models exist: one created later would take memory that another rank
    # counts on.
    there = gather_texts([str(present)], group, device, "bytes of the model")
    mine = free_bytes(given.device) + present
    if given.device.type == "cpu":
        beside = _on_this_host(group)
        mine = (free_bytes(given.device) + sum(int(there[rank][0]) for rank in beside)) // len(beside)
    said = gather_texts([str(mine)], group, device, "bytes that are free")
    return min(int(text) for (text,) in said)


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including unused memory that torch keeps there; or of this host."""
    if device.type != "cuda":
        return available_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _on_this_host(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of the group that share this rank's memory; all of them if the hosts are unknown."""
    hosts = meshes.hosts_in(group) or (tuple(range(group.size())),)
    return next(host for host in hosts if group.rank() in host)
