"""The rule for strategy "auto": one for `imece train`, which knows a whole step, and for `parallelize`, which
knows only the tensors of some model.

Of the strategies that fit it takes the fastest if times are known; otherwise the usual one, or the first that
fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from imece.footprint import Footprint
from imece.observe.units import gigabytes
from imece.plan.answer.space import RESERVE
from imece.plan.setup import Strategy

ORDER: tuple[Strategy, ...] = ("zero1", "replicate", "zero2", "zero3", "hybrid", "hybrid_zero2")
"""From the one that costs a step least; those that only times can judge come last."""
ACTIVATIONS = 0.25  # of the memory is left for activations if their size is unknown
_SAME = 0.02  # of a step: predictions are no more exact, so within this the usual strategy is kept


@dataclass(frozen=True)
class Way:
    """One strategy."""

    strategy: Strategy
    needed: int  # bytes per rank
    seconds: float | None = None  # per step; None if unknown


def fitting(ways: Sequence[Way], room_bytes: float, usual: str) -> Way | None:
    """The one of `ways`, ordered by preference, to take; None if nothing fits."""
    fits = [way for way in ways if way.needed <= room_bytes]
    if not fits:
        return None
    kept = next((way for way in fits if way.strategy == usual), None)
    times = [way.seconds for way in fits if way.seconds is not None]
    if len(times) < len(fits):
        return kept or fits[0]
    if kept is not None and kept.seconds is not None and kept.seconds <= (1 + _SAME) * min(times):
        return kept
    return fits[times.index(min(times))]


@dataclass(frozen=True)
class Asked:
    """What is known when a model is wrapped, before its first forward."""

    found: Mapping[Strategy, Footprint]  # in the order of ORDER, without activations
    memory_bytes: int  # for all of a rank's tensors
    usual: str
    activation_bytes: int | None = None  # at the peak of a step; None: unknown

    @property
    def room_bytes(self) -> float:
        """Bytes for everything that lasts, i.e. without activations."""
        if self.activation_bytes is None:
            return (1 - RESERVE - ACTIVATIONS) * self.memory_bytes
        return (1 - RESERVE) * self.memory_bytes - self.activation_bytes

    def take(self) -> Strategy | None:
        """The strategy; None if nothing fits.

        If activations are unknown and nothing leaves room for them, takes the smallest that fits without any:
        it may well run.
        """
        ways = [Way(name, each.total) for name, each in self.found.items()]
        taken = fitting(ways, self.room_bytes, self.usual)
        if taken is None and self.activation_bytes is None:
            least = min(ways, key=lambda way: way.needed)
            taken = least if least.needed <= self._most_bytes else None
        return taken.strategy if taken is not None else None

    @property
    def _most_bytes(self) -> float:
        """Bytes that a strategy may need without being refused."""
        if self.activation_bytes is None:
            return (1 - RESERVE) * self.memory_bytes
        return self.room_bytes

    def why(self, taken: Strategy) -> str:
        """ "strategy zero2: 5.10 GB a rank of 8.00 GB before activations, which take 2.00 GB; zero1, the
        usual one here, needs 6.90 GB".
        """
        size, usual = self.found[taken].total, self.found.get(cast(Strategy, self.usual))
        said = f"strategy {taken}"
        if taken == self.usual:
            said += ", the usual one here"
        said += f": {_size(size)} a rank of {_size(self.memory_bytes)}"
        said += f" before activations, {self._left()}"
        if taken != self.usual and usual is not None:
            said += f"; {self.usual}, the usual one here, needs {_size(usual.total)}"
        if size > self.room_bytes:
            said += f"; nothing needs less, and that leaves {_size(self.memory_bytes - size)} for activations"
        return said

    def _left(self) -> str:
        if self.activation_bytes is None:
            return f"for which {100 * ACTIVATIONS:.0f} % are kept (activation_bytes= says what they need)"
        return f"which take {_size(self.activation_bytes)}"

    def misses(self, would_fit: Sequence[str]) -> str:
        """The error message if nothing fits. would_fit: changes after which something would, with their
        results."""
        name = min(self.found, key=lambda each: self.found[each].total)
        size = self.found[name].total
        whole = f"{_size(size)} for parameters, gradients and optimizer state"
        if self.activation_bytes is not None:
            whole += f" and {_size(self.activation_bytes)} of activations"
        missing = size - self._most_bytes
        would = " or ".join(would_fit) if would_fit else "More ranks alone would not do"
        return (
            f"no strategy fits: {name}, which needs least, takes {whole} on each rank, which has "
            f"{_size(self.memory_bytes)} less a reserve of {100 * RESERVE:.0f} %: {_size(missing)} too much. "
            f"{would}. strategy={name!r} tries it all the same"
        )

    def fits(self, found: Footprint) -> bool:
        """Whether a strategy with this footprint would not be refused."""
        return found.total <= self._most_bytes


def _size(nbytes: float) -> str:
    """Small sizes in MB, because all of them would be 0.00 GB."""
    return gigabytes(nbytes) if abs(nbytes) >= 1e8 else f"{nbytes / 1e6:.2f} MB"
