"""Collectives under way: what `async_op=True` returns, and the threads that run schedules in the background.

torch's own collectives progress by themselves. A schedule does not: somebody must sum what has arrived and
post what comes next. For asynchronous calls, one thread of this process does that, for one call after the
other in their order, which is the same on all ranks, as with any collective. If such a task still uses a
group, a later call on that group waits for it first (`drain`), so that messages of the two cannot be
confused.

A lane is one more such thread, for calls that use nothing that others use at the same time (over_hosts.py):
calls in different lanes run side by side.

When a connection ends, Gloo does not end everything that waits. It tells neither a sender whose message was
still queued, nor a receiver of a message that had begun to come; these wait for the timeout of their group.
So whoever knows that a rank is gone says so here, and calls that do not end are left behind (`give_up`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Generic, Self

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

from imece.collectives import given_up, recorder
from imece.collectives.given_up import Waitable
from imece.collectives.streams import Place
from imece.collectives.waited import waiting
from imece.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from imece.status import says_peer_gone, says_timed_out

Made = TypeVar("Made")
Result = TypeVar("Result", bound=torch.Tensor | None, default=torch.Tensor, covariant=True)

PATIENCE_S = 2.0  # for one task, before its groups are destroyed
_GOODBYE_S = 0.5
_NOTHING = contextlib.nullcontext()
MAIN = -1
"""The lane of calls that the main thread would carry out itself, if it could leave them behind."""


def without_gradients(*written: torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """A context for writing to these tensors, and for carrying on elsewhere what this thread begins.

    It is torch's inference mode if this thread is in it, or if one of the tensors was made in it: outside of
    the mode, which belongs to a thread, torch lets nobody write to such a tensor.
    """
    made_inside = any(tensor is not None and tensor.is_inference() for tensor in written)
    return _without_gradients(made_inside or torch.is_inference_mode_enabled())


def _without_gradients(inference: bool) -> contextlib.AbstractContextManager[None]:
    if inference:
        return torch.inference_mode()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING  # a tenth of the time


class Pending(Generic[Result]):
    """A collective under way; its tensors must be neither read nor written before `wait` returns."""

    def __init__(
        self,
        what: str,
        result: Result,
        works: Sequence[Waitable],
        finish: Callable[[], object] | None = None,
        token: int | None = None,
    ) -> None:
        """what: words for errors. finish: runs once, in `wait`, after all works. token: the recorder's."""
        self._what = what
        self._token = token
        self._result = result
        self._works = list(works)
        self._finish = finish
        self._inference = torch.is_inference_mode_enabled()

    def __repr__(self) -> str:
        return f"<imece.Pending {self._what}, {'done' if self.done() else 'under way'}>"

    def handed_out(self) -> Self:
        """The call goes on by itself; the recorder counts this rank as waiting only from `wait` on."""
        if self._token is not None:
            recorder.hand_out(self._token)
        return self

    def wait(self, timeout_s: float | None = None) -> Result:
        """The call's tensor, complete (None for barrier and exchange). A second call returns it at once.

        timeout_s: for each message of the call; None means the group's own. CollectiveTimeoutError when it
        has passed: then the group cannot be used any more. PeerLostError if a connection was lost.
        """
        if self._token is not None:
            recorder.wait(self._token)
        try:
            with _without_gradients(self._inference):
                with waiting:
                    while self._works:
                        wait_for(self._works[0], self._what, timeout_s)
                        self._works.pop(0)
                if self._finish is not None:
                    finish, self._finish = self._finish, None
                    finish()
        except BaseException:
            self._tell(recorder.fail)
            raise
        self._tell(recorder.leave)
        return self._result

    def _tell(self, tell: Callable[[int], None]) -> None:
        if self._token is not None:
            tell(self._token)
            self._token = None

    def give_up(self) -> None:
        """Nobody will wait for this call: its group is gone."""
        self._works.clear()
        self._finish = None
        self._tell(recorder.fail)

    def done(self) -> bool:
        """Whether `wait` would return at once. Gloo learns of a receive only in `wait`: until then False."""
        return all(work.is_completed() for work in self._works)


def wait_for(work: Waitable, what: str, timeout_s: float | None = None) -> None:
    """Wait for one work; torch's RuntimeErrors become imece's if they mean a timeout or a lost peer."""
    try:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
        if (task := _here.task) is not None:
            task.check()
    except CollectiveError:
        raise
    except RuntimeError as error:
        text = str(error)
        if says_timed_out(text):
            raise CollectiveTimeoutError(f"{what} did not come to an end in time: {text}") from error
        if says_peer_gone(text):
            raise PeerLostError(f"{what} lost a peer: {text}") from error
        raise


