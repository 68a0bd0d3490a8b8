"""Runs `imece launch ...` in a fork of this process, so that a test need not import torch again."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch.distributed import run

from imece.cli.main import main

LIMIT_S = 200.0  # for what hangs: a busy machine takes ten times as long as an idle one


@dataclass(frozen=True)
class Outcome:
    """What a launcher left: its exit status (negative: a signal), and its output."""

    status: int
    out: str
    err: str


class Launcher:
    """A running `imece launch`, or `call` in its place. Use it in a `with`, which ends it, or run_launch."""

    def __init__(self, *arguments: str | Path, call: Callable[[], int] | None = None) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  (closed on leaving the block)
        self._err = tempfile.TemporaryFile()  # noqa: SIM115  (closed on leaving the block)
        self._outcome: Outcome | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # what the parent left to collect (stores, groups) must not be destroyed in its copy
            status = 70
            try:
                os.dup2(self._out.fileno(), 1)
                os.dup2(self._err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                faulthandler.unregister(signal.SIGUSR1)  # a mesh that a test opened in this process may have
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(
                        number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler
                    )
                status = main(["launch", *map(str, arguments)]) if call is None else call()
            except BaseException:  # noqa: BLE001  (a copy of pytest must never return from here)
                traceback.print_exc()
            finally:
                try:
                    sys.stdout.flush()
                    sys.stderr.flush()
                finally:
                    os._exit(status)

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = LIMIT_S) -> Outcome:
        """How it ended; AssertionError, with its output, if it has not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._outcome is None:
            pid, code = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._outcome = Outcome(os.waitstatus_to_exitcode(code), self.out(), self.err())
            else:
                assert time.monotonic() < deadline, f"the launcher still runs\n{self.out()}\n{self.err()}"
                time.sleep(0.01)
        return self._outcome

    def wait_for(self, text: str, timeout_s: float = LIMIT_S) -> None:
        """Until its output has `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.out():
            assert time.monotonic() < deadline, f"no {text!r} in\n{self.out()}\n{self.err()}"
            time.sleep(0.01)

    def out(self) -> str:
        """What it and its ranks have written to stdout."""
        return os.pread(self._out.fileno(), 1 << 26, 0).decode(errors="surrogateescape")

    def err(self) -> str:
        """What it and its ranks have written to stderr."""
        return os.pread(self._err.fileno(), 1 << 26, 0).decode(errors="surrogateescape")

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outcome is None:
            self.signal(signal.SIGKILL)
            self.wait()
        self._out.close()
        self._err.close()


def run_launch(*arguments: str | Path, timeout_s: float = LIMIT_S) -> Outcome:
    """`imece launch ARGUMENTS` to its end."""
    with Launcher(*arguments) as launcher:
        return launcher.wait(timeout_s)


def torchrun(*arguments: str | Path) -> Outcome:
    """`torchrun ARGUMENTS`, to its end: a fork of this process that starts fresh ranks."""

    def call() -> int:
        run.main([*map(str, arguments)])  # raises if a rank fails
        return 0

    with Launcher(call=call) as launcher:
        return launcher.wait()
