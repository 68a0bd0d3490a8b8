"""Runs `imece train ...`, or `imece launch SCRIPT ...`: launcher and ranks as ever, but each a fork of a
process that has imported all.

Three interpreters that import torch take ten seconds, so only few tests start real ones:

    with Train(words, tmp_path) as running: ...                 # real processes, in a test

All others run in a zygote's fork (tests/ranks.py), in which the launcher and its ranks are forks again. What
a run measures of the machine and draws at its end, seconds of work, is left out there, its
sample is short, and its source is read once for all ranks:

    def story(folder: str) -> None:                             # module-level
        with Train(words, Path(folder), forked=True) as running: ...

    def test_story(tmp_path: Path) -> None:
        in_fork(story, str(tmp_path))

`launched` is such a story: a script under `imece launch` to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import torch

from imece.cli.main import main
from imece.launch.signals import ENDING, hear_all
from imece.train import alike
from tests._rank_main import die_with
from tests.ranks import run_ranks
from tests.zygote import Forked

TIME_LIMIT_S = 200.0
_POLL_S = 0.001
_NOT_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")
_prepared = False  # whether this process is one that may fork launchers


def in_fork(story: Callable[..., Any], *args: Any, timeout_s: float = TIME_LIMIT_S) -> Any:
    """What `story(*args)` returns in a process that may fork launchers. Arguments and value are JSON."""
    names = [story.__module__, story.__qualname__]
    (value,) = run_ranks(_tell, 1, args=[*names, list(args)], backend=None, timeout_s=timeout_s)
    return value


def _tell(module: str, name: str, args: list[Any]) -> Any:
    global _prepared
    for variable in [each for each in os.environ if each.startswith(_NOT_LAUNCHED)]:
        del os.environ[variable]
    torch.set_num_threads(1)  # a pool of threads would not live on in a fork
    leave_out()
    importlib.import_module("tensorboard.summary.writer.record_writer")  # here, once for all
    _prepared = True
    return getattr(importlib.import_module(module), name)(*args)


def leave_out() -> None:
    """For the rest of this process: what takes seconds and is not training."""
    digest = alike._source_digest()
    instead = {
        "imece.launch.crew.subprocess": SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank}),
        "imece.train.loop.measured_peak": lambda device, dtype: 1e12,
        "imece.train.session.measured_peak": lambda device, dtype: 1e12,
        "imece.train.alike._source_digest": lambda: digest,
        "imece.cli.train.catch_up": lambda run: None,
        "imece.train.finish._SAMPLE_TOKENS": 12,
        "imece.train.finish.write_loss_plot": lambda run: None,
        "imece.train.finish.write_report": lambda run: (run / "report.html").write_text(""),
    }
    for name, value in instead.items():
        mock.patch(name, value).start()


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit status (negative: a signal), and its output."""

    status: int
    out: str
    err: str

    def mistake(self) -> str:
        """The one line of a user's mistake. AssertionError if it is anything else."""
        assert self.status == 2, f"status {self.status}\n{self.out}\n{self.err}"
        assert self.err.startswith("imece: ") and self.err.endswith("\n"), self.err
        assert self.err.count("\n") == 1, f"more than one line:\n{self.err}"
        return self.err.removeprefix("imece: ").rstrip("\n")