class Handed:
    """A message that Gloo carries out, waited for so that `give_up` ends the wait.

    Waits for messages cannot be sliced: Gloo breaks all connections of a group if one takes too long.
    """

    def __init__(self, work: Waitable, group: dist.ProcessGroup) -> None:
        self._work, self._group = work, group

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        given = () if timeout is None else (timeout,)
        if not leaves_calls():
            self._work.wait(*given)
            return True
        return in_background(partial(self._work.wait, *given), self._group, lane=MAIN).wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Task:
    """A function that the background thread runs; waits like torch's Work."""

    def __init__(self, run: Callable[[], object], groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = groups
        self._run: Callable[[], object] | None = run
        self._ended = threading.Event()
        self._left = False
        self._error: BaseException | None = None
        self._place = Place()
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        if not self._ended.wait(timeout.total_seconds() if timeout is not None else None):
            raise CollectiveTimeoutError(f"it is still under way in the background. {recorder.who_waits()}")
        if self._error is not None:
            raise self._error
        self._place.join()
        self._run = None  # a GPU may have needed its tensors until now
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def check(self) -> None:
        """For the thread that runs the task: PeerLostError if it was given up and must write nothing more."""
        if self._left:
            raise PeerLostError("this call was given up")

    def give_up(self, error: BaseException) -> None:
        """Whoever waits for it gets `error`, unless it has ended; the thread that runs it may be stuck."""
        self._left = True
        if not self._ended.is_set():
            self._error, self._run = error, None
            self._ended.set()

    def settled(self, patience_s: float | None = None) -> bool:
        """Wait until the task has ended, well or not: its own `wait` raises the error. False if that took
        too long."""
        return self._ended.wait(patience_s)

    def execute(self) -> None:
        run = self._run
        if run is None:
            return  # given up before its turn
        _here.task = self
        try:
            with _without_gradients(self._inference), self._place.behind():
                run()
        except BaseException as error:  # noqa: BLE001 — kept, and raised in the thread that waits
            if not self._left:
                self._error = error
        finally:
            _here.task = None
            if not self._place.on_gpu:
                self._run = None  # the function holds tensors
            self._ended.set()


class _Here(threading.local):
    task: Task | None = None  # the task that this thread runs
    starts_calls = False


_here = _Here()


def start_calls_here() -> None:
    """From now on this thread starts what others have begun."""
    _here.starts_calls = True


def starts_calls() -> bool:
    """Whether this thread starts what others have begun, and must not wait until that has started."""
    return _here.starts_calls


class _Server:
    """A thread that runs tasks in their order."""

    def __init__(self, lane: int) -> None:
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        name = {0: "imece-collectives", MAIN: "imece-calls"}.get(lane, f"imece-lane-{lane}")
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        start_calls_here()
        while (task := self.tasks.get()) is not None:
            task.execute()
            with _lock:
                unfinished[:] = [each for each in unfinished if each is not task]
            del task  # or its error would be kept here, and the groups in that error's frames


unfinished: list[Task] = []  # in the order of their calls
_lock = threading.Lock()
_servers: dict[int, _Server] = {}  # by lane


def in_background(run: Callable[[], object], *groups: dist.ProcessGroup, lane: int = 0) -> Task:
    """Run `run`, without gradients, after all tasks before it in its lane.

    groups: those whose messages it uses; none in a lane other than 0, which has groups of its own.
    """
    task = Task(run, groups)
    with _lock:
        if lane not in _servers:
            _servers[lane] = _Server(lane)
        unfinished.append(task)
        _servers[lane].tasks.put(task)  # here: once the lock is free, give_up may take the server away
    return task


def at_once(run: Callable[[], object], *groups: dist.ProcessGroup) -> Task:
    """Run `run` here and now: this only queues work on a GPU, beside the caller's stream."""
    task = Task(run, groups)
    with waiting:
        task.execute()
    return task


def drain(*groups: dist.ProcessGroup) -> None:
    """Wait until no background task uses any of these groups any more."""
    if not unfinished or starts_calls():
        return
    with _lock:
        waiting = [task for task in unfinished if any(group in task.groups for group in groups)]
    for task in waiting:
        task.settled()


_may_give_up = False  # whether anybody in this process may


def expect_giving_up() -> None:
    """From now on somebody may `give_up`: the main thread must not block where that cannot reach it."""
    global _may_give_up
    _may_give_up = True


def leaves_calls() -> bool:
    """Whether this thread leaves calls that may get stuck to another, which costs some milliseconds
    a call."""
    return _may_give_up and threading.current_thread() is threading.main_thread()


def make_groups(make: Callable[[], Made]) -> Made:
    """What `make` returns, which makes groups: in a thread that may be left, if this one may be.

    In Gloo one of two ranks waits for the other one to connect. If that one is gone there is no connection to
    cut, and it waits for the timeout of the group.
    """
    if not leaves_calls():
        return make()
    found: list[Made] = []
    in_background(lambda: found.append(make()), lane=MAIN).wait()
    return found[0]


def give_up(why: str, within_s: float) -> None:
    """A rank is gone: leave calls that do not end within `within_s` seconds; whoever waits
    gets PeerLostError.

    Threads that are stuck are left too, and others take their place. Before this, end the connections of
    groups and what waits in shared memory: then nothing can complete any more.
    """
    deadline = time.monotonic() + within_s
    with _lock:
        tasks = list(unfinished)
    for task in tasks:
        task.settled(max(0.0, deadline - time.monotonic()))
    given_up.tell(why)
    with _lock:
        left = [task for task in unfinished if not task.is_completed()]
        if not left:
            return
        servers = list(_servers.values())
        _servers.clear()
        unfinished.clear()
    for server in servers:
        server.tasks.put(None)
    for task in left:
        task.give_up(PeerLostError(why))


def finish() -> None:
    """Wait for everything that has begun, except a task that waits for a lost rank, and those behind it."""
    with _lock:
        waiting = list(unfinished)
    for task in waiting:
        if not task.settled(PATIENCE_S):
            return


@atexit.register
def _end() -> None:
    """Before the interpreter ends: a thread that came back from C++ later would abort the process."""
    finish()
    for server in _servers.values():
        server.tasks.put(None)
    until = time.monotonic() + _GOODBYE_S
    for server in _servers.values():
        if server.thread is not threading.current_thread():
            server.thread.join(max(0.0, until - time.monotonic()))
    unfinished.clear()


def _forget_after_fork() -> None:
    """In a forked child: the threads stayed in the parent, and so did their tasks."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()
    unfinished.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
