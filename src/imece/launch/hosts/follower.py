"""The role of an agent that follows another host's coordinator: its ranks do what that one's messages say.

If it loses the coordinator, the remaining agents find out whether they may go on, and who leads them
(succession.py): the one that is to lead asks the others of its side, and each that has also lost the
coordinator answers with all that it knows.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from imece.launch.endings import Ending, Outcome
from imece.launch.host import CannotStart
from imece.launch.hosts.here import Follow, Here, Lead, Seek
from imece.launch.hosts.succession import Standing
from imece.launch.hosts.words import (
    Report,
    Seen,
    of_endings,
    of_seen,
    to_generation,
    to_outcome,
    to_report,
    to_starts,
)
from imece.launch.job import WAITED_FOR_S

_SEEN_S = 0.2  # how often to look for news of the members here
_BEATS_S = 1.0  # how often to say how far they are, if nothing else is new


class Follower:
    """Keeps this host's ranks in the job."""

    def __init__(self, here: Here, follow: Follow) -> None:
        self._here, self._leader = here, follow.leader
        self._lost_since: float | None = None  # since when there is no coordinator
        self._why = ""
        self._asked_by: set[int] = set()  # hosts that want to lead
        self._asked: set[int] = set()
        self._votes: dict[int, Report] = {}
        self._look_at = self._beats_at = 0.0
        self._said: dict[int, tuple[Any, ...]] = {}
        self._missed_since: dict[int, float] = {}  # hosts in the job to which there is no link
        self._apart: list[int] = []  # those of them that are missed for long, as was said
        here.network.serve_store(None)
        here.network.lead_to(here.up[follow.leader].address)
        self._obey(follow.view)
        endings = {member: here.host.endings[member] for member in here.host.crew.ended}
        if endings:  # perhaps some ended when this host had told what it knows, and nobody led
            self.ended(endings, time.monotonic())
        if here.asked_to_go is not None:
            self._ask(here.asked_to_go)

    def up(self, host: int) -> None:
        """Nothing: a host that looks for the coordinator says so, and is told."""

    def said(self, host: int, message: dict[str, Any]) -> None:
        """Obey the coordinator; answer others."""
        here = self._here
        match message:
            case {"say": "role", "role": "seeks"} if host == self._leader:
                self._lose("it was cut off from others", surely=False)
            case {"say": "role", "role": "seeks" | "gathers"} | {"do": "view"} if (
                self._lost_since is None and host != self._leader
            ):
                address = here.up[self._leader].address
                answer = {"say": "role", "role": "follows", "leader": self._leader, "address": address}
                here.send(host, answer)
            case {"say": "vote"}:
                self._asked_by.add(host)
                self._answer()
            case {"say": "yes", "standing": dict(known), "report": dict(report)} if host in self._asked:
                assert here.standing is not None
                here.standing = here.standing.merged(Standing.of(known))
                self._votes[host] = to_report(report, host, time.monotonic())
                self._elect()
            case {"say": "role", "role": "leads"} if self._lost_since is not None:
                here.turn = Seek(f"cut off from host {host}, which goes on without it")
            case {"do": "view"} if self._lost_since is not None:
                here.turn = Follow(host, message)
            case {"do": str()} if host == self._leader and self._lost_since is None:
                self._obey(message)

    def down(self, host: int, why: str, surely: bool, told: bool) -> None:
        """Without the coordinator, find out who goes on; look for another one again, to know it then."""
        if host == self._leader and self._lost_since is None:
            self._lose(why, surely)
        elif self._lost_since is not None:
            self._elect()
        else:
            self._dial_others()

    def ended(self, endings: Mapping[int, Ending], now: float) -> None:
        """Members here have ended: the coordinator judges that, by what they had said last."""
        here = self._here
        beats = here.host.beats(endings)
        last = {}
        for member, ending in endings.items():
            count, steps = beats.get(member, (None, 0))
            last[member] = Seen(ending.rank, ending.pid, count, steps, False, False)
        message = {
            "say": "ended",
            "members": of_seen(here.seen() | last, now),
            "endings": of_endings(endings, now),
        }
        here.send(self._leader, message)

    def signalled(self, number: int) -> None:
        """SIGINT is for the whole job, any other signal for this host; a second one goes to its ranks."""
        here = self._here
        if self._lost_since is None and (number == signal.SIGINT or here.asked_to_go is None):
            here.asked_to_go = number
            self._ask(number)
            return
        here.host.end(list(here.host.crew.living), signal.SIGKILL, 0.0)
        if self._lost_since is not None:
            name = signal.Signals(number).name
            here.outcome = Outcome(128 + number, f"imece: ended by {name}, without the coordinator")

    def _ask(self, number: int) -> None:
        say = "signal" if number == signal.SIGINT else "leave"
        self._here.send(self._leader, {"say": say, "number": number})

    def next_time(self) -> float:
        """When to look at the members, or to give the election up."""
        return self._look_at if self._lost_since is None else self._lost_since + self._here.plan.election_s

    def on_time(self, now: float) -> None:
        """Say what is new about the members."""
        if self._lost_since is not None:
            if now >= self._lost_since + self._here.plan.election_s:
                self._here.turn = Seek(f"cut off from host {self._leader}, and nobody leads in its place")
            return
        if now < self._look_at:
            return
        here = self._here
        waited_for = here.host.crew.living.keys() & set(here.newest.leaving)
        self._look_at = now + (WAITED_FOR_S if waited_for else _SEEN_S)
        seen = here.seen()
        told = {
            m: (each.ready, each.resilient, each.gone_on, each.closed, each.lost) for m, each in seen.items()
        }
        if told != self._said or now >= self._beats_at:
            self._said, self._beats_at = told, now + _BEATS_S
            here.send(self._leader, {"say": "seen", "members": of_seen(seen, now)})
        self._look_who_is_apart(now)

    def _look_who_is_apart(self, now: float) -> None:
        """Say which hosts this one has not reached for so long that the coordinator would have missed them
        by now, if it did not reach them either."""
        here = self._here
        assert here.standing is not None
        missed = here.standing.newest.hosts - here.up.keys() - {here.me}
        self._missed_since = {host: self._missed_since.get(host, now) for host in missed}
        apart = [host for host in sorted(missed) if now >= self._missed_since[host] + here.plan.election_s]
        if apart != self._apart:
            self._apart = apart
            here.send(self._leader, {"say": "apart", "hosts": apart})

    def _obey(self, message: dict[str, Any]) -> None:
        here, host = self._here, self._here.host
        match message:
            case {"do": "start"}:
                self._start(message)
            case {"do": "publish"}:
                here.newest = to_generation(message)
                host.publish(here.newest)
            case {"do": "last", "number": int(number)}:
                host.publish_last(number)
            case {"do": "end", "members": list(members), "signal": int(number), "grace_s": float(grace_s)}:
                host.end(members, number, grace_s)
            case {"do": "hit", "member": int(member), "signal": int(number)}:
                host.hit(member, number)
            case {"do": "kill", "members": list(members)}:
                host.kill(members)
            case {"do": "forget", "members": list(members)}:
                host.forget(members)
            case {"do": "begin_anew"}:
                host.begin_anew()
            case {"do": "stacks"}:
                host.ask_for_stacks()
            case {"do": "say", "line": str(line)}:
                host.say(line)
            case {"do": "view", "standing": dict(known), "run": str(run)}:
                standing = Standing.of(known)
                here.standing = standing if here.standing is None else here.standing.merged(standing)
                here.run = run
                here.send(self._leader, {"say": "heard", "number": here.standing.newest.number})
            case {"do": "settled", "number": int(number)} if here.standing is not None:
                if number == here.standing.newest.number:
                    here.standing = here.standing.settle(here.standing.newest)
            case {"do": "know", "snapshot": dict(snapshot), "book": list(book)}:
                before = dict(here.book)
                here.snapshot = snapshot
                here.note_book(book)
                if here.book != before:
                    self._dial_others()
            case {"do": "over"} if here.outcome is None:  # a host that has left may see this too
                here.outcome = to_outcome(message, here.me)

    def _start(self, message: dict[str, Any]) -> None:
        starts = to_starts(message)
        while starts:
            try:
                self._here.host.start(starts)
                return
            except CannotStart as error:
                said = {"say": "cannot", "member": error.start.member, "why": str(error)}
                self._here.send(self._leader, said)
                starts = starts[starts.index(error.start) + 1 :]

    def _dial_others(self) -> None:
        """Link to each of the others, the higher one dialling, so that they find each other later."""
        here = self._here
        assert here.standing is not None
        for host in here.standing.newest.hosts & here.book.keys() - here.up.keys():
            if host < here.me:
                here.network.dial(host, here.book[host], patience_s=here.plan.patience_s)

    def _lose(self, why: str, surely: bool) -> None:
        """There is no coordinator any more."""
        here = self._here
        self._why = here.how_lost(self._leader, why, surely)
        self._lost_since = time.monotonic()
        here.drop(self._leader, why)
        self._elect()
        self._answer()

    def _elect(self) -> None:
        """Find out whether those who are here may go on, and who leads them."""
        here = self._here
        assert here.standing is not None
        side = here.side() - {self._leader}
        if not here.standing.may_go_on(side, here.dead):
            here.turn = here.seek(side)
            return
        if here.snapshot is None:
            here.turn = Seek(f"cut off from host {self._leader} before it knew of any generation")
            return
        if here.standing.coordinator(here.standing.newest.hosts - side) != here.me:
            return
        for host in side - self._asked - {here.me}:
            self._asked.add(host)
            here.send(host, {"say": "vote"})
        if side - {here.me} <= self._votes.keys():
            here.turn = Lead({host: self._votes[host] for host in side - {here.me}}, self._why)

    def _answer(self) -> None:
        """Answer those who want to lead, once this host has lost its coordinator too."""
        here = self._here
        if self._lost_since is None or here.standing is None or isinstance(here.turn, Seek):
            return
        for host in self._asked_by:
            known = here.standing.message()
            here.send(host, {"say": "yes", "standing": known, "report": here.said_report()})
        self._asked_by.clear()
