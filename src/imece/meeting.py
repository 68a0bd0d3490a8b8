"""How the ranks of a job meet: what they compare, who shares a host, and torch's group of all ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from imece.axes import Partition
from imece.device import adopted_backends, choose_backends
from imece.errors import UserError
from imece.store import swap_notes
from imece.system import connections
from imece.system.addresses import address_of_name, interface_of, interfaces, is_loopback, way_to
from imece.world import LOOPBACK, World, host_id

MEETING_S = 600.0  # ranks that have not met by then never will
_hooked = False
"""Whether torch has wrapped `sys.excepthook`: the wrapper, of which each group adds one, puts the rank in
front of every line."""
_NO_INTERFACE = "Unable to find address for"  # what Gloo says of GLOO_SOCKET_IFNAME
# For ranks that go on without dead ones and abort NCCL's communicators themselves, torch's watchdog must do
# nothing at an error. Otherwise it ends a healthy process; or it sleeps for a minute, and its monitor for
# eight, to make dumps, and destroying the group waits for both.
# The monitor stays on (TORCH_NCCL_ENABLE_MONITORING): a process that is stuck in CUDA should be replaced.
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


def meet(
    store: dist.Store,
    world: World,
    sizes: Mapping[str, int],
    backend: str | None,
    device: torch.device,
    timeout: timedelta,
    adopted: bool = False,
) -> Partition:
    """Check that all ranks want the same; return the ranks of each host."""
    own = adopted_backends(device, None).own if adopted else choose_backends(device, True, backend).own
    note: dict[str, Any] = {
        "world size": world.world_size,
        "axes": dict(sizes),
        "backend": backend,
        "device": device.type,
        "torch": torch.__version__,
        "host": host_id(),
        "rank 0 at": None if adopted else _rank_0_at(world),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
    }
    notes = swap_notes(store, world.rank, world.world_size, note, timeout)
    for rank, other in enumerate(notes):
        for key in ("world size", "axes", "backend", "device", "torch"):
            if other.get(key) != notes[0].get(key):
                raise UserError(f"{key}: {notes[0].get(key)} on rank 0, but {other.get(key)} on rank {rank}")
    hosts: dict[str, list[int]] = {}
    gpus: dict[tuple[str, str], int] = {}
    for rank, other in enumerate(notes):
        hosts.setdefault(str(other["host"]), []).append(rank)
        first = gpus.setdefault((str(other["host"]), str(other["gpu"])), rank)
        if own == "nccl" and other["gpu"] is not None and first != rank:
            raise UserError(
                f"ranks {first} and {rank} share GPU {other['gpu']}, which NCCL cannot: start one rank for "
                "each GPU, or use backend='gloo' (IMECE_BACKEND=gloo) or device='cpu'"
            )
    if len(hosts) > 1 and not adopted:
        _choose_interface([at for other in notes if isinstance(at := other.get("rank 0 at"), list)])
    return tuple(tuple(ranks) for ranks in hosts.values())


def _rank_0_at(world: World) -> tuple[str, str] | None:
    """This rank's address towards rank 0, and rank 0's as this rank finds it."""
    if world.world_size == 1 or world.master_addr is None or world.master_port is None:
        return None
    return way_to((world.master_addr, world.master_port))


def _choose_interface(ways: Sequence[Sequence[object]]) -> None:
    """Make Gloo listen where the other hosts reach this one: at the interface that leads to rank 0.

    By itself it listens at the address of this host's name. That is loopback on many hosts, which write
    127.0.1.1 beside their own name. ways: of all ranks, of `_rank_0_at`.
    """
    own = address_of_name()
    if own is not None and not is_loopback(own):
        return
    # Rank 0's host may know itself by loopback alone, and then finds its address among those of the others.
    for address in (str(address) for way in ways for address in way):
        if not is_loopback(address) and (interface := interface_of(address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return


def adopted_world(world: World) -> World:
    """The world of the existing process group; UserError if a launcher describes another one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if world.launcher == "single":  # nobody says which ranks share a host, before they meet
        return replace(world, rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    if (rank, size) != (world.rank, world.world_size):
        raise UserError(
            f"torch.distributed was initialized as rank {rank} of {size}, but {world.launcher} started "
            f"rank {world.rank} of {world.world_size}"
        )
    return world


def open_default_group(world: World, backend: str, store: dist.Store, timeout: timedelta) -> None:
    """Open torch's default group, without `device_id`. With it torch would ask the group for its backend in
    C++, which "shm" does not have; and for every later group all ranks would split NCCL's communicator, in
    which the members of a group with shm beside NCCL do not take part. The device is the current one.
    """
    if world.master_addr in (LOOPBACK, "localhost", None) and world.agent_port is None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # otherwise they listen on the network
            os.environ.setdefault(variable, "lo")
    if world.member is not None:
        for variable, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(variable, value)
    # torch names the group, and its keys in the store, by this count. It counts up before it makes the group,
    # and only destroying a group resets the count: ranks that failed half-way would never find the others.
    dist.distributed_c10d._world.group_count = 0
    global _hooked
    hook = sys.excepthook
    try:
        with connections.of_groups():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("torch", store),
                rank=world.rank,
                world_size=world.world_size,
                timeout=timeout,
            )
    except RuntimeError as error:
        if _NO_INTERFACE not in str(error):
            raise
        wrong, here = os.environ.get("GLOO_SOCKET_IFNAME", ""), ", ".join(interfaces())
        raise UserError(
            f"GLOO_SOCKET_IFNAME={wrong}: {socket.gethostname()} has no such interface with an address, but "
            f"{here}: name the one that leads to the other hosts, or unset it"
        ) from None
    if _hooked:
        sys.excepthook = hook
    _hooked = True
