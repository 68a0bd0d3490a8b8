"""Segments: pieces of memory that every rank of a host can map, with nothing left behind.

A segment is an anonymous file (`memfd_create`). It has no name in any folder, so there is nothing to
clean up: the kernel frees it when the last process that maps it is gone, however that happened, and
the size of /dev/shm (64 MB in many containers) does not limit it. Another rank opens it through
/proc/PID/fd, which the kernel allows to the same user only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil
import torch

from imece.errors import CollectiveError, UserError
from imece.listing import size_text
from imece.system.control_groups import limits

_MAGIC = 0x696D656365  # "imece"
_HEADER_BYTES = 4096  # one page, so that what follows is page aligned
_POPULATE_WRITE = 23  # of madvise, which mmap has no name for
_serials = count(1)


@dataclass
class Segment:
    """One mapped segment. `memory` is its payload as uint8[nbytes]; it keeps the mapping alive."""

    fd: int  # of this process; -1 for another rank's segment that is not kept open
    serial: int  # tells two segments of one process apart when file descriptors are reused
    nbytes: int
    memory: torch.Tensor = field(repr=False)  # uint8[nbytes]
    map: mmap.mmap = field(repr=False)

    @property
    def address(self) -> int:
        """First byte of the payload in this process."""
        return self.memory.data_ptr()

    def populate(self, start: int, stop: int) -> None:
        """Allocate memory for these bytes of the payload, whole pages, now: page by page on first use takes
        longer. As far as the kernel can (Linux 5.14) and has memory."""
        with contextlib.suppress(OSError):
            self.map.madvise(_POPULATE_WRITE, _HEADER_BYTES + start, stop - start)

    def give_back(self, start: int, stop: int) -> None:
        """Free the memory of these bytes of the payload, whole pages, until any process uses them again; then
        they are zero. As far as the kernel can."""
        with contextlib.suppress(OSError):
            self.map.madvise(mmap.MADV_REMOVE, _HEADER_BYTES + start, stop - start)

    def close(self) -> None:
        """Close the file descriptor. The memory itself goes with the last tensor on it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create(nbytes: int, purpose: str, *, populate: bool = False) -> Segment:
    """A new segment of `nbytes` zero bytes.

    UserError, with the size wanted and the size available, if the machine or the container has too little
    memory: running on would end in a kill without a word.
    """
    if not hasattr(os, "memfd_create"):
        raise UserError("the shm backend needs Linux (memfd_create); use backend='gloo' on this system")
    free_bytes = available_bytes()
    if nbytes > free_bytes:
        raise UserError(
            f"{purpose} needs {size_text(nbytes)} of shared memory and {size_text(free_bytes)} are available "
            f"on this host (pid {os.getpid()}): use fewer ranks, a smaller model or a larger memory limit"
        )
    fd = os.memfd_create("imece-segment", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _HEADER_BYTES + nbytes)
        mapped = _map(fd, _HEADER_BYTES + nbytes, populate)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise UserError(
            f"{purpose} needs {size_text(nbytes)} of shared memory: {error}: raise the limits of this "
            "process (ulimit -f for its files, ulimit -v for its memory)"
        ) from None
    serial = next(_serials)
    mapped[:24] = b"".join(value.to_bytes(8, "little") for value in (_MAGIC, serial, nbytes))
    return Segment(fd, serial, nbytes, _payload(mapped), mapped)


def attach(pid: int, fd: int, serial: int, *, populate: bool = False, keep: bool = False) -> Segment:
    """Map the segment that process `pid` holds as file descriptor `fd`.

    keep: also hold it open, so that others may attach it here when that process is gone.

    CollectiveError if the process is gone, its memory may not be opened, or the descriptor is another segment
    by now.
    """
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CollectiveError(
            f"the shared memory of process {pid} cannot be opened ({error.strerror}): it is gone, belongs to "
            "another user, or /proc is restricted; with backend='gloo' no memory is shared"
        ) from None
    try:
        mapped = _map(own, os.fstat(own).st_size, populate)
        magic, found, nbytes = (int.from_bytes(mapped[at : at + 8], "little") for at in (0, 8, 16))
        if magic != _MAGIC or found != serial:
            raise CollectiveError(f"file descriptor {fd} of process {pid} is not segment {serial} any more")
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            os.close(own)
    return Segment(own if keep else -1, serial, nbytes, _payload(mapped), mapped)


def available_bytes() -> int:
    """Memory that this process can still take: the machine's, or the container's or job's if that is less."""
    return min([psutil.virtual_memory().available, *(each.free_bytes for each in limits())])


def _map(fd: int, nbytes: int, populate: bool) -> mmap.mmap:
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _payload(mapped: mmap.mmap) -> torch.Tensor:
    if len(mapped) == _HEADER_BYTES:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    with torch.inference_mode(False):  # the tensor outlives the mode of whoever happens to make it
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEADER_BYTES)
