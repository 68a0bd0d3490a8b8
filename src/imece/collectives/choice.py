"""Which schedule is the fastest for a message of some size, by measured links. Pure arithmetic.

The model is the usual one of latency and bandwidth (Hockney 1994; the formulae per schedule as in Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005): a message of n
bytes takes a + n·b seconds, and a byte that is summed takes c more. The model leaves out that ranks share
cores and that messages of one rank hinder each other. So a schedule must promise a real gain over the
backend's own way, which was timed as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from imece.collectives.link_types import Hosts, Links
from imece.collectives.schedules import SCHEDULES, cost, nearest
from imece.errors import UserError
from imece.listing import size_text

GAIN = 0.9  # a schedule replaces the native way if its time is predicted to be below this share of that


@dataclass(frozen=True)
class Choice:
    """A schedule and why it was chosen. `str()` of it is one line for people."""

    op: str
    nbytes: int
    name: str  # "native", or a name of schedules.py
    predicted_s: float
    others: tuple[tuple[str, float], ...]  # the other candidates, fastest first, with their seconds
    why: str  # "predicted", or who forced it

    def __str__(self) -> str:
        rest = ", ".join(f"{name} {_milliseconds(took)}" for name, took in self.others)
        return (
            f"{size_text(self.nbytes)} {self.op}: {self.name}, {_milliseconds(self.predicted_s)} ms "
            f"{self.why}{f' ({rest})' if rest else ''}"
        )


_KNOWN = ("native", "auto", *dict.fromkeys(name for names in SCHEDULES.values() for name in names))


def check_forced(name: str) -> None:
    """UserError unless IMECE_SCHEDULE may have this value."""
    if name not in _KNOWN:
        raise UserError(f"IMECE_SCHEDULE={name} is no schedule{nearest(name, _KNOWN)}")


def choose(op: str, nbytes: int, links: Links, forced: str = "") -> Choice:
    """The schedule for one call. Pure.

    op: a key of schedules.SCHEDULES. nbytes: of the whole tensor. forced: IMECE_SCHEDULE, which forces a name
    for every operation that knows it. UserError for a name that no operation knows.
    """
    times = predict(op, nbytes, links)
    if forced:
        check_forced(forced)
    if forced in times:
        name, why = forced, "predicted, forced by IMECE_SCHEDULE"
    else:
        name = min(times, key=lambda each: times[each] * (GAIN if each == "native" else 1.0))
        why = "predicted"
    others = sorted(((each, took) for each, took in times.items() if each != name), key=lambda item: item[1])
    return Choice(op, nbytes, name, times[name], tuple(others), why)


def predict(op: str, nbytes: int, links: Links) -> dict[str, float]:
    """Seconds of every schedule that can run, by name. n bytes, N ranks; a, b, c as in the file's docstring.

    native              as timed
    root                reduce (N-1)(a + nb); broadcast a + (N-1)nb, since all sends leave together
    ring                all_reduce 2(N-1)a + 2(N-1)/N nb; its halves alone half of it
    tree                ceil(log2 N)(a + nb) each way
    recursive_doubling  log2 N (a + nb); between hosts the H ranks of a host share the cable: H n bytes
    pipelined_ring      (N-2+S)(a + nb/S) in S parts
    hierarchical        reduce-scatter and all-gather in the host; between K hosts H slices of n/H share the
                        cable: 2(K-1)a + 2(K-1)/K nb; its halves alone half of it
    Flat schedules run at the pace of their slowest link. Sums cost c per byte besides.
    """
    if op not in SCHEDULES:
        raise UserError(f"unknown collective {op!r}{nearest(op, list(SCHEDULES))}")
    size = links.world_size
    times: dict[str, float] = {}
    if op in links.native:
        times["native"] = links.native[op].fixed_s + nbytes * links.native[op].s_per_byte
    slowest = links.between or links.inside
    if slowest is None:  # one rank
        return times or {"native": 0.0}
    for name in SCHEDULES[op]:
        if name == "hierarchical":
            if _even(links.hosts):
                times[name] = _hierarchical_s(op, nbytes, links)
        elif name == "recursive_doubling":
            times[name] = _doubling_s(nbytes, links)
        else:
            flat = cost(op, name, size, nbytes, best_parts(nbytes, links))
            times[name] = slowest.time_s(*flat) + _summed(op, name, size, nbytes) * links.sum_s_per_byte
    return times


def best_parts(nbytes: int, links: Links) -> int:
    """S of the pipelined ring: (N-2+S)(a + nb/S) is least at S = sqrt((N-2) n b / a)."""
    link = links.between or links.inside
    if link is None or links.world_size <= 2:
        return 1
    ideal = math.sqrt((links.world_size - 2) * nbytes / link.bytes_per_s / max(link.latency_s, 1e-9))
    return max(1, min(256, round(ideal)))


def _summed(op: str, name: str, size: int, nbytes: float) -> float:
    """The bytes that the busiest rank sums."""
    if op in ("broadcast", "all_gather"):
        return 0.0
    return {"ring": (size - 1) / size, "tree": (size - 1).bit_length()}.get(name, size - 1) * nbytes


def _doubling_s(nbytes: float, links: Links) -> float:
    """If hosts have equally many ranks, distances below that number stay inside; else every step
    may cross."""
    total = cost("all_reduce", "recursive_doubling", links.world_size, nbytes)
    per_host = len(links.hosts[0])
    own = min(int(math.log2(per_host)), total.steps) if _even(links.hosts) and links.inside else 0
    if links.between is None:
        own = total.steps
    took = links.inside.time_s(own, own * nbytes) if links.inside is not None else 0.0
    if links.between is not None:
        across = total.steps - own
        took += links.between.time_s(across, across * per_host * nbytes)
    return took + total.nbytes * links.sum_s_per_byte


def _hierarchical_s(op: str, nbytes: float, links: Links) -> float:
    per_host, hosts = len(links.hosts[0]), len(links.hosts)
    halves = ("reduce_scatter", "all_gather") if op == "all_reduce" else (op,)
    took = 0.0
    for half in halves:
        if links.inside is not None:
            took += links.inside.time_s(*cost(half, "ring", per_host, nbytes))
        if links.between is not None:
            took += links.between.time_s(*cost(half, "ring", hosts, nbytes))
    summed = (per_host - 1) / per_host + (hosts - 1) / hosts / per_host if op != "all_gather" else 0.0
    return took + summed * nbytes * links.sum_s_per_byte


def _even(hosts: Hosts) -> bool:
    return len({len(host) for host in hosts}) == 1


def _milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
