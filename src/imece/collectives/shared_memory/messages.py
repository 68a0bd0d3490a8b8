"""Point-to-point messages with tags, in any order, without deadlock.

A channel leads from each rank to each other: a ring of pieces in the sender's segment, a word that counts the
pieces written (the sender's) and one that counts those consumed (the receiver's). A small message counts as
sent when it is in the ring; a tensor in shared memory is read where it lies, and counts as sent when it has
been read. Messages of one channel arrive in order. A message whose tag nobody waits for yet is set aside in
private memory, so that it does not hold up those behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from imece.collectives.fingerprint import describe_tensor
from imece.collectives.shared_memory import futex
from imece.collectives.shared_memory.arena import ARENAS
from imece.collectives.shared_memory.board import (
    CLOSED,
    RING_HEADER_BYTES,
    RING_PIECE_BYTES,
    RING_SLOTS,
    Board,
    words_of,
)
from imece.collectives.shared_memory.tensors import copy_flat
from imece.collectives.shared_memory.waiting import Steps
from imece.errors import MismatchError

_WRITTEN, _CONSUMED = 0, 8  # words of a channel, on two lines: one for each writer
_TAG, _FINGERPRINT, _TOTAL, _START, _FD, _SERIAL, _OFFSET = range(7)  # words of a piece's header
_DIRECT_BYTES = 64 * 1024  # shorter ones are not worth waiting for the receiver


@dataclass(eq=False, slots=True)
class Wanted:
    """A receive that somebody waits for."""

    tag: int
    fingerprint: int
    target: torch.Tensor  # uint8, flat
    claimed: bool = False  # a message is on its way into it
    done: bool = False
    source: int = -1


@dataclass(eq=False, slots=True)
class _Incoming:
    """A message whose pieces are coming."""

    tag: int
    fingerprint: int
    target: torch.Tensor  # uint8, flat: the receiver's, or private memory
    wanted: Wanted | None
    received_bytes: int = 0


class _Pieces:
    """One ring, seen from either end."""

    def __init__(self, ring: torch.Tensor) -> None:
        stride = RING_HEADER_BYTES + RING_PIECE_BYTES
        words = words_of(ring)
        self.headers = [words[at * stride // 8 : at * stride // 8 + 8] for at in range(RING_SLOTS)]
        self.payloads = [
            ring.narrow(0, at * stride + RING_HEADER_BYTES, RING_PIECE_BYTES) for at in range(RING_SLOTS)
        ]


@dataclass(eq=False, slots=True)
class _Outbox:
    pieces: _Pieces
    written: int = 0
    tickets: int = 0  # sends asked for
    serving: int = 0  # the send whose turn it is


@dataclass(eq=False, slots=True)
class _Inbox:
    source: int
    pieces: _Pieces
    consumed: int = 0
    wanted: deque[Wanted] = field(default_factory=deque)
    current: _Incoming | None = None
    unexpected: deque[_Incoming] = field(default_factory=deque)


class Messages:
    """All channels of this rank in one group. Generators of several threads may run through here."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.RLock()
        self._out: dict[int, _Outbox] = {}
        self._in: dict[int, _Inbox] = {}
        self.moved = 0  # pieces so far, which shows progress

    def send(self, target: int, data: torch.Tensor, fingerprint: int, tag: int) -> Steps:
        """Send `data` (uint8, flat) to rank `target`; messages to one rank leave in the order of calls."""
        with self._lock:
            box = self._out.get(target)
            if box is None:
                ring = self._board.message_ring(self._board.rank, target)
                box = self._out[target] = _Outbox(_Pieces(ring))
            ticket = box.tickets
            box.tickets += 1
        return self._send(box, ticket, target, data, fingerprint, tag)

    def _send(
        self, box: _Outbox, ticket: int, target: int, data: torch.Tensor, fingerprint: int, tag: int
    ) -> Steps:
        while box.serving != ticket:
            yield
        total = data.numel()
        location = ARENAS.locate(data.data_ptr(), total) if total >= _DIRECT_BYTES else None
        words, mine = self._board.words[target], self._board.channel_word(target)
        theirs = self._board.channel_word(self._board.rank) + _CONSUMED
        self._board.announce_freed()
        start = 0
        while True:
            while box.written - words[theirs] >= RING_SLOTS:
                yield
            at = box.written % RING_SLOTS
            header = box.pieces.headers[at]
            header[_TAG], header[_FINGERPRINT], header[_TOTAL], header[_START] = (
                tag,
                fingerprint,
                total,
                start,
            )
            header[_FD] = -1
            nbytes = total - start
            if location is not None:
                header[_FD], header[_SERIAL] = location.fd, location.serial
                header[_OFFSET] = location.offset_bytes
            else:
                nbytes = min(nbytes, RING_PIECE_BYTES)
                box.pieces.payloads[at][:nbytes].copy_(data[start : start + nbytes])
            box.written += 1
            self.moved += 1
            self._board.publish_to(target, mine + _WRITTEN, box.written)
            start += nbytes
            if start >= total:
                break
        last = box.written
        box.serving += 1
        while location is not None and words[theirs] < last:
            yield

    def receive(self, sources: Sequence[int], wanted: Wanted) -> Steps:
        """Wait for the first message with `wanted.tag` from one of `sources`."""
        with self._lock:
            boxes = [self._inbox(source) for source in sources]
            try:
                for box in boxes:
                    self._post(box, wanted)
            except MismatchError as error:
                return self._refuse(error)
        return self._receive(boxes, wanted)

    def awaited(self, sources: Sequence[int]) -> Sequence[int]:
        """Those `sources` that can still send; all of them if all have left the group."""
        return [source for source in sources if not self._board.words[source][CLOSED]] or sources

    def _refuse(self, error: MismatchError) -> Steps:
        """Raise when the operation runs: only then does the whole group learn of the error."""
        yield from ()
        raise error

    def _receive(self, boxes: Sequence[_Inbox], wanted: Wanted) -> Steps:
        while not wanted.done:
            with self._lock:
                for box in boxes:
                    self._pump(box)
            if not wanted.done:
                yield

    def _inbox(self, source: int) -> _Inbox:
        box = self._in.get(source)
        if box is None:
            ring = self._board.message_ring(source, self._board.rank)
            box = self._in[source] = _Inbox(source, _Pieces(ring))
        return box

    def _post(self, box: _Inbox, wanted: Wanted) -> None:
        """Hand over a message that has come already, or stand in line."""
        if wanted.claimed:
            return
        for message in box.unexpected:
            if message.tag == wanted.tag and message.wanted is None:
                self._claim(box, message.fingerprint, wanted)
                message.wanted = wanted
                if message.received_bytes == message.target.numel():
                    self._deliver(box, message)
                return
        box.wanted.append(wanted)

    def _pump(self, box: _Inbox) -> None:
        """Take all pieces that have come."""
        board, rank = self._board, self._board.rank
        theirs, mine = board.channel_word(rank) + _WRITTEN, board.channel_word(box.source) + _CONSUMED
        while box.consumed < board.words[box.source][theirs]:
            if futex.NEEDS_FENCE:
                futex.fence()
            at = box.consumed % RING_SLOTS
            header = box.pieces.headers[at]
            if header[_START] == 0:
                box.current = self._begin(box, header)
            message = box.current
            assert message is not None
            start = header[_START]
            target = message.target[start:]
            if header[_FD] >= 0:
                memory = board.memory(box.source, header[_FD], header[_SERIAL])
                copy_flat(target, memory[header[_OFFSET] : header[_OFFSET] + target.numel()])
            else:
                target = target[:RING_PIECE_BYTES]
                target.copy_(box.pieces.payloads[at][: target.numel()])
            message.received_bytes += target.numel()
            box.consumed += 1
            self.moved += 1
            board.publish_to(box.source, mine, box.consumed)
            if message.received_bytes == message.target.numel():
                box.current = None
                if message.wanted is not None:
                    self._deliver(box, message)

    def _begin(self, box: _Inbox, header: memoryview) -> _Incoming:
        tag, fingerprint, total = header[_TAG], header[_FINGERPRINT], header[_TOTAL]
        for wanted in list(box.wanted):
            if wanted.claimed:  # by a message of another source
                box.wanted.remove(wanted)
            elif wanted.tag == tag:
                box.wanted.remove(wanted)
                self._claim(box, fingerprint, wanted)
                return _Incoming(tag, fingerprint, wanted.target, wanted)
        message = _Incoming(tag, fingerprint, torch.empty(total, dtype=torch.uint8, device="cpu"), None)
        box.unexpected.append(message)
        return message

    def _claim(self, box: _Inbox, fingerprint: int, wanted: Wanted) -> None:
        if fingerprint != wanted.fingerprint:
            names = self._board.names
            raise MismatchError(
                f"a message with tag {wanted.tag} differs between ranks: rank {names[box.source]} sent "
                f"{describe_tensor(fingerprint)}, rank {names[self._board.rank]} receives "
                f"{describe_tensor(wanted.fingerprint)}. Do both sides mean the same tensor?"
            )
        wanted.claimed = True
        wanted.source = box.source

    def _deliver(self, box: _Inbox, message: _Incoming) -> None:
        assert message.wanted is not None
        if message.target is not message.wanted.target:
            copy_flat(message.wanted.target, message.target)
            box.unexpected.remove(message)
        message.wanted.done = True
