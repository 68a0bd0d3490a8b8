"""`imece.init` and `reform`: how this process' mesh opens, and how it gets other ranks.

`init` reads the world, lets the ranks meet and check that they want the same, opens torch's group of all
ranks, and makes the one `Mesh` of this process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from imece import mesh as meshes
from imece import moments, status
from imece.axes import check_axes
from imece.device import adopted_backends, check_backend, choose_backends, choose_device
from imece.errors import UserError
from imece.groups import Groups, destroy
from imece.launchers import read_world
from imece.meeting import MEETING_S, adopted_world, meet, open_default_group
from imece.mesh import Mesh
from imece.store import connect, launchers_store, of_this_start, reach_launchers_store
from imece.system import heap, trackers
from imece.system.open_files import check_proc
from imece.world import BACKEND, MEMBER, check_not_opened


class _Asked(NamedTuple):
    """The arguments of one call of `init`."""

    axes: dict[str, int] | None = None
    ranks: int | None = None
    backend: str | None = None
    device: str = "None"
    timeout: timedelta = timedelta()

    def differences(self, other: _Asked) -> tuple[str, str]:
        """The arguments in which the two calls are not alike, of the one and of the other."""
        names = [name for name in self._fields if getattr(self, name) != getattr(other, name)]
        mine, theirs = (
            ", ".join(f"{name}={getattr(each, name)}" for name in names) for each in (self, other)
        )
        return mine, theirs


_opened_with = _Asked()
_openings = 0


def init(
    axes: Mapping[str, int] | None = None,
    *,
    ranks: int | None = None,
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> Mesh:
    """Join the ranks that a launcher started (or be the only one) and return their mesh.

    axes: sizes by name whose product is the number of ranks; by default all ranks are along "replicate".
    ranks: the number of ranks the script is made for; any other number is an error.
    backend: of torch.distributed; by default the environment variable IMECE_BACKEND, else "shm" for the CPUs
        of one host, "gloo" for CPUs of several hosts, and NCCL beside either of them on GPUs. Ranks that
        share a GPU need "gloo".
    device: "cpu" or "cuda[:i]"; by default this rank's own GPU if the host has any.
    timeout: for collectives, and (up to 10 minutes) for the ranks to meet.

    An existing process group is adopted, without a launcher's variables on the GPU that the script has made
    current. A second call with the same arguments returns the same mesh. The mesh is closed when the process
    ends, by `close()`, or by torch's `dist.destroy_process_group()`; after that a call opens a new one.

    On SIGUSR1 this rank prints its stacks and last calls, if `init` ran in the main thread and the program
    has no handler of its own. On a CPU, glibc keeps memory that is freed after the first optimizer step, so
    that the next step need not fetch it from the system, unless the environment sets glibc's thresholds
    (MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES).

    UserError if the world is not the one asked for, if ranks ask for different things, or if this process is
    one that a rank has started: by multiprocessing, which imports the script again, or with its environment.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "imece.init() in a helper of this rank, which imports the script before it begins, as workers of "
            'a DataLoader do from Python 3.14 on: put what the script does under `if __name__ == "__main__":`'
        )
    if meshes.opened() is None and not dist.is_initialized():
        check_not_opened()  # before its failure could pass for that of the rank
    try:
        return _open_or_same(axes, ranks, backend, device, timeout)
    except Exception:
        member = os.environ.get(MEMBER, "")
        if meshes.opened() is None and member.isdecimal():  # no mesh would report it, if it ends this process
            status.tell_failures(reach_launchers_store, int(member))
        raise


def _open_or_same(
    axes: Mapping[str, int] | None,
    ranks: int | None,
    backend: str | None,
    device: str | torch.device | None,
    timeout: timedelta,
) -> Mesh:
    """`init`'s mesh: the one that is open, or a new one."""
    global _opened_with, _openings
    if (mesh := meshes.opened()) is not None and mesh.was_destroyed:
        mesh.close()
    mesh = meshes.opened()
    adopted = dist.is_initialized() if mesh is None else not mesh.owns_world
    if backend is None and not adopted:
        backend = os.environ.get(BACKEND) or None
    if not isinstance(timeout, timedelta):
        raise UserError(f"timeout={timeout!r}: give a datetime.timedelta, timedelta(seconds=60) say")
    if axes is not None and not isinstance(axes, Mapping):
        raise UserError(f"axes={axes!r}: give sizes by name, {{'shard': 2}} say")
    if ranks is not None and not isinstance(ranks, int):
        raise UserError(f"ranks={ranks!r}: give a whole number")
    asked = _Asked(None if axes is None else dict(axes), ranks, backend, str(device), timeout)
    if mesh is not None:
        if asked != _opened_with:
            before, now = _opened_with.differences(asked)
            raise UserError(
                f"imece.init() was called with {before} before, and now with {now}: close() the mesh that is "
                "open to open another"
            )
        return mesh
    check_proc()
    check_backend(backend)
    _openings += 1
    try:
        mesh = _arrange(asked, device, adopted)
    except BaseException:
        if dist.is_initialized() and not adopted:
            destroy()
        raise
    _opened_with = asked
    if mesh.device.type == "cpu":
        heap.keep_from_first_step()
    if mesh.world.member is not None:
        trackers.outlive_launcher()
    mesh.open()
    for call in moments.at_opening:
        call()
    return mesh


