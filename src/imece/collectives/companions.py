"""Groups beside a group, for control messages on the CPU: checked calls talk over them.

torch does not know these groups. Its own ways to make one are a call of all ranks of the world, or name the
group by its ranks alone, and a name used again finds the addresses of the earlier group.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.mesh import hosts_in
from imece.system.connections import of_groups

_made: Counter[str] = Counter()
"""By name and ranks of the group that they belong to. torch counts names anew for each world, so a name alone
may have belonged to other groups of some of these ranks."""


class Companions(NamedTuple):
    """Groups beside a group, of the same ranks, for control messages on the CPU."""

    levels: tuple[Any, ...]
    """One group of all ranks; or this host's ranks, and then the ranks with this one's place on each host."""
    order: list[int]
    """order[rank] is where a rank's row is once the rows of each level are concatenated in the order
    of ranks."""

    def leave(self) -> None:
        """Leave these groups. Ranks that wait for this one in shared memory are told so even if an error
        keeps the groups alive; torch does not know them, and would not end them. Gloo's groups end with their
        last reference, or are cut (imece.system.connections).
        """
        for level in self.levels:
            if isinstance(level, SharedMemoryGroup):
                level.shutdown()


@of_groups()
def companions(group: dist.ProcessGroup) -> Companions:
    """New companions of a group. All ranks of `group` make them, equally often.

    They are on "shm" if the ranks are known to share a host, else on Gloo, with the timeout of the group. A
    group of torch's fake backend has nobody to meet: it is its own companion, and hears itself from all
    ranks.
    """
    me, ranks = group.rank(), tuple(range(group.size()))
    if ":fake" in str(dist.get_backend_config(group)):
        return Companions((group,), list(ranks))
    which = f"{group.group_name}/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
    _made[which] += 1
    key = f"imece/companion/{which}/{_made[which]}"
    store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
    timeout = _timeout_of(group)

    def make(creator: Any, name: str, members: tuple[int, ...]) -> Any:
        made = creator(dist.PrefixStore(name, store), members.index(me), len(members), timeout)
        if isinstance(made, SharedMemoryGroup):
            made.recorded = False  # the checked call is recorded itself, and a wait must not count twice
        return made

    on_hosts = hosts_in(group) or ()
    mine = next((members for members in on_hosts if me in members), ())
    shm, gloo = dist.Backend._plugins["SHM"].creator_fn, dist.ProcessGroupGloo
    if len(mine) == len(ranks):
        return Companions((make(shm, "checks", ranks),), list(ranks))
    if len(mine) > 1 and all(len(members) == len(mine) for members in on_hosts):
        across = tuple(members[mine.index(me)] for members in on_hosts)
        in_host = make(shm, f"checks in host {on_hosts.index(mine)}", mine)
        in_host.sleep_at_once()  # this group waits for other hosts anyway, and what it waits for needs cores
        between = make(gloo, f"checks between hosts {mine.index(me)}", across)
        rows = [rank for members in on_hosts for rank in members]
        return Companions((in_host, between), [rows.index(rank) for rank in ranks])
    return Companions((make(gloo, "checks", ranks),), list(ranks))


def forget() -> None:
    """Forget used names: the ranks are about to meet in a store in which nobody has met."""
    _made.clear()


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    if isinstance(group, SharedMemoryGroup):
        return group.timeout
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return timedelta(seconds=options._timeout.total_seconds())
    return dist.distributed_c10d.default_pg_timeout
