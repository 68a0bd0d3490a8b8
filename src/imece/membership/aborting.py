"""Aborts collectives on a GPU that wait for a lost rank, which no connection tells them.

    aborted   the communicators of a generation's groups on GPUs: whatever waits for them ends
    check     raises for a rank that would go on as if its sums had come

A call on the CPU ends with its connections (system.connections). NCCL's runs on the GPU, and waits there for
what another rank writes. An aborted call leaves anything in its buffers, and tells nobody. So before each
update a rank waits until the sums that it takes are complete, and checks that they were not aborted; and so
it does before it believes a number that came over a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.errors import PeerLostError

_ABORT_S = 20.0  # after this long, aborting counts as stuck: others wait for this rank to meet them


class Aborting:
    """Aborts the groups of one member's generation."""

    def __init__(self) -> None:
        self._aborted = False
        self._updates = False  # an update was made in the step under way, with sums that had come
        self._came = False  # all sums that the updates of the step under way take have come
        self._ending: threading.Thread | None = None

    def begin(self) -> None:
        """A generation begins: earlier groups are of no use any more."""
        self._aborted = self._updates = self._came = False

    def abort(self) -> None:
        """End whatever waits, once in a generation; in a thread, as it may take its time. From any thread."""
        if self._aborted:
            return
        backends = device_backends()
        if backends:
            self._aborted = True  # before any call ends: whoever waited for it asks next
            self._ending = threading.Thread(target=_abort, args=(backends,), name="imece-abort", daemon=True)
            self._ending.start()

    def wait(self) -> None:
        """Wait until what `abort` has begun is over: then the groups can be destroyed."""
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.join(_ABORT_S)

    def check(self) -> None:
        """PeerLostError if sums of this generation have been aborted."""
        if self._aborted:
            raise PeerLostError(
                "a rank is gone, and what this one had from the GPUs since is no sum: aborted"
            )

    def settle(self, device: torch.device) -> None:
        """Wait until everything that `device` has to do is over. Raises as `check`: nothing that has come
        meanwhile is to be believed then."""
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        self.check()

    def came(self) -> None:
        """A number was read that depends on all sums which the updates of this step take: so these need not
        wait. Raises as `check`."""
        self.check()
        self._came = True

    @property
    def has_aborted(self) -> bool:
        """Whether `check` would raise: then any other error may follow from that."""
        return self._aborted

    def finish(self) -> None:
        """A step is over. PeerLostError if no update was made, since its sums were aborted."""
        updates, self._updates, self._came = self._updates, False, False
        if not updates:
            self.check()

    def before_updates(
        self, optimizers: Sequence[Optimizer], device: torch.device, wait: Callable[[], object] | None = None
    ) -> None:
        """Let `optimizers` update parameters only with sums that have come.

        wait: replaces torch's own wait for the work of `device`. On a CPU there is nothing to do: a call that
        did not complete has raised there.
        """
        if device.type == "cpu":
            return
        stream_ends = wait or torch.get_device_module(device).synchronize

        def before(*_: Any) -> None:
            if not self._came:
                stream_ends()
            self.check()
            self._updates = True

        for optimizer in optimizers:
            handle = optimizer.register_step_pre_hook(before)
            # The first of all hooks: a step must not end between the hooks of a sharded model.
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(handle.id, last=False)


def device_backends() -> list[Any]:
    """torch's backends that are only for other devices (Gloo's are for all), of all groups, the last
    one first."""
    found: dict[int, Any] = {}
    names = dict(dist.distributed_c10d._world.pg_names)  # other threads ask too, while one makes groups
    for group in sorted(names, key=lambda each: names[each], reverse=True):  # NCCL's own order
        if isinstance(group, SharedMemoryGroup):  # torch knows of none in a SharedMemoryGroup
            found |= {id(each): each for each in group.other_backends}
            continue
        backends = {device.type: group._get_backend(device) for device in group._device_types}
        on_cpu = backends.pop("cpu", None)
        found |= {id(each): each for each in backends.values() if each is not on_cpu}
    return list(found.values())


def _abort(backends: Sequence[Any]) -> None:
    together = [each for each in backends if hasattr(each, "_group_start")]
    for first in together[:1]:
        first._group_start()  # or one communicator's abort may wait for another's
    try:
        for each in backends:
            each.abort()
    finally:
        for first in together[:1]:
            first._group_end()
