"""Which rank am I, of how many, on which host: what one process knows of its world, and says of it in the
environment. launchers.py reads it there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from imece.errors import UserError

Launcher = Literal["torchrun", "slurm", "openmpi", "mpich", "single"]

LOOPBACK = "127.0.0.1"
MEMBER = "IMECE_MEMBER"
"""The environment variable that holds this process' number as a member of its job (membership/roster.py)."""
JOINING = "IMECE_JOINING"
"""Set to 1 for a member that was started later: it is a world of one rank until the others take it in."""
AGENT_PORT = "IMECE_AGENT_PORT"
"""On several hosts: the loopback port at which this host's launcher serves a store to its own ranks."""
OPENED = "IMECE_OPENED"
"""Set by a rank as long as its world is open, and so inherited by what it starts (see `mark_opened`)."""
BACKEND = "IMECE_BACKEND"
"""The environment variable with the backend that `imece.init` takes if the script names none."""
BACKENDS = ("shm", "gloo", "nccl", "mpi", "ucc", "xccl")
"""The values that IMECE_BACKEND may have: imece's "shm" and torch's backends."""
SCHEDULE = "IMECE_SCHEDULE"
"""The environment variable with a schedule for every collective that knows it (collectives/auto.py)."""


@dataclass(frozen=True)
class World:
    """What one process knows about its world before it has met another rank.

    rank, world_size: this process' number among all ranks, from 0 on, and the number of ranks.
    local_rank, local_world_size: the same among the ranks of this host, as the launcher counts them.
    host: two ranks have the same name here if and only if they share a host (see `host_id`).
    launcher: whose variables say this: "torchrun" (`imece launch` sets the same), "slurm", "openmpi",
        "mpich"; "single" if there are none.
    master_addr, master_port: where the store listens in which ranks meet; None if no variable says so.
    job: tells this job from others on the same host; None if only the port does.
    member: this process' number as a member of its job, which never changes; None if the launcher gives none.
    joining: this process was started to replace one that died, and is alone until the others take it in.
    agent_port: the loopback port of this host's launcher's store; None if ranks meet in that same store.
    full_size: the number of ranks while no host of the job is missing; None if the launcher replaces nobody.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    launcher: Launcher
    master_addr: str | None = None
    master_port: int | None = None
    job: str | None = None
    member: int | None = None
    joining: bool = False
    agent_port: int | None = None
    full_size: int | None = None

    @property
    def is_partial(self) -> bool:
        """Whether some ranks of the job are missing, or this one joins them and is alone until then."""
        return self.full_size is not None and self.world_size < self.full_size

    @property
    def known_as(self) -> int:
        """The number under which the launcher knows this process."""
        return self.rank if self.member is None else self.member


def mark_opened(world: World) -> None:
    """Note in the environment that this process is a rank of `world`, for `check_not_opened` in what it
    starts."""
    if world.launcher == "torchrun" and (world.world_size > 1 or world.joining):
        os.environ[OPENED] = f"{os.getpid()} {world.rank} {_meeting_place(os.environ)}"


def check_not_opened(environ: Mapping[str, str] = os.environ) -> None:
    """UserError if a rank has started this process, with its own variables: it would wait for the others,
    which have met already. What a launcher starts that a rank has started has another place to meet."""
    pid, rank, place = [*environ.get(OPENED, "").split(" ", 2), "", "", ""][:3]
    if "RANK" in environ and place == _meeting_place(environ) and pid != str(os.getpid()):
        raise UserError(
            f"rank {rank} (pid {pid}) has started this process, which is no rank but has its variables: "
            "start it by imece launch --ranks 1, or without RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
        )


def _meeting_place(environ: Mapping[str, str]) -> str:
    return f"{environ.get('MASTER_ADDR')} {environ.get('MASTER_PORT')}"


def host_id(environ: Mapping[str, str] = os.environ) -> str:
    """A name that two processes share if and only if they share a host: its memory, boot and process ids.

    IMECE_HOST overrides it, so that tests can make several hosts out of one.
    """
    given = environ.get("IMECE_HOST", "")
    if given:
        return given[:256]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {boot} {namespace}"
