"""What was promised, beside what was measured.

The figures below are wishes, not results: they come from the plan of this project, which took them from a
rough prototype on two idle cores. A target compares two times of one program: the other's by ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from imece.bench.report import size_text

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Target:
    """`library` is to be at least `least` times as fast as `against`."""

    ranks: int
    size_bytes: int
    library: str
    against: str
    least: float
    op: str = "all_reduce"

    @property
    def text(self) -> str:
        """As the summary names it."""
        where = f"{self.ranks} ranks, {size_text(self.size_bytes)}, {self.library}"
        if self.against == "limit":
            return f"{where}: at least {self.least:.0%} of the limit"
        if self.least < 1:
            return f"{where}: at most {1 / self.least:.3g} x {self.against}'s time"
        return f"{where}: at least {self.least:g} x {self.against}"


COLLECTIVES = (
    Target(2, 64 * MIB, "shm", "gloo", 8),
    Target(2, 64 * MIB, "shm", "mpich", 4),
    Target(2, 1 * MIB, "shm", "gloo", 20),
    Target(2, 1 * MIB, "shm", "mpich", 2),
    Target(2, 6 * MIB, "shm", "gloo", 20),
    Target(2, 6 * MIB, "shm", "mpich", 2),
    Target(2, 1 * KIB, "shm", "gloo", 40),
    Target(2, 1 * KIB, "shm", "mpich", 1 / 3),
    Target(4, 64 * MIB, "shm", "gloo", 6),
    Target(4, 1 * KIB, "shm", "gloo", 15),
    Target(2, 64 * MIB, "shm ordinary", "gloo", 4),
    Target(2, 64 * MIB, "shm", "limit", 0.80),
)

HOSTS = (
    Target(4, 16 * MIB, "hierarchical fp32", "gloo", 1.45),
    Target(4, 16 * MIB, "hierarchical bf16", "gloo", 2.8),
)


def lines(targets: Sequence[Target], ratio: Callable[[Target], float | None]) -> list[str]:
    """One line a target: met, missed, or not measured in this run. `ratio` gives the measured figure."""
    shown = []
    for target in targets:
        found = ratio(target)
        if found is None:
            shown.append(f"  --      {target.text}: not measured in this run")
            continue
        word = "met   " if found >= target.least else "MISSED"
        figure = f"{found:.0%}" if target.against == "limit" else f"{found:.3g} x"
        if target.against != "limit" and target.least < 1:
            figure = f"{1 / found:.3g} x its time"
        shown.append(f"  {word}  {target.text}: {figure}")
    return shown
