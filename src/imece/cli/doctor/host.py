"""What `imece doctor` finds out about this host without starting a rank."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from imece.cli.launch.launch import check_variables
from imece.cli.options import nearest
from imece.collectives.shared_memory import segment
from imece.device import check_backend, usable_gpus
from imece.errors import UserError
from imece.launchers import read_world
from imece.listing import many
from imece.system.addresses import address_of_name, is_loopback
from imece.system.control_groups import allowed_bytes, usable_cores
from imece.system.open_files import TRAIN, lacking, most_ranks
from imece.world import BACKEND, LOOPBACK, SCHEDULE
from imece.writing import NO_TEMPORARY, temporary_files, try_folder

Status = Literal["ok", "warn", "fail", "link"]
_OLDEST_TORCH = (2, 11)
_FEW_FILES = 1024
_THREADS = 16  # of a rank, beside those that compute: Gloo's, autograd's, its own
VARIABLES = (BACKEND, SCHEDULE, "IMECE_HOST", "IMECE_HERE", "IMECE_TOKEN", "IMECE_TOKEN_FILE")
_BETWEEN_PROCESSES = (
    "IMECE_AGENT_PORT", "IMECE_FINISHED", "IMECE_JOINING", "IMECE_MARK", "IMECE_MEMBER", "IMECE_OPENED",
    "IMECE_RECORD", "IMECE_RUN_HELD",
)  # fmt: skip
_OF_BENCH = ("IMECE_BENCH_", "IMECE_CREW_")
_LITTLE_BYTES = 64 * 2**20  # what Docker gives /dev/shm


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status
    text: str


def host_findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """All checks that need no rank."""
    yield software(torch.__version__)
    shm = Path("/dev/shm")
    yield from memory(segment.available_bytes(), _free_bytes(shm), _refusal(shm))
    yield port()
    interfaces = sorted(psutil.net_if_addrs())
    yield from interface(environ, "GLOO_SOCKET_IFNAME", interfaces)
    yield from interface(environ, "NCCL_SOCKET_IFNAME", interfaces)
    yield from threads(environ, usable_cores())
    yield from host_name(environ, socket.gethostname(), address_of_name())
    yield from launcher(environ, socket.getaddrinfo)
    yield from own_variables(environ)
    yield from locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], Path("/dev/infiniband").exists())


def software(torch_version: str) -> Finding:
    """Versions and devices."""
    total, allowed = psutil.virtual_memory().total, allowed_bytes()
    part = f"{allowed / 1e9:.1f} of " if allowed < total else ""  # in a container or job
    text = (
        f"torch {torch_version}, Python {platform.python_version()}, {usable_cores()} cores, "
        f"{part}{total / 1e9:.0f} GB; {_devices()}"
    )
    numbers = tuple(int(word) for word in torch_version.split("+")[0].split(".")[:2] if word.isdecimal())
    if numbers < _OLDEST_TORCH:
        return Finding("warn", f"{text}: imece is made for torch 2.11 or newer")
    return Finding("ok", text)


def memory(available_bytes: int, dev_shm_bytes: int | None, refusal: str = "") -> Iterator[Finding]:
    """Memory for shm, which is limited by the machine's (or container's) memory and not by /dev/shm.

    refusal: why nothing can be written in /dev/shm, however much is free."""
    if not hasattr(os, "memfd_create"):
        yield Finding("warn", "no memfd_create on this system: backend shm needs Linux, gloo will be used")
        return
    yield Finding(
        "ok" if available_bytes >= 2**30 else "warn",
        f"{available_bytes / 1e9:.1f} GB of memory available to shm (it keeps nothing in /dev/shm)",
    )
    if dev_shm_bytes is None:
        yield Finding("warn", "there is no /dev/shm: DataLoader workers of torch need it")
    elif refusal:
        yield Finding(
            "warn",
            f"/dev/shm cannot be written ({refusal}): imece does not mind, but DataLoader workers of torch "
            "need it; mount it with rw and mode 1777",
        )
    elif dev_shm_bytes <= _LITTLE_BYTES:
        yield Finding(
            "warn",
            f"/dev/shm has {dev_shm_bytes / 1e6:.0f} MB free: imece does not mind, but DataLoader workers of "
            "torch may fail; start the container with --shm-size=2g",
        )
    else:
        yield Finding("ok", f"/dev/shm {dev_shm_bytes / 1e9:.1f} GB free (for DataLoader workers)")


def port(address: str = LOOPBACK) -> Finding:
    """Whether a port can be opened at the address where ranks meet."""
    try:
        with socket.create_server((address, 0)) as listener:
            socket.create_connection(listener.getsockname(), timeout=5.0).close()
    except OSError as error:
        return Finding("fail", f"no port can be opened on {address} ({error}): ranks cannot meet")
    return Finding("ok", f"a port on {address} can be opened and reached")


def interface(environ: Mapping[str, str], name: str, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Whether the interfaces that a variable names exist."""
    value = environ.get(name)
    if value is None:
        return
    if name.startswith("NCCL"):  # "^" excludes, "=" asks for the exact name, otherwise names are prefixes
        if value.startswith("^"):
            return
        exact = value.startswith("=")
        words = value.removeprefix("=").split(",")
        bad = [w for w in words if not any(i == w or (not exact and i.startswith(w)) for i in interfaces)]
        useless = len(bad) == len(words)
    else:
        words = value.split(",")
        bad = [word for word in words if word not in interfaces]
        useless = bool(bad)
    if useless:
        yield Finding(
            "warn", f"{name}={value} names no interface: unset it, or use one of {', '.join(interfaces)}"
        )
    else:
        yield Finding("ok", f"{name}={value}")


