"""Who drives the operations of a group: the caller's own thread, or a worker for asynchronous ones.

A synchronous call runs on the thread that makes it: a hand-over would cost more than a small message.
Asynchronous collectives queue for the worker, which runs them in order; messages all progress together beside
them. Collectives of one group never overlap: the thread that runs one holds `_turn`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence

import torch

from imece.collectives.shared_memory.board import FAILED, Board
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.messages import Messages
from imece.collectives.shared_memory.small import Small
from imece.collectives.shared_memory.tensors import writing
from imece.collectives.shared_memory.waiting import Operation, Patience, late
from imece.errors import CollectiveError, CollectiveTimeoutError

Finish = Callable[[BaseException | None], None]


class Runner:
    """Drives the operations of one group."""

    def __init__(self, board: Board, engine: Engine, messages: Messages, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.may_spin = True
        """Whether the main thread polls at first when it waits: not if others need its core at once."""
        self._board = board
        self._engine = engine
        self._messages = messages
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._collectives: deque[tuple[Operation, Finish]] = deque()
        self._current: tuple[Operation, Finish] | None = None
        self._underway: list[tuple[Operation, Finish]] = []  # messages
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: BaseException | None = None
        with _changing:
            _living.add(self)

    # The caller's thread.

    def run(self, operation: Operation, timeout_s: float | None = None) -> None:
        """Run a collective to its end, after all asynchronous ones that were started before it."""
        if self._collectives or self._current is not None:
            self._run_after_others(operation, timeout_s)
            return
        self.check()
        with self._turn:
            self._drive((operation,), timeout_s or self.timeout_s)

    def run_small(
        self, small: Small, source: torch.Tensor | None, target: torch.Tensor | None, label: str
    ) -> None:
        """`run` for small ones, most of which end before preparing to wait would pay."""
        if self._collectives or self._current is not None:
            steps = small.steps(source, target, label)
            self._run_after_others(self._engine.operation(small.fingerprint, steps))
            return
        self.check()
        with self._turn:
            try:
                small.begin(source, label)
                if not self._engine.entered_soon(small.fingerprint, small.shape_word):
                    late = self._engine.entered(small.fingerprint)
                    self._drive((self._engine.operation(small.fingerprint, late),), self.timeout_s)
                small.end(target)
            except BaseException as error:
                self.fail(error)
                raise

    def run_messages(self, operations: Sequence[Operation]) -> None:
        """Run messages together, to the end of all of them."""
        self.check()
        self._drive(operations, self.timeout_s)

    def check(self) -> None:
        """Raise if the group has failed before: no call on it can succeed any more."""
        if (error := self._failed_before()) is not None:
            raise error from self._error

    def _failed_before(self) -> CollectiveError | None:
        if self._error is not None:
            why = str(self._error) or type(self._error).__name__  # as of Ctrl-C
            return CollectiveError(f"this group cannot be used any more, since: {why}")
        return CollectiveError("this group has been destroyed") if self._closed else None

    def _drive(self, operations: Sequence[Operation], timeout_s: float) -> None:
        """Let the operations go on in turn until all are over."""
        left = list(operations)
        patience: Patience | None = None
        moved = 0
        try:
            with writing():
                while left := [operation for operation in left if not _ended(operation)]:
                    if patience is None:
                        # Another thread than the main one shares its core with what the main one computes.
                        hot = self.may_spin and threading.current_thread() is threading.main_thread()
                        patience = Patience(self._board, timeout_s, hot=hot)
                    elif moved != self._moved():
                        moved = self._moved()
                        patience.progress()
                    if self._error is not None or self._closed:  # by another thread
                        self.check()
                    patience.wait(left)
        except BaseException as error:
            self.fail(error)
            raise

    def _moved(self) -> int:
        """Changes whenever something moves: waiting time counts from the last change."""
        return self._engine.clock + self._messages.moved

    def fail(self, error: BaseException) -> None:
        """The group is of no use any more: tell the others, so that they need not find out by waiting."""
        if self._error is None:
            self._error = error
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, CollectiveError):  # imece's errors name their ranks
                name = self._board.names[self._board.rank]
                text = f"CollectiveError: rank {name} (pid {os.getpid()}) failed: {text}"
            self._board.write_text(FAILED, 1, text)

    def abort(self, error: CollectiveError) -> None:
        """End what is under way, in whichever thread: it may wait for a rank that does not come."""
        with self._changed:  # until then nobody closes the board
            if not self._closed:
                self.fail(error)
                self._board.ring(self._board.rank)

    def disown(self) -> None:
        """In a forked child: every later call raises. The other ranks are told nothing, as this rank did
        not fail."""
        board = self._board
        self._error = self._error or CollectiveError(
            f"this process (pid {os.getpid()}) is a forked copy of rank {board.names[board.rank]} "
            f"(pid {board.peers[board.rank].pid}), and only that one can make calls on its groups"
        )

    # The worker.

    def submit_message(self, operation: Operation, finish: Finish) -> None:
        """Run a message: as far as possible at once, here; the rest on the worker.

        Most messages fit into the ring, or have come before somebody asks for them.
        """
        if self._refused(finish):
            return
        try:
            with writing():
                ended = _ended(operation)
        except BaseException as error:
            self.fail(error)
            raise
        if ended:
            finish(None)
            return
        self._hand_over(self._underway, operation, finish)

    def submit(self, operation: Operation, finish: Finish) -> None:
        """Run a collective on the worker; it calls `finish(error or None)` at its end."""
        self._hand_over(self._collectives, operation, finish)

    def _refused(self, finish: Finish) -> bool:
        """On a group that has failed, end an asynchronous call with the error in its work, without
        raising here.

        The failure may be in work that nobody has waited for yet. Whoever waits for all works in order hears
        the cause first, and only then that nothing after it was possible.
        """
        error = self._failed_before()
        if error is not None:
            finish(error)
        return error is not None

    def _hand_over(
        self, queue: MutableSequence[tuple[Operation, Finish]], operation: Operation, finish: Finish
    ) -> None:
        with self._changed:  # the group is not closed meanwhile: then the worker would be gone
            if self._refused(finish):
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="imece-shm", daemon=True)
                thread.start()  # RuntimeError under a limit of threads
                self._thread = thread
            queue.append((operation, finish))
            self._changed.notify()
        if self._board.sleepers:
            self._board.ring(self._board.rank)

    def close(self) -> None:
        """End the worker and give up what is still under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._board.ring(self._board.rank)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run_after_others(self, operation: Operation, timeout_s: float | None = None) -> None:
        done = threading.Event()
        errors: list[BaseException] = []

        def finish(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            done.set()

        self.submit(operation, finish)
        if not done.wait(timeout_s):
            errors.append(CollectiveTimeoutError(late(self._board, operation, timeout_s or 0)))
            self.fail(errors[0])
        if errors:
            raise errors[0]

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._collectives or self._underway or self._current or self._closed):
                    self._changed.wait()
                if self._closed:
                    self._give_up(CollectiveError("this group has been destroyed"))
                    return
            try:
                with writing():
                    self._work_until_idle()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the work gets it
                self.fail(error)
                self._give_up(error)

    def _work_until_idle(self) -> None:
        patience = Patience(self._board, self.timeout_s, hot=False)
        while not self._closed:
            if self._error is not None:
                raise self._error
            moved = self._moved()
            self._step_collective()
            self._step_messages()
            underway = [operation for operation, _ in list(self._underway)]
            if self._current is not None:
                underway.append(self._current[0])
            if not underway and not self._collectives:
                return
            if moved != self._moved():
                patience.progress()
            else:
                patience.wait(underway)

    def _step_collective(self) -> None:
        while self._current is not None or (self._collectives and self._turn.acquire(blocking=False)):
            if self._current is None:
                with self._changed:
                    self._current = self._collectives.popleft()
            operation, finish = self._current
            if not _ended(operation):
                return
            self._current = None
            self._turn.release()
            finish(None)

    def _step_messages(self) -> None:
        with self._changed:
            underway = list(self._underway)
        ended = [each for each in underway if _ended(each[0])]
        if ended:
            with self._changed:
                self._underway[:] = [each for each in self._underway if each not in ended]
            for _, finish in ended:
                finish(None)

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            left = [*self._underway, *self._collectives]
            if self._current is not None:
                left.append(self._current)
                self._turn.release()
            self._current = None
            self._underway.clear()
            self._collectives.clear()
        for _, finish in left:
            finish(error)


_living: weakref.WeakSet[Runner] = weakref.WeakSet()
_changing = threading.Lock()  # guards the set of runners


def abort_all(error: CollectiveError) -> None:
    """End what is under way in any group of this process, and let none be used again. From any thread."""
    with _changing:
        runners = list(_living)
    for runner in runners:
        runner.abort(error)


def _disown_after_fork() -> None:
    """In a forked child: what it does in memory that it shares with the ranks would be taken for its
    parent's work."""
    for runner in _living:
        runner.disown()


os.register_at_fork(after_in_child=_disown_after_fork)


def _ended(operation: Operation) -> bool:
    """Let an operation go on as far as it can; True when it is over."""
    try:
        next(operation.steps)
    except StopIteration:
        return True
    return False
