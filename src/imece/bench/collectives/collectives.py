"""`imece bench collectives`: the same operations by imece and by others, in alternating rounds.

The ranks of all libraries are alive at once, but only one library's ranks work at a time; the others are
blocked in read() (see crew.py). A round times every library once, each round in another order, so that other
load on the machine hits all of them alike.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from imece.bench import report
from imece.bench.collectives.contenders import LIBRARIES, OPS, deepspeed_is_locked, numel_of
from imece.bench.collectives.limit import CHUNKS_BYTES
from imece.bench.crew import Crew, CrewError, slowest
from imece.bench.options import Options, check_ranks, counts, names, read_sizes, sizes
from imece.bench.rounds import turned
from imece.bench.targets import Verdict, at_least, at_most
from imece.errors import UserError
from imece.listing import many, size_text

LIMIT = "limit"
_MODULE = "imece.bench.collectives.rank"
_ONLY_ALL_REDUCE = ("deepspeed",)
_KIB, _MIB = 2**10, 2**20
_SIZES = "1KiB..256MiB,6MiB"
_TARGETS = (
    (2, 64 * _MIB, "shm", "gloo", 8.0),
    (2, 64 * _MIB, "shm", "mpich", 4.0),
    (2, 1 * _MIB, "shm", "gloo", 20.0),
    (2, 1 * _MIB, "shm", "mpich", 2.0),
    (2, 6 * _MIB, "shm", "gloo", 20.0),
    (2, 6 * _MIB, "shm", "mpich", 2.0),
    (2, 1 * _KIB, "shm", "gloo", 40.0),
    (2, 1 * _KIB, "shm", "mpich", 1 / 3),
    (4, 64 * _MIB, "shm", "gloo", 6.0),
    (4, 1 * _KIB, "shm", "gloo", 15.0),
    (2, 64 * _MIB, "shm ordinary", "gloo", 4.0),
    (2, 64 * _MIB, "shm", LIMIT, 0.80),
)
"""(ranks, bytes, ours, another, at least this many times the other's speed)."""


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    ranks: Annotated[tuple[int, ...], counts("--ranks")] = (2,)
    """Numbers of ranks, for instance 2,4."""
    sizes: Annotated[tuple[int, ...], sizes("--sizes", _SIZES)] = read_sizes(_SIZES, "--sizes")
    """Message sizes: a list, or a range in which each size is four times the one before."""
    ops: Annotated[tuple[str, ...], names("--ops", OPS)] = OPS
    """Which operations: a list."""
    rounds: int = 5
    """Rounds, in each of which every library is timed once."""
    against: Annotated[tuple[str, ...], names("--against", LIBRARIES[2:], or_none=True)] = LIBRARIES[2:]
    """Other libraries; those that are not installed are left out."""
    shared: bool = True
    """Measure shm with tensors in shared memory (imece.shared_empty)."""
    ordinary: bool = True
    """Measure shm with ordinary tensors."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Write a plot (PNG) to this file."""
    quick: bool = False
    """Few sizes, 3 short rounds: to see that it works, not to quote."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names in LIBRARIES."""
        ours = zip(LIBRARIES, (self.shared, self.ordinary), strict=False)
        return (*(name for name, wanted in ours if wanted), *self.against)

    @property
    def least_s(self) -> float:
        """A round repeats the operation until it takes at least this long."""
        return 0.004 if self.quick else 0.020

    def check(self) -> None:
        check_ranks(*self.ranks)
        self.at_least_one("rounds")
        if not self.libraries:
            raise UserError("nothing to measure: name at least one library")

    def shortened(self) -> Plan:
        few = read_sizes("1KiB,64KiB,1MiB,8MiB", "--sizes") if self.sizes == Plan.sizes else self.sizes
        return replace(self, sizes=few, rounds=min(self.rounds, 3))


@dataclass
class Result:
    """One library at one operation and size."""

    ranks: int
    op: str
    size_bytes: int
    library: str
    right: bool
    repeat: int
    seconds: list[float] = field(default_factory=list)
    """One figure for each round: the slowest rank's time for one call."""

    @property
    def median_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)

    @property
    def algorithm_gbps(self) -> float:
        """Bytes over time, in 1e9 bytes per second."""
        return self.size_bytes / self.median_s / 1e9

    @property
    def bus_gbps(self) -> float:
        """Bytes that each rank's link must carry, over time: nccl-tests' bus bandwidth."""
        return self.algorithm_gbps * bus_factor(self.op, self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The figures and what follows from them."""
        derived = {"median_s": self.median_s, "algbw_GBps": self.algorithm_gbps, "busbw_GBps": self.bus_gbps}
        return asdict(self) | derived


@dataclass
class Results(report.Results):
    """All figures, in the order of measurement."""

    plan: Plan
    results: list[Result] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Those of libraries that summed or copied wrongly."""
        return [
            f"{each.library} {each.op} of {size_text(each.size_bytes)} among {each.ranks} ranks: its result"
            for each in self.results
            if not each.right
        ]

    def as_json(self) -> dict[str, Any]:
        return {"plan": asdict(self.plan), "results": [each.as_json() for each in self.results]}


def bus_factor(op: str, ranks: int) -> float:
    """nccl-tests' factor from algorithm to bus bandwidth."""
    return {
        "all_reduce": 2 * (ranks - 1) / ranks,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_gather": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }[op]


def missing(library: str) -> str | None:
    """Why `library` cannot be measured here; None if it can."""
    if library == "mpich":
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed (pip install mpi4py mpich)"
        if _mpiexec() is None:
            return "no mpiexec found (pip install mpich)"
    if library == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed"
        return deepspeed_is_locked()
    return None


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure everything in `plan`, and pass the table line by line to `say`.

    CrewError if a rank of imece or Gloo fails; any other library that fails is reported and left out.
    UserError if nothing is left.
    """
    results = Results(plan)
    for ranks in plan.ranks:
        with ExitStack() as stack:
            crews = _crews(plan, ranks, stack, say)
            ops = [op for op in plan.ops if _libraries(crews, op)]
            if not ops:
                raise UserError(
                    f"nothing to measure: no library of {', '.join(plan.libraries)} is here that knows "
                    f"{', '.join(plan.ops)}: name another in --against, or install it"
                )
            for op in ops:
                say("")
                say(f"{op}, float32{', sum' if 'reduce' in op else ''}, {ranks} ranks, 1 thread a rank, "
                    f"medians of {many(plan.rounds, 'alternating round')}")  # fmt: skip
                say(HEADER)
                for size in plan.sizes:
                    found = _measure(plan, crews, ranks, op, size)
                    results.results += found
                    for line in table_lines(found):
                        say(line)
    return results


HEADER = (
    f"{'size':>10}  {'library':<14}{'time us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}"
    f"{'x gloo':>9}{'x mpich':>9}{'of limit':>10}"
)


def table_lines(results: Sequence[Result]) -> Iterator[str]:
    """The lines for one size; `results` are one operation's at that size."""
    times = {result.library: result.median_s for result in results}
    for at, result in enumerate(results):
        ours = result.library.startswith("shm")
        gloo, mpich = (
            f"{times[other] / result.median_s:.2f}" if ours and other in times else ""
            for other in ("gloo", "mpich")
        )
        share = f"{times[LIMIT] / result.median_s:.0%}" if result.library == "shm" and LIMIT in times else ""
        yield (
            f"{size_text(result.size_bytes) if at == 0 else '':>10}  {result.library:<14}"
            f"{result.median_s * 1e6:>12.1f}{result.algorithm_gbps:>12.3f}{result.bus_gbps:>12.3f}"
            f"{gloo:>9}{mpich:>9}{share:>10}{'' if result.right else '  WRONG RESULT'}"
        ).rstrip()


def judged(results: Results) -> list[Verdict]:
    """The targets of all_reduce."""
    times = {(r.ranks, r.op, r.size_bytes, r.library): r.median_s for r in results.results}
    shown = []
    for ranks, size_bytes, library, against, least in _TARGETS:
        where = f"{ranks} ranks, {size_text(size_bytes)}, {library}"
        ours, other = (times.get((ranks, "all_reduce", size_bytes, name)) for name in (library, against))
        found = None if ours is None or other is None else other / ours
        if against == LIMIT:
            shown.append(at_least(f"{where}: at least {least:.0%} of the limit", found, least, "{:.0%}"))
        elif least < 1:
            most = 1 / least
            text = f"{where}: at most {most:.3g} x {against}'s time"
            shown.append(at_most(text, found and 1 / found, most))
        else:
            shown.append(at_least(f"{where}: at least {least:g} x {against}", found, least))
    return shown


def _mpiexec() -> str | None:
    """The mpiexec installed beside this Python, or else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def _crews(plan: Plan, ranks: int, stack: ExitStack, say: Callable[[str], None]) -> dict[str, Crew]:
    """The crew for each library; libraries that cannot start are reported and left out."""
    crews: dict[str, Crew] = {}
    torch_crew = stack.enter_context(
        Crew.of_ranks("torch", _MODULE, ranks, extra=[{"IMECE_BENCH_RANK": "torch"}] * ranks)
    )
    for library in plan.libraries:
        reason = missing(library)
        try:
            if reason is not None:
                say(f"{library} is left out: {reason}")
            elif library == "mpich":
                mpiexec = _mpiexec()
                assert mpiexec is not None
                crews[library] = stack.enter_context(Crew.of_mpi(_MODULE, ranks, mpiexec))
            elif library == "deepspeed":
                # LOCAL_SIZE tells DeepSpeed that all ranks share a host.
                extra = {"IMECE_BENCH_RANK": "deepspeed", "LOCAL_SIZE": str(ranks)}
                crews[library] = stack.enter_context(
                    Crew.of_ranks(library, _MODULE, ranks, extra=[extra] * ranks)
                )
            else:
                crews[library] = torch_crew
        except CrewError as error:
            say(f"{library} is left out: {error.brief().removeprefix(f'{library}: ')}")
    crews[LIMIT] = torch_crew
    return crews


def _libraries(crews: dict[str, Crew], op: str) -> list[str]:
    """The libraries that are here and have the operation."""
    knows = [each for each in LIBRARIES if op == "all_reduce" or each not in _ONLY_ALL_REDUCE]
    return [each for each in knows if each in crews]


def _measure(plan: Plan, crews: dict[str, Crew], ranks: int, op: str, size_bytes: int) -> list[Result]:
    """All libraries at one operation and size."""
    calls = 3 if size_bytes <= 2**20 else 1
    nbytes = 4 * numel_of(size_bytes, ranks)
    results: list[Result] = []
    chunk = 0
    libraries = _libraries(crews, op)
    for library in (*libraries, LIMIT) if "shm" in libraries else libraries:
        crew = crews[library]
        if library == LIMIT:
            once, chunk = _prepare_limit(crew, op, size_bytes, calls)
            right = True
        else:
            answers = crew.ask("prepare", library=library, op=op, size_bytes=size_bytes, calls=calls)
            once = max(answer["once_s"] for answer in answers)
            right = all(answer["right"] for answer in answers)
        repeat = max(1, min(100_000, round(plan.least_s / once + 0.5)))
        results.append(Result(ranks, op, nbytes, library, right, repeat))
    for turn in range(plan.rounds):
        for result in turned(results, turn):
            crew = crews[result.library]
            if result.library == LIMIT:
                answers = crew.ask("measure_limit", chunk=chunk, repeat=result.repeat)
            else:
                answers = crew.ask("measure", library=result.library, repeat=result.repeat)
            result.seconds.append(slowest(answers))
    for result in results:
        if result.library == LIMIT:
            crews[LIMIT].ask("release_limit")
        else:
            crews[result.library].ask("release", library=result.library)
    return results


def _prepare_limit(crew: Crew, op: str, size_bytes: int, calls: int) -> tuple[float, int]:
    """(seconds of one pass with the fastest chunk size, that size's index)."""
    offers = [answer["offer"] for answer in crew.ask("offer_limit", op=op, size_bytes=size_bytes)]
    answers = crew.ask("prepare_limit", offers=offers, calls=calls)
    seconds = [max(answer["once_s"][at] for answer in answers) for at in range(len(CHUNKS_BYTES))]
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return seconds[best], best
