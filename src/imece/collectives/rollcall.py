"""Gathers a row from every rank on every rank: this is how the fingerprints of a checked call travel.

Rows go through shared memory within a host (10 us), then between hosts among the ranks with the same place;
or among all ranks at once if the mesh knows no such levels. Over Gloo a gathering is one all-to-all of equal
rows, which takes the time of one message; Gloo's all-gather passes each row from neighbour to neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imece.collectives.companions import Companions
from imece.collectives.shared_memory.group import SharedMemoryGroup


class RollCall:
    """One row from each rank of a group, being gathered."""

    def __init__(
        self,
        companions: Companions,
        row: torch.Tensor,
        *,
        inline: bool,
        offered: torch.Tensor | None,
    ) -> None:
        """row: uint8 [nbytes], of the same length on every rank. inline: shared memory gathers here and
        now, sooner than a thread of its own would have begun. offered: then also offered to the ranks of
        this host.
        """
        self._companions, self._offered = companions, offered
        self.opened: list[torch.Tensor] = []
        """What the ranks of this host offered, as returned by gather_and_open."""
        self._left = list(companions.levels)
        self._rows = row.view(1, -1)  # [ranks so far, nbytes]
        self._work: dist.Work | None = None
        self._go_on(inline)

    def wait(self, wait_for: Callable[[dist.Work], None]) -> torch.Tensor:
        """uint8 [world_size, nbytes], in the order of the group's ranks. wait_for: waits for one work."""
        while self._work is not None:
            wait_for(self._work)
            self._work = None
            self._go_on(inline=True)
        return self._rows[self._companions.order]

    def _go_on(self, inline: bool) -> None:
        while self._left and self._work is None:
            group = self._left.pop(0)
            if inline and isinstance(group, SharedMemoryGroup):
                rows, self.opened = group.gather_and_open(self._rows.view(-1), self._offered)
                self._rows = rows.view(-1, self._rows.shape[1])
                self._offered = None
            else:
                self._rows, self._work = _gather(group, self._rows)


def _gather(group: Any, rows: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
    """(place, work): all ranks' `rows`, one rank's after another's."""
    place = rows.new_empty(group.size() * rows.shape[0], rows.shape[1])
    if not isinstance(group, dist.ProcessGroupGloo):
        return place, group.allgather([list(place.split(rows.shape[0]))], [rows])
    sent = rows.repeat(group.size(), 1)
    gloo: Any = group  # torch's stub lacks this call
    return place, gloo.alltoall_base(place, sent, [], [], dist.AllToAllOptions())
