"""The processes of a job's ranks: started, heard, waited for, and none of them left behind.

One selector waits for their output, for readers of our own output, for their ends (pidfds) and for signals:
there are no threads, no lost lines, and no reader that holds up the rest. A dead rank is reaped last: until
then its process group, and so whatever it started, can be killed by number.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imece.launch.output import RankOutput
from imece.launch.processes import (
    die_together,
    die_with_parent,
    group_lives,
    hear_of_cpu_limit,
    kill_group,
    reap_adopted,
)
from imece.launch.relay import Relay
from imece.launch.signals import ENDING, NOTICES, hear_all, signals_as_bytes
from imece.membership.where import RECORD, new_record, read_record
from imece.system.open_files import allow_open_files
from imece.system.out_of_memory import preference, take_first

_DRAIN_S = 1.0  # for output of processes that left the ranks' groups; and for its reader, after a signal
_LONGEST_S = 60.0  # of a single wait, where nothing is ever due
_GROUP_S = 0.05  # how often to look whether a group whose leader has ended is empty
_SAME_SIGNAL_S = 1.0  # signals within this time are one: `timeout` and systemd send theirs twice at least
_TOGETHER_S = 0.01  # ranks that end within this time ended together: one change for the others, not two


@dataclass
class Process:
    """One rank, until it is reaped."""

    member: int
    slot: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    outputs: tuple[RankOutput, RankOutput]  # stdout, stderr
    record: int  # the descriptor of its record (membership/where.py)
    lifeline: int  # of a pipe: closing it, at the latest at this process' end, kills the whole group
    may_wrap: bool  # no Python of ours: the training may be another process, which it has started
    direct: bool  # it writes to this process' own output
    ends_together: bool = False  # all of its group were asked to end, and have the same time for it

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self.popen.pid

    @property
    def where(self) -> str:
        """The phase and step in which it is, or was; "" if it has noted none."""
        return read_record(self.record)


class Crew:
    """All processes of ranks. Leaving its block kills, drains and reaps whatever is left."""

    def __init__(self, logs: Path | None) -> None:
        """logs: a folder that also gets each rank's output. UserError if it cannot be made or written."""
        allow_open_files()
        self._preference = preference()
        self.living: dict[int, Process] = {}
        self.ended: dict[int, Process] = {}
        """Members that have ended and are not reaped yet."""
        self._selector = selectors.DefaultSelector()
        self._relay = Relay(self._selector, logs, lambda: self._heard(signal.SIGPIPE))
        self._signalled_s: float | None = None  # when the first signal came, or a reader of our output went
        self._is_process_1 = os.getpid() == 1
        self._leaderless: list[Process] = []  # processes whose group leader has ended; part of the living
        self._news: list[int] = []
        self._signals: list[int] = []
        self._handlers = contextlib.ExitStack()
        self._wake: socket.socket | None = None

    def __enter__(self) -> Crew:
        self._handlers.enter_context(signals_as_bytes(self._selector))
        return self

    def __exit__(self, *_exception: object) -> None:
        processes = [*self.ended.values(), *self.living.values()]
        self._relay.release()
        if self._wake is not None:
            self._selector.unregister(self._wake)
        try:
            for process in processes:
                kill_group(process.pid)
            deadline = time.monotonic() + _DRAIN_S
            while self._relay.is_open and time.monotonic() < deadline:
                self._look(deadline)
            self._relay.end_lines()
        finally:
            for process in processes:
                self._let_go(process)
            self._pass_on_rest()
            self._relay.close()
            for process in self.living.values():
                os.close(process.pidfd)
            self._handlers.close()
            self._selector.close()

    def wakes(self, wake: socket.socket) -> None:
        """`wait` also returns when there is something to read here, and leaves it there."""
        self._wake = wake
        self._selector.register(wake, selectors.EVENT_READ, wake)

    def start(
        self,
        member: int,
        slot: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        direct: bool,
        listens: bool = False,
    ) -> Process:
        """Start one rank, as the leader of its own process group. direct: it writes to this process'
        own output.
        listens: signals that end it wait until the rank listens for them (train/watch/stopping.py).

        Raises OSError, ValueError or subprocess.SubprocessError.
        """
        outputs = self._relay.outputs(slot, is_logged=not direct)
        launcher, record, (reader, lifeline) = os.getpid(), new_record(), os.pipe()

        def prepare() -> None:
            die_together(reader)
            die_with_parent(launcher)
            take_first(self._preference)
            hear_of_cpu_limit()
            hear_all()
            if listens:  # a signal in its imports would leave half a module
                signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

        with contextlib.ExitStack() as undo:
            undo.callback(os.close, record)
            undo.callback(os.close, lifeline)
            try:
                popen = subprocess.Popen(
                    command,
                    env={**environ, RECORD: str(record)},
                    stdin=subprocess.DEVNULL,  # a background group that reads the terminal would be stopped
                    stdout=None if direct else subprocess.PIPE,
                    stderr=None if direct else subprocess.PIPE,
                    pass_fds=(record, reader),
                    process_group=0,
                    preexec_fn=prepare,
                )
            finally:
                os.close(reader)
            undo.callback(popen.wait)
            undo.callback(kill_group, popen.pid)
            if (log := outputs[0].log) is not None:
                log.begin(slot, popen.pid)
            pidfd = os.pidfd_open(popen.pid)
            undo.pop_all()
        if direct:
            self._relay.watch_readers()
        may_wrap = command[0] != sys.executable
        process = Process(member, slot, popen, pidfd, outputs, record, lifeline, may_wrap, direct)
        self.living[member] = process
        self._selector.register(pidfd, selectors.EVENT_READ, process)
        for stream, output in zip((popen.stdout, popen.stderr), outputs, strict=True):
            if stream is not None:
                self._relay.follow(stream, output)
        return process

    def wait(self, until: float) -> tuple[list[int], list[int]]:
        """(members that have ended, signals that came), up to the monotonic time `until` or the first of
        them; output is passed on meanwhile. If the first event is that a reader of our output has gone, it
        counts as SIGPIPE. Ending signals within a second of the first are left out: they are no second
        wish."""
        self._look(until)
        if self._news:
            together = time.monotonic() + _TOGETHER_S
            while time.monotonic() < together:
                self._look(together)
        news, self._news = self._news, []
        signals, self._signals = self._signals, []
        return news, signals

    def signal(self, member: int, number: int, pid: int | None) -> None:
        """Send a signal to one living rank. pid: its process, if that is known.

        A rank itself ends what it has started, such as a loader's workers. But everything that a wrapper has
        started gets the signal too, and the rank lives until the last of them has ended or is killed.
        """
        process = self.living[member]
        if process.may_wrap and pid is None:
            process.ends_together = True
            kill_group(process.pid, number)
        else:
            with contextlib.suppress(ProcessLookupError):  # a wrapper has reaped it
                os.kill(pid or process.pid, number)

    def kill(self, member: int) -> None:
        """SIGKILL to a rank and everything it has started."""
        process = self.living.get(member) or self.ended[member]
        process.ends_together = False
        kill_group(process.pid)

    def reap(self, member: int) -> None:
        """Forget a rank that has ended, after its last output."""
        process = self.ended.pop(member)
        kill_group(process.pid)
        self._relay.take_rest(process.outputs)
        self._let_go(process)

    def say(self, line: str) -> None:
        """Print one line of the launcher's, after what ranks have printed there."""
        self._relay.say(line)

    def show_failure(self, output: RankOutput) -> None:
        """Show the traceback again that a rank has printed, unless little came after it."""
        self._relay.show_failure(output)

    def _look(self, until: float) -> None:
        """Handle what happens up to `until`, or the first things that happen."""
        if self._leaderless:
            until = min(until, time.monotonic() + _GROUP_S)
        for key, _ in self._selector.select(min(max(0.0, until - time.monotonic()), _LONGEST_S)):
            if isinstance(key.data, Process):
                self._selector.unregister(key.fd)
                self._leaderless.append(key.data)
            elif key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                # The bytes stand for all signals that have a handler in Python.
                for number in key.fileobj.recv(64):
                    if number in ENDING:
                        self._heard(number)
                    elif number in NOTICES:
                        self._signals.append(number)
            else:
                self._relay.handle(key)
        self._look_at_leaderless()
        self._relay.hold_back()
        if self._is_process_1:
            reap_adopted({each.pid for each in (*self.living.values(), *self.ended.values())})

    def _look_at_leaderless(self) -> None:
        for process in list(self._leaderless):
            if not (process.ends_together and group_lives(process.pid)):
                self._leaderless.remove(process)
                os.close(process.pidfd)
                self.ended[process.member] = self.living.pop(process.member)
                self._news.append(process.member)

    def _heard(self, number: int) -> None:
        now = time.monotonic()
        if self._signalled_s is None:
            self._signalled_s = now
        elif number == signal.SIGPIPE or now < self._signalled_s + _SAME_SIGNAL_S:
            return  # `tee` ends at the same Ctrl-C; that is seen when a rank says that it has saved
        self._signals.append(number)

    def _let_go(self, process: Process) -> None:
        """Reap it, and close what it leaves."""
        if process.popen.wait() < 0 and process.direct:
            self._relay.end_live_line()
        for fd in (process.record, process.lifeline):
            os.close(fd)

    def _pass_on_rest(self) -> None:
        """Pass on what a slow reader has not taken yet; only briefly if a signal has ended the job."""
        deadline = None
        while self._relay.waits:
            now = time.monotonic()
            if self._signalled_s is not None:
                deadline = deadline or now + _DRAIN_S
                if now >= deadline:
                    return
            self._look(deadline or math.inf)
