"""Starts ranks that need not import torch: keeps two zygotes (tests/_zygote_main.py) that fork them.

There are two because each interpreter has its own seed for hashes and its own addresses. If all ranks were
copies of one process, ranks that iterate over a set in different orders, or write an address that another
rank reads, would agree by accident. Even ranks come from one zygote, odd ranks from the other.

A fork shares with its zygote whatever was read from the environment at an import, so `reason_against` names
the variables that may be read at import.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_MAIN = Path(__file__).with_name("_zygote_main.py")
# As it is before any test changes it; OMP_NUM_THREADS, that of every rank, is read when libgomp is loaded.
# GPUs are hidden from all tests but those for them (tests/conftest.py), whose ranks are fresh.
_ENVIRON = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
_READ_LATE = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_USE_AGENT_STORE|IMECE_HOST|IMECE_BACKEND|IMECE_TEST_\w+|PYTEST_CURRENT_TEST"
    r"|GLOO_SOCKET_IFNAME|NCCL_SOCKET_IFNAME"  # imece.init() sets them, also in a test's own process
    r"|TORCHINDUCTOR_CACHE_DIR"  # torch's first optimizer, and torch.compile, leave its usual value there
)
_ANSWER_S = 240.0
_PR_SET_CHILD_SUBREAPER = 36

_zygotes: dict[int, subprocess.Popen[bytes]] = {}


class Forked:
    """A rank from a zygote: a child of this process, to be asked as a subprocess.Popen is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:  # until we have reaped it, no other process can have its number
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, flags: int) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


def reason_against(variables: Mapping[str, str]) -> str | None:
    """Why a fork with this environment is not as good as a fresh interpreter, or None if it is."""
    if sys.platform != "linux":
        return "only Linux gives a fork's children to another process"
    names = variables.keys() | _ENVIRON.keys()
    changed = [name for name in names if variables.get(name) != _ENVIRON.get(name)]
    early = sorted(name for name in changed if not _READ_LATE.fullmatch(name))
    return f"{', '.join(early)} may be read at an import" if early else None


def fork_ranks(directory: Path, environs: Sequence[Mapping[str, str]]) -> list[Forked]:
    """A child for each rank, whose whole environment is `environs[rank]`; it runs _rank_main.main."""
    shares = [
        {rank: environs[rank] for rank in range(n, len(environs), 2)} for n in range(min(2, len(environs)))
    ]
    asked = [(_zygote(number), share) for number, share in enumerate(shares)]
    for rank in range(len(environs)):  # by us: a rank that is killed at once would not come to it
        (directory / f"{rank}.output").touch()
    ranks: dict[int, Forked] = {}
    try:
        with _orphans_are_ours():
            for zygote, share in asked:
                _send(zygote, {"directory": str(directory), "cwd": os.getcwd(), "environ": share})
            for zygote, share in asked:
                pids = _answer(zygote)
                ranks |= {rank: Forked(pid) for rank, pid in zip(share, pids, strict=True)}
    except BaseException:
        for forked in ranks.values():
            forked.kill()
            forked.wait()
        raise
    return [ranks[rank] for rank in range(len(environs))]


def zygotes() -> list[int]:
    """Pids of those that run."""
    return [process.pid for process in _zygotes.values() if process.poll() is None]


def _zygote(number: int) -> subprocess.Popen[bytes]:
    """A new one if there is none, or if it has died: it does with the thread that started it."""
    process = _zygotes.get(number)
    if process is None or process.poll() is not None:
        command = [sys.executable, str(_MAIN), str(os.getpid())]
        process = subprocess.Popen(
            command, env=_ENVIRON, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        _zygotes[number] = process
        _send(process, sys.path)
    return process


def _send(zygote: subprocess.Popen[bytes], message: object) -> None:
    assert zygote.stdin is not None
    try:
        zygote.stdin.write(json.dumps(message).encode() + b"\n")
        zygote.stdin.flush()
    except BrokenPipeError:
        return  # it has died, and `_answer` will say how


def _answer(zygote: subprocess.Popen[bytes]) -> list[int]:
    """Its next line. AssertionError if it dies or takes too long; it is killed then."""
    assert zygote.stdout is not None
    ready, _, _ = select.select([zygote.stdout], [], [], _ANSWER_S)
    line = zygote.stdout.readline() if ready else b""
    if not line:
        zygote.kill()
        status = zygote.wait()
        how = f"ended with status {status}, see its stderr" if ready else f"said nothing in {_ANSWER_S} s"
        raise AssertionError(f"the process that forks ranks {how}")
    pids: list[int] = json.loads(line)
    return pids


@contextmanager
def _orphans_are_ours() -> Iterator[None]:
    """Inside, a process below us whose parent ends becomes our child (Linux).

    Not for longer: whoever tests what becomes of orphans wants them to go where they always go.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _end() -> None:
    for process in _zygotes.values():
        process.kill()
        process.communicate()


atexit.register(_end)
