"""`imece bench hosts`: two emulated hosts and a slow cable, where the schedule decides.

Between two hosts an all-reduce of M bytes must move at least M bytes each way. With 2 ranks per host, the
ring (Gloo's and imece's) moves 1.5 M; the hierarchical schedule moves M, in bf16 half of that, and
in int8 a quarter.
"""

from __future__ import annotations

import re
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from imece.bench import report
from imece.bench.crew import Crew, slowest
from imece.bench.hosts import step as hosts_step
from imece.bench.hosts import tcp
from imece.bench.hosts.namespaces import ADDRESSES, Hosts, two_hosts
from imece.bench.hosts.rank import WAYS
from imece.bench.hosts.step import StepResults
from imece.bench.options import Options, size
from imece.bench.rounds import Taken, alternate
from imece.bench.targets import Verdict, at_least
from imece.errors import UserError
from imece.listing import many, size_text

_MODULE = "imece.bench.hosts.rank"
PARTS, FEW_PARTS = (1, 2, 4, 8, 16, 32), (1, 4)
_TCP_BYTES = 48 * 2**20
_TARGETS = (("hierarchical fp32", 1.45), ("hierarchical bf16", 2.8))
"""(way, at least this many times the speed of gloo), of the default size and rate."""


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    size: Annotated[int, size("--size", "16MiB")] = 16 * 2**20  # bytes
    """Message size."""
    rate: str = "1gbit"
    """Rate of the cable in each direction, in tc's notation."""
    rounds: int = 5
    """Rounds, in each of which all ways are measured."""
    steps: bool = True
    """Also time training steps across the cable."""
    json: Path | None = None
    """Write all figures to this file."""
    quick: bool = False
    """2 MiB, 2 rounds and no training steps: to see that it works, not to quote."""

    @property
    def size_bytes(self) -> int:
        """Of whole fp32 numbers."""
        return self.size // 4 * 4

    def check(self) -> None:
        if re.fullmatch(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?[kmg]?bit", self.rate) is None:
            raise UserError(f"--rate {self.rate!r} is not a rate like 1gbit or 100mbit")
        self.at_least_one("rounds")

    def shortened(self) -> Plan:
        return replace(self, size=min(self.size, 2 * 2**20), rounds=min(self.rounds, 2), steps=False)


@dataclass
class Results(report.Results):
    """Seconds in each round, on the slowest rank."""

    plan: Plan
    tcp_mbps: dict[str, float]
    """Plain TCP in each direction."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    right: dict[str, bool] = field(default_factory=dict)
    check_s: list[float] = field(default_factory=list)
    """The check before each call on Gloo, in which ranks tell each other what they are about to do."""
    link_s: list[float] = field(default_factory=list)
    """The whole message from one host to the other, by Gloo."""
    steps: StepResults | None = None
    broadcast_s: dict[int, list[float]] = field(default_factory=dict)
    """The pipelined ring, by number of parts."""
    taken: Taken = field(default_factory=Taken)
    """Processor time that others took in the rounds of all_reduce."""

    @property
    def wrong(self) -> list[str]:
        return [f"{way}: its result" for way, right in self.right.items() if not right]

    def model_s(self, parts: int) -> float:
        """The model of a pipelined ring over K = 3 ranks in S parts: (K-2+S) * M/(S*B)."""
        return (3 - 2 + parts) / parts * statistics.median(self.link_s)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "broadcast_model_s": {parts: self.model_s(parts) for parts in self.broadcast_s}
        }


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes. HostsUnavailable if two hosts cannot be made."""
    with two_hosts(plan.rate) as hosts:
        results = Results(plan, {"a to b": plain_tcp(hosts, "a", "b"), "b to a": plain_tcp(hosts, "b", "a")})
        speeds = ", ".join(f"{way} {mbps:.0f}" for way, mbps in results.tcp_mbps.items())
        say(f"two hosts (network namespaces), a cable of {plan.rate}; plain TCP moves {speeds} Mbit/s")
        with _crew(hosts, "aabb") as crew:
            _all_reduce(crew, results)
        for line in all_reduce_lines(results):
            say(line)
        with _crew(hosts, "aba") as crew:
            _broadcast(crew, results)
        for line in broadcast_lines(results):
            say(line)
        if plan.steps:
            with _crew(hosts, "aabb") as crew:
                results.steps = hosts_step.measure(crew, plan.rounds)
            for line in hosts_step.lines(results.steps):
                say(line)
    return results


def judged(results: Results) -> list[Verdict]:
    """The targets of all_reduce, and of training steps if they were measured."""
    as_promised = (results.plan.size_bytes, results.plan.rate) == (Plan.size, Plan.rate)
    medians = {way: statistics.median(rounds) for way, rounds in results.seconds.items()}
    shown = [
        at_least(
            f"4 ranks, {size_text(Plan.size)}, {way}: at least {least:g} x gloo",
            medians["gloo"] / medians[way] if as_promised else None,
            least,
        )
        for way, least in _TARGETS
    ]
    if results.steps is None:
        return shown
    return shown + hosts_step.judged(results.steps, min(results.tcp_mbps.values()) * 1e6 / 8)


def plain_tcp(hosts: Hosts, source: str, target: str, nbytes: int = _TCP_BYTES) -> float:
    """Megabits per second of one plain TCP transfer. CalledProcessError if it fails."""
    sending: list[BaseException] = []

    def send() -> None:
        try:
            hosts.run(source, [sys.executable, tcp.__file__, "send", ADDRESSES[target], str(nbytes)])
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            sending.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        received = hosts.run(target, [sys.executable, tcp.__file__, "receive", ADDRESSES[target]])
    finally:
        thread.join()
    if sending:
        raise sending[0]
    return float(received)


def all_reduce_lines(results: Results) -> list[str]:
    """The table of all-reduces."""
    plan, gloo = results.plan, statistics.median(results.seconds["gloo"])
    lines = [
        "",
        f"all_reduce, float32, sum, {size_text(plan.size_bytes)}, 2 ranks on each host, 1 thread a rank, "
        f"medians of {many(plan.rounds, 'alternating round')}",
        f"  {'':<20}{'time ms':>10}{'algbw MB/s':>12}{'busbw MB/s':>12}{'x gloo':>8}",
    ]
    for way, rounds in results.seconds.items():
        seconds = statistics.median(rounds)
        algorithm = plan.size_bytes / seconds / 1e6
        lines.append(
            f"  {way:<20}{seconds * 1e3:>10.1f}{algorithm:>12.1f}{algorithm * 1.5:>12.1f}"
            f"{gloo / seconds:>8.2f}{'' if results.right[way] else '  WRONG RESULT'}"
        )
    check = statistics.median(results.check_s)
    lines += results.taken.lines
    lines.append(f"  of which the check before each of imece's calls takes {check * 1e3:.1f} ms")
    return lines


def broadcast_lines(results: Results) -> list[str]:
    """The pipelined ring beside its model."""
    plan, size = results.plan, size_text(results.plan.size_bytes)
    bandwidth = plan.size_bytes / statistics.median(results.link_s)
    lines = [
        "",
        f"pipelined ring broadcast of {size} over 3 ranks on hosts a, b, a, in S parts; "
        f"model (K-2+S) * M/(S*B), B = {bandwidth / 1e6:.1f} MB/s by one Gloo send",
        f"  {'S':>4}{'time ms':>10}{'model ms':>10}{'time/model':>12}",
    ]
    for parts, rounds in results.broadcast_s.items():
        seconds, model = statistics.median(rounds), results.model_s(parts)
        lines.append(f"  {parts:>4}{seconds * 1e3:>10.1f}{model * 1e3:>10.1f}{seconds / model:>12.2f}")
    return lines


def _crew(hosts: Hosts, places: str) -> Crew:
    """A rank on each host that `places` names, in the order of ranks."""
    extra = [
        {"LOCAL_RANK": str(places[:rank].count(host)), "LOCAL_WORLD_SIZE": str(places.count(host))}
        for rank, host in enumerate(places)
    ]
    return Crew.of_ranks(
        "hosts", _MODULE, len(places), extra=extra, starts=[hosts.starter(host) for host in places],
        master_addr=ADDRESSES["a"],
    )  # fmt: skip


def _all_reduce(crew: Crew, results: Results) -> None:
    answers = crew.ask("prepare", size_bytes=results.plan.size_bytes)
    results.right = {way: all(answer["right"][way] for answer in answers) for way in WAYS}
    results.seconds, results.taken = alternate(
        WAYS, results.plan.rounds, lambda way: slowest(crew.ask("measure", way=way))
    )
    results.check_s = [slowest(crew.ask("check")) for _ in range(results.plan.rounds)]


def _broadcast(crew: Crew, results: Results) -> None:
    crew.ask("prepare", size_bytes=results.plan.size_bytes)
    results.broadcast_s = {parts: [] for parts in (FEW_PARTS if results.plan.quick else PARTS)}
    results.right["broadcast"] = True
    for _ in range(results.plan.rounds):
        results.link_s.append(slowest(crew.ask("link")))
        for parts in results.broadcast_s:
            answers = crew.ask("broadcast", parts=parts)
            results.broadcast_s[parts].append(slowest(answers))
            results.right["broadcast"] &= all(answer["right"] for answer in answers)
