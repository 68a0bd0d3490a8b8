"""Reads the recorder of another process, even one that hangs. who_waits.py says who is missing from what.

    recorder    the ring of last calls that each rank writes (recorder.py)
    recording   what was read from one rank's recorder at one moment
    call        one record: a collective or point-to-point call that this rank entered, left or failed

Layout of the memory, all integers in the host's byte order (only processes of the same host read it):
    0           header: magic, version, pid, rank, capacity, record size, job
    4096        64 rows of 256 bytes, one a group: last collective, last point-to-point, name, ranks
    20480       ring of 1,024 records of 128 bytes; the record of call `token` lies at token % 1,024
A record begins and ends with its token. The writer writes it front to back and takes no lock. So a reader
copies it until two copies agree and both tokens are equal, and leaves out a record that never settles.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from imece.collectives import fingerprint as fp
from imece.errors import UserError

MEMFD_NAME = "imece-recorder"
MAGIC, VERSION = b"imecerec", 3
HEADER = struct.Struct("=8sIIiII64s")
GROUPS_AT, GROUP_BYTES, MAX_GROUPS = 4096, 256, 64
GROUP = struct.Struct("=qq64s176s")  # number of the last collective, of the last point-to-point; name, ranks
RING_AT, CAPACITY, RECORD_BYTES = GROUPS_AT + GROUP_BYTES * MAX_GROUPS, 1024, 128
TOTAL_BYTES = RING_AT + CAPACITY * RECORD_BYTES
RECORD = struct.Struct("@qqqq88sq")  # token, number in the group, start ns, end ns, body, token
BODY = struct.Struct("=BBBBhxx6q32s")  # op, reduce op, dtype, group row, peer, 6 x (dim + 1), label
POINT_TO_POINT = frozenset({"send", "recv", "exchange"})


@dataclass(frozen=True)
class Call:
    """One call of one rank. Times are the host's monotonic clock in ns."""

    token: int  # counts all calls of the rank, from 1
    number: int  # counts the calls on this group; point-to-point calls are counted apart
    group: str
    op: str
    reduce_op: str
    dtype: str
    shape: tuple[int, ...]  # dims beyond the sixth are multiplied into the sixth
    peer: int  # rank in the group: root, or the other side; -1 if none
    label: str
    start_ns: int  # < 0: since then it goes on by itself, and the rank does not wait for it yet
    end_ns: int  # 0 while the call is open, < 0: it failed

    @property
    def state(self) -> str:
        if self.end_ns == 0:
            return "entered" if self.start_ns > 0 else "started"
        return "left" if self.end_ns > 0 else "failed"

    @property
    def what(self) -> str:
        """E.g. "all_reduce(sum) of float32[8, 4] (blocks.0.weight)"."""
        text = fp.words(
            fp.Fields(self.op, self.reduce_op, self.dtype, self.peer, math.prod(self.shape)), self.shape
        )
        return text + (f" ({self.label})" if self.label else "")


@dataclass(frozen=True)
class GroupSeen:
    """What one rank knows of a group."""

    ranks: tuple[int, ...] | None  # None if nobody told the recorder
    last_number: int  # of collectives; 0 before the first


@dataclass(frozen=True)
class Recording:
    """The last calls of one rank, oldest first, as they were at `read_at_ns`."""

    pid: int
    rank: int  # -1 if the process did not know it yet
    job: str
    process_state: str  # of /proc/PID/stat: R running, S sleeping, T stopped, Z zombie, ...
    read_at_ns: int
    calls: tuple[Call, ...]
    groups: dict[str, GroupSeen]
    stopped: tuple[int, ...] = ()  # pids of processes that it has started, as loader workers, and are stopped

    def age_s(self, call: Call) -> float:
        """Seconds since the call ended; for an open call, since the rank began to wait in it or
        started it."""
        return max(0, self.read_at_ns - (abs(call.end_ns) or abs(call.start_ns))) / 1e9

    @property
    def open_calls(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.end_ns == 0)


