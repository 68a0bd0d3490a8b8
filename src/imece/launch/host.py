"""One host's hands: starts ranks, signals and kills them, and sees how they are.

job.py decides what follows: here, or in the launcher of another host, which asks by message.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Protocol, cast

from imece import status
from imece.launch.crew import Crew
from imece.launch.endings import Ending, Outcome, name_of
from imece.launch.processes import busy_s_of, catches, is_stopped
from imece.launch.signals import NOTICES
from imece.launch.silence import Silence
from imece.launch.view import View, hit, known_pid
from imece.membership.roster import Generation, Roster, forget_meetings
from imece.store import NO_MORE, listen_here, say_finished, serve
from imece.system.out_of_memory import Killer

if TYPE_CHECKING:  # torch is imported while a job runs: that may take many seconds
    import torch.distributed as dist

_SERVED_S = 0.05  # how often to look whether the store is served
_STACKS_S = 0.5  # for a silent rank to print where it is
_TRACEBACK_S = 2.0  # for a rank that has failed to print why, at least
_NEVER = float("inf")
_GENERATIONS = 3  # so many follow each other within a moment at most


@dataclass(frozen=True)
class Order:
    """What to run on a host, and how: see launch/local.py."""

    command: Sequence[str]
    direct: bool
    silent_s: float
    grace_s: float


@dataclass(frozen=True)
class Start:
    """A member to be started."""

    member: int
    slot: int
    rank: int
    world_size: int
    joining: bool
    """Whether it takes a place later on; until then it is a world of its own, whatever its rank says."""
    starts: int
    """torchrun's restart count."""


class CannotStart(Exception):
    """A member's process could not be started; the message says why."""

    def __init__(self, start: Start, error: Exception) -> None:
        super().__init__(NO_MORE if isinstance(error, BlockingIOError) else str(error))
        self.start = start


class Hands(Protocol):
    """What a job needs of a host: actions there, and what its members say."""

    def start(self, starts: Sequence[Start]) -> None: ...
    def publish(self, generation: Generation) -> None: ...
    def publish_last(self, generation: int) -> None: ...
    def say_finished(self, ranks: Collection[int], starts: int) -> None: ...
    def end(self, members: Collection[int], number: int, grace_s: float) -> None: ...
    def kill(self, members: Collection[int]) -> None: ...
    def forget(self, members: Collection[int]) -> None: ...
    def begin_anew(self) -> None: ...
    def ask_for_stacks(self) -> None: ...
    def say(self, line: str) -> None: ...
    def all_resilient(self, members: Collection[int]) -> bool: ...
    def ready(self, members: Iterable[int]) -> list[int]: ...
    def closed(self, members: Iterable[int]) -> list[int]: ...
    def lost(self, members: Iterable[int], generation: int) -> list[int]: ...
    def beats(self, members: Iterable[int]) -> dict[int, tuple[int, int]]: ...
    def name(self, member: int, slot: int) -> str: ...