def reform(rank: int, world_size: int, store: dist.Store, met: Callable[[], object] = lambda: None) -> Mesh:
    """Put other ranks into the open mesh: it stays the same object, and gets new groups in place of all
    old ones.

    store: used by the new ranks alone. All of them call this, whichever world they come from; ranks that are
    gone are not asked. met: called once all have come, before they make groups; it may raise. Groups and
    DeviceMeshes that the mesh handed out before can no longer be used. A rank waits for the others as long as
    a collective would; a rank that joins waits without limit.
    UserError if the mesh was opened with axes, or on a process group that imece did not open, or if others do
    not come.
    """
    mesh = meshes.current()
    axes, backend, timeout = _opened_with.axes, _opened_with.backend, _opened_with.timeout
    if not mesh.can_change:
        why = f"axes {axes}" if axes is not None else "a process group that existed before"
        raise UserError(f"imece.init() was called with {why}: such a world cannot change its ranks")
    mesh.let_go()
    if dist.is_initialized():  # else the last attempt got no further
        destroy()
    world = replace(mesh.world, rank=rank, world_size=world_size, joining=False)
    sizes = check_axes(None, world_size)
    # The others come after their step and whatever follows it, such as an evaluation, so a rank that joins
    # sets no limit. If a rank is gone, the store raises; if a rank lives but never comes, the others'
    # timeouts end the wait, in their collectives and here.
    patience = timedelta.max if mesh.world.joining else timeout
    hosts = meet(store, world, sizes, backend, mesh.device, patience)
    met()
    backends = choose_backends(mesh.device, len(hosts) == 1, backend)
    open_default_group(world, backends.world, store, timeout)
    own_store = dist.PrefixStore("mesh", store)
    mesh.take(world, sizes, Groups(world, hosts, backends, store=own_store, timeout=timeout))
    return mesh


def _arrange(asked: _Asked, device: str | torch.device | None, adopted: bool) -> Mesh:
    """Meet, compare, open torch's process group unless it was `adopted`, build the mesh: in this order."""
    axes, ranks, backend, _, timeout = asked
    world = adopted_world(read_world()) if adopted else read_world()
    if ranks is not None and ranks != world.world_size and not world.joining:
        raise UserError(
            f"this script wants {ranks} ranks and was started as {world.world_size}: "
            f"start it with imece launch --ranks {ranks} {os.path.basename(sys.argv[0])}"
        )
    sizes = check_axes(axes, world.world_size)
    own_device = choose_device(device, world, str(dist.get_backend_config()) if adopted else backend)
    meeting = min(timeout, timedelta(seconds=MEETING_S))
    if adopted:
        store: dist.Store = dist.distributed_c10d._get_default_store()
    else:
        store, world = connect(world, meeting)
    alone = f"joining/{world.member}/" if world.joining else ""
    store = dist.PrefixStore(f"imece/{alone}{_openings}", store)
    store = of_this_start(store, world.rank, world.world_size, meeting)
    hosts = meet(store, world, sizes, backend, own_device, meeting, adopted)
    if adopted:
        backends = adopted_backends(own_device, backend)
        if world.launcher == "single":
            here = next(host for host in hosts if world.rank in host)
            world = replace(world, local_rank=here.index(world.rank), local_world_size=len(here))
    else:
        backends = choose_backends(own_device, len(hosts) == 1, backend)
        open_default_group(world, backends.world, store, timeout)
    if (dist.get_world_size(), dist.get_rank()) != (world.world_size, world.rank):
        raise UserError(
            f"torch.distributed sees rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the launcher started rank {world.rank} of {world.world_size}"
        )
    own_store = dist.PrefixStore("mesh", store)
    return Mesh(
        world,
        sizes,
        Groups(world, hosts, backends, store=own_store, timeout=timeout),
        own_device,
        launchers=launchers_store(world, own_store, meeting),
        owns_world=not adopted,
        can_change=not adopted and axes is None,
    )
