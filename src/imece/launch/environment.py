"""The environment of a rank that this host starts."""

from __future__ import annotations

from collections.abc import Mapping

from imece.launch.hosts.token import VARIABLES
from imece.system.control_groups import usable_cores
from imece.world import AGENT_PORT, JOINING, LOOPBACK, MEMBER

MOST_RANKS_PER_HOST = 1024  # more would be a typing error and exhaust the host


def worker_environment(
    environ: Mapping[str, str],
    rank: int,
    ranks: int,
    port: int,
    job: str,
    *,
    member: int | None = None,
    joining: bool = False,
    starts: int = 0,
) -> dict[str, str]:
    """`environ` with torchrun's variables for one of `ranks` ranks of this host.

    member: its number, if the parent keeps a roster. joining: it replaces a dead rank, and is a world of its
    own at first. starts: torchrun's restart count, which keeps torch's keys in the store apart.

    The store listens on loopback at `port` and is served by the parent. Threads are divided among ranks; Gloo
    and NCCL stay on loopback, unless the user has set their variables.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    own: dict[str, object] = {
        "RANK": 0 if joining else rank,
        "WORLD_SIZE": 1 if joining else ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": 0 if joining else rank,
        "ROLE_WORLD_SIZE": 1 if joining else ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": starts,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": job,
    }
    if member is not None:
        own[MEMBER] = member
    if joining:
        own[JOINING] = 1
    # A rank may itself start ranks: they are no members of its job. None needs to know the launchers' secret.
    left_out = (MEMBER, JOINING, AGENT_PORT, *VARIABLES)
    theirs = {name: value for name, value in environ.items() if name not in left_out}
    return {**defaults, **theirs, **{name: str(value) for name, value in own.items()}}
