"""The basis of every call of the "shm" group: its engine, its names, and the way of an operation.

torch takes a ProcessGroup written in Python as it is, and then asks no other backend. So with
"cpu:shm,cuda:nccl", tensors on other devices go on from here to a group of their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from imece.collectives import recorder
from imece.collectives.fingerprint import unpack
from imece.collectives.shared_memory.board import Board
from imece.collectives.shared_memory.engine import Engine
from imece.collectives.shared_memory.messages import Messages
from imece.collectives.shared_memory.other_devices import OtherDevices
from imece.collectives.shared_memory.runner import Finish, Runner
from imece.collectives.shared_memory.small import Small
from imece.collectives.shared_memory.tensors import nothing
from imece.collectives.shared_memory.waiting import Operation, Steps
from imece.collectives.shared_memory.work import ShmWork

Tensor = torch.Tensor
_fields = functools.lru_cache(maxsize=4096)(unpack)


class GroupBase(dist.ProcessGroup):
    """One rank's end of a group; `SharedMemoryGroup` adds the calls that torch makes."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._name = self._desc = "undefined"
        self.recorded = True
        self._timeout = timeout
        self._board = Board(store, rank, size, timeout)
        self._engine = Engine(self._board)
        self._messages = Messages(self._board)
        self._runner = Runner(self._board, self._engine, self._messages, timeout.total_seconds())
        self._others = OtherDevices(store, rank, size, timeout)
        self._batching = False  # calls with their tensors are becoming one batch
        self._barrier = Small(self._engine, "barrier")
        self._smalls: dict[Hashable, Small | None] = {}
        self._inline = threading.local()
        self._members = list(range(size))
        self._calls = 0
        self._close = weakref.finalize(self, _close, os.getpid(), self._runner, self._board)

    def sleep_at_once(self) -> None:
        """From now on a thread that waits in this group leaves its core to others at once, instead of
        polling first."""
        self._runner.may_spin = False

    # Attributes and methods that torch expects of a group.

    def getBackendName(self) -> str:
        """The name in torch's tables."""
        return "shm"

    # torch's own accessors read these from backends in C++, which this group does not have.

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it moves. torch uses them to choose where a state dict travels,
        for one."""
        return [torch.device(device) for device in self._others.asked(self)]

    def _get_backend(self, device: torch.device) -> Any:
        """torch's backend for a device; for the CPU this group itself. ValueError if there is none."""
        other = self._others.on(torch.device(device), self)
        return self if other is None else other._get_backend(device)

    @property
    def group_name(self) -> GroupName:
        """The unique name under which torch's functional collectives find this group."""
        return GroupName(self._name)

    @property
    def cores(self) -> int:
        """The number of cores that every rank may run on: the least of all ranks."""
        return min(peer.cores for peer in self._board.peers)

    @property
    def timeout(self) -> timedelta:
        """The timeout of each call that does not name its own."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Another timeout for later calls."""
        self._timeout = timeout
        self._runner.timeout_s = timeout.total_seconds()
        self._others.set_timeout(timeout)

    @property
    def other_backends(self) -> list[Any]:
        """torch's backends for tensors on other devices that have come so far."""
        return self._others.backends

    @property
    def group_desc(self) -> str:
        """torch's name of the group in its logs."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        """group_name, for torch's C++ side."""
        return self._name

    def getGroupDesc(self) -> str:
        """group_desc, for torch's C++ side."""
        return self._desc

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to set: collectives are counted from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        """How many calls with tensors of the CPU this rank has made, begun or not."""
        return self._calls

    def split_group(self, *_: Any, **__: Any) -> Any:
        """RuntimeError: torch's version works on backends in C++, which this group does not have."""
        raise RuntimeError("a group of shm is not split: make the others by torch.distributed.new_group")

    def shutdown(self) -> None:
        """Leave the group; torch's destroy_process_group calls this."""
        self._others.shutdown()
        self._close()

    def abort(self) -> None:
        """Give up what is under way, on other devices too, and leave."""
        self._others.abort()
        self._close()

    # Inside.

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label whatever this thread starts inside, for errors and the recorder."""
        self._inline.label = label
        try:
            yield
        finally:
            self._inline.label = ""

    @property
    def _label(self) -> str:
        return getattr(self._inline, "label", "")

    @contextlib.contextmanager
    def inline(self) -> Iterator[None]:
        """Whatever this thread starts inside runs on this thread, and is over at the end of the block.

        Collectives end at once, messages together at the end: there is no hand-over to the worker, which
        costs more than a small message.
        """
        self._inline.messages = []
        try:
            yield
            messages: list[tuple[Operation, Finish]] = self._inline.messages
            if messages:
                self._runner.run_messages([operation for operation, _ in messages])
                for _, finish in messages:
                    finish(None)
        finally:
            self._inline.messages = None

    def _message(self, operation: Operation, finish: Finish) -> None:
        messages = getattr(self._inline, "messages", None)
        if messages is None:
            self._runner.submit_message(operation, finish)
        else:
            messages.append((operation, finish))

    def _collective(
        self,
        fingerprint: int,
        steps: Steps,
        tensor: Tensor | None,
        opts: Any,
        result: Any,
        back: Callable[[], None] = nothing,
    ) -> dist.Work:
        """Run the collective here, or hand it to the worker; `back` runs at its end."""
        shape = tuple(tensor.shape) if tensor is not None else ()
        dtype = tensor.dtype if tensor is not None else None
        self._calls += 1
        noted = self._noted(fingerprint, dtype, shape, steps, back, self._label)
        operation = self._engine.operation(fingerprint, noted)
        if getattr(opts, "asyncOp", True) and getattr(self._inline, "messages", None) is None:
            work = ShmWork(result, done=False)
            self._runner.submit(operation, work.finish)
            return work
        timeout = getattr(opts, "timeout", None)
        self._runner.run(
            operation, timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else None
        )
        return ShmWork(result, done=True)

    def _noted(
        self,
        fingerprint: int,
        dtype: torch.dtype | None,
        shape: tuple[int, ...],
        steps: Steps,
        back: Callable[[], None],
        label: str = "",
    ) -> Steps:
        """`steps`, noted in the recorder and for errors once it is their turn, and then `back`."""
        fields = _fields(fingerprint)
        if fields.op not in ("send", "recv"):  # messages run beside a collective, which owns this note
            self._engine.shape, self._engine.label, self._engine.way = shape, label, ""
        token: int | None = None
        if self.recorded:
            token = recorder.enter(fields.op, self._name, dtype, shape, fields.reduce_op, fields.root, label)
        try:
            yield from steps
        except BaseException:
            if token is not None:
                recorder.fail(token)
            raise
        back()
        if token is not None:
            recorder.leave(token)

    def _all_of(self, works: Sequence[dist.Work], result: Any) -> dist.Work:
        """One handle for several operations, which run in order: the end of the last is the end of all."""
        if not works:
            return ShmWork(result, done=True)
        last = works[-1]
        return last.giving(result) if isinstance(last, ShmWork) else last


def _close(pid: int, runner: Runner, board: Board) -> None:
    if os.getpid() == pid:  # the end of a forked copy is not the end of the rank
        runner.close()
        board.close()
