"""In which order gradients came in the first backward: whole buckets are laid anew by it before the next."""

from __future__ import annotations

import time

from imece.data_parallel.reducing.buckets import Gradients, Slot


class Arrivals:
    """Of one model's parameters. Whoever takes part in the first backward lays anew: all ranks, or none."""

    def __init__(self, wanted: bool) -> None:
        """wanted: whether buckets are laid anew at all."""
        self.noting = wanted
        """Whether the first backward is still to come, or under way."""
        self._came: dict[int, tuple[int, float]] = {}  # of a parameter: bytes, and when
        self._to_lay = False
        self.laid = False
        """Whether buckets were laid anew."""

    def came(self, slot: Slot) -> None:
        """A gradient of a parameter. Its last one counts: which that is nobody may know before the end."""
        self._came.pop(slot.index, None)  # so that it comes after all others
        self._came[slot.index] = slot.parameter.nbytes, time.perf_counter()

    def end(self) -> None:
        """A backward is over."""
        if self.noting:
            self.noting, self._to_lay = False, True

    def again(self) -> None:
        """It has raised: the first one is the next one."""
        if self.noting:
            self._came.clear()

    def lay_anew(self, gradients: Gradients, overlap: bool) -> None:
        """Before a forward: after the first backward buckets are laid anew, by all ranks."""
        if self._to_lay:
            gradients.rebuild(list(self._came), list(self._came.values()), overlap)
            self._to_lay, self.laid = False, True
            self._came.clear()
