"""The way of every collective: it is recorded, checked, started, then waited for or returned as `Pending`.

Only the shortest way, a synchronous all_reduce in shared memory, passes this file by (ops.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist

from imece import mesh, moments
from imece.collectives import checks, in_order, pending, recorder
from imece.collectives.fingerprint import Announced
from imece.collectives.given_up import Waitable
from imece.collectives.pending import Handed, Pending, at_once, drain, in_background, without_gradients
from imece.collectives.recording import POINT_TO_POINT
from imece.collectives.reduction import flattened, shares_memory
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.shared_memory.tensors import check_written
from imece.collectives.waited import waiting
from imece.errors import UserError
from imece.listing import kind_of


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all ranks. UserError if there is none, ValueError if this rank is not in it,
    TypeError for what is no group, as a mesh or a list of ranks."""
    if type(group) is SharedMemoryGroup or type(group) is dist.ProcessGroup:
        return group  # torch's isinstance takes longer than all other checks of a small call
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise UserError("there are no ranks yet: call imece.init() first")
    if not isinstance(group, dist.ProcessGroup):
        raise _no_group(group)
    return group


def _no_group(given: object) -> Exception:
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        return ValueError("this rank is not in the group that it was asked to communicate in")
    return TypeError(f"{kind_of(given)} is no group: give one of torch's, as mesh.world_group")


def finish() -> None:
    """Before groups are destroyed: end calls that nobody waits for any more, as other ranks may need them.

    Calls that wait for a lost rank are left.
    """
    checks.start_all(pending.PATIENCE_S)
    pending.finish()


moments.before_closing.append(finish)
in_order.install()


def in_shared_memory(group: dist.ProcessGroup, tensor: torch.Tensor | None) -> TypeGuard[SharedMemoryGroup]:
    """Whether imece's own engine moves this tensor (None: a barrier's), not NCCL in a group of
    "cpu:shm,cuda:nccl". It checks calls itself and knows all reductions."""
    return type(group) is SharedMemoryGroup and (tensor is None or tensor.is_cpu)


def collectives_made(group: dist.ProcessGroup, device: torch.device) -> int | None:
    """How many collectives this rank has made on a group with tensors of a device, by torch's functions
    or imece's, plus a few: only changes of the number mean something. None if the backend does not
    count torch's."""
    try:
        backend: Any = group._get_backend(device)
        number = int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return None
    ours = isinstance(group, SharedMemoryGroup) and device.type == "cpu"
    return number if ours else number + recorder.count(group.group_name)


def host_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where a number that the host knows travels in this group: on the CPU if the group moves the
    CPU's tensors.

    On `device`, a GPU, it would be copied there and back, and the host would wait for all that the GPU has to
    do.
    """
    if device.type == "cpu" or isinstance(group, SharedMemoryGroup):
        return torch.device("cpu")
    return torch.device("cpu") if torch.device("cpu") in group._device_types else device


def flat_place(tensor: torch.Tensor) -> torch.Tensor:
    """Flat memory to receive into: the tensor's own if it is contiguous."""
    return flattened(tensor) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())