def threads(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    """OMP_NUM_THREADS, which torch reads: too many threads for the cores, or too few."""
    value = environ.get("OMP_NUM_THREADS")
    if value is None:
        return
    words = value.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        yield Finding("warn", f"OMP_NUM_THREADS={value} is not a number: unset it, or set cores / ranks")
    elif int(words[0]) > cores:
        yield Finding(
            "warn", f"OMP_NUM_THREADS={value} on {cores} cores: ranks would wait for each other; unset it"
        )
    else:
        yield Finding("ok", f"OMP_NUM_THREADS={value}")


def host_name(environ: Mapping[str, str], name: str, address: str | None) -> Iterator[Finding]:
    """Whether this host's name leads to an address (None: to none) that other hosts reach: there Gloo
    listens unless it is told an interface."""
    if "GLOO_SOCKET_IFNAME" not in environ and (address is None or is_loopback(address)):
        yield Finding(
            "warn",
            f"this host's name {name} leads to {address or 'no address'}, where other hosts do not reach "
            "Gloo. imece.init() takes the interface that leads to rank 0; a script that calls "
            "init_process_group itself needs GLOO_SOCKET_IFNAME",
        )


def launcher(environ: Mapping[str, str], resolve: Callable[..., Any]) -> Iterator[Finding]:
    """What a launcher left in the environment: what fails here, imece.init() would refuse."""
    try:
        world = read_world(environ)
    except UserError as error:
        yield Finding("fail", f"the launcher's variables do not fit: {error}")
    else:
        if world.launcher != "single":
            yield Finding("ok", f"{world.launcher} says rank {world.rank} of {world.world_size}")
    address = environ.get("MASTER_ADDR")
    if address is None:
        return
    try:
        resolve(address, None)
    except (OSError, UnicodeError):
        yield Finding(
            "fail", f"MASTER_ADDR={address} has no address: use a name or number that this host knows"
        )
    else:
        yield Finding("ok", f"MASTER_ADDR={address} has an address")


def own_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """imece's own variables: with a value that is refused here, no rank begins."""
    for name in (BACKEND, SCHEDULE):
        if not (value := environ.get(name)):
            continue
        try:
            check_variables({name: value})
        except UserError as error:
            yield Finding("fail", str(error))
            continue
        wrong = _without_backend(value) if name == BACKEND else None
        yield Finding("fail", f"{name}={value}: {wrong}") if wrong else Finding("ok", f"{name}={value}")
    for name in sorted(environ):
        known = name in (*VARIABLES, *_BETWEEN_PROCESSES) or name.startswith(_OF_BENCH)
        if name.upper().startswith("IMECE_") and not known:
            after = len("IMECE_")
            meant = nearest(name.upper()[after:], [each[after:] for each in VARIABLES])
            hint = f"did you mean IMECE_{meant}?" if meant else f"those are {', '.join(VARIABLES)}"
            yield Finding("warn", f"{name} is no variable of imece's, and nothing reads it; {hint}")


def _without_backend(asked: str) -> str | None:
    """What this backend lacks here; None if nothing."""
    try:
        check_backend(asked)
    except UserError as error:
        return str(error)
    if "nccl" in asked and not usable_gpus():
        return "NCCL moves tensors of GPUs, and torch can use none here: unset it, or say gloo"
    return None


def open_files(ranks: int, allowed: int) -> Iterator[Finding]:
    """The limit of open files: sockets and segments count as files."""
    if (why := lacking(ranks, TRAIN, allowed)) is not None:
        yield Finding("fail", why)
    elif allowed < _FEW_FILES:
        most = most_ranks(TRAIN, allowed)
        yield Finding("warn", f"only {allowed} open files are allowed (ulimit -Hn), enough for {most} ranks")


def processes(ranks: int, free: int | None) -> Iterator[Finding]:
    """The limit of processes and threads. free: how many more may be started; None is without a limit."""
    wanted = ranks * (_THREADS + max(1, usable_cores() // ranks))
    if free is not None and free < wanted:
        yield Finding(
            "warn",
            f"only {free} more processes and threads may be started, and {many(ranks, 'rank')} may want "
            f"{wanted}: raise the limit (ulimit -u, docker --pids-limit) or start fewer ranks",
        )


def temporary() -> Iterator[Finding]:
    """A folder for temporary files: torch wants one as soon as a script makes an optimizer."""
    if not temporary_files():
        yield Finding("fail", NO_TEMPORARY)


def locked_memory(limit: int, infiniband: bool) -> Iterator[Finding]:
    """The limit of locked memory: InfiniBand locks the memory that it registers."""
    if infiniband and limit != resource.RLIM_INFINITY:
        yield Finding(
            "warn", f"locked memory is limited to {limit / 1e6:.0f} MB (ulimit -l): InfiniBand needs all"
        )


def _devices() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return f"{many(len(names), 'GPU')}: {', '.join(sorted(set(names)))}"


def _free_bytes(folder: Path) -> int | None:
    return psutil.disk_usage(str(folder)).free if folder.is_dir() else None


def _refusal(folder: Path) -> str:
    try:
        try_folder(folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""
