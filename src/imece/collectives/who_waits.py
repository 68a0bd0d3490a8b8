"""Says who waits for whom, from the recordings of a job's ranks. Pure; no rank is asked anything."""

from __future__ import annotations

from collections.abc import Iterable

from imece.collectives.recording import POINT_TO_POINT, Call, Recording
from imece.listing import rank_words, some

_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "dead, not yet reaped", "X": "dead"}


def explain(recordings: Iterable[Recording]) -> list[str]:
    """One line for each collective that some rank is in, longest wait first; then point-to-point calls, and
    calls that were started and nobody waits for yet.

    E.g. "all_reduce number 812 on group replicate (ranks 0-3): ranks 0, 1, 3 wait since 12.4 s; rank 2 is not
    in it (pid 102): its last call was broadcast number 811 on group replicate (left 13.0 s ago)".
    Ranks are global ranks. A job in which no rank waits gets one line that says so.
    """
    jobs: dict[str, dict[int, Recording]] = {}
    for recording in recordings:
        jobs.setdefault(recording.job, {})[recording.rank] = recording
    lines = []
    for job, by_rank in sorted(jobs.items()):
        if len(jobs) > 1:
            lines.append(f"job {job} ({rank_words(sorted(by_rank))}):")
        lines += _explain_job(by_rank)
    return lines


def _explain_job(by_rank: dict[int, Recording]) -> list[str]:
    collectives: dict[tuple[str, int], dict[int, Call]] = {}
    direct: list[tuple[float, int, Call]] = []
    for rank, recording in by_rank.items():
        for call in recording.open_calls:
            if call.op in POINT_TO_POINT:
                direct.append((-recording.age_s(call), rank, call))
            else:
                collectives.setdefault((call.group, call.number), {})[rank] = call
    waited = {key: open_ for key, open_ in collectives.items() if any(map(_waits, open_.values()))}
    lines = [
        _explain_collective(open_, by_rank)
        for open_ in sorted(waited.values(), key=lambda calls: -_wait_s(calls, by_rank))
    ]
    direct.sort(key=lambda item: item[:2])
    lines += [_explain_direct(rank, call, by_rank) for _, rank, call in direct if _waits(call)]
    if not lines:
        last = "; ".join(
            f"rank {rank}{_state(by_rank[rank])}: {_last(by_rank[rank])}" for rank in sorted(by_rank)
        )
        lines.append(f"no rank waits in a call. {last}")
    lines += [_explain_started(open_, by_rank) for key, open_ in collectives.items() if key not in waited]
    return lines + [_explain_started({rank: call}, by_rank) for _, rank, call in direct if not _waits(call)]


def _explain_collective(open_: dict[int, Call], by_rank: dict[int, Recording]) -> str:
    waiting = {rank: call for rank, call in open_.items() if _waits(call)}
    call = next(iter(waiting.values()))
    members = _members(call.group, by_rank)
    ranks = sorted(waiting)
    differ = len({(c.op, c.reduce_op, c.dtype, c.shape, c.peer) for c in open_.values()}) > 1
    name = "collective" if len({c.op for c in open_.values()}) > 1 else call.op
    where = f" ({rank_words(list(members))})" if members else ""
    who = f"{rank_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
    since = f"{who} since {_wait_s(waiting, by_rank):.1f} s"
    parts = [f"{name} number {call.number} on group {call.group}{where}: {since}"]
    if differ:
        sides = ", ".join(f"rank {rank} in {open_[rank].what}" for rank in sorted(open_))
        parts.append(f"they differ: {sides}")
    parts += [f"rank {rank} {_absent(call, by_rank.get(rank))}" for rank in members if rank not in waiting]
    if len(parts) == 1:
        # A rank that is in the call may still be the one the others wait for.
        held = [f"rank {rank} (pid {by_rank[rank].pid}) is {_STATES[by_rank[rank].process_state]}"
                for rank in ranks if by_rank[rank].process_state in _STATES]  # fmt: skip
        parts += held or ["all of them are in it" if members else "the ranks of this group are not known"]
    return "; ".join(parts)


