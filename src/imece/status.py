"""What a rank tells its launcher through the store: that it runs, why it failed, that it left in order.

Exit statuses alone cannot tell a finished rank from one that called os._exit(0) in the middle, nor which of
two tracebacks came first. Times are of the host's monotonic clock, which its processes share. The launcher
knows a rank by its number as a member (membership/roster.py), or by its rank if there are no such numbers.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from traceback import TracebackException, walk_tb
from types import TracebackType
from typing import TYPE_CHECKING

from imece.errors import CollectiveError, CollectiveTimeoutError, PeerLostError, UserError
from imece.listing import some
from imece.saying import say
from imece.store import read_note

if TYPE_CHECKING:  # a launcher does not wait for torch before it starts ranks
    import torch.distributed as dist

# What Gloo, NCCL and the store say when the other side, or the way to it, is gone.
_PEER_GONE = (
    "connection closed", "connection reset", "broken pipe", "remote process exited",
    "connection refused", "connection timed out", "connection was likely closed", "socket closed",
    "no route to host", "network is unreachable", "software caused connection abort",
)  # fmt: skip
_DYING_S = 0.2  # for a worker whose connections have closed to have ended


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank."""

    time_s: float
    kind: str
    """The exception's class, such as "ValueError"."""
    message: str
    """The first 500 characters of its message, and which worker of its was killed, if that may be why."""
    because_of_peer: bool
    """Whether the error only says that another rank is gone, and so is not the first cause."""


def describe(error: BaseException) -> Failure:
    """`error` as the launcher gets it, with the present time."""
    import torch.distributed as dist

    message = str(TracebackException(type(error), error, None, compact=True))  # as str(error) may raise
    caught, _, in_worker = message.partition("\nOriginal Traceback (most recent call last):\n")
    if in_worker.strip():  # of a loader's worker: what it failed with is the last line, beyond what is kept
        message = f"{caught} {in_worker.strip().splitlines()[-1]}"
    lost = isinstance(error, PeerLostError | CollectiveTimeoutError | dist.DistNetworkError)
    gone = isinstance(error, RuntimeError) and says_peer_gone(message)
    why = _ended_workers(error) if isinstance(error, OSError | EOFError) else ""
    said = "; ".join(filter(None, (message[:500], why)))
    return Failure(time.monotonic(), type(error).__name__, said, lost or gone)


def _ended_workers(error: BaseException) -> str:
    """Those of multiprocessing's processes, a loader's workers say, that a signal has ended, in words; if
    multiprocessing raised the error, those too that have ended by themselves, by sys.exit(0) say. Who reads
    what such a worker sends learns only that a connection has closed, or that a socket is not there."""
    frames = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    any_end = bool(frames) and frames[-1].startswith("multiprocessing.")
    until, workers = time.monotonic() + _DYING_S, list(multiprocessing.process._children)  # type: ignore[attr-defined]
    while not (ended := [(each.pid, code) for each in workers if _counts(code := each.exitcode, any_end)]):
        if not workers or time.monotonic() > until:
            return ""
        time.sleep(0.01)
    return some([f"its worker {pid} {_how(code)}" for pid, code in ended], 3)


def _counts(status: int | None, any_end: bool) -> bool:
    return status is not None and (status < 0 or any_end)


def _how(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"


def says_peer_gone(message: str) -> bool:
    """Whether this message of torch says that another process has ended or cannot be reached any more."""
    return any(sign in message.lower() for sign in _PEER_GONE)


def says_timed_out(message: str) -> bool:
    """Whether this message of torch says that something ran into a timeout."""
    return any(sign in message.lower() for sign in ("timed out", "timeout"))


def tell_running(store: dist.Store, member: int) -> None:
    """From now on it is a failure to exit with status 0 without `tell_closed`. Also tells that this process
    is the rank, which the launcher may have started through another program."""
    store.set(_key(member, "pid"), str(os.getpid()))
    store.set(_key(member, "state"), "running")


def tell_closed(store: dist.Store, member: int) -> None:
    """Tell that the rank leaves in order."""
    store.set(_key(member, "state"), "closed")


def tell_failures(store: Callable[[], dist.Store], member: int) -> Callable[[], None]:
    """If an exception ends this process, report it before the usual traceback is printed.

    store: asked for then; it may raise OSError, RuntimeError or ValueError. See `traceback_to_show`.
    Returns a function that ends the reporting. In a forked copy of the process nothing is reported.
    """
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure = describe(error)
        try:
            if os.getpid() == pid:
                store().set(_key(member, "failure"), json.dumps(asdict(failure)))
        except (OSError, RuntimeError, ValueError) as gone:  # the launcher ended first, or is not where
            # the environment says; the traceback is all there is
            say(f"member {member} cannot report its failure: {gone}")
        error.__traceback__ = traceback_to_show(error, failure, trace)
        before(kind, error, error.__traceback__)

    def stop() -> None:
        if sys.excepthook is hook:  # else someone has wrapped ours
            sys.excepthook = before

    sys.excepthook = hook
    return stop


def traceback_to_show(
    error: BaseException, failure: Failure, trace: TracebackType | None
) -> TracebackType | None:
    """`trace` as people see it. That of an error of imece's, or of one that only says that another rank is
    gone, is without the frames of imece and torch: where the program stands and the message say it all, and
    many ranks print them."""
    if failure.because_of_peer or isinstance(error, CollectiveError | UserError):
        return _of_the_program(trace)
    return trace


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The trace without frames of imece and torch."""
    if trace is None:
        return None
    rest = _of_the_program(trace.tb_next)
    module = str(trace.tb_frame.f_globals.get("__name__"))
    if module.partition(".")[0] in ("imece", "torch"):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def pid_of(store: dist.Store, member: int) -> int | None:
    """The process id that `member` has told; within a container it may be another process' number outside."""
    key = _key(member, "pid")
    text = store.get(key).decode(errors="replace") if store.check([key]) else ""
    return int(text) if text.isdecimal() else None


def left_early(store: dist.Store, member: int) -> bool:
    """Whether `member`, which has exited, was still in a world that imece.init() had opened."""
    return _state(store, member) == b"running"


def has_closed(store: dist.Store, member: int) -> bool:
    """Whether `member` has told that it leaves in order; it may still run."""
    return _state(store, member) == b"closed"


def _state(store: dist.Store, member: int) -> bytes:
    key = _key(member, "state")
    return store.get(key) if store.check([key]) else b""


def read_failure(store: dist.Store, member: int) -> Failure | None:
    """The exception that ended `member`, if it could report one."""
    key = _key(member, "failure")
    if not store.check([key]):
        return None
    note = read_note(store.get(key), f"member {member}")
    return Failure(
        time_s=float(note.get("time_s", 0)),
        kind=str(note.get("kind", "")),
        message=str(note.get("message", "")),
        because_of_peer=bool(note.get("because_of_peer")),
    )


def forget(store: dist.Store, member: int) -> None:
    """Remove what is stored about a member that has ended and will not be asked about again."""
    for name in ("state", "pid", "failure"):
        store.delete_key(_key(member, name))


def _key(member: int, name: str) -> str:
    return f"imece/member/{member}/{name}"
