"""`imece launch`: ranks on this host, until all are done or one fails; nothing of them is left afterwards.

One loop waits for the ranks' output, their ends (pidfds) and signals: no threads, no lost lines. A dead rank
is reaped last: until then its process group, and with it what it started, can be killed by number.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import torch.distributed as dist

from imece import status
from imece.errors import UserError
from imece.launch.output import Printed, RankOutput
from imece.launch.processes import (
    MAX_RANKS,
    Ending,
    die_with_parent,
    first_cause,
    kill_group,
    worker_environment,
)
from imece.store import listen, serve

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES = 65_536
_AFTER_FAILURE_S = 2.0  # from SIGTERM to SIGKILL once a rank has failed
_BLAME_S = 1.0  # how long a rank that lost its peer waits for that peer's own end to be seen
_SAID = 2  # the status of a command that has told a user's mistake
_DRAIN_S = 1.0  # for output of processes that left the ranks' process groups


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    grace_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
    direct: bool = False,
) -> int:
    """Run `command` once for each rank and return the exit status for the whole.

    0 if all ranks finished; the first failing rank's status, or 128 + its signal; 128 + the signal that
    this process got. SIGINT, SIGTERM and SIGHUP are passed on to the ranks, which then have `grace_s`
    seconds; a second one kills them at once. direct: rank 0 has this process' own output, without a prefix,
    and a rank that ends with status 2 has said itself what is wrong. Call it from the main thread. Raises
    UserError if the ranks cannot be started.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise UserError(f"--ranks {ranks}: from 1 to {MAX_RANKS} ranks can run on one host")
    listener = listen()
    port = listener.getsockname()[1]
    with _Job(serve(listener), grace_s, direct) as job:
        job.start(command, ranks, port, environ)
        job.watch()
    return job.report()


