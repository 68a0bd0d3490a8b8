"""What agents tell each other about members, as JSON and back.

A peer knows the token, and may still say anything: KeyError, TypeError or ValueError if a message is not as
written here. Times travel as ages, since the clocks of two hosts have nothing in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imece.launch.endings import Ending, Outcome
from imece.launch.host import Start
from imece.membership.roster import Generation
from imece.status import Failure

_ALL_MESSAGES = 30_000  # characters of exception messages in one frame, of up to 6 bytes each


@dataclass(frozen=True)
class Seen:
    """What is known about a member that lives on another host."""

    slot: int
    pid: int
    beats: int | None
    """None before its first beat."""
    steps: int
    ready: bool
    resilient: bool
    gone_on: tuple[tuple[int, float, int], ...] = ()
    """(generation, when it finished its first step in that, how many steps it had to make again)."""
    closed: bool = False
    """Whether it has told that it leaves in order."""
    lost: int = -1
    """The generation in which it cannot reach others, if that is the newest."""


@dataclass(frozen=True)
class Report:
    """The state of a host, for an agent that has just become the leader."""

    members: dict[int, Seen]
    endings: dict[int, Ending]
    """The endings of members that are not forgotten yet."""
    newest: Generation
    """The newest generation that was published there; number -1: none."""


def of_starts(starts: Sequence[Start]) -> dict[str, Any]:
    first = starts[0]
    members = [[start.member, start.slot, start.rank] for start in starts]
    return {
        "members": members, "size": first.world_size, "joining": first.joining, "starts": first.starts,
    }  # fmt: skip


def to_starts(said: Mapping[str, Any]) -> list[Start]:
    size, starts, joining = int(said["size"]), int(said["starts"]), bool(said["joining"])
    return [
        Start(int(member), int(slot), int(rank), size, joining, starts)
        for member, slot, rank in said["members"]
    ]


def to_generation(said: Mapping[str, Any]) -> Generation:
    members, leaving = tuple(map(int, said["members"])), tuple(map(int, said["leaving"]))
    return Generation(int(said["number"]), members, tuple(map(str, said["lost"])), leaving)


def of_seen(seen: Mapping[int, Seen], now: float) -> list[list[Any]]:
    return [
        [
            member, each.slot, each.pid, each.beats, each.steps, each.ready, each.resilient,
            [[number, now - time_s, again] for number, time_s, again in each.gone_on],
            each.closed, each.lost,
        ]
        for member, each in seen.items()
    ]  # fmt: skip


def to_seen(said: Sequence[Any], now: float) -> dict[int, Seen]:
    return {
        int(member): Seen(
            int(slot), int(pid), None if beats is None else int(beats), int(steps),
            bool(ready), bool(resilient),
            tuple((int(number), now - float(age_s), int(again)) for number, age_s, again in gone_on),
            bool(closed), int(lost),
        )
        for member, slot, pid, beats, steps, ready, resilient, gone_on, closed, lost in said
    }  # fmt: skip


def of_endings(endings: Mapping[int, Ending], now: float) -> list[list[Any]]:
    longest = _ALL_MESSAGES // max(1, len(endings))
    return [
        [
            member, each.rank, each.pid, each.status, now - each.time_s,
            None if each.failure is None else _of_failure(each.failure, now, longest),
            each.left_early, each.ended_by_us, each.silent_s, each.where, each.by_our_signal,
            each.out_of_memory,
        ]
        for member, each in endings.items()
    ]  # fmt: skip


def to_endings(said: Sequence[Any], host: int, now: float) -> dict[int, Ending]:
    return {
        int(member): Ending(
            int(rank), int(pid), int(status), now - float(age_s),
            None if failure is None else _to_failure(failure, now),
            bool(early), bool(by_us), None if silent_s is None else float(silent_s), host,
            where=str(where)[:100], by_our_signal=bool(by_our_signal),
            out_of_memory=None if no_memory is None else bool(no_memory),
        )
        for member, rank, pid, status, age_s, failure, early, by_us, silent_s, where, by_our_signal, no_memory
        in said
    }  # fmt: skip


def of_report(report: Report, now: float) -> dict[str, Any]:
    return {
        "members": of_seen(report.members, now),
        "endings": of_endings(report.endings, now),
        "newest": report.newest.as_json(),
    }


def to_report(said: Mapping[str, Any], host: int, now: float) -> Report:
    endings = to_endings(said["endings"], host, now)
    return Report(to_seen(said["members"], now), endings, to_generation(said["newest"]))


def of_outcome(outcome: Outcome) -> dict[str, Any]:
    """With where the cause was, but not what it was: the line says that."""
    cause = outcome.cause
    where = None if cause is None else [cause.host, cause.pid]
    return {"status": outcome.status, "line": outcome.line[:2000], "cause": where}


def to_outcome(said: Mapping[str, Any], me: int) -> Outcome:
    """The outcome that host `me` reports: with the cause only if the cause was on this host."""
    host, pid = said["cause"] or (None, 0)
    cause = Ending(-1, int(pid), 1, 0.0) if host == me else None
    return Outcome(int(said["status"]), str(said["line"]), cause)


def _of_failure(failure: Failure, now: float, longest: int) -> list[Any]:
    return [now - failure.time_s, failure.kind, failure.message[:longest], failure.because_of_peer]


def _to_failure(said: Sequence[Any], now: float) -> Failure:
    age_s, kind, message, because_of_peer = said
    return Failure(now - float(age_s), str(kind), str(message), bool(because_of_peer))
