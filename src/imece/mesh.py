"""The ranks of this job, arranged: axes, hosts, and every group over them.

No other module creates groups, except meeting.py, which opens the group of all ranks. axes.py defines the
axes. `init` reads the world, lets the ranks meet and check that they want the same, and returns the one
`Mesh` of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from imece import status
from imece.axes import AXES, PLACEMENT, Partition, check_axes, coordinates, crossing, partition
from imece.buckets import LANES
from imece.device import Backends, adopted_backends, check_backend, choose_backends, choose_device
from imece.errors import UserError
from imece.meeting import MEETING_S, adopted_world, meet, open_default_group
from imece.opening import opened
from imece.store import connect, launchers_store, of_this_start, reach_launchers_store
from imece.system import connections, heap, trackers
from imece.system.open_files import check_proc
from imece.world import BACKEND, MEMBER, OPENED, World, check_not_opened, mark_opened, read_world

Lane = int | str  # among groups of the same ranks: 0 is the usual one, a name says what another is for
_SHOWN_CHARS = 200

before_closing: list[Callable[[], None]] = []
"""Called before groups are destroyed, by a mesh or by torch."""
once_arranged: list[Callable[[], None]] = []
"""Called when a mesh has got its ranks, and again when it has got others."""
once_lost: list[Callable[[str], None]] = []
"""Called with a reason when ranks are gone, to end all waits for them. May be called from any thread."""
ended_last: list[Callable[[], None]] = []
"""Called at the exit of this process, after all other exit handlers."""


_destroy = dist.destroy_process_group


@functools.wraps(_destroy)
def _finish_and_destroy(group: dist.ProcessGroup | None = None) -> None:
    # What is under way in the background and on other ranks would wait for this one until the timeout.
    for finish in before_closing:
        finish()
    if group is None:
        os.environ.pop(OPENED, None)
    _destroy(group)


dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _finish_and_destroy


@atexit.register  # here, before others can: what is registered first is called last
def _end_the_last() -> None:
    for end in ended_last:
        end()


class Mesh:
    """The ranks of this job, arranged. `imece.init` makes one on each rank, all of equal shape.

    On CPUs of several hosts the groups of hosts exist from the beginning. A method that returns any other
    group creates it on first use. That is a call of the whole world: all ranks must ask for the same groups
    in the same order, as with any collective; otherwise they get an error.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        backends: Backends,
        hosts: Partition,
        sizes: Mapping[str, int],
        *,
        store: dist.Store,
        timeout: timedelta,
        owns_world: bool,
    ) -> None:
        """hosts: the global ranks of each host. sizes: as `check_axes` returns them. owns_world: closing the
        mesh also destroys torch's default group. torch.distributed must be initialized."""
        self.device = device
        self._timeout = timeout
        self._owns_world = owns_world
        self._closed = False
        self._pid = os.getpid()
        self._take(world, backends, hosts, sizes, store)
        launchers = launchers_store(world, store, min(timeout, timedelta(seconds=MEETING_S)))
        self._launchers = launchers
        status.tell_running(launchers, world.known_as)
        self._stop_telling = status.tell_failures(lambda: launchers, world.known_as)

    def _take(
        self,
        world: World,
        backends: Backends,
        hosts: Partition,
        sizes: Mapping[str, int],
        store: dist.Store,
    ) -> None:
        """Become the mesh of these ranks, whose default group is open."""
        self.world = world
        self.backend = backends.own
        self.hosts = hosts
        self._backends = backends
        self._sizes = dict(sizes)
        self._store = store  # of this mesh alone
        self._whole: Partition = (tuple(range(world.world_size)),)
        self._groups: dict[tuple[Partition, Lane], dist.ProcessGroup] = {(self._whole, 0): _default_group()}
        self._created: list[dist.ProcessGroup] = []
        self._device_mesh: DeviceMesh | None = None
        for begin in once_arranged:
            begin()
        self._make_groups_of_hosts()

    @property
    def rank(self) -> int:
        """This process' number among all ranks."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.world.world_size

    @property
    def can_change(self) -> bool:
        """Whether other ranks can replace these: not if axes were asked for, nor in a process group that
        imece did not open."""
        return self._owns_world and _opened_with.axes is None

    def size(self, axis: str) -> int:
        """The number of ranks along `axis`."""
        self._check((axis,))
        return self._sizes[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's position along `axis`, from 0."""
        self._check((axis,))
        return coordinates(self.rank, self._sizes)[axis]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of ranks that differ from this one only along `axes`, in ascending order."""
        self._check(axes)
        return self._group(partition(axes, self._sizes))

    def batching_group(self, *axes: str) -> dist.ProcessGroup:
        """As `group`, for torch.distributed.batch_isend_irecv. On GPUs this is another group: before torch
        2.14 only groups of torch's own class send a batch of messages as one."""
        group = self.group(*axes)
        if self.device.type == "cpu" or type(group) is dist.ProcessGroup:
            return group
        return self._group(partition(axes, self._sizes), "batches", "nccl")

    @property
    def world_group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self._groups[self._whole, 0]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that train one model on different data: those along replicate, shard and context."""
        return self.group("replicate", "shard", "context")

    @property
    def batch_ranks(self) -> int:
        """The number of shares of the data: the ranks along replicate and shard."""
        return self._sizes["replicate"] * self._sizes["shard"]

    @property
    def batch_rank(self) -> int:
        """Which of the `batch_ranks` shares this rank reads; along the other axes all read the same."""
        at = coordinates(self.rank, self._sizes)
        return at["replicate"] * self._sizes["shard"] + at["shard"]

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The ranks of this host."""
        return self._group(self.hosts)

    def host_group_in(self, lane: int) -> dist.ProcessGroup:
        """Another group of this host's ranks, for calls beside those on `host_group`, which is lane 0."""
        return self._group(self.hosts, lane)

    @property
    def cross_group(self) -> dist.ProcessGroup | None:
        """The ranks with this rank's index on each host, one per host. None if hosts differ in size."""
        crossed = crossing(self.hosts)
        return None if crossed is None else self._group(crossed)

    @property
    def has_groups_of_hosts(self) -> bool:
        """Whether `host_group` and `cross_group` can be had without a call of all ranks."""
        crossed = crossing(self.hosts)
        return crossed is None or {(self.hosts, 0), (crossed, 0)} <= self._groups.keys()

    @property
    def device_mesh(self) -> DeviceMesh:
        """torch's DeviceMesh over the axes larger than 1 (at least one), on the groups of this mesh."""
        if self._device_mesh is None:
            used = [axis for axis in PLACEMENT if self._sizes[axis] > 1] or ["replicate"]
            shape = [self._sizes[axis] for axis in used]
            groups = [self.group(axis) for axis in used]
            self._device_mesh = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0],
                self.device.type,
                mesh=torch.arange(self.world_size, dtype=torch.int, device="cpu").view(shape),
                mesh_dim_names=tuple(used),
            )
        return self._device_mesh

    def decide(self, key: str, text: str) -> None:
        """Store what these ranks have agreed on, for ranks that join later and run the same lines alone."""
        if self.world.member is not None:
            self._launchers.set(f"imece/decided/{key}", text)

    def decided(self, key: str) -> str | None:
        """What `decide` stored; None if no rank of this host did."""
        name = f"imece/decided/{key}"
        return self._launchers.get(name).decode() if self._launchers.check([name]) else None

    def close(self) -> None:
        """Destroy the groups, the last one first, and tell the launcher that this rank leaves in order.

        In a forked copy of the rank this does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        for finish in before_closing:
            finish()
        with contextlib.suppress(RuntimeError):  # whoever serves the store may have left before us
            status.tell_closed(self._launchers, self.world.known_as)
        self._stop_telling()
        if not self._destroyed:
            for group in reversed(self._created):
                _destroy(group)
            if self._owns_world and dist.is_initialized():
                _destroy()
        self._groups.clear()
        _forget(self)

    @property
    def _destroyed(self) -> bool:
        """Whether the script has called dist.destroy_process_group(), which ends all groups."""
        known = self._groups.get((self._whole, 0))  # None if `reform` failed half-way
        return known is not None and known is not dist.group.WORLD

    def _check(self, axes: Sequence[str]) -> None:
        if self._closed:
            raise UserError("this mesh is closed: call imece.init() again")
        if not axes or len(set(axes)) != len(axes) or any(axis not in AXES for axis in axes):
            named = ", ".join(axes) or "nothing"
            raise UserError(f"{named}: name one or more different axes of {', '.join(AXES)}")

    def _make_groups_of_hosts(self) -> None:
        """Make all groups that a call over hosts needs, lanes too.

        Not on GPUs: there such a call is made only on request, and NCCL's groups cost memory, so each group
        is made on first use.
        """
        if self.device.type != "cpu" or len(self.hosts) == 1 or self.cross_group is None:
            return
        for lane in range(1 + LANES):
            self.host_group_in(lane)

    def _group(self, sets: Partition, lane: Lane = 0, backend: str | None = None) -> dist.ProcessGroup:
        """backend: another one than usual for these ranks; such a group needs a lane of its own."""
        if (sets, lane) not in self._groups:
            self._check_same_order(sets)
            on_host = all(any(set(ranks) <= set(host) for host in self.hosts) for ranks in sets)
            backend = backend or (self._backends.host if on_host else self._backends.world)
            for ranks in sets:
                with connections.of_groups():
                    group = dist.new_group(ranks=list(ranks), backend=backend, timeout=self._timeout)
                if self.rank in ranks:
                    self._groups[sets, lane] = group
                    self._created.append(group)
        return self._groups[sets, lane]

    def _check_same_order(self, sets: Partition) -> None:
        """UserError if another rank creates another group now: that would hang for the whole timeout."""
        key, mine = f"group/{len(self._groups)}", repr(sets)
        theirs = self._store.compare_set(key, "", mine).decode()
        if theirs != mine:
            raise UserError(
                f"rank {self.rank} asks for the groups {mine[:_SHOWN_CHARS]} where another rank asked for "
                f"{theirs[:_SHOWN_CHARS]}: "
                "all ranks must ask for groups in the same order"
            )


_open: Mesh | None = None


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

    An existing process group is adopted. A second call with the same arguments returns the same mesh. The
    mesh is closed when the process ends, by `close()`, or by torch's `dist.destroy_process_group()`; after
    that a call opens a new one.

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
    if _open is None and not dist.is_initialized():
        check_not_opened()  # before its failure could pass for that of the rank
    try:
        return _open_or_same(axes, ranks, backend, device, timeout)
    except Exception:
        member = os.environ.get(MEMBER, "")
        if _open is None and member.isdecimal():  # no mesh would report it, if it ends this process
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
    global _open, _opened_with, _openings
    if _open is not None and _open._destroyed:
        _open.close()
    adopted = dist.is_initialized() if _open is None else not _open._owns_world
    if backend is None and not adopted:
        backend = os.environ.get(BACKEND) or None
    if not isinstance(timeout, timedelta):
        raise UserError(f"timeout={timeout!r}: give a datetime.timedelta, timedelta(seconds=60) say")
    if axes is not None and not isinstance(axes, Mapping):
        raise UserError(f"axes={axes!r}: give sizes by name, {{'shard': 2}} say")
    asked = _Asked(None if axes is None else dict(axes), ranks, backend, str(device), timeout)
    if _open is not None:
        if asked != _opened_with:
            before, now = _opened_with.differences(asked)
            raise UserError(
                f"imece.init() was called with {before} before, and now with {now}: close() the mesh that is "
                "open to open another"
            )
        return _open
    check_proc()
    check_backend(backend)
    _openings += 1
    try:
        _open = _arrange(asked, device, adopted)
    except BaseException:
        if dist.is_initialized() and not adopted:
            _destroy()
        raise
    _opened_with = asked
    if _open.device.type == "cpu":
        heap.keep_from_first_step()
    if _open.world.member is not None:
        trackers.outlive_launcher()
    atexit.register(_open.close)
    mark_opened(_open.world)
    opened()
    return _open


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
    mesh = current()
    axes, backend, timeout = _opened_with.axes, _opened_with.backend, _opened_with.timeout
    if not mesh.can_change:
        why = f"axes {axes}" if axes is not None else "a process group that existed before"
        raise UserError(f"imece.init() was called with {why}: such a world cannot change its ranks")
    # Gloo closes a group's connections with the last reference to it, and other ranks wait for that.
    mesh._groups, mesh._created, mesh._device_mesh = {}, [], None
    if dist.is_initialized():  # else the last attempt got no further
        _destroy()
    world = replace(mesh.world, rank=rank, world_size=world_size, joining=False)
    sizes = check_axes(None, world_size)
    # The others come after their step and whatever follows it, such as an evaluation, so a rank that joins
    # sets no limit. If a rank is gone, the store raises; if a rank lives but never comes, the others'
    # timeouts end the wait, in their collectives and here.
    patience = timedelta.max if mesh.world.joining else timeout
    hosts = meet(store, world, sizes, backend, mesh.device, patience)
    met()
    backends = choose_backends(mesh.device, len(hosts) == 1, backend)
    hook = sys.excepthook
    open_default_group(world, backends.world, store, timeout)
    sys.excepthook = hook  # torch wraps it each time, which prefixes every line
    mesh._take(world, backends, hosts, sizes, dist.PrefixStore("mesh", store))
    return mesh


def current() -> Mesh:
    """The mesh that `imece.init` opened; UserError if there is none."""
    if _open is None:
        raise UserError("there is no mesh of ranks yet: call imece.init() first")
    return _open


def hosts_in(group: dist.ProcessGroup) -> Partition | None:
    """The ranks of `group`, numbered within the group, by host; hosts without any are left out. None before
    `imece.init`."""
    if _open is None:
        return None
    places = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
    found = (tuple(places[rank] for rank in host if rank in places) for host in _open.hosts)
    return tuple(host for host in found if host)


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
    else:
        backends = choose_backends(own_device, len(hosts) == 1, backend)
        open_default_group(world, backends.world, store, timeout)
    if (dist.get_world_size(), dist.get_rank()) != (world.world_size, world.rank):
        raise UserError(
            f"torch.distributed sees rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"the launcher started rank {world.rank} of {world.world_size}"
        )
    mesh_store = dist.PrefixStore("mesh", store)
    return Mesh(
        world, own_device, backends, hosts, sizes, store=mesh_store, timeout=timeout, owns_world=not adopted
    )


def _forget(mesh: Mesh) -> None:
    global _open
    if _open is mesh:
        _open = None
        os.environ.pop(OPENED, None)
    atexit.unregister(mesh.close)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialized"
    return group
