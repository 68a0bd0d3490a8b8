"""In which order gradients came in the first backward: whole buckets are laid anew by it before the next."""

from __future__ import annotations

import time

from imece.data_parallel.buckets import Gradients, Slot


class Arrivals:
    """Of one model's parameters. Whoever takes part in the first backward lays anew: all ranks, or none."""

    def __init__(self, wanted: bool) -> None:
        """wanted: whether buckets are laid anew at all."""
        self.noting = wanted
        """Whether the first backward is still to come, or under way."""
        self._order: list[int] = []  # parameters
        self._times: list[tuple[int, float]] = []  # bytes and time of those whose hook ran
        self._to_lay = False
        self.laid = False
        """Whether buckets were laid anew."""

    def came(self, slot: Slot) -> None:
        """The last gradient of a parameter."""
        self._order.append(slot.index)
        self._times.append((slot.parameter.nbytes, time.perf_counter()))

    def was_there(self, slot: Slot) -> None:
        """At the end of backward: how often its gradients come was not known before."""
        self._order.append(slot.index)

    def end(self) -> None:
        """A backward is over."""
        if self.noting:
            self.noting, self._to_lay = False, True

    def again(self) -> None:
        """It has raised: the first one is the next one."""
        if self.noting:
            self._order, self._times = [], []

    def lay_anew(self, gradients: Gradients, overlap: bool) -> None:
        """Before a forward: after the first backward buckets are laid anew, by all ranks."""
        if self._to_lay:
            gradients.rebuild(self._order, self._times, overlap)
            self._to_lay, self._order, self._times = False, [], []
            self.laid = True
