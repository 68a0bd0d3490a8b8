"""A sharded model made whole for a while: to read it, to write it, to take and load a state dict."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from imece.collectives import ops
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.parts import move_into
from imece.data_parallel.sharding.stores import Store


@contextlib.contextmanager
def gathered(
    sharding: Sharding, writing: Callable[[], contextlib.AbstractContextManager[None]] | None
) -> Iterator[None]:
    """Inside, parameters are whole on every rank. writing: what all ranks write into them inside of it
    stays."""
    inside: contextlib.AbstractContextManager[None]
    sharding.divided.end()
    sharding.settle()
    if sharding.gathering is not None:
        inside = sharding.gathering.gathered()
    elif writing and sharding.common_parameters and not sharding.has_private:
        inside = _private(sharding)
    else:
        inside = contextlib.nullcontext()
    with inside:
        with writing() if writing else contextlib.nullcontext():
            yield
        if writing:
            with torch.no_grad():
                _take_over(sharding)
            sharding.note_versions()


def fill_state(sharding: Sharding, state: dict[str, Any]) -> None:
    """Put copies of masters in place of parameters that are gathered or have fewer bits than their masters.

    Besides the copies no more than one bucket is whole. A write into a gathered parameter that is not in its
    master yet counts.
    """
    keys: dict[int, list[str]] = defaultdict(list)
    for key, value in state.items():
        keys[id(value)].append(key)
    sharding.settle()
    for store in sharding.stores_to_copy:
        whole = sharding.gather_masters(store, "whole for state_dict(), which all ranks call")
        for place, parameter in zip(store.plan.places, store.members, strict=True):
            if id(parameter) not in keys:
                continue
            copy = whole[place.start : place.stop].view(parameter.shape)
            is_there = not isinstance(parameter, FreedParameter)
            copy = _rounding_to(parameter.detach(), copy) if is_there else copy.clone()
            state.update(dict.fromkeys(keys[id(parameter)], copy))


@contextlib.contextmanager
def loading(sharding: Sharding) -> Iterator[None]:
    """Inside, values copied into parameters with fewer bits than their masters go into the
    masters unrounded."""
    stores = [store for store in sharding.stores if store.has_more_bits]
    copied = _Copied([parameter for store in stores for parameter in store.members])
    with copied:
        yield
    with torch.no_grad():
        for store in stores:
            for part in store.parts:
                if (source := copied.by_id.get(id(sharding.slots[part.index].parameter))) is not None:
                    own = part.of(store.master)
                    own.copy_(source.reshape(-1)[part.start : part.stop].view(own.shape))


class _Copied(TorchFunctionMode):
    """Sees what is copied into parameters, whatever modules do to a state dict before that."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._dtypes = {id(each): each.dtype for each in parameters}
        self.by_id: dict[int, torch.Tensor] = {}  # not of the parameter's own dtype: masters have more bits

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == torch.Tensor.copy_ and len(args) > 1:
            into, source = args[:2]
            if source.dtype != self._dtypes.get(id(into), source.dtype):
                self.by_id[id(into)] = source
        return func(*args, **(kwargs or {}))


def _take_over(sharding: Sharding) -> None:
    """Copy this rank's part of what was written into the kept memory."""
    for store in sharding.every_store:
        store.take_in()
    sharding.check_views()
    sharding.lane.wait()
    for store in sharding.every_store:
        start, stop = store.plan.shard(sharding.rank)
        new = store.parameters[start:stop].to(store.master.device)
        if store.is_frozen:
            _take_over_frozen(store, new)
            continue
        if store.has_more_bits:
            store.master.copy_(_rounding_to(new, store.master))
        elif store.own is not store.master or sharding.gathering is not None:
            store.master.copy_(new)
        if store.own is not store.master and sharding.gathering is not None:
            store.own.copy_(new)


def _take_over_frozen(store: Store, new: torch.Tensor) -> None:
    """Copy only if something changed: holders of copies or digests go by how often the parts were written."""
    if not torch.equal(store.own.view(torch.uint8), new.view(torch.uint8)):
        store.own.copy_(new)
        torch.autograd.graph.increment_version([part.parameter for part in store.parts])


def _rounding_to(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A new tensor: each element has the master's bits, unless somebody wrote it in the parameter."""
    written = master.to(parameter.dtype) != parameter
    return torch.where(written, parameter.to(master.dtype), master)


@contextlib.contextmanager
def _private(sharding: Sharding) -> Iterator[None]:
    """Inside, each rank has a private copy of shared parameters: an `add_` by all ranks must count once."""
    stores = sharding.every_store
    common = [store.parameters for store in stores]
    for store in stores:
        store.parameters = store.parameters.clone()
        move_into(store.parameters, store.plan, store.members, copy=False)
    ops.barrier(group=sharding.groups.shard)  # all have copied
    sharding.has_private = True
    try:
        yield
        for store, memory in zip(stores, common, strict=True):
            start, stop = store.plan.shard(sharding.rank)
            memory[start:stop].copy_(store.parameters[start:stop])
    finally:
        sharding.has_private = False
        for store, memory in zip(stores, common, strict=True):
            store.parameters = memory
            move_into(memory, store.plan, store.members, copy=False)
        sharding.note_versions()
    ops.barrier(group=sharding.groups.shard)  # all have written
