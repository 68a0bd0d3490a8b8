"""Tests of several processes: the one helper that starts ranks, and always ends them.

    def sum_of_ranks(factor: int) -> float:            # module-level: each rank imports it by its name
        tensor = torch.full((4,), float(dist.get_rank() * factor))
        dist.all_reduce(tensor)
        return tensor[0].item()

    def test_sum() -> None:
        assert run_ranks(sum_of_ranks, 3, args=(2,), backend="gloo") == [6.0, 6.0, 6.0]

`run_ranks` fails when a rank fails, when time is up and when no rank ran, and shows each rank's traceback
or stacks. `start_ranks` is for tests in which ranks are meant to die: it returns a handle and judges nothing.

Ranks are forks of a process that has imported torch and imece (tests/zygote.py), unless `fresh`, or unless
the environment has something that may be read at an import. A start costs about 0.03 s of CPU time, a fresh
one 2 s: let the function loop over many cases rather than start ranks for each. Arguments and values travel
as JSON, so tuples arrive as lists. Ranks die with the process that started them (Linux).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

from tests import zygote

Env = Mapping[str, str] | Callable[[int], Mapping[str, str]]

_MAIN = Path(__file__).with_name("_rank_main.py")
_OUTPUT_LIMIT = 20_000  # characters of each rank's output that a report shows, the last ones
_POLL_S = 0.005
_LIMIT_S = 200.0  # limits are for what hangs: ranks of a busy machine take ten times as long as alone
_STACKS_S = 2.0  # time a rank has to print its stacks before SIGKILL


@dataclass(frozen=True)
class RankResult:
    """What became of one rank."""

    rank: int
    returncode: int  # negative: ended by that signal
    entered: bool  # the function was called
    finished: bool  # the function returned
    value: Any  # what it returned, after JSON; None unless `finished`
    error_text: str  # the traceback if it raised, else ""
    output: str  # stdout and stderr together, stacks included
    hung: bool  # still alive when time was up, so we ended it

    @property
    def ok(self) -> bool:
        return self.finished and self.returncode == 0 and not self.hung

    def report(self) -> str:
        """Several lines: how the rank ended, its traceback, and the end of its output."""
        if self.hung:
            how = "still running when time was up; it was ended, its stacks are below"
        elif self.returncode < 0:
            how = f"ended by signal {-self.returncode} ({signal.strsignal(-self.returncode)})"
        elif self.ok:
            how = "ok"
        elif not self.entered:
            how = f"exit status {self.returncode}, before the function was called"
        elif self.finished or self.error_text:
            how = f"exit status {self.returncode}"
        else:
            how = f"exit status {self.returncode} in the midst of the function"
        parts = [f"--- rank {self.rank}: {how}", self.error_text.rstrip()]
        if self.output.strip():
            parts += [f"--- output of rank {self.rank}", self.output[-_OUTPUT_LIMIT:].rstrip()]
        return "\n".join(part for part in parts if part)


class Ranks:
    """Running ranks. Use it in a `with`: leaving the block ends and reaps whatever still runs."""

    def __init__(self, directory: Path, store: TCPStore) -> None:
        self._directory = directory
        self._store = store  # lives as long as the ranks: it is their meeting point
        self._processes: list[subprocess.Popen[bytes] | zygote.Forked] = []
        self._hung: set[int] = set()
        self._results: list[RankResult] | None = None

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, also after its end."""
        return [process.pid for process in self._processes]

    @property
    def world_size(self) -> int:
        return len(self._processes)

    def alive(self) -> list[int]:
        """The ranks that have not ended. A stopped rank (SIGSTOP) is alive."""
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank. AssertionError if it has already ended: the fault would not be real."""
        ended = self._processes[rank].poll() is not None
        assert not ended, f"rank {rank} had already ended\n{self._look(rank).report()}"
        self._processes[rank].send_signal(signum)

    def entered(self, rank: int) -> bool:
        """Whether this rank's function has been called by now."""
        if self._results is not None:
            return self._results[rank].entered
        return (self._directory / f"{rank}.entered").exists()

    def wait_entered(self, timeout_s: float = _LIMIT_S) -> None:
        """Wait until every rank's function has been called. AssertionError if one ends before that."""
        deadline = time.monotonic() + timeout_s
        while waiting := [rank for rank in range(self.world_size) if not self.entered(rank)]:
            ended = [rank for rank in waiting if self._processes[rank].poll() is not None]
            ended = [rank for rank in ended if not self.entered(rank)]  # it may have entered in between
            assert not ended, "\n".join(self._look(rank).report() for rank in ended)
            assert time.monotonic() < deadline, f"ranks {waiting} had not started after {timeout_s} s"
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float = _LIMIT_S, *, after_failure_s: float | None = None) -> list[RankResult]:
        """What became of each rank. Ranks that still run after `timeout_s` are ended, and marked `hung`.

        With `after_failure_s`, the time left shrinks to that once a rank has failed: the others would
        only wait for it. Never raises because of what ranks did. A second call returns the same list.
        """
        if self._results is None:
            deadline = time.monotonic() + timeout_s
            failed = False
            while self.alive() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                if after_failure_s is not None and not failed and any(p.poll() for p in self._processes):
                    failed = True
                    deadline = min(deadline, time.monotonic() + after_failure_s)
            self._hung = set(self.alive())
            self._end()
            self._results = [self._look(rank) for rank in range(self.world_size)]
            shutil.rmtree(self._directory)
        return self._results

    def close(self) -> None:
        """End and reap whatever still runs."""
        self.wait(0)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, environs: Sequence[Mapping[str, str]], fresh: bool) -> None:
        """A process for each environment."""
        reason = next(filter(None, map(zygote.reason_against, environs)), None)
        if reason and not fresh:
            warnings.warn(f"slow: fresh ranks, as {reason}", stacklevel=4)
        if fresh or reason:
            for variables in environs:
                self._start_fresh(variables)
        else:
            self._processes += zygote.fork_ranks(self._directory, environs)

    def _start_fresh(self, variables: Mapping[str, str]) -> None:
        rank = str(len(self._processes))
        command = [sys.executable, str(_MAIN), str(self._directory), rank]
        with (self._directory / f"{rank}.output").open("wb") as output:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self._processes.append(process)

    def _end(self) -> None:
        """SIGABRT makes the ranks print their stacks (faulthandler), SIGKILL ends them for certain."""
        for rank in self.alive():
            self._processes[rank].send_signal(signal.SIGABRT)
        deadline = time.monotonic() + _STACKS_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in self._processes:
            process.kill()  # does nothing to a process that was reaped
            process.wait()

    def _look(self, rank: int) -> RankResult:
        if self._results is not None:
            return self._results[rank]
        returncode = self._processes[rank].poll()
        file = self._directory / f"{rank}.json"
        found = json.loads(file.read_text()) if file.exists() else None
        return RankResult(
            rank=rank,
            returncode=0 if returncode is None else returncode,
            entered=self.entered(rank),
            finished=found is not None and not found["error"],
            value=found["value"] if found else None,
            error_text=found["error"] if found else "",
            output=(self._directory / f"{rank}.output").read_text(errors="replace"),
            hung=rank in self._hung,
        )


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    backend: str | None = None,
    env: Env | None = None,
    ranks_per_host: int | None = None,
    group_timeout_s: float = 300,
    fresh: bool = False,
) -> Ranks:
    """Start `world_size` processes that each call `fn(*args)`, with torchrun's environment variables.

    fn: a module-level function. args: JSON-able. backend: the torch.distributed backend to open around
    the call; None leaves everything to `fn`. env: more environment variables, the same for all ranks or a
    function of the rank; they win over ours. ranks_per_host: emulate hosts of so many ranks each
    (IMECE_HOST, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK); by default all ranks are on one host.
    group_timeout_s: the process group's own timeout. fresh: each rank is an interpreter of its own from the
    start, for what an import does. It is so anyway, with a warning, if a variable may be read at an import.
    """
    assert world_size > 0, f"no rank ran: world_size is {world_size}"
    module, qualname = fn.__module__, fn.__qualname__
    assert "<" not in qualname and module != "__main__", f"{module}.{qualname} is not a module-level function"
    directory = Path(tempfile.mkdtemp(prefix="imece-ranks-"))
    store, port = _open_store()
    job = {
        "path": sys.path,
        "module": module,
        "qualname": qualname,
        "args": list(args),
        "backend": backend,
        "group_timeout_s": group_timeout_s,
        "parent": os.getpid(),
    }
    (directory / "job.json").write_text(json.dumps(job))
    ranks = Ranks(directory, store)
    try:
        environs = []
        for rank in range(world_size):
            variables = os.environ | torchrun_variables(rank, world_size, port, ranks_per_host)
            variables |= (env(rank) if callable(env) else env) or {}
            environs.append(variables)
        ranks._start(environs, fresh)
    except BaseException:
        ranks.close()
        raise
    return ranks


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    backend: str | None = "shm",
    timeout_s: float = _LIMIT_S,
    env: Env | None = None,
    ranks_per_host: int | None = None,
    after_failure_s: float = 30,
    expect: str | None = None,
    fresh: bool = False,
) -> list[Any]:
    """What `fn(*args)` returned in each rank, by rank. Arguments as for `start_ranks`.

    timeout_s: hard limit for everything, start included. after_failure_s: time that the others are given
    once a rank has failed. expect: every rank must raise, with a traceback that this regular expression
    finds; then the tracebacks are returned. AssertionError otherwise, with the report of each rank that
    failed, those that ended by themselves first.
    """
    ranks = start_ranks(
        fn,
        world_size,
        args=args,
        backend=backend,
        env=env,
        ranks_per_host=ranks_per_host,
        group_timeout_s=max(timeout_s, 1),
        fresh=fresh,
    )
    with ranks:
        results = ranks.wait(timeout_s, after_failure_s=after_failure_s)
    assert any(result.entered for result in results), _complaint("no rank ran", fn, backend, results)
    if expect is None:
        failed = sorted((r for r in results if not r.ok), key=lambda r: r.hung)
        how_many = f"{len(failed)} of {world_size} ranks failed"
        assert not failed, _complaint(how_many, fn, backend, failed)
        return [result.value for result in results]
    others = [r for r in results if not re.search(expect, r.error_text) or r.returncode != 1]
    how_many = f"{len(others)} of {world_size} ranks did not raise {expect!r}"
    assert not others, _complaint(how_many, fn, backend, others)
    return [result.error_text for result in results]


def _complaint(what: str, fn: Callable[..., Any], backend: str | None, results: Sequence[RankResult]) -> str:
    title = f"{what} ({fn.__qualname__}, backend {backend})"
    return "\n".join([title, *(result.report() for result in results)])


def _open_store() -> tuple[TCPStore, int]:
    """A store on a loopback port that was never free for another process to take."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def torchrun_variables(rank: int, world_size: int, port: int, ranks_per_host: int | None) -> dict[str, str]:
    per_host = ranks_per_host or world_size
    host, local_rank = divmod(rank, per_host)
    local_world_size = min(per_host, world_size - host * per_host)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is ours: rank 0 connects, it does not open one
        "OMP_NUM_THREADS": 1,
        "PYTHONUNBUFFERED": 1,
    }
    if ranks_per_host is not None:
        variables["IMECE_HOST"] = f"host{host}"
    return {name: str(value) for name, value in variables.items()}
