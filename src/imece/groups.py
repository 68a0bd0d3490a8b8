"""torch's groups of some of the ranks. No other module creates any, except meeting.py: that of all ranks."""

from __future__ import annotations

import functools
import os
from datetime import timedelta

import torch.distributed as dist

from imece import moments
from imece.axes import Partition
from imece.device import Backends
from imece.errors import UserError
from imece.system import connections
from imece.world import OPENED, World

Lane = int | str  # among groups of the same ranks: 0 is the usual one, a name says what another is for
_SHOWN_CHARS = 200

destroy = dist.destroy_process_group
"""torch's own, which waits for what is under way."""


@functools.wraps(destroy)
def _finish_and_destroy(group: dist.ProcessGroup | None = None) -> None:
    finish()
    if group is None:
        os.environ.pop(OPENED, None)
    destroy(group)


dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _finish_and_destroy


def finish() -> None:
    """Before groups are destroyed: what is under way in the background, and on other ranks, would wait for
    this one until the timeout."""
    for each in moments.before_closing:
        each()


class Groups:
    """The groups over sets of one world's ranks, each made on first use by a call of the whole world."""

    def __init__(
        self, world: World, hosts: Partition, backends: Backends, *, store: dist.Store, timeout: timedelta
    ) -> None:
        """The group of all ranks is torch's default one, which is open. hosts: the ranks of each host. store:
        of these groups alone."""
        self.hosts, self.backends = hosts, backends
        self._rank, self._store, self._timeout = world.rank, store, timeout
        self._whole: Partition = (tuple(range(world.world_size)),)
        self._known: dict[tuple[Partition, Lane], dist.ProcessGroup] = {(self._whole, 0): _default_group()}
        self._created: list[dist.ProcessGroup] = []

    @property
    def world(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self._known[self._whole, 0]

    @property
    def were_destroyed(self) -> bool:
        """Whether the script has called dist.destroy_process_group(), which ends all groups."""
        known = self._known.get((self._whole, 0))  # None after `forget`
        return known is not None and known is not dist.group.WORLD

    def has(self, *partitions: Partition) -> bool:
        """Whether this rank's groups of all these sets are there, without a call of all ranks."""
        return {(sets, 0) for sets in partitions} <= self._known.keys()

    def over(self, sets: Partition, lane: Lane = 0, backend: str | None = None) -> dist.ProcessGroup:
        """The group of this rank's set. UserError if another rank makes other groups now.

        backend: another one than usual for these ranks; such a group needs a lane of its own.
        """
        if (sets, lane) not in self._known:
            self._check_same_order(sets)
            on_host = all(any(set(ranks) <= set(host) for host in self.hosts) for ranks in sets)
            backend = backend or (self.backends.host if on_host else self.backends.world)
            for ranks in sets:
                with connections.of_groups():
                    group = dist.new_group(ranks=list(ranks), backend=backend, timeout=self._timeout)
                if self._rank in ranks:
                    self._known[sets, lane] = group
                    self._created.append(group)
        return self._known[sets, lane]

    def destroy(self, *, with_default: bool) -> None:
        """Destroy them, the last one first."""
        if not self.were_destroyed:
            for group in reversed(self._created):
                destroy(group)
            if with_default and dist.is_initialized():
                destroy()
        self.forget()

    def forget(self) -> None:
        """Let go of them: Gloo closes a group's connections with the last reference to it, and other ranks
        wait for that."""
        self._known, self._created = {}, []

    def _check_same_order(self, sets: Partition) -> None:
        """UserError if another rank creates another group now: that would hang for the whole timeout."""
        key, mine = f"group/{len(self._known)}", repr(sets)
        theirs = self._store.compare_set(key, "", mine).decode()
        if theirs != mine:
            raise UserError(
                f"rank {self._rank} asks for the groups {mine[:_SHOWN_CHARS]} where another rank asked for "
                f"{theirs[:_SHOWN_CHARS]}: all ranks must ask for groups in the same order"
            )


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"
    return group
