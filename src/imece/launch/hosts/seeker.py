"""The role of an agent without a part in the job: not yet, or no longer, since it was cut off.

A host that was cut off ends its ranks at once, as others may be going on without them, and then reports.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from typing import Any

from imece.errors import UserError
from imece.launch.endings import Ending, Outcome
from imece.launch.hosts.here import Follow, Here, Lead, Seek
from imece.listing import some
from imece.system.addresses import describe

_AGAIN_S = 1.0
SILENT_S = 5.0
"""An agent that waits for longer prints what it waits for."""


class Seeker:
    """Dials everybody it knows of, and follows whoever leads."""

    def __init__(self, here: Here, seek: Seek) -> None:
        self._here, self._gathers = here, bool(seek.why) and here.me == 0
        here.was_cut_off |= bool(seek.why)
        self._until = time.monotonic() + here.plan.patience_s
        self._say_at = time.monotonic() + SILENT_S
        self._shows = False
        self._dial_at: dict[int, float] = {}
        self._why_not = ""
        self._asked: dict[int, str] = {}  # hosts that were asked to take this one in, and as what they led
        self._members = 1 + max(here.host.endings.keys() | here.host.crew.living.keys(), default=-1)
        here.standing = None
        here.network.serve_store(None)
        here.network.lead_to(None)
        here.host.end(list(here.host.crew.living), signal.SIGKILL, 0.0)
        if seek.why:
            tries = f"; it tries for {here.plan.patience_s:.0f} s to join the others again"
            asked = here.asked_to_go is not None
            here.say(f"host {here.me} was {seek.why}: its ranks were ended{'' if asked else tries}")
        self.on_time(time.monotonic())

    def up(self, host: int) -> None:
        """Say what this host wants."""
        self._dial_at.pop(host, None)
        if self._shows:
            self._here.send(host, {"say": "role", "role": "seeks"})

    def said(self, host: int, message: dict[str, Any]) -> None:
        """Ask a host that leads to take this one in."""
        here = self._here
        match message:
            case {"say": "role", "role": "leads" | "gathers", "id": str(name)} if self._shows:
                if self._asked.get(host) != name:  # the host repeats this whenever it is asked
                    self._asked[host] = name
                    here.send(host, {"say": "here", "numbers": [here.newest.number, self._members]})
            case {
                "say": "role",
                "role": "follows",
                "leader": int(leader),
                "address": [str(address), int(port)],
            }:
                here.note_book([[leader, address, port]])
                if leader not in here.up and leader != here.me:
                    self._dial(leader, time.monotonic())
            case {"say": "role", "role": "seeks"}:
                self._perhaps_gather()
            case {"do": "view"} if host in self._asked:  # not from one that takes it for who it was
                if here.was_cut_off:
                    here.say(f"host {here.me} is back, and follows host {host}")
                here.was_cut_off = False
                here.turn = Follow(host, message)
            case {"do": "say", "line": str(line)}:
                here.host.say(line)
            case {"do": "refuse", "why": str(why)}:
                raise UserError(why)
            case {"do": "over", "line": str(line), "status": int(status)}:
                here.outcome = Outcome(status, line)

    def down(self, host: int, why: str, surely: bool, told: bool) -> None:
        """Try again, unless somebody there has said why not, and this host is new."""
        self._why_not = why
        if told and not self._here.was_cut_off:
            raise UserError(f"host {self._here.me} cannot join: {why}")
        self._asked.pop(host, None)
        self._dial_at[host] = time.monotonic() + _AGAIN_S
        self._perhaps_gather()

    def ended(self, endings: Mapping[int, Ending], now: float) -> None:
        """Nothing follows from that."""

    def signalled(self, number: int) -> None:
        """There is nobody to pass it on to."""
        name = signal.Signals(number).name
        self._here.outcome = Outcome(
            128 + number, f"imece: ended by {name}, while it was looking for the others"
        )

    def next_time(self) -> float:
        """When to dial, or to give up."""
        return min([self._until, self._say_at, *self._dial_at.values()])

    def on_time(self, now: float) -> None:
        """Report once no rank is left here."""
        here = self._here
        if not self._shows and not here.host.crew.living:
            if here.asked_to_go is not None:  # nobody else has heard of that signal, or nobody else is left
                self.signalled(here.asked_to_go)
                return
            self._shows = True
            here.host.begin_anew()
            for host in here.up:
                here.send(host, {"say": "role", "role": "seeks"})
            for host in here.book:
                self._dial(host, now)
            if self._gathers:
                here.turn = Lead()
        for host in [host for host, at in self._dial_at.items() if now >= at]:
            self._dial(host, now)
        if now >= self._say_at:
            self._say_at = math.inf
            self._say_what_it_waits_for()
        if now >= self._until:
            self._give_up()

    def _perhaps_gather(self) -> None:
        """Host 0 gathers all who seek, until one says that the job goes on elsewhere; whoever has said so may
        be gone by now, or seek itself."""
        if self._here.me == 0 and self._shows:
            self._here.turn = Lead()

    def _say_what_it_waits_for(self) -> None:
        here = self._here
        if here.up:
            return
        if here.was_cut_off:
            others = [address for host, address in here.book.items() if host != here.me]
            here.say(
                f"host {here.me} still reaches nobody at {some(list(map(describe, others)), 3)}: is the way "
                "there cut, has the other host another address now, or has the job ended there?"
            )
            return
        here.say(
            f"host {here.me} finds no job at {describe(here.plan.rendezvous)} yet: it tries for "
            f"{here.plan.patience_s:.0f} s; is host 0 started, with that --rendezvous?"
        )

    def _dial(self, host: int, now: float) -> None:
        self._dial_at.pop(host, None)
        if host != self._here.me and host not in self._here.up and now < self._until:
            self._here.network.dial(host, self._here.book[host], patience_s=self._until - now)

    def _give_up(self) -> None:
        here = self._here
        patience = f"{here.plan.patience_s:.0f} s"
        why = f" ({self._why_not})" if self._why_not else ""
        if here.was_cut_off:
            line = f"imece: host {here.me} found nobody within {patience} who goes on with the job{why}"
            here.outcome = Outcome(1, line)
            return
        where = describe(here.plan.rendezvous)
        raise UserError(
            f"no job at {where} within {patience}{why}: is host 0 started, with that --rendezvous?"
        )
