"""A crew: rank processes that carry out one order at a time and sleep in between.

Libraries are compared round by round, so the ranks of all of them are alive at once. Ranks that wait for an
order are blocked in read() on a socket: they take no processor time from those being measured, however their
library waits for messages. Orders and answers are lines of JSON on a Unix socket in a folder that only this
user can enter.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from imece import store
from imece.launch.processes import die_with_parent, kill_group
from imece.world import LOOPBACK

_START_S = 120.0  # importing torch in several processes on a busy machine
_LINE_BYTES = 4 * 2**20
_SOCKET, _RANK, _PARENT = "IMECE_CREW_SOCKET", "IMECE_CREW_RANK", "IMECE_CREW_PARENT"
_SOURCES = str(Path(__file__).resolve().parents[2])

Start = Callable[[Sequence[str], Mapping[str, str], BinaryIO], "subprocess.Popen[bytes]"]
_RAISED = "failed in order"  # the traceback follows


class CrewError(RuntimeError):
    """A rank of a crew failed, ended or did not answer in time."""

    def brief(self) -> str:
        """In one line: what a rank raised, or what became of it and the last line that the ranks wrote."""
        what, *told = [line.strip() for line in str(self).splitlines() if line.strip()] or [""]
        if not told:
            return what
        return told[-1] if _RAISED in what else f"{what}; the last line of the ranks: {told[-1]}"


def start_here(argv: Sequence[str], environ: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Start `argv` on this host, in a process group of its own, with stdout and stderr in `output`."""
    return subprocess.Popen(
        list(argv), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip


class Crew:
    """`size` ranks running `module`, which must call `serve`. A context manager: leaving it ends them."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.pids: list[int] = []  # of the ranks, in order
        self._folder = Path(tempfile.mkdtemp(prefix="imece-crew-"))
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(str(self._folder / "orders")) as address:
            self._listener.bind(address)
        self._listener.listen(size)
        self._log = (self._folder / "log").open("wb")
        self._children: list[subprocess.Popen[bytes]] = []
        self._lines: list[BinaryIO] = []
        self._sockets: list[socket.socket] = []
        self._store: object = None  # held as long as the crew lives

    @classmethod
    def of_ranks(
        cls, name: str, module: str, size: int, *, extra: Sequence[Mapping[str, str]] | None = None,
        starts: Sequence[Start] | None = None, master_addr: str | None = None,
    ) -> Self:  # fmt: skip
        """A crew with torchrun's environment variables and one thread per rank.

        `starts[rank]` starts that rank (default: on this host). The store is served by this process on
        loopback, or by rank 0 on `master_addr` if that is given. `extra[rank]` overrides a rank's variables.
        """
        crew = cls(name, size)
        try:
            port = 29_400
            served = master_addr is None
            if served:
                listener = store.listen()
                port = listener.getsockname()[1]
                crew._store = store.serve(listener)
            for rank in range(size):
                environ = _environment(rank, size, master_addr or LOOPBACK, port, served)
                environ |= dict(extra[rank] if extra else {}) | {_RANK: str(rank)}
                if starts is None:
                    environ[_PARENT] = str(os.getpid())
                crew._start(module, environ, starts[rank] if starts else start_here)
            crew._await_ranks()
        except BaseException:
            crew.close()
            raise
        return crew

    @classmethod
    def of_mpi(cls, module: str, size: int, mpiexec: str) -> Self:
        """A crew that `mpiexec` starts; its ranks find each other through MPI."""
        crew = cls("mpich", size)
        try:
            crew._start(module, _one_thread(), start_here, (mpiexec, "-n", str(size)))
            crew._await_ranks()
        except BaseException:
            crew.close()
            raise
        return crew

    def ask(self, do: str, *, timeout_s: float = 300.0, **details: Any) -> list[dict[str, Any]]:
        """Give every rank the order `do`; returns their answers in the order of ranks.

        CrewError, with the rank's traceback, if one fails, ends or takes too long. The crew cannot be used
        afterwards.
        """
        for connection in self._sockets:
            try:
                connection.sendall(json.dumps({"do": do, **details}).encode() + b"\n")
            except OSError as error:
                raise self._error(f"order {do!r} could not be given: {error}") from None
        deadline = time.monotonic() + timeout_s
        return [self._answer(rank, do, deadline, timeout_s) for rank in range(self.size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks: they leave when their socket closes, and are killed after 3 s."""
        for connection in (*self._sockets, self._listener):
            connection.close()
        for line in self._lines:
            line.close()
        deadline = time.monotonic() + 3.0
        try:
            for child in self._children:
                try:
                    child.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    kill_group(child.pid)
                    child.wait()
        finally:  # a second Ctrl-C does not wait
            self._children.clear()
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(
        self, module: str, environ: Mapping[str, str], start: Start, before: Sequence[str] = ()
    ) -> None:
        path = os.pathsep.join(filter(None, (_SOURCES, os.environ.get("PYTHONPATH"))))
        whole = {**os.environ, **environ, "PYTHONPATH": path}
        whole[_SOCKET] = str(self._folder / "orders")
        argv = (*before, sys.executable, "-m", module)
        self._children.append(start(argv, whole, self._log))

    def _await_ranks(self) -> None:
        """Accept every rank's connection; its first line says which rank it is."""
        deadline = time.monotonic() + _START_S
        found: dict[int, tuple[socket.socket, BinaryIO, int]] = {}
        self._listener.settimeout(0.2)
        while len(found) < self.size:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                ended = [child for child in self._children if child.poll() is not None]
                if ended:
                    status = ended[0].returncode
                    raise self._error(f"a rank ended with status {status} before it began") from None
                if time.monotonic() > deadline:
                    raise self._error(
                        f"{len(found)} of {self.size} ranks began in {_START_S:.0f} s"
                    ) from None
                continue
            connection.settimeout(_START_S)
            self._sockets.append(connection)
            line = connection.makefile("rb")
            self._lines.append(line)
            hello = self._read(line, "a rank")
            found[int(hello["rank"])] = (connection, line, int(hello["pid"]))
        self._sockets = [found[rank][0] for rank in range(self.size)]
        self._lines = [found[rank][1] for rank in range(self.size)]
        self.pids = [found[rank][2] for rank in range(self.size)]

    def _answer(self, rank: int, do: str, deadline: float, timeout_s: float) -> dict[str, Any]:
        self._sockets[rank].settimeout(max(0.01, deadline - time.monotonic()))
        try:
            answer = self._read(self._lines[rank], f"rank {rank}")
        except TimeoutError:
            raise self._error(f"rank {rank} did not finish order {do!r} in {timeout_s:.0f} s") from None
        if "error" in answer:
            ended = [child.returncode for child in self._children if child.poll() is not None]
            also = f", and a rank ended with status {ended[0]}" if ended else ""
            raise CrewError(f"{self.name}: rank {rank} {_RAISED} {do!r}{also}\n{answer['error']}")
        return answer

    def _read(self, line: BinaryIO, who: str) -> dict[str, Any]:
        try:
            data = line.readline(_LINE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise self._error(f"{who} ended")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise self._error(f"{who} answered {data[:80]!r}")
        return answer

    def _error(self, what: str) -> CrewError:
        """`what` with the last lines that the ranks wrote."""
        self._log.flush()
        tail = (self._folder / "log").read_text(errors="replace").splitlines()[-15:]
        return CrewError("\n".join([f"{self.name}: {what}", *tail]))


def slowest(answers: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of the slowest rank."""
    return max(float(answer["seconds"]) for answer in answers)


def serve(make: Callable[[], Any]) -> None:
    """In a rank: carry out orders, each a method of the object from `make`, until the crew closes the
    connection.

    Then the rank ends. It also ends with the process that started it, even during an order. The object may
    have a `rank`, if another launcher (MPI) numbers them, and a `leave`, called at the end.
    """
    die_with_parent(int(os.environ.get(_PARENT, os.getppid())))
    rank = make()
    number = int(os.environ[_RANK]) if _RANK in os.environ else rank.rank
    with socket.socket(socket.AF_UNIX) as connection:
        with _short(os.environ[_SOCKET]) as address:
            connection.connect(address)
        connection.sendall(json.dumps({"rank": number, "pid": os.getpid()}).encode() + b"\n")
        with connection.makefile("rb") as orders:
            while line := orders.readline(_LINE_BYTES):
                order = json.loads(line)
                try:
                    answer = getattr(rank, order.pop("do"))(**order)
                except Exception:  # noqa: BLE001 - told to the crew, which raises it there
                    answer = {"error": traceback.format_exc()}
                connection.sendall(json.dumps(answer).encode() + b"\n")
    if hasattr(rank, "leave"):
        rank.leave()
    # Not by the interpreter's exit: groups with a dead peer may wait there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _short(path: str) -> Iterator[str]:
    """`path` as the address of a socket: that has at most 108 bytes, and TMPDIR may have more."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


def _one_thread() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _environment(rank: int, size: int, address: str, port: int, served: bool) -> dict[str, str]:
    """torchrun's variables for one rank."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
             "MASTER_PORT": port}  # fmt: skip
    environ = {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": address}
    return environ | _one_thread() | ({"TORCHELASTIC_USE_AGENT_STORE": "True"} if served else {})
