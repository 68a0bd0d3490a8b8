"""Checked calls on backends that do not check themselves: Gloo, NCCL, MPI. "shm" checks in its own protocol.

Left alone, Gloo adds float32 bits to int32 bits, takes one rank's broadcast for another's all_reduce, and if
sizes differ it hangs, or ends the process from a thread of its own (`gloo::EnforceNotMet`, SIGABRT), which
Python cannot catch. So before each collective a second group of the same ranks gathers its fingerprint from
all of them, and data moves only when all agree. On a mismatch no rank has started: every rank gets the same
error and can leave (destroy_process_group() would wait for a Gloo collective that never ends).

    checker = checks.guard(group, companions(group))

    checker.begin(Announced("all_reduce", x.dtype, x.shape, "sum")).wait()            # synchronous
    dist.all_reduce(x, group=group)

    work = checker.call(lambda: dist.all_reduce(x, group=group, async_op=True),       # asynchronous
                        Announced("all_reduce", x.dtype, x.shape, "sum", label=name))
    work.wait()

The price is one gathering of 240 bytes a rank (rollcall.py) before each call. Among asynchronous calls in a
row, the next check runs while data moves, if a core is free for it. send and recv are not checked here: one
more message each way for every message would double their time. A recv with too small a buffer still ends a
Gloo process.
"""

from __future__ import annotations

import atexit
import math
import queue
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from imece.collectives import fingerprint as fp
from imece.collectives import recorder
from imece.collectives.companions import Companions, companions
from imece.collectives.given_up import Sliced, Waitable
from imece.collectives.pending import make_groups, start_calls_here, without_gradients
from imece.collectives.recording import text_of
from imece.collectives.rollcall import RollCall
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.work import ShmWork
from imece.collectives.streams import Place
from imece.errors import CollectiveError, CollectiveTimeoutError, MismatchError, PeerLostError
from imece.status import says_timed_out

# What travels: number of the call, fingerprint, shape as six_dims, the label's `name_of`, way; then the label
# itself, which is not compared.
_ROW = struct.Struct("=qq6qq48s128s")
_COMPARED_BYTES = 72 + 48
_SHUT_S = 5.0


class Check:
    """The fingerprints of one call, being gathered. Created by `Checker.begin`."""

    def __init__(self, checker: Checker, what: str, rollcall: RollCall, before: CheckedWork | None) -> None:
        self.what = what
        self.opened = rollcall.opened  # bytes that the ranks of this host have offered, in the order of ranks
        self._checker, self._rollcall, self._before = checker, rollcall, before

    def wait(self) -> None:
        """Returns once all ranks are known to make the same call, and earlier asynchronous ones have started.

        MismatchError on every rank if they differ; CollectiveTimeoutError after the check group's timeout;
        PeerLostError if a rank has gone.
        """
        if self._before is not None:
            self._before.started.wait()
            self._before = None
        self._gather()

    def _gather(self) -> None:
        checker = self._checker
        if checker.failure is not None:
            raise checker.failure  # the first one; later failures only follow from it
        rows = self._rollcall.wait(lambda work: _wait(checker.sliced(work), None, self.what, checker))
        raw = rows.numpy().tobytes()
        if any(
            raw[at : at + _COMPARED_BYTES] != raw[:_COMPARED_BYTES] for at in range(0, len(raw), _ROW.size)
        ):
            said = [_unpack(raw[at : at + _ROW.size]) for at in range(0, len(raw), _ROW.size)]
            raise checker._fail(MismatchError(_explain(dict(zip(checker.ranks, said, strict=True)))))


class CheckedWork:
    """A collective that starts as soon as its check allows, waited for like torch's Work. Created by
    `Checker.call`."""

    def __init__(
        self, check: Check, launch: Callable[[], Waitable | None], device: torch.device | None
    ) -> None:
        """device: of the tensors that move, if any."""
        self._check, self._device = check, device
        self._launch: Callable[[], Waitable | None] | None = launch
        self.started = threading.Event()
        self._work: Waitable | None = None
        self._error: BaseException | None = None
        self._place = Place(device, beside=check._checker.is_nccls(device))
        self._mode = without_gradients()

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        if not self.started.is_set():
            return False
        work = self._work  # another thread may be at the end of `wait`
        return work is None or work.is_completed()

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        """Returns when the collective is complete (on CUDA: when the current stream waits for it).

        Errors as for `Check.wait`, and whatever starting the collective raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if not self.started.wait(None if timeout is None else timeout.total_seconds()):
            raise _timeout(self._check.what)
        if self._error is not None:
            raise self._error
        if self._work is not None:
            checker = self._check._checker
            _wait(checker.sliced_call(self._work, self._device), deadline, self._check.what, checker)
        self._work = self._launch = None  # the checker keeps its last call, and would keep its tensors
        return True

    def _run(self) -> None:
        """Runs in the checker's thread; keeps an error for whoever waits."""
        try:
            self._check._gather()
            # Inference mode belongs to a thread, and a tensor that is reduced in place may want gradients.
            with self._mode, self._place.behind():
                assert self._launch is not None, "it is started once, and waited for after that"
                self._work = self._launch()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self.started.set()


