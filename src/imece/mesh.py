"""The ranks of this job, arranged: axes, hosts, and the groups over them.

axes.py defines the axes, groups.py makes the groups. A process has one `Mesh`, which opening.py makes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from imece import moments, status
from imece.axes import AXES, PLACEMENT, Partition, coordinates, crossing, partition
from imece.buckets import LANES
from imece.errors import UserError
from imece.groups import Groups, finish
from imece.listing import many
from imece.world import OPENED, World, mark_opened


class Mesh:
    """The ranks of this job, arranged. `imece.init` makes one on each rank, all of equal shape.

        mesh = imece.init({"replicate": 2, "tensor": 4})
        imece.all_reduce(tensor, "avg", group=mesh.group("replicate"))
        inputs = batch[mesh.batch_rank :: mesh.batch_ranks].to(mesh.device)

    On CPUs of several hosts the groups of hosts exist from the beginning. A method that returns any other
    group creates it on first use. That is a call of the whole world: all ranks must ask for the same groups
    in the same order, as with any collective; otherwise they get an error.
    """

    def __init__(
        self,
        world: World,
        sizes: Mapping[str, int],
        groups: Groups,
        device: torch.device,
        *,
        launchers: dist.Store,
        owns_world: bool,
        can_change: bool,
    ) -> None:
        """sizes: as `check_axes` returns them. launchers: through which this rank talks to its launcher.
        owns_world: closing the mesh also destroys torch's default group. torch.distributed must be
        initialized."""
        self.device = device
        """Where this rank's tensors belong."""
        self.can_change = can_change
        """Whether other ranks can replace these: not if axes were asked for, nor in a process group that
        imece did not open."""
        self.owns_world = owns_world
        self._closed = False
        self._pid = os.getpid()
        self.take(world, sizes, groups)
        self._launchers = launchers
        status.tell_running(launchers, world.known_as)
        self._stop_telling = status.tell_failures(lambda: launchers, world.known_as)

    def take(self, world: World, sizes: Mapping[str, int], groups: Groups) -> None:
        """Become the mesh of these ranks, whose default group is open."""
        self.world = world
        self.hosts = groups.hosts
        """The ranks of each host."""
        self.backend = groups.backends.own
        """Of torch.distributed, for tensors on `device`."""
        self._sizes, self._groups = dict(sizes), groups
        self._device_mesh: DeviceMesh | None = None
        for begin in moments.once_arranged:
            begin()
        self._make_groups_of_hosts()

    def let_go(self) -> None:
        """Let go of these ranks' groups, which nobody may use any more; `take` follows."""
        self._groups.forget()
        self._device_mesh = None

    def open(self) -> None:
        """Be the mesh of this process until `close`, which its exit calls too."""
        global _open
        _open = self
        atexit.register(self.close)
        mark_opened(self.world)

    def __repr__(self) -> str:
        axes = [f"{axis} {self._sizes[axis]}" for axis in PLACEMENT if self._sizes[axis] > 1]
        where = f"rank {self.rank} of {self.world_size} on {many(len(self.hosts), 'host')}"
        return f"<imece.Mesh {', '.join([where, *axes, str(self.device), self.backend])}>"

    @property
    def rank(self) -> int:
        """This process' number among all ranks."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.world.world_size

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
        return self._groups.over(partition(axes, self._sizes))

    def messages_group(self, *axes: str) -> dist.ProcessGroup:
        """As `group`, for batches of messages, torch.distributed.batch_isend_irecv's too. Over NCCL this is
        another group. NCCL runs the calls on a group one after the other, so ranks must begin them in one
        order; and no check tells when a thread beside may begin a collective among messages, which are not
        checked. Nor does torch before 2.14 send a batch as one in groups that are not of its own class."""
        if self.backend != "nccl":
            return self.group(*axes)
        return self._groups.over(partition(axes, self._sizes), "messages", "nccl")

    @property
    def world_group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self._groups.world

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
        return self._groups.over(self.hosts)

    def host_group_in(self, lane: int) -> dist.ProcessGroup:
        """Another group of this host's ranks, for calls beside those on `host_group`, which is lane 0."""
        return self._groups.over(self.hosts, lane)

    @property
    def cross_group(self) -> dist.ProcessGroup | None:
        """The ranks with this rank's index on each host, one per host. None if hosts differ in size."""
        crossed = crossing(self.hosts)
        return None if crossed is None else self._groups.over(crossed)

    @property
    def has_groups_of_hosts(self) -> bool:
        """Whether `host_group` and `cross_group` can be had without a call of all ranks."""
        crossed = crossing(self.hosts)
        return crossed is None or self._groups.has(self.hosts, crossed)

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
        global _open
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        finish()
        with contextlib.suppress(RuntimeError):  # whoever serves the store may have left before us
            status.tell_closed(self._launchers, self.world.known_as)
        self._stop_telling()
        self._groups.destroy(with_default=self.owns_world)
        if _open is self:
            _open = None
            os.environ.pop(OPENED, None)
        atexit.unregister(self.close)

    @property
    def was_destroyed(self) -> bool:
        """Whether the script has called dist.destroy_process_group(), which ends all groups."""
        return self._groups.were_destroyed

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


_open: Mesh | None = None  # of this process


def opened() -> Mesh | None:
    """The mesh that `imece.init` opened, if it did."""
    return _open


def current() -> Mesh:
    """The mesh that `imece.init` opened; UserError if there is none."""
    if _open is None:
        raise UserError("there is no mesh of ranks yet: call imece.init() first")
    return _open


def chosen(mesh: Mesh | None) -> Mesh:
    """The given mesh; None: that of `imece.init`, UserError if there is none. TypeError for what is no mesh,
    as a name or torch's DeviceMesh."""
    if mesh is not None and not hasattr(mesh, "batch_ranks"):
        raise TypeError(f"mesh={mesh!r}: what imece.init() returned is wanted")
    return current() if mesh is None else mesh


def hosts_in(group: dist.ProcessGroup) -> Partition | None:
    """The ranks of `group`, numbered within the group, by host; hosts without any are left out. None before
    `imece.init`."""
    if _open is None:
        return None
    places = {rank: at for at, rank in enumerate(dist.get_process_group_ranks(group))}
    found = (tuple(places[rank] for rank in host if rank in places) for host in _open.hosts)
    return tuple(host for host in found if host)