def attach(pid: int) -> Recording:
    """Read the recorder of process `pid`, which need not help and may hang or be stopped.

    UserError if there is no such process, it belongs to someone else, or it has made no imece call.
    """
    for descriptor in _descriptors(pid):
        try:
            if not os.readlink(descriptor).startswith(f"/memfd:{MEMFD_NAME}"):
                continue
            with (
                open(descriptor, "rb") as file,
                mmap.mmap(file.fileno(), TOTAL_BYTES, prot=mmap.PROT_READ) as view,
            ):
                recording = read(view, _process_state(pid))
            if recording is not None and recording.pid == _own_pid(pid):
                return replace(recording, stopped=_stopped_children(pid))
        except (OSError, ValueError):
            continue  # closed, replaced by a smaller file, or ended, between listing and reading
    raise UserError(f"process {pid} has no imece recorder: it has made no collective yet, or is not a rank")


def find(job: str | None = None) -> list[Recording]:
    """The recordings of all live ranks of this user on this host, or of one job, ordered by job and rank."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not entry.isdigit():
            continue
        try:
            if os.stat(f"/proc/{entry}").st_uid == os.geteuid():
                found.append(attach(int(entry)))
        except (OSError, UserError):
            continue  # ended meanwhile, or not a rank
    if job is not None:
        found = [recording for recording in found if recording.job == job]
    return sorted(found, key=lambda recording: (recording.job, recording.rank, recording.pid))


def read(view: mmap.mmap, process_state: str) -> Recording | None:
    """The recording in a mapping of a recorder's memory; None if the mapping holds something else."""
    header = HEADER.unpack_from(view, 0)
    magic, version, pid, rank, capacity, record_bytes, job = header
    if (magic, version, capacity, record_bytes) != (MAGIC, VERSION, CAPACITY, RECORD_BYTES):
        return None
    names, groups = [], {}
    for row in range(MAX_GROUPS):
        last, _last_p2p, raw_name, raw_ranks = GROUP.unpack_from(view, GROUPS_AT + row * GROUP_BYTES)
        names.append(text_of(raw_name))
        if names[row]:
            groups[names[row]] = GroupSeen(_parse_ranks(text_of(raw_ranks)), last)
    calls = [call for slot in range(CAPACITY) if (call := _call(view, slot, names)) is not None]
    return Recording(
        pid, rank, text_of(job), process_state, time.monotonic_ns(),
        tuple(sorted(calls, key=lambda call: call.token)), groups,
    )  # fmt: skip


def _call(view: mmap.mmap, slot: int, group_names: list[str]) -> Call | None:
    at = RING_AT + slot * RECORD_BYTES
    raw = view[at : at + RECORD_BYTES]
    for _ in range(8):
        again = view[at : at + RECORD_BYTES]
        if raw == again:
            break
        raw = again
    else:
        return None
    token, number, start_ns, end_ns, body, token_again = RECORD.unpack(raw)
    if token <= 0 or token != token_again:
        return None
    op, reduce_op, dtype, row, peer, *rest = BODY.unpack(body)
    try:
        names = fp.OPS[op], fp.REDUCE_OPS[reduce_op], fp.DTYPES[dtype]
        group = group_names[row]
    except IndexError:
        return None
    return Call(token, number, group, *names, fp.shape_of(rest[:6]), peer, text_of(rest[6]), start_ns, end_ns)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks of a group in at most 176 bytes: "0:8:2" if evenly spaced, else a list, or "" if too long."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{step}"
    text = ",".join(map(str, ranks))
    return text if len(text) <= 176 else ""


def _parse_ranks(text: str) -> tuple[int, ...] | None:
    try:
        if ":" in text:
            start, stop, step = map(int, text.split(":"))
            return tuple(range(start, min(stop, start + (1 << 20)), step))
        return tuple(map(int, text.split(","))) if text else None
    except ValueError:
        return None


def text_of(raw: bytes) -> str:
    """The text of a field that is padded with zeros."""
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    try:
        return [str(folder / name) for name in os.listdir(folder)]
    except PermissionError:
        raise UserError(f"process {pid} belongs to another user; attach as that user or as root") from None
    except OSError:  # also for a number that is too long for a file's name
        raise UserError(f"no process {pid} on this host (attach reads /proc, so it needs Linux)") from None


def _own_pid(pid: int) -> int:
    """The pid that the process itself sees: another one if it runs in a container of its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def _stopped_children(pid: int) -> tuple[int, ...]:
    """The processes that it has started, and those that these have, that a signal has stopped."""
    found = []
    with contextlib.suppress(psutil.Error):  # it has ended
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [child.pid] * (child.status() == psutil.STATUS_STOPPED)
    return tuple(found)


def _process_state(pid: int) -> str:
    # The command's name is in brackets and may hold brackets too: the state follows the last one.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
