"""The order in which gradients came in the first backward. Before the next forward, whole buckets are laid
out anew in that order."""

from __future__ import annotations

import time

from imece.data_parallel.reducing.buckets import Gradients, Slot


class Arrivals:
    """The arrivals of one model's gradients. All ranks in the first backward lay out anew, or none."""

    def __init__(self, wanted: bool) -> None:
        """wanted: whether buckets are laid out anew at all."""
        self.noting = wanted
        """Whether the first backward is under way or still to come."""
        self._came: dict[int, tuple[int, float]] = {}  # by parameter: bytes and time
        self._to_lay = False

    def came(self, slot: Slot) -> None:
        """A gradient came. The parameter's last one counts; nobody may know before the end which that is."""
        self._came.pop(slot.index, None)  # so that it goes in after all others
        self._came[slot.index] = slot.parameter.nbytes, time.perf_counter()

    def end(self) -> None:
        """A backward is over."""
        if self.noting:
            self.noting, self._to_lay = False, True

    def again(self) -> None:
        """The backward has raised: the next one counts as the first."""
        if self.noting:
            self._came.clear()

    def lay_anew(self, gradients: Gradients, overlap: bool) -> None:
        """Before a forward: if the first backward is over, lay out buckets anew; all ranks do."""
        if self._to_lay:
            gradients.rebuild(list(self._came), list(self._came.values()), overlap)
            self._to_lay = False
            self._came.clear()
