"""A wrapped model goes on with other ranks, in the same objects: after some have died, or others have come.

    let go    of what belongs to the ranks until now: buckets, hooks, shards, what is under way. Nobody is
              asked or waited for, so it does not matter who is still there, or in what a backward has failed
    build     the same as at construction, on the new group, but that no values move

Each parameter keeps its memory until its new bucket takes it in. So no more than one bucket is there twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig

from imece.data_parallel import freed
from imece.data_parallel.freed import FreedParameter
from imece.data_parallel.same import check_same_shapes

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


def regroup(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """As DistributedDataParallel.regroup. If it raises, the next one begins with what this one has left."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("regroup() inside of backward")
    old, before = model.reducer, model.process_group
    named = [(slot.name, slot.parameter) for slot in old.slots]
    model._let_go()
    for _, parameter in named:
        parameter.grad = None
    model.process_group = group
    model.__dict__.pop("device_mesh", None)
    model._join_config = _JoinConfig.construct_disabled_join_config()  # a failed join leaves it on
    model.require_forward_param_sync = True
    model._synchronised = 0  # those that have just come count from here too
    _replace_in_others(model, before, group)
    model._choose_way()
    check_same_shapes(model._alike(), group, model.device)
    with _wanting_gradients(named):
        model._make_reducer(named)
    model.reducer.watch = old.watch
    model.reducer.hook, model.reducer.hook_state = old.hook, old.hook_state


def make_usable(parameter: torch.Tensor) -> None:
    """Of a parameter that is freed: all elements are one 0, since nobody has the others any more."""
    if isinstance(parameter, FreedParameter):
        freed.revive(parameter)
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)


def _replace_in_others(
    model: DistributedDataParallel, before: dist.ProcessGroup, group: dist.ProcessGroup
) -> None:
    """What meets in the model's group without being of it: synchronised batch norms, states of hooks."""
    if model.reducer.hook_state is before:
        model.reducer.hook_state = group
    if model._buffer_hook is not None and model._buffer_hook[1] is before:
        hook, _, location = model._buffer_hook
        model._buffer_hook = hook, group, location
    others: list[Any] = [model.reducer.hook_state, *model.module.modules()]
    for each in others:
        if getattr(each, "process_group", None) is before:
            each.process_group = group


@contextlib.contextmanager
def _wanting_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Those that were frozen after construction have their place in a bucket all the same."""
    frozen = [each for _, each in named if not each.requires_grad]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)
