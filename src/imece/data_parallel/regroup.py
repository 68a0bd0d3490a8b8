"""Lets a wrapped model go on with other ranks, in the same objects: after some have died, or others
have come.

    leave     lets go of everything that belongs to the old ranks: buckets, hooks, shards, sums under way. It
              asks nobody and waits for nobody, so it does not matter who is still there, or where a backward
              failed
    regroup   builds all this on the new group, as at construction, but moves no values

Each parameter keeps its memory until its new bucket takes it in, so no more than one bucket exists twice.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig

from imece.collectives import checks
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.reducing import task
from imece.data_parallel.reducing.comm_hook import CommHook
from imece.data_parallel.reducing.watch import Watch
from imece.data_parallel.same import check_same_shapes
from imece.data_parallel.sharding import freed
from imece.data_parallel.sharding.freed import FreedParameter

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


@dataclass
class Kept:
    """What goes over from one group to the next."""

    named: list[tuple[str, torch.Tensor]]  # parameters with a place in a bucket
    watch: Watch | None
    hook: CommHook | None
    group_is_state: bool  # the hook's state is the group
    buffer_hook_too: bool  # the same for the hook on buffers
    meeting: list[Any]  # other objects with this process_group: synchronised batch norms, states of hooks

    @classmethod
    def of(cls, model: DistributedDataParallel) -> Kept:
        reducer, group = model.reducer, model.process_group
        state = reducer.leaving.hook.state if reducer.leaving.hook is not None else None
        buffer_hook = model._buffer_sync.hook
        others = [state, *model.module.modules()]
        return cls(
            [(slot.name, slot.parameter) for slot in reducer.slots],
            reducer.leaving.watch,
            reducer.leaving.hook,
            state is group,
            buffer_hook is not None and buffer_hook.state is group,
            [each for each in others if getattr(each, "process_group", None) is group],
        )

    def move(self, model: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
        """Give another group to all of these but the model itself."""
        for each in self.meeting:
            each.process_group = group
        if self.hook is not None and self.group_is_state:
            self.hook.state = group
        if self.buffer_hook_too and model._buffer_sync.hook is not None:
            model._buffer_sync.hook.state = group


def leave(model: DistributedDataParallel) -> None:
    """DistributedDataParallel.leave; may be called again after a `regroup` that raised."""
    if task.is_running():
        raise RuntimeError("regroup() or leave() inside of backward")
    if model._kept is None:
        model._kept = Kept.of(model)
        model._let_go()
    for _, parameter in model._kept.named:
        parameter.grad = None
        _make_usable(parameter)
    for _, parameter in model._frozen:
        _make_usable(parameter)
    model._kept.move(model, None)
    model.__dict__.pop("device_mesh", None)
    model._join_config = _JoinConfig.construct_disabled_join_config()  # a failed join leaves it on
    groups = model._pop_groups()
    has_connections = any(not isinstance(group, SharedMemoryGroup) for group in groups)
    while groups:
        if checks.checker(groups[-1]) is not None:  # another group may have its name by now
            checks.release(groups[-1])
        groups.pop()
    if has_connections:
        gc.collect()  # errors and the frames they came through refer to each other, and to the group


def regroup(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """DistributedDataParallel.regroup, after `leave`. If it raises, the next `leave` starts from what
    is there."""
    kept = model._kept
    assert kept is not None
    model.process_group = group
    kept.move(model, group)
    model.require_forward_param_sync = True
    model._synchronised = 0  # newcomers count from here too
    model._choose_way()
    with wanting_gradients(kept.named):  # which of them want one may differ between one step and the next
        check_same_shapes(model._alike(), group, model.device)
        model._make_reducer(kept.named)
    model.reducer.leaving.watch = kept.watch
    model.reducer.leaving.hook = kept.hook
    model._kept = None


def _make_usable(parameter: torch.Tensor) -> None:
    """Give a freed parameter elements again: one 0 for all of them, since nobody has their values
    any more."""
    if isinstance(parameter, FreedParameter):
        freed.revive(parameter)
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)


@contextlib.contextmanager
def wanting_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Parameters that were frozen after construction want gradients inside: they keep their place in
    a bucket."""
    frozen = [each for _, each in named if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
