"""A wrapped model goes on with other ranks, in the same objects: after some have died, or others have come.

    leave     let go of what belongs to the ranks until now: buckets, hooks, shards, what is under way. Nobody
              is asked or waited for, so it does not matter who is still there, or in what a backward failed
    regroup   build the same as at construction, on the new group, but that no values move

Each parameter keeps its memory until its new bucket takes it in. So no more than one bucket is there twice.
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
from imece.data_parallel.reducing.comm_hook import CommHook
from imece.data_parallel.reducing.watch import Watch
from imece.data_parallel.same import check_same_shapes
from imece.data_parallel.sharding import freed
from imece.data_parallel.sharding.freed import FreedParameter

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


@dataclass
class Kept:
    """What goes from one group to the next."""

    named: list[tuple[str, torch.Tensor]]  # parameters with a place in a bucket
    watch: Watch | None
    hook: CommHook | None
    group_is_state: bool  # of that hook
    buffer_hook_too: bool  # and of that on buffers
    meeting: list[Any]  # what else has it as its process_group: synchronised batch norms, states of hooks

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
        """Those beside the model to another group."""
        for each in self.meeting:
            each.process_group = group
        if self.hook is not None and self.group_is_state:
            self.hook.state = group
        if self.buffer_hook_too and model._buffer_sync.hook is not None:
            model._buffer_sync.hook.state = group


def leave(model: DistributedDataParallel) -> None:
    """As DistributedDataParallel.leave; again after a `regroup` that has raised."""
    if torch._C._current_graph_task_id() != -1:
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
        if checks.checker(groups[-1]) is not None:  # its name may be another's by now
            checks.release(groups[-1])
        groups.pop()
    if has_connections:
        gc.collect()  # errors and the frames that they came through know each other, and the group


def regroup(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """After leave. If it raises, the next leave begins with what this one has left."""
    kept = model._kept
    assert kept is not None
    model.process_group = group
    kept.move(model, group)
    model.require_forward_param_sync = True
    model._synchronised = 0  # those that have just come count from here too
    model._choose_way()
    with wanting_gradients(kept.named):  # which of them do may differ between a step and the next
        check_same_shapes(model._alike(), group, model.device)
        model._make_reducer(kept.named)
    model.reducer.leaving.watch = kept.watch
    model.reducer.leaving.hook = kept.hook
    model._kept = None


def _make_usable(parameter: torch.Tensor) -> None:
    """Of a parameter that is freed: all elements are one 0, since nobody has the others any more."""
    if isinstance(parameter, FreedParameter):
        freed.revive(parameter)
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)


@contextlib.contextmanager
def wanting_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Those that were frozen after construction have their place in a bucket all the same."""
    frozen = [each for _, each in named if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
