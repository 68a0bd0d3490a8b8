"""The last 1,024 calls of this rank, in memory that another process can read while this one hangs.

    token = recorder.enter("all_reduce", "replicate", tensor.dtype, tensor.shape, "sum")
    ...                                     # the collective
    recorder.leave(token)                   # or recorder.fail(token)

From elsewhere: `imece doctor --attach`, or `for line in explain(find()): print(line)`.

The ring lies in an anonymous file (memfd): it has no name in the file system, so nothing can stay behind, and
/proc/PID/fd lets any process of the same user map it. recording.py defines the layout and reads it. Without
memfd (macOS) the ring is private, and only `dump` and the signal show it.
"""

from __future__ import annotations

import faulthandler
import itertools
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from imece import moments
from imece.collectives import fingerprint as fp
from imece.collectives import recording as ring
from imece.collectives.recording import Recording, find
from imece.collectives.who_waits import explain

_MASK = ring.CAPACITY - 1
_RING_AT, _RECORD_BYTES = ring.RING_AT, ring.RECORD_BYTES
_OP_CODES = {name: code for code, name in enumerate(fp.OPS)}
_REDUCE_CODES = {name: code for code, name in enumerate(fp.REDUCE_OPS)}
_MAX_BODIES = 4096
_DUMPED = 16  # calls that `dump` shows
_write = ring.RECORD.pack_into
_now = time.monotonic_ns

_Key = tuple[str, str, "torch.dtype | None", Sequence[int], str, int, str]