class _Job:
    """The running ranks. Leaving its block kills, drains and reaps whatever is left."""

    def __init__(self, store: dist.Store, grace_s: float, direct: bool) -> None:
        self._store = store
        self._grace_s = grace_s
        self._direct = direct
        self._selector = selectors.DefaultSelector()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: list[int] = []
        self._outputs: list[RankOutput] = []  # two for each rank: stdout, stderr
        self._open_outputs = 0
        self._printed = Printed()
        self._endings: dict[int, Ending] = {}
        self._got_signal: int | None = None
        self._ended_by_us: set[int] = set()  # the ranks that ran when we began to end them
        self._ending_since = float("inf")
        self._blame_at: float | None = None
        self._kill_at: float | None = None
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> _Job:
        self._signals.enter_context(_signals_as_bytes(self._selector))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._processes:
                kill_group(process.pid)
            deadline = time.monotonic() + _DRAIN_S
            while self._open_outputs and time.monotonic() < deadline:
                self._wait(deadline)
            for output in self._outputs:
                self._print(output, None)
        finally:
            for process in self._processes:
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._signals.close()
            self._selector.close()

    def start(self, command: Sequence[str], ranks: int, port: int, environ: Mapping[str, str]) -> None:
        """Start all ranks, each the leader of its own process group."""
        launcher = os.getpid()
        for rank in range(ranks):
            try:
                process = subprocess.Popen(
                    command,
                    env=worker_environment(environ, rank, ranks, port, f"imece-{launcher}-{port}"),
                    stdin=subprocess.DEVNULL,  # a background group that reads the terminal would be stopped
                    stdout=None if self._is_direct(rank) else subprocess.PIPE,
                    stderr=None if self._is_direct(rank) else subprocess.PIPE,
                    process_group=0,
                    preexec_fn=lambda: die_with_parent(launcher),
                )
                self._processes.append(process)
                self._pidfds.append(os.pidfd_open(process.pid))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise UserError(f"cannot start rank {rank} of {ranks}: {error}") from None
            self._selector.register(self._pidfds[-1], selectors.EVENT_READ, rank)
            for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                output = RankOutput(rank, target.buffer, self._printed)
                self._outputs.append(output)
                if stream is None:
                    continue
                self._open_outputs += 1
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, output)

    def _is_direct(self, rank: int) -> bool:
        return self._direct and rank == 0

    def watch(self) -> None:
        """Until every rank has ended: pass on output and signals, and end all ranks once one has failed."""
        while len(self._endings) < len(self._processes):
            now = time.monotonic()
            self._wait(min(at for at in (self._blame_at, self._kill_at, now + 60.0) if at is not None))
            now = time.monotonic()
            if self._blame_at is not None and now >= self._blame_at:
                self._blame_at = None
                self._end_ranks(signal.SIGTERM, _AFTER_FAILURE_S)
            if self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                for process in self._processes:
                    kill_group(process.pid)

    def report(self) -> int:
        """Say what went wrong, the first cause last, and return the exit status."""
        cause = first_cause(list(self._endings.values()))
        if self._got_signal is not None:
            name = signal.Signals(self._got_signal).name
            self._say(f"imece: ended by {name}, passed on to {len(self._processes)} ranks")
            return 128 + self._got_signal
        if cause is None:
            return 0
        if self._direct and cause.status == _SAID:
            return _SAID
        stderr = self._outputs[2 * cause.rank + 1]
        for line in stderr.failure_lines():
            self._print(stderr, line)
        others = len(self._processes) - 1
        ended = f"; the other {others} ranks were ended" if others > 1 else "; the other rank was ended"
        gone = [each.rank for each in self._endings.values() if each.ok and cause.because_of_peer]
        left = f"; rank {gone[0]} had finished before" if gone else ""
        self._say(f"imece: {cause.describe()}{left or ended if others else ''}")
        return 128 - cause.status if cause.status < 0 else cause.status or 1

    def _wait(self, until: float) -> None:
        """Handle what happens up to the monotonic time `until`, or the first things that happen."""
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if isinstance(key.data, RankOutput):
                self._read(key.fd, key.data)
            elif isinstance(key.data, int):
                self._selector.unregister(key.fd)
                self._ended(key.data)
            else:
                assert isinstance(key.fileobj, socket.socket)
                for number in key.fileobj.recv(64):
                    if number in _SIGNALS:  # it tells of all that have a handler in Python
                        self._signalled(number)

    def _read(self, fd: int, output: RankOutput) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._print(output, data, feed=True)
        else:
            self._selector.unregister(fd)
            self._open_outputs -= 1

    def _print(self, output: RankOutput, data: bytes | None, *, feed: bool = False) -> None:
        """Feed `data`, show it as one line, or (None) show what is left. Who reads us may have gone."""
        try:
            if data is None:
                output.finish()
            elif feed:
                output.feed(data)
            else:
                output.show(data)
        except BrokenPipeError:
            # As for any program in a pipeline: end. Output goes nowhere from here on.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, output.target.fileno())
            os.close(null)
            self._signalled(signal.SIGPIPE)

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(line, file=sys.stderr, flush=True)

    def _ended(self, rank: int) -> None:
        """Note how `rank` ended, and begin to end the others if it failed."""
        now = time.monotonic()
        process = self._processes[rank]
        info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert info is not None, "a pidfd is readable only once its process has ended"
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        failure = status.read_failure(self._store, rank)
        by_us = rank in self._ended_by_us and (failure is None or failure.time_s > self._ending_since)
        early = code == 0 and status.left_early(self._store, rank)
        ending = Ending(rank, process.pid, code, now, failure, early, by_us)
        self._endings[rank] = ending
        if ending.ok or self._ended_by_us or self._got_signal is not None:
            return
        if ending.because_of_peer:
            self._blame_at = self._blame_at or now + _BLAME_S
        else:
            self._blame_at = None
            self._end_ranks(signal.SIGTERM, _AFTER_FAILURE_S)

    def _signalled(self, number: int) -> None:
        again = self._got_signal is not None
        self._got_signal = self._got_signal or number
        passed_on = signal.SIGTERM if number == signal.SIGPIPE else number
        self._end_ranks(passed_on, 0.0 if again else self._grace_s)

    def _end_ranks(self, signum: int, grace_s: float) -> None:
        """Send a signal to every rank that runs, and after `grace_s` SIGKILL to them and all they started."""
        self._ending_since = min(self._ending_since, time.monotonic())
        for rank, process in enumerate(self._processes):
            if rank not in self._endings:
                self._ended_by_us.add(rank)
                os.kill(process.pid, signum)  # not reaped yet, so the number is still this rank's
        self._kill_at = time.monotonic() + grace_s


@contextlib.contextmanager
def _signals_as_bytes(selector: selectors.BaseSelector) -> Iterator[None]:
    """While open, SIGINT, SIGTERM and SIGHUP only wake `selector`, one byte for each."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    before = {number: signal.signal(number, _note) for number in _SIGNALS}
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    selector.register(reader, selectors.EVENT_READ, None)
    try:
        yield
    finally:
        selector.unregister(reader)
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _note(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor carries the signal; this only keeps Python's default handler from acting."""
