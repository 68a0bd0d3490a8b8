"""`imece.spawn`: a function on several ranks of this host, for notebooks, tests and small programs."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist

from imece import status
from imece.errors import UserError
from imece.launch.endings import Ending, first_cause
from imece.launch.environment import MOST_RANKS_PER_HOST, worker_environment
from imece.launch.processes import die_with_parent, kill_group
from imece.launch.results import decode, encode
from imece.listing import rank_words
from imece.store import listen_here, say_finished, serve
from imece.system.open_files import SPAWN, check_open_files
from imece.system.out_of_memory import Killer, preference, take_first

Returned = TypeVar("Returned")

_BLAME_S = 1.0  # how long a rank that lost its peer waits for that peer's end to be seen
_LONGEST_S = 60.0  # of a single wait, so that a caller's limit is never too large for it
_RESULT, _FAILURE = b"r", b"f"
_LENGTH_BYTES = 8  # of a message, before it
_PIECE_BYTES = 1 << 20


class RankFailedError(RuntimeError):
    """A rank that `imece.spawn` started failed. `rank` and `pid` say which; the message has its traceback."""

    def __init__(self, message: str, rank: int, pid: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid


def spawn(
    fn: Callable[..., Returned],
    args: Sequence[Any] = (),
    ranks: int = 2,
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Returned]:
    """Run `fn(*args)` in each of `ranks` new processes of this host; returns the results, by rank.

    Each process has torchrun's environment variables, so `fn` may call imece.init(); `env` adds to them.
    Returned values may be None, numbers, strings, tensors, or lists, tuples and dicts of these.

    A function of a module or script starts in a fresh process, which imports that module: a script needs `if
    __name__ == "__main__":` around its call of spawn. A function from a notebook, a lambda or a closure
    starts in a copy of this process (fork), with one thread; then this process must not have used CUDA or
    torch.distributed.

    TypeError if `fn` cannot be called, `args` is no list or tuple, or `env` has other values than strings;
    RankFailedError with the traceback of the rank that failed first; UserError if that rank raised one;
    TimeoutError naming the ranks that still ran after `timeout_s`. All processes are dead when this returns
    or raises, and they die with this process. Call it from a thread that lives as long.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: a function is wanted, as in spawn(fn, (1, 2), ranks=2)")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"args={args!r}: the arguments of a call are wanted, as in spawn(fn, (1, 2), ranks=2)"
        )
    for name, value in (env or {}).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"env={{{name!r}: {value!r}}}: names and values of variables are strings")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS_PER_HOST:
        raise UserError(f"ranks={ranks!r}: from 1 to {MOST_RANKS_PER_HOST} ranks can run on one host")
    if timeout_s is not None and not timeout_s > 0:
        raise UserError(f"timeout_s={timeout_s!r}: give a number of seconds above 0, or None")
    if multiprocessing.current_process().daemon:
        raise UserError(
            "imece.spawn: this process is a daemonic one of multiprocessing, as those of a Pool are, and "
            "may start no others: call it elsewhere, or in a process with daemon=False"
        )
    fresh = _importable(fn)
    if not fresh and (torch.cuda.is_initialized() or dist.is_initialized()):
        raise _cannot_be_copied(fn)
    check_open_files(ranks, SPAWN)
    listener = listen_here()
    port = listener.getsockname()[1]
    job = f"imece-{os.getpid()}-{port}"
    crew = _Crew()
    try:
        context = multiprocessing.get_context("spawn" if fresh else "fork")
        inherited = None if fresh else (listener.fileno(), gc.isenabled())
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            variables = worker_environment({**os.environ, **(env or {})}, rank, ranks, port, job)
            with _Call(fn, tuple(args)) as call:
                process = context.Process(  # type: ignore[attr-defined]
                    target=_run_rank,
                    args=(call, variables, os.getpid(), writer, inherited),
                    name=f"imece-rank-{rank}",
                )
                crew.start(process, reader)
            writer.close()
        # Not earlier: the store has a thread, whose locks a forked rank would find taken forever.
        crew.store = serve(listener)
        return crew.wait(timeout_s)
    finally:
        crew.end()
        listener.close()


