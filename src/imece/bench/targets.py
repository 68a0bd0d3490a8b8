"""The promises for collectives and steps, and whether they were met.

The bounds are wishes, not results: they were set before anything was written, from a rough prototype on two
idle cores. A target compares two times of one program: the other's over imece's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from imece.bench.report import size_text

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Target:
    """`library` is to be at least `least` times as fast as `against` in an all_reduce."""

    ranks: int
    size_bytes: int
    library: str
    against: str
    least: float

    @property
    def text(self) -> str:
        """The target's text in the summary."""
        where = f"{self.ranks} ranks, {size_text(self.size_bytes)}, {self.library}"
        if self.against == "limit":
            return f"{where}: at least {self.least:.0%} of the limit"
        if self.least < 1:
            return f"{where}: at most {1 / self.least:.3g} x {self.against}'s time"
        return f"{where}: at least {self.least:g} x {self.against}"

    def met(self, found: float) -> bool:
        """Whether the measured ratio is good enough."""
        return found >= self.least

    def figure(self, found: float) -> str:
        """The measured ratio for people."""
        if self.against == "limit":
            return f"{found:.0%}"
        if self.least < 1:
            return f"{times(1 / found, 1 / self.least)} its time"
        return times(found, self.least)


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


@dataclass(frozen=True)
class StepTarget:
    """One of imece's ways beside `against`, in a training step of `tokens` tokens per rank."""

    tokens: int
    what: Literal["added", "speed", "memory", "time", "peak"]
    """added: what it adds to a step without synchronisation is at most `bound` of what the other adds. speed:
    its tokens/s are at least `bound` times the other's. memory: its resident memory after a backward, with
    pages that ranks share divided among them, is at most `bound` times the other's. time: a step takes at
    most `bound` times as long. peak: its peak of resident memory is at most `bound` times the other's."""
    against: str
    bound: float
    way: str = "imece"

    @property
    def text(self) -> str:
        """The target's text in the summary."""
        promise = {
            "added": f"adds at most {self.bound:.0%} of what {self.against} adds",
            "speed": f"at least {self.bound:g} x the tokens/s of {self.against}",
            "memory": f"resident memory at most {self.bound:g} x that of {self.against}",
            "time": f"at most {self.bound:g} x the time of {self.against}",
            "peak": f"peak resident memory at most {self.bound:g} x that of {self.against}",
        }[self.what]
        who = "" if self.way == "imece" else f"{self.way}: "
        return f"{self.tokens} tokens a rank: {who}{promise}"

    def met(self, found: float) -> bool:
        """Whether the measured figure is good enough; it must be below what torch DDP on shm adds, not
        equal."""
        if self.what == "speed":
            return found >= self.bound
        return found < self.bound or (found == self.bound and self.against != "torch-shm")

    def figure(self, found: float) -> str:
        """The measured figure for people."""
        return f"{found:.0%}" if self.what == "added" else times(found, self.bound)


STEP = (
    StepTarget(128, "added", "torch-gloo", 0.2),
    StepTarget(512, "added", "torch-gloo", 0.2),
    StepTarget(128, "added", "torch-shm", 1.0),
    StepTarget(512, "added", "torch-shm", 1.0),
    StepTarget(128, "speed", "no-sync", 0.97),
    StepTarget(512, "speed", "no-sync", 0.97),
    StepTarget(128, "speed", "torch-gloo", 1.2),
    StepTarget(128, "speed", "accelerate", 1.2),
    StepTarget(128, "speed", "fabric", 1.2),
    StepTarget(128, "memory", "torch-gloo-view", 1.0),
    StepTarget(512, "memory", "torch-gloo-view", 1.0),
)

STRATEGY = (
    *(
        StepTarget(tokens, "time", "replicate", bound, way)
        for way, bound in (("zero1", 1.0), ("zero2", 1.05), ("zero3", 1.15))
        for tokens in (128, 512)
    ),
    StepTarget(128, "speed", "fully-shard", 1.9, "zero3"),
    StepTarget(512, "speed", "fully-shard", 1.2, "zero3"),
    StepTarget(128, "speed", "deepspeed-zero3", 1.5, "zero3"),
    StepTarget(512, "speed", "deepspeed-zero3", 1.5, "zero3"),
    StepTarget(128, "speed", "torch-zero1", 1.4, "zero1"),
    StepTarget(512, "speed", "torch-zero1", 1.1, "zero1"),
    *(
        StepTarget(tokens, "peak", against, 1.0, way)
        for way, against in (("zero1", "torch-zero1"), ("zero3", "fully-shard"))
        for tokens in (128, 512)
    ),
)

_WORDS = {True: "met   ", False: "MISSED", None: "--    "}

PARAMETER_COST_US = 8.0  # of processor time in backward, per parameter
PARAMETER_GROWTH = 1.25  # ratio of that cost at 10,000 and at 1,000 parameters: linear, up to noise


class Promise(Protocol):
    """A target (a dataclass) that knows how to print its figure."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def text(self) -> str: ...

    def met(self, found: float) -> bool: ...

    def figure(self, found: float) -> str: ...


AnyPromise = TypeVar("AnyPromise", bound=Promise)


def lines(targets: Sequence[AnyPromise], found: Callable[[AnyPromise], float | None]) -> list[str]:
    """One line per target: met, missed, or not measured in this run. `found` gives the measured figure."""
    shown = []
    for target in targets:
        figure = found(target)
        if figure is None:
            shown.append(verdict(None, target.text))
        else:
            shown.append(verdict(target.met(figure), target.text, target.figure(figure)))
    return shown


def as_json(
    targets: Sequence[AnyPromise], found: Callable[[AnyPromise], float | None]
) -> list[dict[str, Any]]:
    """The targets for a program; not measured is None."""
    return [asdict(target) | {"text": target.text, "measured": found(target)} for target in targets]


def verdict(met: bool | None, text: str, figure: str = "not measured in this run") -> str:
    """One line: what was promised, and what was found."""
    return f"  {_WORDS[met]}  {text}: {figure}"


def times(found: float, bound: float) -> str:
    """`found` with three digits, or enough to tell it from the `bound` beside it: 1.4493 is not 1.45 x."""
    digits = 3
    while found != bound and f"{found:.{digits}g}" == f"{bound:.{digits}g}":
        digits += 1
    return f"{found:.{digits}g} x"


def without_verdict(line: str) -> str:
    """A line of `verdict` without the verdict, but with the figure."""
    return f"  {_WORDS[None]}{line[2 + len(_WORDS[None]) :]}"