class Host:
    """This host's ranks: `Hands` for a job in this process or another."""

    def __init__(
        self,
        order: Order,
        crew: Crew,
        environment: Callable[[Start, Host], Mapping[str, str]],
        number: int | None = None,
    ) -> None:
        """crew: open. environment: makes that of a member's process here. number: of this host, if there
        are several."""
        self.crew = crew
        self.number = number
        self.endings: dict[int, Ending] = {}
        """Endings of all members so far."""
        self._order = order
        self._environment = environment
        self._listener = listen_here()
        self.port: int = self._listener.getsockname()[1]
        """The loopback port of the store in which this host's ranks and launcher meet."""
        self.meeting_port = self.port
        """The port of the store in which ranks meet each other: a new one once all have started again."""
        self._meeting: dist.Store | None = None
        self._serving: Future[dist.Store] | None = None
        self._unserved: _Unserved | None = _Unserved()  # stands for the store while that is not served
        self._store = cast("dist.Store", self._unserved)
        self._roster = Roster(self._store)
        self._newest: deque[int] = deque(maxlen=_GENERATIONS)
        self._gone_on: dict[int, dict[int, tuple[float, int]]] = {}
        self._silence = Silence(order.silent_s)
        self._look_at = 0.0
        self._over_since = _NEVER  # when its ranks were first asked to end
        self._sent: dict[int, set[int]] = {}  # signals sent to members that should end
        self._evicted: set[int] = set()
        self._failed: set[int] = set()  # living members that have reported a failure
        self._killer = Killer()
        self._kill_at: dict[int, float] = {}

    @property
    def store(self) -> dist.Store:
        """The store in which this host's ranks and launcher meet. Waits until it is served."""
        self._serve(wait=True)
        return self._store

    def _serve(self, *, wait: bool = False) -> None:
        """Begin to serve the store in a thread, which imports torch; once that is done, use it.

        Ranks that come earlier wait. wait: until it is served.
        """
        if self._unserved is None:
            return
        if self._serving is None:
            self._serving = Future()
            Thread(target=_serve, args=(self._listener, self._serving), name="imece-serve").start()
        if wait or self._serving.done():
            self._store = self._serving.result()
            for key, value in self._unserved.said.items():
                self._store.set(key, value)
            self._roster, self._unserved = Roster(self._store), None

    def hit(self, member: int, number: int) -> bool:
        """Send a member a signal that it is not prepared for; from any thread. False if it has ended."""
        return hit(self.crew, member, number, self._store)

    def went_on(self, member: int) -> list[tuple[int, float, int]]:
        """For the newest generations: the number, when a member finished its first step in it, and how many
        steps it had to make again."""
        for number in self._newest:
            known = self._gone_on.setdefault(member, {})
            if number not in known and (found := self._roster.went_on(member, number)) is not None:
                known[number] = found
        return [(number, *found) for number, found in self._gone_on.get(member, {}).items()][-_GENERATIONS:]

    def view(self) -> View:
        """A view for another thread."""
        self._serve(wait=True)  # before another thread asks it
        return View(self.port, self.crew, self.endings)

    # Called by a job.

    def start(self, starts: Sequence[Start]) -> None:
        """Start these members. Raises CannotStart at the first that cannot be started."""
        for each in starts:
            environ = self._environment(each, self)
            # Only the very first: people who watch should see that a replacement is another process.
            direct = self._order.direct and each.member == 0
            command, listens = self._order.command, self._order.direct
            try:
                self.crew.start(each.member, each.slot, command, environ, direct=direct, listens=listens)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise CannotStart(each, error) from None

    def publish(self, generation: Generation) -> None:
        """Tell its ranks of a new generation."""
        self._newest.append(generation.number)
        self._roster.publish(generation)
        forget_meetings(self._meeting or self._store, self._newest[0])

    def publish_last(self, generation: int) -> None:
        """Tell its ranks that no generation follows this one as long as nobody dies."""
        self._roster.say_last(generation)

    def say_finished(self, ranks: Collection[int], starts: int) -> None:
        """Tell ranks that wait here for others that these have ended with exit status 0."""
        say_finished(self._meeting or self._store, ranks, starts)

    def end(self, members: Collection[int], number: int, grace_s: float) -> None:
        """Send them a signal, and after `grace_s` SIGKILL to them and everything they started."""
        now = time.monotonic()
        self._over_since = min(self._over_since, now)
        for member in members:
            if member in self.crew.living:
                self._sent.setdefault(member, set()).add(number)
                self.crew.signal(member, number, self._known_pid(member))
                self._kill_at[member] = now + grace_s

    def kill(self, members: Collection[int]) -> None:
        """SIGKILL to everything they started, even if they themselves have ended."""
        for member in members:
            if member in self.crew.living or member in self.crew.ended:
                self.crew.kill(member)

    def forget(self, members: Collection[int]) -> None:
        """Reap members that have ended and will not be asked about again."""
        for member in members:
            if member in self.crew.ended:
                self.crew.reap(member)
                self._roster.forget(member)
                status.forget(self._store, member)

    def begin_anew(self) -> None:
        """All have ended, and all will start again."""
        self.forget(list(self.crew.ended))
        self._sent.clear()
        self._over_since = _NEVER
        self._serve()
        if self.endings and self._unserved is None:
            # The next ranks would find what torch's groups have left in a store, addresses too.
            listener = listen_here()
            self.meeting_port = listener.getsockname()[1]
            self._meeting = serve(listener)

    def ask_for_stacks(self) -> None:
        """Make all ranks print where they are, if they can."""
        for member in self.crew.living:
            self._ask_for_stacks(member)

    def say(self, line: str) -> None:
        """Print one line of the launcher's."""
        self.crew.say(line)

    def all_resilient(self, members: Collection[int]) -> bool:
        """Whether each of them would go on without another. False for none."""
        return self._roster.all_resilient(members)

    def ready(self, members: Iterable[int]) -> list[int]:
        """Those of `members` that wait to be taken in."""
        return [member for member in members if self._roster.is_ready(member)]

    def closed(self, members: Iterable[int]) -> list[int]:
        """Those of `members` that have said that they leave in order, though they may still run."""
        return [member for member in members if status.has_closed(self._store, member)]

    def lost(self, members: Iterable[int], generation: int) -> list[int]:
        """Those of `members` that cannot reach others in that generation."""
        return [member for member in members if self._roster.has_lost(member, generation)]

    def beats(self, members: Iterable[int]) -> dict[int, tuple[int, int]]:
        """(beats, finished steps) as they last said; without those that have said nothing yet."""
        return {member: beat for member in members if (beat := self._roster.beat(member)) is not None}

    def name(self, member: int, slot: int) -> str:
        """The name by which people know a living member."""
        return name_of(slot, self.pid_of(member), self.number)

    def pid_of(self, member: int) -> int:
        """The process that is a living member: the one that says so, or the one that was started here."""
        return self._known_pid(member) or self.crew.living[member].pid

    def wait(self, until: float) -> tuple[list[int], list[int]]:
        """As Crew.wait, up to what the host itself has to do. Signals that end nothing go to its ranks."""
        ended, signals = self.crew.wait(min(until, self.next_time()))
        for number in NOTICES:
            if number in signals:
                for member in self.crew.living:
                    self._notify(member, number)
        return ended, [number for number in signals if number not in NOTICES]

    # What the host does by itself.

    def next_time(self) -> float:
        """When `on_time` has something to do."""
        look_at = self._look_at if self.crew.living else _NEVER
        serve_at = time.monotonic() + _SERVED_S if self._unserved is not None else _NEVER
        return min(look_at, serve_at, *self._kill_at.values(), _NEVER)

    def on_time(self, now: float) -> None:
        """Kill members whose time is over or that are silent; serve the store once there are ranks."""
        if self.crew.living:
            self._serve()
        for member in [member for member, at in self._kill_at.items() if now >= at]:
            del self._kill_at[member]
            if member in self._sent:
                self._sent[member].add(signal.SIGKILL)
            elif member in self._failed:
                who = self.name(member, self.crew.living[member].slot)
                waits = "it is killed (it may wait for a thread that is no daemon)"
                self.say(f"imece: {who} has failed and not ended within {self._failed_s:g} s: {waits}")
            self.crew.kill(member)
        if now < self._look_at:
            return
        self._look_at = now + self._silence.interval_s
        self._look_for_failures(now)
        if self._order.silent_s:
            self._look_for_silence([member for member in self.crew.living if member not in self._sent], now)

    def ended(self, members: Sequence[int], now: float) -> dict[int, Ending]:
        """How these members ended, whose ends have just been seen."""
        self._serve()  # one that has come and ended meanwhile may have said something
        struck = self._killer.struck()
        endings = {member: self._ending(member, now, struck) for member in members}
        self.endings |= endings
        return endings

    def tell(self, outcome: Outcome) -> None:
        """Print the outcome of the job, after the traceback of its cause if that was here.

        Call this once the crew has left: nothing may be printed later.
        """
        for member, process in self.crew.ended.items():
            ending = self.endings.get(member)
            if outcome.cause is not None and ending is not None and ending.pid == outcome.cause.pid:
                self.crew.show_failure(process.outputs[1])
        if outcome.line:
            self.crew.say(outcome.line)

    @property
    def _failed_s(self) -> float:
        return max(self._order.grace_s, _TRACEBACK_S)

    def _look_for_failures(self, now: float) -> None:
        """Give those a time to end that have reported a failure: Python waits for a thread that is no daemon
        before it ends, and other ranks would wait for the rank."""
        for member in self.crew.living:
            known = member in self._sent or member in self._failed
            if not known and status.read_failure(self._store, member) is not None:
                self._failed.add(member)
                self._kill_at[member] = now + self._failed_s

    def _look_for_silence(self, members: Iterable[int], now: float) -> None:
        # One that is stopped may not have begun to beat: its script may have no loop of imece's.
        beats = {member: 0 for member in members if is_stopped(self.pid_of(member))}
        beats |= {member: count for member, (count, _) in self.beats(members).items()}
        busy_s = {member: busy_s_of(self.pid_of(member)) for member in beats}
        silent = [member for member in self._silence.look(beats, now, busy_s) if member not in self._evicted]
        closed = self.closed(silent)
        silent = [member for member in silent if member not in closed]
        if not silent:
            return
        suspects = [member for member in self._silence.suspects() if member not in self._evicted]
        stopped = [member for member in suspects if is_stopped(self.pid_of(member))]
        if stopped:
            self._silence.forgive()
        for member in stopped or silent:
            shows = member not in stopped and self._ask_for_stacks(member)
            self._evicted.add(member)
            self._kill_at[member] = now + (_STACKS_S if shows else 0.0)

    def _ask_for_stacks(self, member: int) -> bool:
        """Make it print where it is, if it can: imece.init has a handler that shows stacks and calls."""
        return self._notify(member, signal.SIGUSR1)

    def _notify(self, member: int, number: int) -> bool:
        """Send it a signal that does not end it; whether it has a handler, without which it gets none."""
        pid = self.pid_of(member)
        if catches(pid, number):
            self.crew.signal(member, number, pid)
            return True
        return False

    def _known_pid(self, member: int) -> int | None:
        return known_pid(self._store, member, self.crew.living[member].pid)

    def _ending(self, member: int, now: float, struck: bool | None) -> Ending:
        process = self.crew.ended[member]
        info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None, "a pidfd is readable only once its process has ended"
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        failure = status.read_failure(self._store, member)
        by_us = member in self._sent and (failure is None or failure.time_s > self._over_since)
        signalled = member in self._sent or member in self._evicted or member in self._failed
        if code < 0 and signalled and failure is not None and not (by_us or failure.because_of_peer):
            code = 1  # it had already failed when our signal ended its slow exit
        open_world = status.left_early(self._store, member)
        wrapped = process.may_wrap and not status.has_closed(self._store, member)
        if failure is None and (open_world or wrapped) and 128 < code < 128 + signal.NSIG:
            code = 128 - code  # wrappers report the signal that killed what they run like this
        early = open_world and code == 0
        silent_s = self._order.silent_s if member in self._evicted else None
        self._kill_at.pop(member, None)
        self._failed.discard(member)
        pid = status.pid_of(self._store, member) or process.pid
        return Ending(
            process.slot, pid, code, now, failure, early, by_us, silent_s, self.number,
            where=process.where, by_our_signal=-code in self._sent.get(member, ()),
            out_of_memory=struck,
        )  # fmt: skip


class _Unserved:
    """Stands for a store that is not served yet: keeps what is said to ranks; no rank has said anything."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.said for key in keys)

    def delete_key(self, key: str) -> None:
        self.said.pop(key, None)

    def list_keys(self) -> list[str]:
        return list(self.said)


def _serve(listener: socket.socket, serving: Future[dist.Store]) -> None:
    try:
        serving.set_result(serve(listener))
    except BaseException as error:  # noqa: BLE001  (it is raised to whoever asks for the store)
        serving.set_exception(error)
