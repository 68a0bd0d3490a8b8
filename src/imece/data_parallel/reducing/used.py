"""Which parameters some rank used in a backward: one small collective at its end, which nobody asks for."""

from __future__ import annotations

from array import array
from collections.abc import Collection

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending

_NONE_USED = -1


class Used:
    """What the ranks of one group tell each other about the parameters of one model."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """device: of the parameters."""
        self._group, self._device = group, host_device(group, device)
        self._counts: array[int] = array("i")  # of the latest flags
        self._flags = self._any = torch.empty(0)  # uint8, by parameter: this rank's, and all ranks'
        self._coming: Pending | torch.Tensor | None = None
        self._known_unused: set[int] = set()
        self.anywhere: list[int] = []
        """By parameter, whether some rank used it in the last backward that was asked about."""

    def begin(self) -> None:
        """Nothing is exchanged in this backward yet."""
        self._coming = None

    def exchange(self, fired: array[int], touched: array[int], async_op: bool) -> None:
        """Tell what this rank used. fired, touched: by parameter, not 0 if it did, in one way or another."""
        counts = array("i", map(max, fired, touched)) if any(touched) else fired
        if counts != self._counts:  # they seldom change, and to move flags to a GPU waits for all it has
            self._counts = counts[:]
            self._flags = torch.tensor([bool(count) for count in counts], dtype=torch.uint8).to(self._device)
            self._any = torch.empty_like(self._flags)
        self._coming = ops.all_reduce(
            self._any.copy_(self._flags), "max", group=self._group, async_op=async_op, label="used parameters"
        )

    def wait(self, *, read: bool) -> bool:
        """Till all have told. False if nothing was exchanged in this backward.

        read: into `anywhere`. On a GPU that waits for all of backward, so only for an unused parameter.
        """
        if self._coming is None:
            return False
        flags = self._coming.wait() if isinstance(self._coming, Pending) else self._coming
        if read:
            assert flags is not None
            self.anywhere = flags.tolist()
        return True

    def newly_unused(self, absent: Collection[int]) -> bool:
        """Whether no rank used one of these, or any parameter, which was not so before; alike on all ranks.

        absent: what this rank did not use.
        """
        unused = {index for index in absent if not self.anywhere[index]}
        if unused and not any(self.anywhere):
            unused = {_NONE_USED}  # where all are frozen now
        is_new = not self._known_unused.issuperset(unused)
        self._known_unused |= unused
        return is_new

    def give_up(self) -> None:
        """Nobody will ask for what is under way."""
        if isinstance(self._coming, Pending):
            self._coming.give_up()
        self._coming = None
        del self._group