class Train:
    """A running `imece train ARGUMENTS`. Leaving its block ends it."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        folder: Path,
        *,
        forked: bool = False,
        fault: Callable[[], None] = lambda: None,
        command: str = "train",
    ) -> None:
        """folder: for its output. fault: called in the forked launcher before all else."""
        self._out, self._err = folder / "command.out", folder / "command.err"
        self._outcome: Outcome | None = None
        words = [command, *map(str, arguments)]
        self._process: subprocess.Popen[bytes] | Forked
        with self._out.open("wb") as out, self._err.open("wb") as err:
            if forked:
                self._process = Forked(_fork_launcher(words, out.fileno(), err.fileno(), fault))
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "imece", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the launcher a signal; its ranks die with it. AssertionError if it has ended already."""
        assert self.running(), f"nobody left to kill\n{self.out()}\n{self.err()}"
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return self._process.pid

    def running(self) -> bool:
        """Whether the launcher has not ended."""
        return self._process.poll() is None

    def wait_until(self, happened: Callable[[], Any], timeout_s: float = TIME_LIMIT_S) -> bool:
        """Whether it happened before the command ended. AssertionError if neither did in time."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            if not self.running():
                return bool(happened())
            assert time.monotonic() < deadline, f"waited in vain\n{self.out()}\n{self.err()}"
            time.sleep(_POLL_S)
        return True

    def wait(self, timeout_s: float = TIME_LIMIT_S) -> Outcome:
        """How it ended. AssertionError, with its output, if it has not within `timeout_s`."""
        if self._outcome is None:
            deadline = time.monotonic() + timeout_s
            while (status := self._process.poll()) is None:
                assert time.monotonic() < deadline, f"it still runs\n{self.out()}\n{self.err()}"
                time.sleep(0.01)
            self._outcome = Outcome(status, self.out(), self.err())
        return self._outcome

    def out(self) -> str:
        """What it and its ranks have written to stdout."""
        return self._out.read_text(errors="surrogateescape")

    def err(self) -> str:
        """What it and its ranks have written to stderr."""
        return self._err.read_text(errors="surrogateescape")

    def __enter__(self) -> Train:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()


def train(arguments: Sequence[str | Path], folder: Path, **how: Any) -> Outcome:
    """`imece train ARGUMENTS`, forked, to its end."""
    with Train(arguments, folder, forked=True, **how) as running:
        return running.wait()


def launched(folder: str, *arguments: str) -> list[Any]:
    """A story: `imece launch ARGUMENTS`, the script's among them. Its exit status, output and errors."""
    with Train(arguments, Path(folder), forked=True, command="launch") as running:
        outcome = running.wait()
    return [outcome.status, outcome.out, outcome.err]


# From here on: forks.


def _fork_launcher(words: list[str], out: int, err: int, fault: Callable[[], None]) -> int:
    assert _prepared, "only within in_fork(): a test's own process has threads"
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        die_with(parent)
        os.setpgid(0, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        fault()
        status = _status_of(partial(main, words))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _status_of(call: Callable[[], int]) -> int:
    """What the interpreter would make of the call's end."""
    try:
        return call()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  (a copy of the tests must never return from here)
        sys.excepthook(*sys.exc_info())  # the mesh's own tells the launcher
        return 1


def _script(path: str) -> int:
    runpy.run_path(path, run_name="__main__")
    return 0


class ForkedRank:
    """What launch/crew.py needs of subprocess.Popen."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        process_group: int,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert command[0] == sys.executable, command
        assert (stdin, process_group) == (subprocess.DEVNULL, 0)
        sys.stdout.flush()
        pipes = {target: os.pipe() for target, kind in ((1, stdout), (2, stderr)) if kind is not None}
        # A signal to the copy, before it has handlers of its own, would be heard by the launcher.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                signal.set_wakeup_fd(-1)
                hear_all()
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                gc.freeze()  # what the launcher holds, its store say, must not be destroyed in a copy
                atexit._clear()
                os.setpgid(0, 0)
                preexec_fn()
                for target, (_, writer) in pipes.items():
                    os.dup2(writer, target)
                status = _as_rank(list(command[1:]), env, pass_fds)
            finally:
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for _, writer in pipes.values():
            os.close(writer)
        readers = {target: os.fdopen(reader, "rb", 0) for target, (reader, _) in pipes.items()}
        self.stdout, self.stderr = readers.get(1), readers.get(2)

    def wait(self) -> int:
        """Reap it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _as_rank(words: list[str], env: dict[str, str], kept: Sequence[int]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd in set(range(3, 256)).difference(kept):
        with contextlib.suppress(OSError):
            os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    # torch makes a fork's pool of threads anew in the first call that wants it, without a lock. Autograd's
    # threads, of which CUDA builds have several, begin together: one that finds no pool yet ends the process.
    torch.set_num_threads(torch.get_num_threads())
    if words[:2] == ["-m", "imece"]:
        status = _status_of(partial(main, words[2:]))
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        status = _status_of(partial(_script, words[0]))
    atexit._run_exitfuncs()  # a fork leaves without them: the mesh would not be closed
    sys.stdout.flush()
    return status
