"""The board: one segment a rank and group, in which the rank writes and all others read.

Layout of a segment (word = int64, line = 8 words = 64 bytes, so that ranks never share a line):

    line 0        CLOCK   how many steps of collectives this rank has done; it only grows
                  SLEEPERS   how many of its threads sleep
                  FAILED, CLOSED   it gave up / it left in order
                  FREED   arenas it has given back: mappings of them may be dropped
                  DETAIL  number of the collective to which the text about what it sent belongs
                  JOINED  it has mapped everybody's segments, or has given that up
    line 1, 2     the descriptor of its collective, for even and odd numbers:
                  fingerprint, bytes offered, (fd, serial, offset) of a tensor in shared memory
    line 3        BELL, the word it sleeps on: the only one that others write, so it has a line of its own
    then          two texts, JSON: why it failed, and what it sent, for the error messages of the others.
                  Two, because a rank fails as soon as it has read what the others sent, and others may
                  still be reading what this one sent
    then          two lines for each other rank: a channel of point-to-point messages (messages.py)
    then          SLOTS slots, through which tensors in ordinary memory travel
    then          a ring of pieces for each other rank, for messages (pages that are never used cost nothing)

Two descriptors are enough: a rank that writes number n + 2 has seen everybody enter n + 1, so nobody reads
number n any more. Four slots are enough by the same argument; see `Engine.next_slot`.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from imece.collectives.shared_memory import arena, futex, segment
from imece.collectives.shared_memory.segment import Segment
from imece.errors import CollectiveError, CollectiveTimeoutError, UserError
from imece.status import says_timed_out
from imece.system.control_groups import usable_cores
from imece.system.open_files import allow_open_files
from imece.world import host_id

CLOCK, SLEEPERS, FAILED, CLOSED, FREED, DETAIL, JOINED = range(7)
DESCRIPTORS = 8  # word; + 8 * (number & 1)
BELL = 24
FINGERPRINT, OFFERED, FD, SERIAL, OFFSET = range(5)

_TEXT_BYTE = {FAILED: 256, DETAIL: 2176}
_TEXT_BYTES = 1920  # of each text, including 8 bytes for its length
_CHANNELS_BYTE = 4096
CHANNEL_WORDS = 16

_JOIN_LIMIT_S = 5.0

SLOTS = 4
SLOT_BYTES = 1024 * 1024  # two ranks' slots stay in the cache
CROWDED_SLOT_BYTES = 4 * SLOT_BYTES  # with more ranks than cores, fewer changes of process matter more
RING_SLOTS = 4  # pieces of messages to one rank that may be under way
RING_HEADER_BYTES = 64
RING_PIECE_BYTES = 128 * 1024
RING_BYTES = RING_SLOTS * (RING_HEADER_BYTES + RING_PIECE_BYTES)


def words_of(memory: torch.Tensor) -> memoryview:
    """Shared bytes (uint8, a multiple of 8) as words, each read and written by one instruction."""
    array: Any = memory.numpy()  # a buffer, which numpy's stubs do not say
    return memoryview(array).cast("B").cast("q")


@dataclass(frozen=True)
class Peer:
    """One rank of the group, as it introduced itself through the store."""

    rank: int  # in the group
    name: int  # its rank in the world, by which errors name it
    pid: int
    fd: int
    serial: int
    host: str
    cores: int  # that it may run on


class Board:
    """This rank's view of everybody's segments in one group."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Raises what `_meet` raises, and CollectiveError if a rank that has come is gone again."""
        allow_open_files()
        self.rank = rank
        self.world_size = world_size
        slots_byte = -(-(_CHANNELS_BYTE + world_size * CHANNEL_WORDS * 8) // 4096) * 4096
        rings_byte = slots_byte + SLOTS * CROWDED_SLOT_BYTES
        own = segment.create(rings_byte + world_size * RING_BYTES, "a group of the shm backend")
        self._pidfds: dict[int, int] = {}
        try:
            self.peers = _meet(store, own, rank, world_size, timeout)
            self._segments = [
                own if peer.rank == rank else segment.attach(peer.pid, peer.fd, peer.serial)
                for peer in self.peers
            ]
            for peer in self.peers:
                if peer.rank != rank:
                    self._pidfds[peer.rank] = _pidfd(peer)
        except BaseException:
            words = words_of(own.memory)
            words[CLOSED] = words[JOINED] = 1  # for ranks that have come: nobody must wait for this one
            own.close()
            self._close_pidfds()
            raise
        self.names = [peer.name for peer in self.peers]
        self.crowded = world_size > min(peer.cores for peer in self.peers)  # more ranks than cores
        self.slot_bytes = CROWDED_SLOT_BYTES if self.crowded else SLOT_BYTES  # the same on all ranks
        self.words = [words_of(each.memory) for each in self._segments]
        self.mine = self.words[rank]
        self.others = [other for other in range(world_size) if other != rank]
        self.slots = [
            [
                each.memory.narrow(0, slots_byte + at * CROWDED_SLOT_BYTES, self.slot_bytes)
                for each in self._segments
            ]
            for at in range(SLOTS)
        ]  # [slot][rank] -> uint8[slot_bytes]
        self._slots_byte, self._rings_byte = slots_byte, rings_byte
        self._bells = [each.address + BELL * 8 for each in self._segments]
        self._rings = 0
        self.sleepers = 0  # threads of this process
        self._counting = threading.Lock()
        self._attached: dict[tuple[int, int], Segment] = {}  # (rank, serial) -> another rank's arena
        self._freed = [0] * world_size
        self._watch, self._looking = select.poll(), threading.Lock()
        for fd in self._pidfds.values():
            self._watch.register(fd, select.POLLIN)
        self.mine[JOINED] = 1

    # Writing one's own line.

    def publish(self, word: int, value: int) -> None:
        """Store a word after everything that was written before it, and wake the sleepers."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.mine[word] = value
        self.ring_sleepers()

    def ring_sleepers(self) -> None:
        """Wake the sleepers: something has changed that they may wait for."""
        for other in self.others:
            if self.words[other][SLEEPERS]:
                self.ring(other)

    def publish_to(self, other: int, word: int, value: int) -> None:
        """The same for a word that only `other` waits for."""
        if futex.NEEDS_FENCE:
            futex.fence()
        self.mine[word] = value
        if self.words[other][SLEEPERS]:
            self.ring(other)

    def ring(self, other: int) -> None:
        """Wake a rank. Each ring leaves a new value, so that none is mistaken for an older one."""
        self._rings += 1
        self.words[other][BELL] = (self._rings * self.world_size + self.rank) & 0x7FFFFFFF
        futex.wake(self._bells[other])

    def bell(self) -> int:
        """The value of this rank's bell: read it before checking the condition to wait for."""
        return self.mine[BELL]

    def sleep(self, seen: int, limit_s: float) -> None:
        """Sleep until somebody rings after `seen` was read, `limit_s` at most."""
        self._count_sleeper(1)
        try:
            futex.wait(self._bells[self.rank], seen, limit_s)
        finally:
            self._count_sleeper(-1)

    def _count_sleeper(self, change: int) -> None:
        with self._counting:  # the main thread and the worker may both be here
            self.sleepers += change
            self.mine[SLEEPERS] = self.sleepers

    def give_back_slots(self) -> None:
        """Free the memory of this rank's slots, which nobody reads any more."""
        self._segments[self.rank].give_back(self._slots_byte, self._rings_byte)

    # What went wrong.

    def write_text(self, word: int, value: int, text: str) -> None:
        """Leave a text for the others and announce it in `word` (FAILED or DETAIL)."""
        data = json.dumps(text).encode()
        while len(data) > _TEXT_BYTES - 8:  # the beginning says most; a cut JSON text would say nothing
            text = text[: len(text) * 3 // 4]
            data = json.dumps(text + "...").encode()
        at = 4096 + _TEXT_BYTE[word]
        self._segments[self.rank].map[at : at + 8] = len(data).to_bytes(8, "little")
        self._segments[self.rank].map[at + 8 : at + 8 + len(data)] = data
        self.publish(word, value)

    def read_text(self, rank: int, word: int | None = None) -> str:
        """The text that a rank left for `word`; by default the one about its failure, if it has failed.

        "" if it is damaged.
        """
        mapped = self._segments[rank].map
        if word is None:
            word = FAILED if self.words[rank][FAILED] else DETAIL
        at = 4096 + _TEXT_BYTE[word]
        nbytes = int.from_bytes(mapped[at : at + 8], "little")
        try:
            return str(json.loads(mapped[at + 8 : at + 8 + min(nbytes, _TEXT_BYTES - 8)]))
        except ValueError:
            return ""

    def dead(self) -> list[int]:
        """Ranks whose process has ended, for whatever reason."""
        with self._looking:  # a poll object that two threads use at once raises
            gone = {fd for fd, _ in self._watch.poll(0)}
        return [rank for rank, fd in self._pidfds.items() if fd in gone] if gone else []

    # Tensors of other ranks.

    def memory(self, rank: int, fd: int, serial: int) -> torch.Tensor:
        """Payload of an arena of a rank as uint8[nbytes], mapped on first use."""
        if rank == self.rank:
            return arena.ARENAS.memory(serial)
        freed = self.words[rank][FREED]
        if freed != self._freed[rank]:
            self._freed[rank] = freed
            self._attached = {key: kept for key, kept in self._attached.items() if key[0] != rank}
        found = self._attached.get((rank, serial))
        if found is None:
            found = segment.attach(self.peers[rank].pid, fd, serial)  # memory counts for what is used of it
            self._attached[rank, serial] = found
        return found.memory

    def announce_freed(self) -> None:
        """Tell the others that arenas of this process are gone, so that they drop their mappings."""
        if self.mine[FREED] != arena.ARENAS.freed:
            self.mine[FREED] = arena.ARENAS.freed

    def close(self) -> None:
        """Leave in order. Memory is unmapped when the last tensor on it is gone."""
        self._wait_for_late_ranks()
        self.publish(CLOSED, 1)
        self._close_pidfds()
        self._watch = select.poll()
        self._segments[self.rank].close()
        self._attached.clear()

    def _close_pidfds(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    def _wait_for_late_ranks(self) -> None:
        """Wait a moment for ranks that are still joining: they need this segment's descriptor, and
        this process."""
        deadline = time.monotonic() + _JOIN_LIMIT_S
        while late := {other for other in self.others if not self.words[other][JOINED]}:
            if late <= set(self.dead()) or time.monotonic() > deadline:
                return
            time.sleep(0.001)

    def message_ring(self, source: int, target: int) -> torch.Tensor:
        """The ring for messages from `source` to `target`, uint8[RING_BYTES]."""
        return self._segments[source].memory.narrow(0, self._rings_byte + target * RING_BYTES, RING_BYTES)

    def channel_word(self, other: int) -> int:
        """First word of the channel line that concerns `other`."""
        return _CHANNELS_BYTE // 8 + other * CHANNEL_WORDS


def _meet(store: dist.Store, own: Segment, rank: int, world_size: int, timeout: timedelta) -> list[Peer]:
    """All ranks introduce themselves through the store, as JSON.

    UserError if the ranks are not on one host, CollectiveTimeoutError if one does not come.
    """
    me: dict[str, int | str] = {"pid": os.getpid(), "fd": own.fd, "serial": own.serial, "host": host_id()}
    me["cores"] = usable_cores()
    me["name"] = dist.get_rank() if dist.is_initialized() else rank  # not yet: this is the group of the world
    meeting = meeting_of(store, rank, world_size)
    store.set(f"{meeting}/{rank}", json.dumps(me))
    peers = []
    for other in range(world_size):
        text = _get(store, f"{meeting}/{other}", timeout, f"rank {other} of {world_size}")
        peers.append(Peer(rank=other, **json.loads(text)))
    hosts = {peer.host: peer.name for peer in peers}
    if len(hosts) > 1:
        raise UserError(
            "the shm backend joins ranks of one host, and these are on "
            + ", ".join(f"{host} (rank {first})" for host, first in hosts.items())
            + ": use backend='gloo' between hosts"
        )
    return peers


def meeting_of(store: dist.Store, rank: int, world_size: int) -> str:
    """Under which keys the ranks meet this time. After destroy_process_group() torch gives groups their names
    again, and in a launcher's store the notes of the ranks that met before are still there."""
    times = store.add(f"shm/{world_size}/came/{rank}", 1)
    return f"shm/{world_size}/{times}"


def _pidfd(peer: Peer) -> int:
    """A descriptor that shows when a peer's process ends. CollectiveError if it has been reaped already."""
    try:
        return os.pidfd_open(peer.pid)
    except ProcessLookupError:
        raise CollectiveError(
            f"rank {peer.name} (pid {peer.pid}) is gone: it ended while the group was formed"
        ) from None


def _get(store: dist.Store, key: str, timeout: timedelta, who: str) -> bytes:
    started = time.monotonic()
    try:
        store.wait([key], timeout)
    except (dist.DistStoreError, RuntimeError) as error:
        said = f"{who} did not join the group within {time.monotonic() - started:.0f} s"
        if says_timed_out(str(error)):  # and names a key, which tells nobody anything
            raise CollectiveTimeoutError(f"{said}: see what it does with `imece doctor --attach`") from None
        raise CollectiveError(f"{said}: {error}") from None
    return bytes(store.get(key))