def copy_back(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what came into `flat_place(tensor)` to the tensor, if it is not there already."""
    if not shares_memory(place, tensor):
        tensor.detach().copy_(place.view(tensor.shape))


_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Call:
    """One call on a group. op: a name of fingerprint.OPS; tensor: the one that must be alike on all ranks."""

    op: str
    group: dist.ProcessGroup
    tensor: torch.Tensor | None
    reduce_op: str = ""
    root: int = -1  # or the peer of a message
    label: str = ""
    way: str = ""  # as in fingerprint.Said, for calls made of messages of imece's

    def native(
        self,
        launch: Callable[[], Waitable | list[Waitable]],
        result: torch.Tensor | None,
        finish: Callable[[], object] | None,
        async_op: bool,
    ) -> Any:
        """Run what the backend does by itself. launch starts it, finish puts the result where it belongs.

        ValueError if nothing can be written there; so for the two methods below.
        """
        if finish is not None and result is not None:
            check_written(result)
        with without_gradients(result):
            with self._noted() as token:
                with waiting:
                    drain(self.group)
                checker = self._checker()
                works: Waitable | list[Waitable]
                if checker is not None and async_op and not self._keeps_order:
                    one = cast(Callable[[], Waitable], launch)
                    works = checker.call(one, self._announced(), self._device)
                else:
                    with waiting, self._labelled(), self._here(async_op):
                        if checker is not None:
                            checker.begin(self._announced()).wait()
                        works = launch()
                    if checker is not None and not isinstance(works, list):
                        works = checker.sliced_call(works, self._device)
                    elif isinstance(works, list) and self._is_gloos:
                        works = [Handed(each, self.group) for each in works]
            pending = Pending(self.op, result, works if isinstance(works, list) else [works], finish, token)
            return pending.handed_out() if async_op else pending.wait()

    def scheduled(
        self,
        run: Callable[[], object],
        result: torch.Tensor | None,
        async_op: bool,
        *others: dist.ProcessGroup,
    ) -> Any:
        """Run what imece does itself, message by message. others: groups that it uses besides its own."""
        if result is not None:
            check_written(result)
        with self._noted() as token:
            check = self._begun()

            def checked() -> None:
                if check is not None:
                    check.wait()
                run()

            with without_gradients(result):
                if async_op:
                    begin = at_once if self._keeps_order else in_background
                    task = begin(checked, self.group, *others)
                    return Pending(self.op, result, [task], None, token).handed_out()
                with waiting:
                    drain(self.group, *others)
                    if self._may_get_stuck:
                        in_background(checked, self.group, *others, lane=pending.MAIN).wait()
                    else:
                        checked()
        if token is not None:
            recorder.leave(token)
        return result

    def in_lane(
        self,
        run: Callable[[Sequence[torch.Tensor]], object],
        result: torch.Tensor,
        lane: int,
        offered: torch.Tensor | None,
    ) -> Pending:
        """Like `scheduled`, but asynchronous, beside calls in other lanes.

        run: uses nothing that calls in other lanes use. It gets the bytes of what the ranks of this host have
        `offered` for this call, where they lie; nothing unless all of them are in shared memory.
        """
        check_written(result)
        with self._noted() as token:
            with waiting:
                checker = self._checker()
                if offered is not None:
                    reached = offered.is_contiguous() and offered.device.type == "cpu"
                    offered = offered.detach() if reached else None
                check = checker.meet(self._announced(), offered) if checker is not None else self._begun()

            def checked() -> None:
                # Here, not in a thread of the checker: if all cores compute, each hand-over between threads
                # waits for one.
                if check is not None:
                    check.wait()
                run(check.opened if check is not None else ())

            with without_gradients(result):
                work = in_background(checked, lane=lane)
        return Pending(self.op, result, [work], None, token).handed_out()

    @property
    def _device(self) -> torch.device | None:
        return self.tensor.device if self.tensor is not None else None

    @property
    def _keeps_order(self) -> bool:
        """Whether it is launched before the call returns, even if nobody waits for it.

        NCCL may hang if ranks launch calls of several communicators in different orders. Along tensor, the
        computing thread makes calls, and another thread's launches would fall between them anywhere. Along
        the other axes this must not be: on parts of a sequence ranks may use different parameters, and stages
        wait for each other, so a rank that waits here might hold up the rank it waits for.
        """
        if self.tensor is None or self.tensor.is_cpu:
            return False
        with contextlib.suppress(UserError):
            arranged = mesh.current()
            alone = arranged.size("context") == arranged.size("pipeline") == 1
            return arranged.backend == "nccl" and arranged.size("tensor") > 1 and alone
        return False

    @property
    def _may_get_stuck(self) -> bool:
        """Whether another thread must carry it out, which can be given up: Gloo's messages may get stuck."""
        return self._is_gloos and pending.leaves_calls()

    @property
    def _is_gloos(self) -> bool:
        """Whether its messages are of the CPU's tensors, and not in shared memory."""
        return type(self.group) is not SharedMemoryGroup and (self.tensor is None or self.tensor.is_cpu)

    def _labelled(self) -> contextlib.AbstractContextManager[None]:
        """A label for the recorder; shared memory notes a call itself, when its turn comes."""
        if self.label and in_shared_memory(self.group, self.tensor):
            return self.group.labelled(self.label)
        return _NOTHING

    def _here(self, async_op: bool) -> contextlib.AbstractContextManager[None]:
        """In shared memory, a call that waits runs on the thread that makes it."""
        if not async_op and type(self.group) is SharedMemoryGroup:
            return self.group.inline()
        return _NOTHING

    @contextlib.contextmanager
    def _noted(self) -> Iterator[int | None]:
        """The recorder notes that this rank enters the call, and that it fails if the block raises. Yields
        its token; None for calls that shared memory notes itself."""
        if in_shared_memory(self.group, self.tensor):
            yield None
            return
        dtype, shape = self._kind
        token = recorder.enter(
            self.op, self.group.group_name, dtype, shape, self.reduce_op, self.root, self.label
        )
        try:
            yield token
        except BaseException:
            recorder.fail(token)
            raise

    def _begun(self) -> checks.Check | None:
        """Tell the other ranks of this call. Returns what to wait for before data moves; None if all
        have come.

        In shared memory a call without a `way` is made of other calls, which the group checks itself. Those
        may still be in the background, and this one must come after them on all ranks.
        """
        checker = self._checker()
        if checker is not None:
            return checker.begin(self._announced())
        if self.way and isinstance(self.group, SharedMemoryGroup):
            with waiting:
                drain(self.group)
            self.group.agree(self._announced())
        return None

    def _checker(self) -> checks.Checker | None:
        if in_shared_memory(self.group, self.tensor) or self.op in POINT_TO_POINT or self.group.size() == 1:
            return None
        return checks.checker(self.group) or checks.meet(self.group, f"{self.op} number 1")

    def _announced(self) -> Announced:
        return Announced(self.op, *self._kind, self.reduce_op, self.root, self.label, self.way)

    @property
    def _kind(self) -> tuple[torch.dtype | None, tuple[int, ...]]:
        """The tensor's dtype and shape."""
        return (None, ()) if self.tensor is None else (self.tensor.dtype, tuple(self.tensor.shape))