class Recorder:
    """The ring of one process. Threads may enter at the same time: each call takes its own slot."""

    def __init__(self, rank: int, job: str) -> None:
        self._fd = -1
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(ring.MEMFD_NAME)
            os.ftruncate(self._fd, ring.TOTAL_BYTES)
        self._map = mmap.mmap(self._fd, ring.TOTAL_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._tokens = itertools.count(1)
        self.begin(rank, job)

    def begin(self, rank: int, job: str) -> None:
        """Begin anew, with nothing noted. To `leave` a call that was noted before does nothing."""
        self._map[ring.GROUPS_AT :] = bytes(ring.TOTAL_BYTES - ring.GROUPS_AT)
        self._bodies: dict[_Key, tuple[bytes, Iterator[int], int]] = {}
        self._rows: dict[str, int] = {}
        self._numbers: dict[int, Iterator[int]] = {}
        ring.HEADER.pack_into(
            self._map, 0, ring.MAGIC, ring.VERSION, os.getpid(), rank, ring.CAPACITY, ring.RECORD_BYTES,
            job.encode()[:64],
        )  # fmt: skip

    def enter(
        self, op: str, group_name: str, dtype: torch.dtype | None, shape: Sequence[int], reduce_op: str,
        peer: int, label: str,
    ) -> int:  # fmt: skip
        key = (op, group_name, dtype, shape, reduce_op, peer, label)
        known = self._bodies.get(key)
        if known is None:
            known = self._remember(key)
        body, numbers, word = known
        number, token = next(numbers), next(self._tokens)
        _write(self._map, _RING_AT + (token & _MASK) * _RECORD_BYTES, token, number, _now(), 0, body, token)
        self._words[word] = number
        return token

    def leave(self, token: int, sign: int = 1) -> None:
        word = (_RING_AT + (token & _MASK) * _RECORD_BYTES) >> 3
        # If 1,024 later calls have come, one of them has taken this call's slot.
        if self._words[word] == token:
            self._words[word + 3] = sign * _now()

    def turn(self, token: int, sign: int) -> None:
        """From now on the call goes on by itself (sign -1), or the rank waits in it again (sign 1)."""
        word = (_RING_AT + (token & _MASK) * _RECORD_BYTES) >> 3
        if self._words[word] == token and self._words[word + 2] * sign < 0:
            self._words[word + 2] = sign * _now()

    def count(self, group_name: str) -> int:
        row = self._rows.get(group_name)
        return 0 if row is None else self._words[(ring.GROUPS_AT + row * ring.GROUP_BYTES) // 8]

    def recording(self) -> Recording:
        recording = ring.read(self._map, "R")
        assert recording is not None, "the recorder's own header is damaged"
        return recording

    def close(self) -> None:
        self._words.release()
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = min(len(self._rows), ring.MAX_GROUPS - 1)
            shown = name if row < ring.MAX_GROUPS - 1 else "further groups"
            ranks = _ranks_of(name) if row < ring.MAX_GROUPS - 1 else b""
            ring.GROUP.pack_into(
                self._map, ring.GROUPS_AT + row * ring.GROUP_BYTES, 0, 0, shown.encode()[:64], ranks
            )
        return row

    def _remember(self, key: _Key) -> tuple[bytes, Iterator[int], int]:
        """Pack what repeats with every call of the same kind, so that `enter` only copies bytes."""
        op, group_name, dtype, shape, reduce_op, peer, label = key
        row = self._row(group_name)
        word = (ring.GROUPS_AT + row * ring.GROUP_BYTES) // 8 + (op in ring.POINT_TO_POINT)
        numbers = self._numbers.setdefault(word, itertools.count(1))
        body = ring.BODY.pack(
            _OP_CODES[op], _REDUCE_CODES[reduce_op], fp.DTYPE_CODES.get(dtype, fp.DTYPES.index("other")),
            row, peer, *fp.six_dims(shape), _short(label),
        )  # fmt: skip
        if len(self._bodies) >= _MAX_BODIES:
            self._bodies.clear()
        self._bodies[key] = known = body, numbers, word
        return known


_recorder: Recorder | None = None


def enter(
    op: str, group_name: str, tensor_dtype: torch.dtype | None, shape: Sequence[int], reduce_op: str = "",
    peer: int = -1, label: str = "",
) -> int:  # fmt: skip
    """Note that this rank enters a call; returns the token for `leave` or `fail`.

    shape: a tuple or torch.Size; () with dtype None for a barrier. peer: root or other side, as rank in the
    group. KeyError for an operation that is not in fingerprint.OPS. Enter and leave cost about 1 us.
    """
    return (_recorder or _create()).enter(op, group_name, tensor_dtype, shape, reduce_op, peer, label)


def leave(token: int) -> None:
    """Note that the call is complete."""
    (_recorder or _create()).leave(token)


def fail(token: int) -> None:
    """Note that the call has raised."""
    (_recorder or _create()).leave(token, -1)


def hand_out(token: int) -> None:
    """Note that the call goes on by itself: this rank does not wait for it before `wait`."""
    (_recorder or _create()).turn(token, -1)


def wait(token: int) -> None:
    """Note that this rank waits for a call from now on, if it was handed out."""
    (_recorder or _create()).turn(token, 1)


def count(group_name: str) -> int:
    """How many collectives of the group this rank has noted."""
    return 0 if _recorder is None else _recorder.count(group_name)


def who_waits() -> str:
    """Who waits for whom among this job's ranks on this host, in words."""
    return " / ".join(explain(find((_recorder or _create()).recording().job)))


def dump() -> None:
    """Print this rank's last calls, newest last, to standard error."""
    recording = (_recorder or _create()).recording()
    calls = recording.calls[-_DUMPED:]
    lines = [f"rank {recording.rank} (pid {recording.pid}): last {len(calls)} calls"]
    for call in calls:
        age = f"{recording.age_s(call):.3f} s"
        when = f"{age} ago" if call.end_ns else f"since {age}"
        lines.append(f"  {call.state:7} {when:>18}  {call.group} number {call.number}: {call.what}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def install_signal() -> None:
    """After this, `kill -USR1 PID` prints all threads' stacks and this rank's last calls to standard error.

    C code prints the stacks at once. A Python handler prints the calls, and can run only between two
    bytecodes of the main thread: if that thread hangs in C (in a Gloo or NCCL call), it never prints them.
    Reading from outside still works: `imece doctor --attach`.
    Main thread only (ValueError elsewhere); replaces any earlier handler.
    """

    def show(_number: int, _frame: FrameType | None) -> None:
        dump()

    signal.signal(signal.SIGUSR1, show)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # chain: then `show`


def _ranks_of(group_name: str) -> bytes:
    """The global ranks of a torch group, in words; empty for a name that torch does not know."""
    try:
        group = distributed_c10d._resolve_process_group(distributed_c10d.GroupName(group_name))
        return ring.ranks_text(tuple(dist.get_process_group_ranks(group))).encode()
    except (LookupError, RuntimeError, ValueError):
        return b""


def _create() -> Recorder:
    global _recorder
    _recorder = Recorder(*_place())
    return _recorder


def _begin_again() -> None:
    """Start anew: torch gives new groups the names of old ones, and what this rank did in those must
    not count."""
    if _recorder is not None:
        _recorder.begin(*_place())


moments.once_arranged.append(_begin_again)


def _place() -> tuple[int, str]:
    """(rank, job), as far as this process knows."""
    if dist.is_initialized():
        return dist.get_rank(), _job()
    try:
        return int(os.environ.get("RANK", -1)), _job()
    except ValueError:
        return -1, _job()


def _job() -> str:
    """A name that is equal on all ranks of a job, and differs between jobs alive at the same time on
    one host."""
    environ = os.environ
    if environ.get("MASTER_PORT"):
        run = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""
        return f"{environ.get('MASTER_ADDR', '')}:{environ['MASTER_PORT']} {run}".strip()
    return f"children of {os.getppid()}"


def _short(label: str) -> bytes:
    """At most 32 bytes: both ends of a parameter's name tell more than its first half."""
    raw = label.encode()
    return raw if len(raw) <= 32 else raw[:13] + b".." + raw[-17:]


def _forget_after_fork() -> None:
    """A forked child must not write into its parent's ring: it gets its own at its first call."""
    global _recorder
    if _recorder is not None:
        _recorder.close()
        _recorder = None


os.register_at_fork(after_in_child=_forget_after_fork)
