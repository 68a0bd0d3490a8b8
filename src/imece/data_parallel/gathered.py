"""All of a sharded model for a while: to look at it, to write into it, to take a state dict."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from imece.collectives import ops
from imece.data_parallel.gathering import Gathering
from imece.data_parallel.parts import move_into
from imece.data_parallel.shard import Sharding


@contextlib.contextmanager
def gathered(sharding: Sharding, write: bool) -> Iterator[None]:
    """Parameters are whole inside, on every rank. write: what all ranks write into them stays."""
    inside: contextlib.AbstractContextManager[None]
    sharding.settle()
    if sharding.gathering is not None:
        inside = sharding.gathering.gathered()
    else:
        inside = _private(sharding) if write and sharding.common_parameters else contextlib.nullcontext()
    with inside:
        yield
        if write:
            with torch.no_grad():
                _take_over(sharding)
            sharding.note_versions()


def fill_state(gathering: Gathering, state: dict[str, Any]) -> None:
    """Copies in place of the parameters in a state dict; no more than one unit is there besides them."""
    keys: dict[int, list[str]] = defaultdict(list)
    for key, value in state.items():
        keys[id(value)].append(key)
    for unit in gathering.units:
        with gathering.gathered([unit]):
            for flat in unit.flats:
                for _, parameter in flat.named:
                    copy = parameter.detach().clone() if id(parameter) in keys else None
                    for key in keys.get(id(parameter), ()):
                        state[key] = copy


def _take_over(sharding: Sharding) -> None:
    """This rank's part of what was written goes where it stays."""
    sharding.check_views()
    sharding.lane.wait()
    for store in sharding.stores:
        start, stop = store.plan.shard(sharding.rank)
        new = store.parameters[start:stop].to(store.master.device)
        if store.own.dtype != store.master.dtype:
            written = store.master.to(new.dtype) != new  # the others keep all their bits
            store.master.copy_(torch.where(written, new.to(store.master.dtype), store.master))
        elif store.own is not store.master:
            store.master.copy_(new)
        if sharding.gathering is not None:
            store.own.copy_(new)


@contextlib.contextmanager
def _private(sharding: Sharding) -> Iterator[None]:
    """Ranks with parameters in common write into a copy each, as `add_` by all of them must count once."""
    common = [store.parameters for store in sharding.stores]
    for store in sharding.stores:
        store.parameters = store.parameters.clone()
        move_into(store.parameters, store.plan, store.members, copy=False)
    ops.barrier(group=sharding.groups.shard)  # all have copied
    try:
        yield
        for store, memory in zip(sharding.stores, common, strict=True):
            start, stop = store.plan.shard(sharding.rank)
            memory[start:stop].copy_(store.parameters[start:stop])
    finally:
        for store, memory in zip(sharding.stores, common, strict=True):
            store.parameters = memory
            move_into(memory, store.plan, store.members, copy=False)
        sharding.note_versions()
    ops.barrier(group=sharding.groups.shard)  # all have written
