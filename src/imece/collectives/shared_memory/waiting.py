"""How a rank waits: it polls briefly, then sleeps, and always looks out for dead ranks.

Every operation is a generator that yields when it cannot go on yet. Whoever drives it (the caller's thread,
or the worker for asynchronous work) lets a `Patience` pass the time in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from imece.collectives.fingerprint import describe
from imece.collectives.shared_memory.board import CLOSED, FAILED, Board
from imece.errors import CollectiveError, CollectiveTimeoutError, MismatchError, PeerLostError
from imece.listing import rank_words

Steps = Generator[None, None, None]

_HOT_POLLS = 40  # about 10 us: the other rank is on its own core and nearly there
_YIELD_POLLS = 240  # then about 100 us in which any other process may have the core
_FIRST_SLEEP_S = 0.0005
_LONGEST_SLEEP_S = 0.02
_LOOK_EVERY_S = 0.02
_LONGEST_LOOK_S = 1.0  # between two looks, unless the rank was stopped

_KINDS = {kind.__name__: kind for kind in (MismatchError, PeerLostError, CollectiveTimeoutError)}


@dataclass(eq=False, slots=True)
class Operation:
    """One collective or message under way."""

    steps: Steps
    fingerprint: int
    which: Callable[[], str]  # the collective's number in its group; the message's tag
    missing: Callable[[], Sequence[int]]  # ranks it waits for now


class Patience:
    """Passes the time while one thread waits; raises when waiting has become pointless."""

    def __init__(self, board: Board, timeout_s: float, *, hot: bool) -> None:
        self._board = board
        self._timeout_s = timeout_s
        # With more ranks than cores, the rank we wait for may need this very core.
        self._hot = 0 if board.crowded or not hot else _HOT_POLLS
        self._yields = _YIELD_POLLS if hot else 0
        self.progress()

    def progress(self) -> None:
        """Something moved: start over with the short waits."""
        self._polls = 0
        self._sleep_s = _FIRST_SLEEP_S
        self._waited_s = self._looked = 0.0
        self._seen = self._board.bell()
        self._suspects: set[int] = set()

    def wait(self, operations: Sequence[Operation]) -> None:
        """Wait a little. Raises CollectiveError (one of its kinds) if `operations` cannot end any more."""
        self._polls += 1
        if self._polls <= self._hot:
            return
        if self._polls <= self._yields:
            os.sched_yield()
            self._seen = self._board.bell()
            return
        self._board.sleep(self._seen, self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)
        self._seen = self._board.bell()
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            if self._looked:  # a rank that was stopped for an hour has not waited that long for others
                self._waited_s += min(now - self._looked, _LONGEST_LOOK_S)
            self._looked = now
            self._look(operations, self._waited_s)

    def _look(self, operations: Sequence[Operation], waited_s: float) -> None:
        board = self._board
        # A rank that failed, died or left may have done its part before: poll once more before giving up.
        suspects, self._suspects = self._suspects, set()
        for other in board.others:
            if board.words[other][FAILED]:
                if other in suspects:
                    raise_text(board.read_text(other))
                self._suspects.add(other)
        dead = set(board.dead())
        for operation in operations:
            for other in operation.missing():
                if other in dead or board.words[other][CLOSED]:
                    if other in suspects:
                        raise PeerLostError(_gone(board, other, operation, other in dead))
                    self._suspects.add(other)
            if waited_s > self._timeout_s:
                raise CollectiveTimeoutError(late(board, operation, waited_s))


def raise_text(text: str) -> None:
    """Raise what another rank wrote about its failure ("Kind: message")."""
    kind, _, message = text.partition(": ")
    raise _KINDS.get(kind, CollectiveError)(message or text or "another rank failed")


def _gone(board: Board, other: int, operation: Operation, dead: bool) -> str:
    how, names = "is dead" if dead else "has left the group", board.names
    return (
        f"rank {names[other]} (pid {board.peers[other].pid}) {how}, and rank {names[board.rank]} waits for "
        f"it in {_words(operation, board)}. Its own output says why; the launcher names signals and exit "
        "statuses"
    )


def late(board: Board, operation: Operation, waited_s: float) -> str:
    """Who has not come in time, and where to look."""
    missing = list(operation.missing())
    names, pids = board.names, ", ".join(str(board.peers[other].pid) for other in missing)
    who = rank_words([names[other] for other in missing]) if missing else "the others"
    return (
        f"rank {names[board.rank]} waited {waited_s:.0f} s for {who} in {_words(operation, board)}. "
        f"Alive but not there (pid {pids}): see what it does with `imece doctor --attach`"
    )


def _words(operation: Operation, board: Board) -> str:
    return f"{describe(operation.fingerprint, board.names)}, {operation.which()}"