class Checker:
    """Checks all collectives of one group. All ranks make their calls on it in the same order.

    group: moves the data. companions: groups of the same ranks on the CPU, only for checks.
    After a failure every further call raises it again: the ranks no longer agree on what comes next.
    """

    def __init__(self, group: dist.ProcessGroup, companions: Companions) -> None:
        self.group, self.companions = group, companions
        self.ranks: list[int] = dist.get_process_group_ranks(group)  # global ranks, in group order
        assert len(companions.order) == group.size(), "group and companions hold different ranks"
        config = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
        self._has_nccl, self._has_cpu = "nccl" in config, "cpu:" in config
        self._number = 0
        self._lock = threading.Lock()  # calls get numbers in the order in which they go to the check group
        self.failure: CollectiveError | None = None  # the first
        self.last: CheckedWork | None = None
        self._behind: CheckedWork | None = None  # the last call whose fingerprint the thread sends on
        self._queue: queue.SimpleQueue[CheckedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, announced: fp.Announced) -> Check:
        """Send this rank's fingerprint of its next call; `wait` on it before the data moves."""
        with self._lock:
            return self._begin(announced, self.last, inline=True)

    def meet(self, announced: fp.Announced, offered: torch.Tensor | None) -> Check:
        """`begin` for a call that may start before earlier ones, since it uses nothing that they use.

        Returns when the ranks of this host have come: if cores are fewer than ranks, early ranks leave theirs
        to late ones, and all hosts begin to send sooner. Whoever carries out the call, in whatever thread,
        waits on the check before data moves. offered: contiguous, on the CPU; `opened` has what the other
        ranks offer, unless some of it is not in shared memory.
        """
        with self._lock:
            return self._begin(announced, None, inline=True, offered=offered)

    def call(
        self,
        launch: Callable[[], Waitable | None],
        announced: fp.Announced,
        device: torch.device | None = None,
    ) -> CheckedWork:
        """Start a collective as soon as all ranks are known to make it, in the order of calls.

        launch: starts it asynchronously and returns its work; runs in the checker's own thread, and never if
        ranks differ. Do not touch the tensors until `wait`. device: where they lie, if there are any.
        """
        with self._lock:
            work = CheckedWork(self._begin(announced, None, inline=False), launch, device)
            self.last = self._behind = work
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="imece-check", daemon=True)
                self._thread.start()
        return work

    def sliced(self, work: Waitable) -> Waitable:
        """A work of the companions, waited for so that it can be given up."""
        if isinstance(work, ShmWork):
            return work
        groups = (self.group, *self.companions.levels)
        return Sliced(work, *(each for each in groups if not isinstance(each, SharedMemoryGroup)))

    def sliced_call(self, work: Waitable, device: torch.device | None) -> Waitable:
        """The same for a work of the group; the host does not wait for NCCL's."""
        return work if self.is_nccls(device) else self.sliced(work)

    def is_nccls(self, device: torch.device | None) -> bool:
        """Whether NCCL makes the group's calls with tensors of this device, on a stream beside the caller's.

        Gloo copies a GPU's tensors at launch and reads the copies in `wait`, on one stream: the caller's. In
        a group that has both, Gloo moves the CPU's tensors. None: a barrier, for which torch asks the CPU's
        backend if there is one.
        """
        return self._has_nccl and (not self._has_cpu if device is None else device.type != "cpu")

    def close(self) -> None:
        """End the thread, after the calls that are still queued, and leave the companions."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_SHUT_S)  # a check that waits for a lost rank ends with its group's timeout
            self._thread = None
        self.companions.leave()

    def _begin(
        self,
        announced: fp.Announced,
        before: CheckedWork | None,
        inline: bool,
        offered: torch.Tensor | None = None,
    ) -> Check:
        if self.failure is not None:
            raise self.failure
        op, dtype, shape, reduce_op, root, label, way = announced
        self._number += 1
        fingerprint = fp.pack(op, reduce_op, dtype, math.prod(shape), root)
        row = bytearray(_ROW.size)
        name, texts = fp.name_of(label), (way.encode(), label.encode())
        _ROW.pack_into(row, 0, self._number, fingerprint, *fp.six_dims(shape), name, *texts)
        what = f"{op} number {self._number}" + (f" ({label})" if label else "")
        if inline and self._behind is not None and len(self.companions.levels) > 1:
            self._behind.started.wait()  # or on some ranks this one might be the first between the hosts
            self._behind = None
        said = torch.frombuffer(row, dtype=torch.uint8)
        rollcall = RollCall(self.companions, said, inline=inline, offered=offered)
        return Check(self, what, rollcall, before)

    def _fail(self, error: CollectiveError) -> CollectiveError:
        self.failure = self.failure or error
        return self.failure

    def _run(self) -> None:
        start_calls_here()
        while (work := self._queue.get()) is not None:
            work._run()
            del work  # else it, and its tensors, would be kept until the next one comes


_checkers: dict[str, Checker] = {}


def guard(group: dist.ProcessGroup, companions: Companions) -> Checker:
    """Make and keep the checker of a group; `checker(group)` returns it. All ranks call this. Those of groups
    that have been destroyed are released."""
    destroyed = [
        each.group for each in _checkers.values() if each.group not in distributed_c10d._world.pg_map
    ]
    for each in (group, *destroyed):
        release(each)
    _checkers[group.group_name] = made = Checker(group, companions)
    return made


def meet(group: dist.ProcessGroup, what: str) -> Checker:
    """`guard` with new companions, in the group's first call, named `what`. CollectiveTimeoutError if not all
    ranks make it.
    """
    try:
        return guard(group, make_groups(partial(companions, group)))
    except RuntimeError as error:
        if isinstance(error, CollectiveTimeoutError) or says_timed_out(str(error)):
            raise _timeout(what) from error
        raise


def checker(group: dist.ProcessGroup) -> Checker | None:
    """The checker of a group; None if its calls are not checked here."""
    found = _checkers.get(group.group_name)
    # Group names come again after destroy_process_group(); the group object does not.
    return found if found is not None and found.group is group else None


def wait_started(group: dist.ProcessGroup) -> None:
    """Wait until all calls that were begun on this group have started. It may have no name."""
    for found in list(_checkers.values()):
        if found.group is group and found.last is not None:
            found.last.started.wait()


def start_all(patience_s: float) -> None:
    """Wait until all calls have started, except those that not all ranks make."""
    for found in list(_checkers.values()):
        if found.last is not None:
            found.last.started.wait(patience_s)


def release(group: dist.ProcessGroup) -> None:
    """Forget the checker of a group; call this before the group is destroyed."""
    found = _checkers.pop(group.group_name, None)
    if found is not None:
        found.close()


@atexit.register
def _end() -> None:
    """End the threads: one that comes back from C++ after Python has ended would abort the process."""
    for found in _checkers.values():
        found.close()
    _checkers.clear()


def _wait(work: Waitable, deadline: float | None, what: str, checker: Checker) -> None:
    """Wait for a work; RuntimeErrors of its backend become imece's errors."""
    try:
        if deadline is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except CollectiveError as error:  # from shared memory, whose errors name ranks
        raise checker._fail(error) from None
    except RuntimeError as error:
        if says_timed_out(str(error)):
            raise checker._fail(_timeout(what)) from error
        raise checker._fail(PeerLostError(f"{what}: a rank has gone: {error}")) from error


def _timeout(what: str) -> CollectiveTimeoutError:
    """An error that says who is missing, as far as this host's recorders know."""
    return CollectiveTimeoutError(f"{what}: not all ranks came in time. {recorder.who_waits()}")


def _unpack(raw: bytes) -> tuple[int, fp.Said]:
    """(the call's number, the call)"""
    number, fingerprint, *dims, name, way, label = _ROW.unpack(raw)
    return number, fp.Said(fingerprint, fp.shape_of(dims), text_of(label), text_of(way), name)


def _explain(said: dict[int, tuple[int, fp.Said]]) -> str:
    """said: by global rank."""
    number, _ = next(iter(said.values()))
    message = fp.explain(number, {rank: call for rank, (_, call) in said.items()})
    if message is not None:
        return message
    at = ", ".join(
        f"rank {rank} at {fp.unpack(call.fingerprint).op} number {number}"
        for rank, (number, call) in said.items()
    )
    return f"ranks differ in how many calls they made on this group: {at}. Did one catch an error and go on?"