class _Call:
    """A function and its arguments, for one rank. A fresh process finds them in memory that it inherits:
    multiprocessing itself would write them into a pipe of which it holds both ends, and wait forever if the
    process died before it had read them."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pair = fn, args
        self._memory: BinaryIO | None = None

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._memory is not None:
            self._memory.close()

    def __getstate__(self) -> Any:
        self._memory = open(os.memfd_create("imece-call"), "w+b")  # noqa: SIM115  (as long as the block)
        ForkingPickler(self._memory).dump(self._pair)
        self._memory.flush()
        return DupFd(self._memory.fileno())

    def __setstate__(self, inherited: Any) -> None:
        self._memory = open(inherited.detach(), "rb")  # noqa: SIM115  (until it is loaded)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments."""
        if self._memory is None:  # a copy of the process has them
            return self._pair
        self._memory.seek(0)  # the two processes have one position
        with self._memory as memory:
            pair: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.load(memory)  # noqa: S301  (our parent's)
        return pair


class _Crew:
    """The running ranks of one spawn."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None  # must live as long as the ranks, which meet in it
        self._processes: list[BaseProcess] = []
        self._readers: list[Connection] = []
        self._pidfds: list[int] = []
        self._came: dict[int, bytearray] = {}  # what has come of each rank's message
        self._frames: dict[int, bytes] = {}  # each rank's one message, whole: a result or a failure
        self._endings: dict[int, Ending] = {}
        self._killer = Killer()

    def start(self, process: BaseProcess, reader: Connection) -> None:
        """Start one more rank."""
        self._processes.append(process)
        self._readers.append(reader)
        os.set_blocking(reader.fileno(), False)
        with _no_collection():
            process.start()
        assert process.pid is not None
        # Not its sentinel, a pipe that its own children hold open too.
        self._pidfds.append(os.pidfd_open(process.pid))

    def wait(self, timeout_s: float | None) -> list[Any]:
        """The results, once every rank has ended; raises as soon as the first cause of a failure is known."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        blame_at: float | None = None
        while len(self._endings) < len(self._processes):
            until = min(at for at in (deadline, blame_at, time.monotonic() + _LONGEST_S) if at is not None)
            self._collect(max(0.0, until - time.monotonic()))
            failed = [each for each in self._endings.values() if not each.ok]
            now = time.monotonic()
            if failed:
                blame_at = blame_at or now + _BLAME_S
                if now >= blame_at or not all(each.because_of_peer for each in failed):
                    break
            elif deadline is not None and now >= deadline:
                running = [rank for rank in range(len(self._processes)) if rank not in self._endings]
                raise TimeoutError(f"after {timeout_s} s, {rank_words(running)} still ran; all were ended")
        cause = first_cause(list(self._endings.values()))
        if cause is not None:
            self._raise(cause)
        return [decode(self._frames[rank][1:]) for rank in range(len(self._processes))]

    def end(self) -> None:
        """Kill and reap whatever is left, including what the ranks have started."""
        for process in self._processes:
            if process.pid is not None:
                kill_group(process.pid)
                process.kill()  # in case it had not become a group's leader yet
        for process, reader in zip(self._processes, self._readers, strict=True):
            if process.pid is not None:
                process.join()
                process.close()
            reader.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self.store = None  # now, and not when an exception that refers to this crew is forgotten

    def _collect(self, timeout_s: float) -> None:
        """Read messages and ends that come within `timeout_s`."""
        running = [rank for rank in range(len(self._processes)) if rank not in self._endings]
        readers = {self._readers[rank]: rank for rank in running if rank not in self._frames}
        pidfds = {self._pidfds[rank]: rank for rank in running}
        for ready in wait([*readers, *pidfds], timeout_s):
            if isinstance(ready, Connection):
                self._read(readers[ready])
        for ready in wait(list(pidfds), 0):
            assert isinstance(ready, int)
            self._ended(pidfds[ready])

    def _read(self, rank: int) -> None:
        """Take what is there of a message, and wait for nothing: its rank may stop or die in the middle."""
        came = self._came.setdefault(rank, bytearray())
        try:
            while piece := os.read(self._readers[rank].fileno(), _PIECE_BYTES):
                came += piece
        except BlockingIOError:
            pass
        else:
            self._frames[rank] = b""  # it ended before, or in the middle of, its message
        if len(came) - _LENGTH_BYTES >= int.from_bytes(came[:_LENGTH_BYTES], "big"):
            self._frames[rank] = bytes(memoryview(came)[_LENGTH_BYTES:])
            del self._came[rank]

    def _ended(self, rank: int) -> None:
        process = self._processes[rank]
        assert process.pid is not None
        kill_group(process.pid)  # what the process started; before exitcode reaps it and frees its number
        if rank not in self._frames:
            self._read(rank)
        frame = self._frames.get(rank, b"")
        code = process.exitcode
        assert code is not None
        ending = Ending(
            rank, process.pid, code, time.monotonic(), left_early=code == 0 and not frame,
            out_of_memory=self._killer.struck(),
        )  # fmt: skip
        if frame[:1] == _FAILURE:
            note = json.loads(frame[1:])
            ending = replace(ending, failure=status.Failure(**note["failure"]), status=code or 1)
        self._endings[rank] = ending
        if ending.ok and self.store is not None:
            say_finished(self.store, [each.rank for each in self._endings.values() if each.ok])

    def _raise(self, cause: Ending) -> None:
        frame = self._frames.get(cause.rank, b"")
        trace = json.loads(frame[1:])["traceback"] if frame[:1] == _FAILURE else ""
        if cause.failure is not None and cause.failure.kind == UserError.__name__:
            raise UserError(f"rank {cause.rank}: {cause.failure.message}")
        message = cause.describe() + (f"\n\n{trace}" if trace else "")
        if not frame and cause.status == 1:  # multiprocessing failed before it could call the function
            message += (
                ": can a new process import the function? It wrote why to stderr. A script needs "
                '`if __name__ == "__main__":` around its call of spawn'
            )
        raise RankFailedError(message, cause.rank, cause.pid)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: a forked copy must not destroy our garbage, whose threads it lacks."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _importable(fn: Callable[..., Any]) -> bool:
    """Whether a fresh process finds `fn` by its module and name."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = getattr(fn, "__qualname__", "<")
    if module is None or "<" in name or not hasattr(module, name.split(".")[0]):
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ != "__main__" or (file is not None and os.path.isfile(file))


def _cannot_be_copied(fn: Callable[..., Any]) -> UserError:
    return UserError(
        f"{fn!r} cannot be imported by a new process, and this one cannot be copied after it has used CUDA "
        "(torch.cuda.is_available() does) or torch.distributed: move the function to a module"
    )


def _run_rank(
    call: _Call,
    variables: Mapping[str, str],
    parent_pid: int,
    writer: Connection,
    inherited: tuple[int, bool] | None,
) -> None:
    """The life of one rank: the call, one message to the parent, and the end in order.

    inherited: None in a fresh process. In a fork, the parent's listening descriptor, and whether the parent
    collects garbage; collecting is off until the parent's objects can no longer be collected here.
    """
    die_with_parent(parent_pid)
    take_first(preference())
    os.setpgid(0, 0)  # so that whatever it starts can be killed with it
    os.environ.update(variables)
    # After a fork, OpenMP's threads are gone, and a parallel region would wait for them forever.
    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]) if inherited is None else 1)
    if inherited is not None:
        listener, collects = inherited
        os.close(listener)
        gc.freeze()  # destroying the parent's store would wait for threads that only it has
        if collects:
            gc.enable()
        faulthandler.enable(file=2)  # PYTHONFAULTHANDLER does this in a fresh process
        atexit._clear()  # a copy must not do what the parent does at its end
        if (pools := sys.modules.get("concurrent.futures.thread")) is not None:
            pools._threads_queues.clear()  # nor wait for threads of its pools: this may be a copy of one
    try:
        fn, args = call.load()
        message = _RESULT + encode(fn(*args))
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as raised:  # noqa: BLE001  (SystemExit too: the parent reports it)
        # Asking only for the number of GPUs in the parent is enough to break CUDA here, and only the
        # copy notices.
        bad_copy = torch.cuda._is_in_bad_fork() and "forked subprocess" in str(raised)
        error = _cannot_be_copied(call.load()[0]) if bad_copy else raised
        failure = status.describe(error)
        error.__traceback__ = status.traceback_to_show(error, failure, error.__traceback__)
        note = {"failure": asdict(failure), "traceback": "".join(traceback.format_exception(error))}
        message = _FAILURE + json.dumps(note).encode()
    with open(os.dup(writer.fileno()), "wb", buffering=0) as pipe:
        for part in (len(message).to_bytes(_LENGTH_BYTES, "big"), message):
            view = memoryview(part)
            while view:
                view = view[pipe.write(view) :]
    writer.close()
    if inherited is not None:
        atexit._run_exitfuncs()  # a forked child skips them: the mesh would not be closed
    sys.exit(0 if message[:1] == _RESULT else 1)