def _explain_started(started: dict[int, Call], by_rank: dict[int, Recording]) -> str:
    call = next(iter(started.values()))
    name = call.what if call.op in POINT_TO_POINT else f"{call.op} number {call.number}"
    who, verb = rank_words(sorted(started)), "does" if len(started) == 1 else "do"
    ago = f"{_wait_s(started, by_rank):.1f} s ago"
    return f"{name} on group {call.group}: {who} started it {ago} and {verb} not wait for it yet"


def _explain_direct(rank: int, call: Call, by_rank: dict[int, Recording]) -> str:
    seen = by_rank[rank].groups.get(call.group)
    known = seen is not None and seen.ranks is not None and 0 <= call.peer < len(seen.ranks)
    text = f"{call.what} on group {call.group}: rank {rank} waits since {by_rank[rank].age_s(call):.1f} s"
    if not known:
        return text
    assert seen is not None and seen.ranks is not None
    peer = seen.ranks[call.peer]
    if peer not in by_rank:
        return f"{text}; rank {peer} {_absent(call, None)}"
    other = by_rank[peer]
    mirror = {"send": "recv", "recv": "send"}.get(call.op)
    if any(c.op in (mirror, "exchange") for c in other.open_calls):
        return f"{text}; rank {peer}{_state(other)} is in {other.open_calls[-1].what}"
    return f"{text}; rank {peer}{_state(other)} does not answer it: {_last(other)}"


def _absent(call: Call, recording: Recording | None) -> str:
    """What a rank does that does not wait in `call`: the rest of a sentence that begins with the rank."""
    if recording is None:
        return "has no recorder on this host: it has ended, runs elsewhere, or has made no call yet"
    for own in recording.calls:
        if own.group == call.group and own.number == call.number and own.op not in POINT_TO_POINT:
            yet = " and does not wait for it yet" if own.state == "started" else ""
            return f"{own.state} it {recording.age_s(own):.1f} s ago{yet}{_state(recording)}"
    seen = recording.groups.get(call.group)
    if seen is not None and seen.last_number >= call.number:
        return f"is past it (it is at number {seen.last_number}){_state(recording)}"
    return f"is not in it{_state(recording)}: {_last(recording)}"


def _last(recording: Recording) -> str:
    if not recording.calls:
        return "it has made no call"
    call = recording.calls[-1]
    name = f"{call.op} number {call.number} on group {call.group}"
    if call.state == "started":
        return f"it started {name} {recording.age_s(call):.1f} s ago and does not wait for it yet"
    if call.end_ns == 0:
        return f"it is in {name} since {recording.age_s(call):.1f} s"
    return f"its last call was {name} ({call.state} {recording.age_s(call):.1f} s ago)"


def _state(recording: Recording) -> str:
    """Its process, which the launcher's output does not name, and what holds that."""
    words = [f"pid {recording.pid}", _STATES.get(recording.process_state, "")]
    if recording.stopped:
        words.append(f"whose worker {some(recording.stopped, 3)} is stopped by a signal")
    return f" ({', '.join(filter(None, words))})"


def _members(group: str, by_rank: dict[int, Recording]) -> tuple[int, ...]:
    """The global ranks of a group, from whichever rank knows them; () if none does."""
    for recording in by_rank.values():
        seen = recording.groups.get(group)
        if seen is not None and seen.ranks is not None:
            return seen.ranks
    return ()


def _waits(call: Call) -> bool:
    """Whether the call is open and the rank stands still in it."""
    return call.state == "entered"


def _wait_s(calls: dict[int, Call], by_rank: dict[int, Recording]) -> float:
    return max(by_rank[rank].age_s(call) for rank, call in calls.items())
