"""What is kept and let go of when a wrapped model goes on with other ranks, in the same objects: after some
have died, or others have come. The wrapper's methods:

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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from imece.collectives import checks
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.data_parallel.buffers import BufferHook
from imece.data_parallel.reducer import Reducer
from imece.data_parallel.reducing.comm_hook import CommHook
from imece.data_parallel.reducing.watch import Watch
from imece.data_parallel.sharding import freed
from imece.data_parallel.sharding.freed import FreedParameter


@dataclass
class Kept:
    """What goes over from one group to the next."""

    watch: Watch | None
    hook: CommHook | None
    meeting: list[Any]  # objects with this process_group: synchronised batch norms, states of hooks
    hooks_of_group: list[CommHook | BufferHook]  # those whose state is the group

    @classmethod
    def of(
        cls, reducer: Reducer, module: nn.Module, buffer_hook: BufferHook | None, group: dist.ProcessGroup
    ) -> Kept:
        hook = reducer.leaving.hook
        others = [hook.state if hook is not None else None, *module.modules()]
        return cls(
            reducer.leaving.watch,
            hook,
            [each for each in others if getattr(each, "process_group", None) is group],
            [each for each in (hook, buffer_hook) if each is not None and each.state is group],
        )

    def move(self, group: dist.ProcessGroup | None) -> None:
        """Give another group to all of these."""
        for each in self.meeting:
            each.process_group = group
        for hook in self.hooks_of_group:
            hook.state = group


def release(groups: list[dist.ProcessGroup]) -> None:
    """Let go of the old groups, and of their connections, for which other ranks may wait. Empties the
    list."""
    has_connections = any(not isinstance(group, SharedMemoryGroup) for group in groups)
    while groups:
        if checks.checker(groups[-1]) is not None:  # another group may have its name by now
            checks.release(groups[-1])
        groups.pop()
    if has_connections:
        gc.collect()  # errors and the frames they came through refer to each other, and to the group


def make_usable(parameter: torch.Tensor) -> None:
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
