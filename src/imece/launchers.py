"""Reads which rank this is from the variables of its launcher: torchrun, SLURM, Open MPI, MPICH.

Nothing here talks to another rank. If several launchers left their variables, `read_world` wants them to
agree: a world of another size than the user asked for would train silently wrong.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from imece.errors import UserError
from imece.world import AGENT_PORT, JOINING, LOOPBACK, MEMBER, Launcher, World, host_id

MOST_RANKS = 32_767
"""Of a job: what ranks tell each other of a call, and record of it, has 15 bits for a rank."""
_MOST = 1_000_000  # members, which are counted on as they are replaced, and hosts
# Below Linux' ephemeral ports (32768 and up), so that a derived port is rarely taken by a client.
_FIRST_PORT, _PORTS = 15_000, 17_000
_FIRST_HOST = re.compile(r"([^\[\],\s]+(?:\[\d+[\d,-]*\][^\[\],\s]*)*)(?:,|$)")
_NUMBERS = re.compile(r"\[(\d+)[\d,-]*\]")  # several in one name where hosts stand in rows and racks
# Step ids that SLURM gives to batch scripts, interactive shells and the like start here.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class _Claim:
    """What the variables of one launcher say."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    said_in: str
    """The name of the variable with world_size, for messages."""
    job: str | None = None


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """The world that the launchers' variables in `environ` describe; one rank if there are none.

    UserError if a launcher's variables are incomplete or malformed, or if two launchers disagree.
    """
    if environ.get(JOINING) == "1":
        return _joining_world(environ)
    slurm = _slurm(environ)
    mpi = _openmpi(environ) or _mpich(environ)
    torchrun = _torchrun(environ)
    if mpi and slurm:
        _check_nested(inner=mpi, outer=slurm, inner_nodes=-(-mpi.world_size // mpi.local_world_size))
    if torchrun:
        for outer in (mpi, slurm):
            if outer:
                nodes = _number(environ, "GROUP_WORLD_SIZE") if "GROUP_WORLD_SIZE" in environ else None
                _check_nested(inner=torchrun, outer=outer, inner_nodes=nodes)
    claim = torchrun or mpi or slurm
    if claim is None or (claim is torchrun and "GROUP_WORLD_SIZE" not in environ and not mpi and not slurm):
        _check_allocation(environ, claim)
    host = host_id(environ)
    if claim is None:
        return World(0, 1, 0, 1, host, "single")
    address, port = _master(environ, claim)
    return World(
        rank=claim.rank,
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        local_world_size=claim.local_world_size,
        host=host,
        launcher=claim.launcher,
        master_addr=address,
        master_port=port,
        job=claim.job if "MASTER_PORT" not in environ else None,
        member=_number(environ, MEMBER) if MEMBER in environ else None,
        agent_port=_agent_port(environ),
        full_size=_full_size(environ),
    )


def _joining_world(environ: Mapping[str, str]) -> World:
    """A world of one rank, with the local rank of the process that it replaces."""
    for name in (MEMBER, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise UserError(f"the environment has {JOINING}=1 but not {name}: only imece launch sets them")
    return World(
        rank=0,
        world_size=1,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", least=1),
        host=host_id(environ),
        launcher="torchrun",
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT", least=1, most=65_535),
        member=_number(environ, MEMBER),
        joining=True,
        agent_port=_agent_port(environ),
        full_size=_full_size(environ),
    )


def _agent_port(environ: Mapping[str, str]) -> int | None:
    """None unless this is a member: a process that a rank starts inherits the variables, but is no member."""
    if MEMBER not in environ or AGENT_PORT not in environ:
        return None
    return _number(environ, AGENT_PORT, least=1, most=65_535)


def _full_size(environ: Mapping[str, str]) -> int | None:
    """None for whoever is no member. Each host of a job has equally many ranks."""
    if MEMBER not in environ or "GROUP_WORLD_SIZE" not in environ:
        return None
    return _number(environ, "GROUP_WORLD_SIZE", least=1) * _number(environ, "LOCAL_WORLD_SIZE", least=1)


def derived_port(job: str) -> int:
    """The port on which the ranks of `job` meet if nobody sets MASTER_PORT: the same on all ranks."""
    return _FIRST_PORT + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % _PORTS


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],cpu1" -> "gpu07".

    UserError if `nodelist` is not a node list.
    """
    match = _FIRST_HOST.match(nodelist)
    if match is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} is not a list of hosts: give MASTER_ADDR")
    return _NUMBERS.sub(r"\1", match[1])


def _number(environ: Mapping[str, str], name: str, *, least: int = 0, most: int = _MOST) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise UserError(f"{name}={environ[name]!r} in the environment is not a number from {least} to {most}")
    return int(text)


def _claim(
    environ: Mapping[str, str], launcher: Launcher, names: tuple[str, str, str, str], job: str | None = None
) -> _Claim:
    """What the four variables `names` say: rank, world size, local rank, local world size."""
    missing = [name for name in names if name not in environ]
    if missing:
        there = next(name for name in names if name in environ)
        raise UserError(
            f"the environment has {there} but not {', '.join(missing)}: "
            "set all of them, or none to run as one rank"
        )
    rank, size, local_rank, local_size = names
    claim = _Claim(
        launcher,
        rank=_number(environ, rank),
        world_size=_number(environ, size, least=1, most=MOST_RANKS),
        local_rank=_number(environ, local_rank),
        local_world_size=_number(environ, local_size, least=1),
        said_in=size,
        job=job,
    )
    for low, low_name, high, high_name in (
        (claim.rank, rank, claim.world_size, size),
        (claim.local_rank, local_rank, claim.local_world_size, local_size),
    ):
        if low >= high:
            raise UserError(f"{low_name}={low}, but {high_name}={high}: ranks count from 0 to {high - 1}")
    if claim.local_world_size > claim.world_size:
        raise UserError(f"{local_size}={claim.local_world_size} is more than {size}={claim.world_size}")
    return claim


def _torchrun(environ: Mapping[str, str]) -> _Claim | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    complete = dict(environ)
    one_host = environ.get("MASTER_ADDR") in (LOOPBACK, "localhost") or environ.get("WORLD_SIZE") == "1"
    if one_host and "RANK" in environ and "WORLD_SIZE" in environ:  # set by hand: the local ones follow
        complete.setdefault("LOCAL_RANK", environ["RANK"])
        complete.setdefault("LOCAL_WORLD_SIZE", environ["WORLD_SIZE"])
    return _claim(complete, "torchrun", names)


def _openmpi(environ: Mapping[str, str]) -> _Claim | None:
    prefix = "OMPI_COMM_WORLD_"
    names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    if not any(name in environ for name in names):
        return None
    namespace = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    return _claim(environ, "openmpi", names, job=f"openmpi {namespace}" if namespace else None)


def _mpich(environ: Mapping[str, str]) -> _Claim | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    # srun --mpi=pmi2 sets the first two as well; only Hydra also sets the local ones.
    marks = names[2:] if in_job_step(environ) else names
    if not any(name in environ for name in marks):
        return None
    return _claim(environ, "mpich", names)


def in_job_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, and not sbatch or salloc."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in environ:
        return False
    return not (step.strip().isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)


def _slurm(environ: Mapping[str, str]) -> _Claim | None:
    if not in_job_step(environ):
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    complete = dict(environ)
    if size in environ:
        complete["SLURM_TASKS_ON_NODE"] = str(_slurm_local_size(environ, _number(environ, size, least=1)))
    job = f"slurm {environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return _claim(complete, "slurm", ("SLURM_PROCID", size, "SLURM_LOCALID", "SLURM_TASKS_ON_NODE"), job)


def _slurm_local_size(environ: Mapping[str, str], world_size: int) -> int:
    """The number of tasks of this job step on this node, from a text like "2(x3),1" and the node's index."""
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE"))
    if layout is None:
        return world_size
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={layout!r} is not a list like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE is {layout!r}")
    return counts[node]


def _check_nested(inner: _Claim, outer: _Claim, inner_nodes: int | None) -> None:
    """Refuse two launchers that describe different worlds.

    The tasks of `outer` started `inner`. That is fine if both count the same ranks, or if `outer` started no
    more than one task for each of the `inner_nodes` hosts that `inner` spans.
    """
    if inner.world_size == outer.world_size:
        if inner_nodes is None and inner.rank != outer.rank:
            raise UserError(
                f"{outer.launcher} says this is rank {outer.rank}, RANK says {inner.rank}: unset one of them"
            )
        return
    if inner_nodes is not None and outer.world_size <= inner_nodes:
        return
    raise UserError(
        f"{outer.said_in}={outer.world_size}, but {inner.said_in}={inner.world_size}: "
        f"{outer.launcher} and {inner.launcher} each started a world; use one of them, or torchrun --nnodes"
    )


def _check_allocation(environ: Mapping[str, str], claim: _Claim | None) -> None:
    """Refuse a single process in an allocation of several tasks: srun was meant to start it."""
    tasks = _number(environ, "SLURM_NTASKS", least=1) if "SLURM_NTASKS" in environ else 1
    if tasks == 1:
        return
    if claim is None:
        raise UserError(
            f"SLURM_NTASKS={tasks}, but this is one process outside of any job step: start it with srun"
        )
    if claim.world_size != tasks:
        raise UserError(f"SLURM_NTASKS={tasks}, but {claim.said_in}={claim.world_size}: start it with srun")


def _master(environ: Mapping[str, str], claim: _Claim) -> tuple[str | None, int | None]:
    """Address and port of rank 0's store, as far as the environment says."""
    address = environ.get("MASTER_ADDR", "").strip() or None
    port = _number(environ, "MASTER_PORT", least=1, most=65_535) if environ.get("MASTER_PORT") else None
    if claim.launcher == "torchrun":
        if claim.world_size > 1 and (address is None or port is None):
            missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
            raise UserError(
                f"WORLD_SIZE={claim.world_size}, but {missing} is not set: use torchrun or imece launch"
            )
        return address, port
    if address is None and claim.local_world_size == claim.world_size:
        address = LOOPBACK
    if address is None and claim.launcher == "slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = first_host(nodes)
    if port is None and claim.job is not None:
        port = derived_port(claim.job)
    if address is None:
        raise UserError(
            f"{claim.said_in}={claim.world_size} ranks on several hosts need MASTER_ADDR (rank 0's host) "
            "and MASTER_PORT in the environment"
        )
    return address, port
