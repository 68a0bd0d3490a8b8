"""The role of the agent that leads: it starts the job once all hosts have come, or continues another's.

view      the hosts in the job, as all of them must know it (succession.py)
heard     a host has answered that it knows the newest view, and follows
settled   all have answered. Only now the purpose of the view is carried out: lost hosts' members are given
          up, new hosts get members, or the job of a lost coordinator goes on
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping
from typing import Any

from imece.errors import UserError
from imece.launch.endings import Ending, Outcome
from imece.launch.hosts.far import Far
from imece.launch.hosts.here import Here, Lead, Seek
from imece.launch.hosts.succession import Published, Standing
from imece.launch.hosts.wide_job import WideJob
from imece.launch.hosts.words import of_outcome, to_endings, to_seen
from imece.system.addresses import describe

_SAY_WHO_IS_MISSING_S = 3.0
_KNOW_S = 0.05
_LOOK_S = 0.05
_NEVER = float("inf")
_DIAL_S = 1.0
_FOR_EVER_S = 30 * 86_400.0


class Coordinator:
    """Leads the job; `WideJob` decides what to do."""

    def __init__(self, here: Here, lead: Lead) -> None:
        self._here, self._lead = here, lead
        plan = here.plan
        self._job = WideJob(plan.limits, plan.grace_s, {here.me: here.host}, plan.ranks, self._serve_store)
        self.runs = False
        """Whether the job has been started, or continued."""
        self._gathers = not lead.why
        self._far: dict[int, Far] = {}
        """Hosts that follow, or will follow from the next view on."""
        self._heard: set[int] = set()
        self._lost: dict[int, str] = {}  # how hosts were lost that the next view gives up
        self._new: set[int] = set()  # hosts to be taken in then
        self._empty: set[int] = set()  # in the job, but without members
        self._told_to_wait: set[int] = set()
        self._apart: dict[int, set[int]] = {}  # whom a host that follows does not reach
        self._leaving: dict[int, int] = {}  # hosts that were asked to leave, and by which signal
        self._signalled: set[int] = set()  # hosts that got a signal
        self._ends = False  # whether one of these signals ends the job
        self._late: list[tuple[int, dict[str, Any]]] = []  # said before the job goes on
        self._numbers = (here.newest.number, 0)  # numbers of generations and members that were used before
        self._dial_at = _NEVER
        self._look_at = 0.0
        self._id = secrets.token_hex(4)
        self._until, self._say_at = time.monotonic() + plan.election_s, _NEVER
        self._know_at, self._known = 0.0, ""
        self._serve_store()
        if self._gathers:
            here.run = f"imece-{secrets.token_hex(6)}"
            self._until = time.monotonic() + plan.patience_s
            self._say_at = time.monotonic() + _SAY_WHO_IS_MISSING_S
        else:
            here.say(f"{lead.why}; host {here.me} leads the job now")
            for host, report in lead.votes.items():
                self._far[host] = self._new_far(host)
                self._far[host].seen = dict(report.members)
            self._change_view()
        for host in here.up:
            self.up(host)
        self._dial_missing()

    def up(self, host: int) -> None:
        """Tell it who leads, once that is settled."""
        if host not in self._far and (self.runs or self._gathers):
            role = "gathers" if self._gathers else "leads"
            self._here.send(host, {"say": "role", "role": role, "id": self._id})

    def said(self, host: int, message: dict[str, Any]) -> None:
        """Handle what followers say about their members, and what others want."""
        here, far, now = self._here, self._far.get(host), time.monotonic()
        match message:
            case {"say": "role", "role": "leads" | "follows"} if self._gathers:
                here.turn = Seek()  # host 0 was away, and the job goes on elsewhere
            case {"say": "role", "role": "leads"} if not self.runs:
                here.turn = Seek(f"cut off from host {host}, which goes on without it")
            case {"say": "role", "role": "follows", "leader": int(leader)} if not self.runs and far:
                self._give_up(host, f"it follows host {leader}")
            case {"say": "role", "role": "seeks" | "gathers"}:
                if host in self._far:
                    self._give_up(host, f"host {host} was lost: it was cut off from others")
                self.up(host)
            case {"say": "here", "numbers": [int(generation), int(members)]}:
                self._numbers = max(self._numbers[0], generation), max(self._numbers[1], members)
                self._admit(host)
            case {"say": "heard", "number": int(number)} if here.standing is not None:
                if number == here.standing.newest.number:
                    self._heard.add(host)
                    self._settle()
            case {"say": "seen", "members": list(members)} if far is not None:
                far.seen = to_seen(members, now)
            case {"say": "apart", "hosts": list(hosts)} if far is not None:
                self._note_apart(host, set(map(int, hosts)))
            case {"say": "ended" | "cannot" | "signal" | "leave"} if not self.runs:
                self._late.append((host, message))
            case {"say": "ended", "members": list(members), "endings": list(endings)} if far is not None:
                far.seen = to_seen(members, now)
                self._job.ended(to_endings(endings, host, now), now)
            case {"say": "cannot", "member": int(member), "why": str(why)}:
                self._job.cannot_start(member, why, now)
            case {"say": "signal", "number": int(number)}:
                self._end(host, number)
            case {"say": "leave", "number": int(number)} if far is not None:
                self._leave(host, number)

    def down(self, host: int, why: str, surely: bool, told: bool) -> None:
        """A host is gone, or nobody knows."""
        if host in self._far:
            self._give_up(host, self._here.how_lost(host, why, surely))
        self._dial_at = time.monotonic() + _DIAL_S

    def ended(self, endings: Mapping[int, Ending], now: float) -> None:
        """Members on this host have ended."""
        # If the last ranks of this host have left, the next coordinator judges that.
        if self.runs and not self._has_left:
            self._job.ended(endings, now)

    def signalled(self, number: int) -> None:
        """SIGINT is for the whole job; any other signal for this host, if the others go on without it."""
        here = self._here
        if self._gathers:
            name = signal.Signals(number).name
            self._finish(Outcome(128 + number, f"imece: ended by {name}, before all hosts had come"))
        elif not self.runs:
            here.asked_to_go = number
        elif number == signal.SIGINT:
            self._end(here.me, number)
        else:
            self._leave(here.me, number)

    def next_time(self) -> float:
        """When `on_time` has something to do."""
        if not self.runs:
            return min(self._dial_at, self._until, self._say_at)
        look_at = _NEVER if self._here.view is None else self._look_at
        return min(self._dial_at, self._job.next_time(), look_at)

    def on_time(self, now: float) -> None:
        """Do what is due."""
        if now >= self._dial_at:
            self._dial_missing()
        if self._gathers:
            self._look_who_is_missing(now)
            return
        if not self.runs:
            if now >= self._until:
                limit = f"{self._here.plan.election_s:.0f} s"
                self._here.turn = Seek(f"not followed by all of its side within {limit}")
            return
        if self._has_left:
            self._tell_what_is_known(now, anyway=True)
            here, number = self._here, self._leaving[self._here.me]
            here.outcome = Outcome(128 + number, _left(here.me, number))
            return
        self._job.on_time(now)
        if self._here.view is not None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            seen = {member: each for far in self._far.values() for member, each in far.seen.items()}
            self._here.view.look(self._job, seen | self._here.seen())
        for host, number in list(self._leaving.items()):
            if host != self._here.me and not self._job.has_members(host):
                self._let_go(host, number)
        if self._empty and self._job.is_calm:
            self._fill()
        if self._job.is_done:
            self._finish(self._job.outcome())
        self._tell_what_is_known(now)

    # Who is in the job.

    @property
    def _has_left(self) -> bool:
        """Whether this host was asked to leave, and its ranks have left."""
        return self._here.me in self._leaving and not self._here.host.crew.living

    def _admit(self, host: int) -> None:
        """Admit a host that has no ranks and wants a part in the job."""
        here = self._here
        if host in self._far:
            self._give_up(host, f"host {host} was lost: it begins anew")
        self._far[host] = self._new_far(host)
        if not self._gathers:
            self._new.add(host)
            self._change_view()
        elif len(self._far) == here.plan.hosts - 1:
            hosts = frozenset(range(here.plan.hosts))
            first = Published(0, hosts, here.me)
            here.standing = Standing(first)
            self._publish_view()
        else:
            self._say_at = time.monotonic() + _SAY_WHO_IS_MISSING_S  # to those who have come, too

    def _new_far(self, host: int) -> Far:
        return Far(host, lambda message: self._here.send(host, message))

    def _give_up(self, host: int, why: str) -> None:
        """A host follows no more."""
        del self._far[host]
        self._apart.pop(host, None)
        self._new.discard(host)
        self._empty.discard(host)
        self._heard.discard(host)
        if self._gathers:
            self._here.standing = None  # the first start waits for all
            return
        if host in self._job.hands:
            self._lost[host] = why
        self._change_view()

    def _note_apart(self, host: int, others: set[int]) -> None:
        """Tell all of two hosts that follow and do not reach each other: their ranks wait in silence."""
        before = self._pairs_apart()
        self._apart[host] = others
        after, name = self._pairs_apart(), self._here.name
        for one, other in sorted(after - before):
            self._job.say(
                f"imece: {name(one)} and {name(other)} do not reach each other, though both reach "
                f"{name(self._here.me)}: ranks there wait for each other, at most as long as "
                "imece.init(timeout=...) says. Mend the way between them, or send SIGTERM to the launcher of "
                "one: the others go on without it"
            )
        for one, other in sorted(before - after):
            self._job.say(f"imece: {name(one)} and {name(other)} reach each other again")

    def _pairs_apart(self) -> set[tuple[int, int]]:
        return {
            (min(host, other), max(host, other))
            for host, others in self._apart.items()
            for other in others
            if {host, other} <= self._far.keys()
        }

    def _change_view(self) -> None:
        """Make a view of exactly the hosts that are here, if they may go on."""
        here = self._here
        assert here.standing is not None
        side = {here.me, *(self._far.keys() - self._new)}
        if not here.standing.may_go_on(side, here.dead):
            here.turn = here.seek(side)
            return
        published = here.standing.next({here.me, *self._far}, here.me, self._new)
        here.standing = here.standing.publish(published)
        self._publish_view()

    def _publish_view(self) -> None:
        here = self._here
        assert here.standing is not None
        self._heard = {here.me}
        for host in self._far:
            here.send(host, {"do": "view", "standing": here.standing.message(), "run": here.run})
        self._settle()

    def _settle(self) -> None:
        """Carry out the newest view, if all have heard of it."""
        here = self._here
        assert here.standing is not None
        settled = here.standing.acknowledged(self._heard, here.dead)
        if settled is None:
            return
        here.standing = settled
        for host in self._far:
            here.send(host, {"do": "settled", "number": settled.newest.number})
        lost, self._lost = self._lost, {}
        now = time.monotonic()
        if not self.runs:
            self._run(now)
        elif lost:
            self._job.lose(lost, now)
            for host in lost:
                self._leaving.pop(host, None)
        for host in self._new:
            if host in self._job.hands:  # the host had come back before its loss was settled
                self._job.lose({host: f"host {host} was lost: it has begun anew"}, now)
            self._job.take(host, self._far[host])
        self._empty |= self._new
        self._new = set()

    def _run(self, now: float) -> None:
        """Start the job, or continue it."""
        here, self.runs = self._here, True
        for host in here.up:
            self.up(host)
        for host, far in self._far.items():
            if host not in self._new:
                self._job.take(host, far)
        here.was_cut_off = False
        if self._gathers:
            self._gathers = False
            self._job.begin_after(here.snapshot, *self._numbers)
            try:
                self._job.start()
            except UserError as error:
                self._finish(Outcome(2, f"imece: {error}"))
                raise
            return
        assert here.snapshot is not None
        votes = {host: report for host, report in self._lead.votes.items() if host in self._far}
        reports = {**votes, here.me: here.report()}
        self._job.resume(here.snapshot, reports, self._lead.why, now)
        self._empty = {host for host in self._job.hands if not self._job.has_members(host)}
        if here.asked_to_go is not None:
            self.signalled(here.asked_to_go)
        late, self._late = self._late, []
        for host, message in late:
            self.said(host, message)

    def _fill(self) -> None:
        """Start members on hosts that have none, if the others take them in."""
        here = self._here
        takes_in = self._job.takes_in()
        for host in sorted(self._empty):
            if self._job.has_members(host):
                self._empty.discard(host)
            elif takes_in:
                self._empty.discard(host)
                self._job.say(f"imece: host {host} has come; its ranks are starting")
                self._job.fill(host)
            elif host not in self._told_to_wait and host != here.me:
                self._told_to_wait.add(host)
                here.send(
                    host, {"do": "say", "line": f"imece: host {host} waits until the others take it in"}
                )

    # Its end.

    def _leave(self, host: int, number: int) -> None:
        name = signal.Signals(number).name
        if host == self._here.me:
            self._here.asked_to_go = number
        if host not in self._leaving and self._job.leave(host):
            self._leaving[host] = number
            self._signalled.add(host)
            self._job.say(f"imece: host {host} got {name}: its ranks leave in order, the others go on")
        elif host in self._leaving:
            self._job.cut_short(host)
        else:
            self._end(host, number)

    def _end(self, host: int, number: int) -> None:
        """A signal ends the job. All hosts may get it at once, as SLURM's do: only the second one at a host
        means hurry."""
        self._leaving.clear()  # all are leaving
        self._here.asked_to_go = number
        if not self._ends or host in self._signalled:
            self._ends = True
            self._job.signalled(number, "" if host == self._here.me else f" on host {host}")
        self._signalled.add(host)

    def _let_go(self, host: int, number: int) -> None:
        """Its members have left."""
        outcome = Outcome(128 + number, _left(host, number))
        self._here.send(host, {"do": "over", **of_outcome(outcome)})
        del self._leaving[host]
        self._empty.discard(host)

    def _finish(self, outcome: Outcome) -> None:
        for host in self._far:
            self._here.send(host, {"do": "over", **of_outcome(outcome)})
        self._here.outcome = outcome

    def _look_who_is_missing(self, now: float) -> None:
        here = self._here
        missing = [host for host in range(here.plan.hosts) if host not in (*self._far, here.me)]
        who = ", ".join(f"host {host}" for host in missing[:8]) + (", ..." if len(missing) > 8 else "")
        where = describe(here.plan.rendezvous)
        if now >= self._say_at:
            self._say_at = _NEVER
            if missing:
                line = f"waiting at {where} for {who} of {here.plan.hosts} hosts"
                here.say(line)
                for host in self._far:
                    here.send(host, {"do": "say", "line": f"imece: {line}"})
        if now >= self._until:
            hosts, patience = here.plan.hosts, f"{here.plan.patience_s:.0f} s"
            why = f"{who} of {hosts} hosts did not come to {where} within {patience}"
            self._finish(Outcome(1 if here.was_cut_off else 2, f"imece: {why}"))

    def _serve_store(self) -> None:
        """Serve the store in which all ranks meet on this host."""
        self._here.network.serve_store(self._here.host.meeting_port)
        self._here.network.lead_to(self._here.host.meeting_port)

    def _tell_what_is_known(self, now: float, *, anyway: bool = False) -> None:
        """Tell all hosts that may have to continue without this one."""
        if now < self._know_at and not anyway:
            return
        self._know_at = now + _KNOW_S
        snapshot = self._job.generations.snapshot()
        known = repr((snapshot | {"steps": None}, self._here.book))
        if known != self._known or anyway:
            self._known, self._here.snapshot = known, snapshot
            for host in self._far:
                message = {"do": "know", "snapshot": snapshot, "book": self._here.said_book()}
                self._here.send(host, message)

    def _dial_missing(self) -> None:
        """Dial hosts that are missing: a restarted one looks for host 0, and does not know that another leads
        now; host 0 itself waits at the rendezvous."""
        here, self._dial_at = self._here, _NEVER
        if here.me == 0:
            return
        for host, address in here.book.items():
            if host != here.me and host not in here.up:
                here.network.dial(host, address, patience_s=_FOR_EVER_S)


def _left(host: int, number: int) -> str:
    name = signal.Signals(number).name
    return f"imece: ended by {name}: the ranks of host {host} have left in order, the others go on"
