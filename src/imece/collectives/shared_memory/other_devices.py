"""Tensors that are not on the CPU, in a group made for "cpu:shm,cuda:nccl"."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def owner_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of "shm" for whose other devices this group was made; any other group itself."""
    known = _owners.get(group)
    return (known() if known is not None else None) or group


class OtherDevices:
    """Groups of other backends, each made when the first tensor of its device comes.

    torch stops asking for backends as soon as one returns a whole ProcessGroup, as shm's must. The backends
    that the user asked for are in torch's table, under the group's name.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._making = threading.Lock()  # the first tensors of a device may come in two threads at once

    def on(self, device: torch.device, owner: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """The group for tensors of a device; None for the CPU. ValueError if there is no backend for it."""
        if device.type == "cpu":
            return None
        found = self._groups.get(device.type)
        if found is None:
            with self._making:
                found = self._groups.get(device.type)
                if found is None:
                    found = self._make(device.type, owner)
                    _owners[found] = weakref.ref(owner)
                    self._groups[device.type] = found
        return found

    @property
    def backends(self) -> list[Any]:
        """torch's backends of the groups made so far."""
        return [group._get_backend(torch.device(device)) for device, group in list(self._groups.items())]

    def asked(self, owner: dist.ProcessGroup) -> dict[str, str]:
        """The backend for each kind of device, as asked for when the group was made."""
        asked = distributed_c10d._world.pg_backend_config.get(owner, "cpu:shm")
        return dict(part.split(":") for part in asked.split(",") if ":" in part)

    def _make(self, device: str, owner: dist.ProcessGroup) -> dist.ProcessGroup:
        asked = self.asked(owner)
        if asked.get(device) != "nccl" or not dist.is_nccl_available():
            made = ",".join(":".join(each) for each in asked.items())
            cure = "; use init_process_group('cpu:shm,cuda:nccl')" if device == "cuda" else ""
            raise ValueError(
                f"this group has no backend for {device} tensors: it was made with {made!r}{cure}"
            )
        store = dist.PrefixStore(f"{device}/", self._store)
        group = dist.ProcessGroup(store, self._rank, self._world_size)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.group_name = GroupName(f"{owner.group_name} {device}")
        options.global_ranks_in_group = dist.get_process_group_ranks(owner)
        nccl = dist.ProcessGroupNCCL(store, self._rank, self._world_size, options)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.NCCL, nccl)
        group._set_group_name(options.group_name)
        return group

    def set_timeout(self, timeout: timedelta) -> None:
        """Another timeout for groups made so far and later."""
        self._timeout = timeout
        for backend in self.backends:
            backend._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """End the groups made so far, once their work is over."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def abort(self) -> None:
        """End them at once."""
        for group in self._groups.values():
            group.abort()
        self._groups.clear()
