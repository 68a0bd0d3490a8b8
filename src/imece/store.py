"""Where ranks meet before they have a group: a torch key-value store that only its own ranks can reach.

torch's TCPStore("127.0.0.1") listens on every interface of the host. Here imece binds the socket to one
address and hands it to the store. Ranks store JSON of limited size, never a pickle.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from imece.errors import NotMetError, PeerLostError, UserError
from imece.launchers import derived_port
from imece.listing import rank_words
from imece.saying import say
from imece.system.open_files import allow_open_files
from imece.world import AGENT_PORT, LOOPBACK, World

if TYPE_CHECKING:  # a launcher does not wait for torch before it starts ranks
    import torch.distributed as dist

MESSAGE_LIMIT_BYTES = 16_384
NO_MORE = (
    "no more processes or threads may be started here: raise the limit (ulimit -u or -v, docker --pids-limit)"
)
"""What to say after EAGAIN, whose own words are "Resource temporarily unavailable"."""
_FINISHED = "imece/finished/{}"  # by torchrun's restart count
_POLL_S = 0.02
_REACH_S = 5.0
_SILENT_S = 30.0  # before a rank says for whom it waits
_MPI_PARENTS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted")


def listen(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """A socket that listens on `address` alone; port 0 takes a free port. Ranks may connect from now on.

    OSError if the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Closed connections of an earlier process at this port must not block a later one.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def listen_here() -> socket.socket:
    """A socket that listens on loopback, at a free port. UserError if loopback is down."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((LOOPBACK, 9))  # looks up the route and sends nothing
        return listen()
    except OSError as error:
        why = f"cannot listen on {LOOPBACK} ({error.strerror})"
        raise UserError(
            f"{why}: is the loopback interface down, or without that address? "
            f"ip link set lo up; ip address add {LOOPBACK}/8 dev lo"
        ) from None


def serve(listener: socket.socket) -> dist.Store:
    """A store that this process serves at `listener`, and that takes the listener over.

    Returns at once, without waiting for ranks. The port closes with the store or with this process.
    UserError if this process may have no thread for it.
    """
    import torch.distributed as dist

    allow_open_files()  # each rank has connections to it
    address, port = listener.getsockname()[:2]
    try:
        return dist.TCPStore(
            LOOPBACK if address in ("0.0.0.0", "::") else address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except RuntimeError as error:
        if os.strerror(errno.EAGAIN) not in str(error):
            raise
        raise UserError(f"the store where ranks meet cannot be served: {NO_MORE}") from None


def connect(
    world: World, timeout: timedelta, environ: Mapping[str, str] = os.environ
) -> tuple[dist.Store, World]:
    """The store of `world`'s ranks, and the world with the address and port that were used.

    If a launcher serves the store (torchrun, imece launch), this connects to it; otherwise rank 0 serves it,
    on loopback if the ranks share a host. A single rank that nobody launched opens no port, and a rank that
    joins meets nobody yet.
    UserError if the port is taken, belongs to another job or never opens.
    """
    import torch.distributed as dist

    served_by_launcher = _served_by_launcher(environ)
    if world.joining or (world.world_size == 1 and not served_by_launcher):
        return dist.HashStore(), world
    address, port, job = _meeting_point(world)
    met = replace(world, master_addr=address, master_port=port, job=job)
    if world.rank == 0 and not served_by_launcher:
        store = _serve(address, port, world, timeout)
        store.set("imece/job", job or "")
    else:
        _await_port(address, port, world, timeout)
        store = client(address, port, timeout)
    if job is not None:
        owner = store.get("imece/job").decode(errors="replace")
        if owner != job:
            raise UserError(
                f"port {port} on {address} belongs to job {owner!r}, this is job {job!r}: set MASTER_PORT"
            )
    return store, met


def client(address: str, port: int, timeout: timedelta) -> dist.Store:
    """A new connection to the store that another process serves. A connection that waits for a key keeps
    other callers waiting, so whoever waits needs one of its own.

    timeout: for the port to open, and for each wait for a key.
    """
    import torch.distributed as dist

    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def launchers_store(
    world: World, meeting: dist.Store, timeout: timedelta, environ: Mapping[str, str] = os.environ
) -> dist.Store:
    """The store through which a rank talks to its launcher. meeting: the store where its ranks meet.

    On one host these are the same; on several, each host's launcher serves a store of its own, on loopback.
    Where no launcher serves one, nobody listens: rank 0 may end before another rank reports its failure, and
    torch would print pages of C++ frames.
    """
    import torch.distributed as dist

    if world.agent_port is not None:
        return client(LOOPBACK, world.agent_port, timeout)
    if world.joining and world.master_addr is not None and world.master_port is not None:
        return client(world.master_addr, world.master_port, timeout)
    return root_store(meeting) if _served_by_launcher(environ) else dist.HashStore()


def reach_launchers_store() -> dist.Store:
    """The same for a member whose ranks have not met. OSError, RuntimeError or ValueError if it is not where
    the environment says."""
    port = int(os.environ.get(AGENT_PORT) or os.environ.get("MASTER_PORT", ""))
    socket.create_connection((LOOPBACK, port), _REACH_S).close()  # or torch would print pages of C++ frames
    return client(LOOPBACK, port, timedelta(seconds=_REACH_S))


def of_this_start(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    environ: Mapping[str, str] = os.environ,
) -> dist.Store:
    """The part of `store` that no earlier start of these ranks has written to; all ranks call this.

    A launcher may serve one store for all starts, and torchrun's agents on several hosts do not count starts
    alike. So rank 0 makes up a name. Another rank accepts it only if it answers the word that this rank has
    just written: what ended ranks wrote is still in the store. UserError if two processes claim one rank, or
    if ranks do not come in time, or have ended (`say_finished`); the message names them.
    """
    if not _served_by_launcher(environ):
        return store  # rank 0 of this start serves it
    import torch.distributed as dist

    starts, mine = dist.PrefixStore("starts", store), secrets.token_hex(8)
    starts.set(f"says/{rank}", mine)
    patience = _Patience(rank, world_size, timeout)
    waiting = list(range(1, world_size)) if rank == 0 else [0]
    while waiting:
        if rank == 0:
            for other in [other for other in waiting if starts.check([f"says/{other}"])]:
                starts.set(f"answer/{starts.get(f'says/{other}').decode(errors='replace')}", mine)
            waiting = [other for other in waiting if not starts.check([f"{mine}/{other}"])]
        elif starts.check([f"answer/{mine}"]):
            name = starts.get(f"answer/{mine}").decode(errors="replace")
            starts.set(f"{name}/{rank}", "heard")
            return dist.PrefixStore(name, store)
        if starts.get(f"says/{rank}") != mine.encode():
            raise _claimed_twice(rank, world_size)
        if gone := [other for other in _finished(store, environ) if other in waiting]:
            raise NotMetError(
                f"rank {rank} of {world_size} waits for {rank_words(gone)}, which ended with exit status 0 "
                "before it had opened its world (imece.init): all ranks open it, or none"
            )
        if waiting:
            patience.wait_for(waiting)
    return dist.PrefixStore(mine, store)


def say_finished(store: dist.Store, ranks: Collection[int], starts: int = 0) -> None:
    """A launcher's word to those that wait for others: these ranks have ended with exit status 0. starts: how
    often all were started again."""
    store.set(_FINISHED.format(starts), json.dumps(list(ranks)))


def _finished(store: dist.Store, environ: Mapping[str, str]) -> list[int]:
    """The ranks of this start that have ended, as far as a launcher says so."""
    root, key = root_store(store), _FINISHED.format(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return list(json.loads(root.get(key))) if root.check([key]) else []


def swap_notes(
    store: dist.Store, rank: int, world_size: int, note: Mapping[str, Any], timeout: timedelta
) -> list[dict[str, Any]]:
    """Every rank's note (JSON of at most 16 KiB), in the order of ranks; all ranks call this once
    per `store`.

    UserError if two processes claim one rank, or if ranks do not come in time; the message names them.
    PeerLostError if whoever serves the store ends meanwhile.
    """
    import torch.distributed as dist

    message = json.dumps(dict(note))
    if len(message) > MESSAGE_LIMIT_BYTES:
        raise ValueError(f"a note of {len(message)} bytes, of which {MESSAGE_LIMIT_BYTES} are allowed")
    patience, waiting = _Patience(rank, world_size, timeout), list(range(world_size))
    try:
        if store.add(f"taken/{rank}", 1) != 1:
            raise _claimed_twice(rank, world_size)
        store.set(f"note/{rank}", message)
        while waiting := [other for other in waiting if not store.check([f"note/{other}"])]:
            patience.wait_for(waiting)
        return [read_note(store.get(f"note/{other}"), f"rank {other}") for other in range(world_size)]
    except dist.DistNetworkError as error:
        lost = f"rank {rank} of {world_size} has lost the process in which ranks meet, rank 0 or the launcher"
        raise PeerLostError(f"{lost}, before all had come: look for why that one ended") from error


def read_note(data: bytes, sender: str, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> dict[str, Any]:
    """The JSON object in `data`, written by `sender`; UserError if it is too long or no JSON object."""
    try:
        note = json.loads(data) if len(data) <= limit_bytes else None
    except (ValueError, RecursionError):
        note = None
    if not isinstance(note, dict):
        raise UserError(f"{sender} left {len(data)} bytes in the store that imece did not write")
    return note


def _claimed_twice(rank: int, world_size: int) -> UserError:
    return UserError(f"two processes say they are rank {rank} of {world_size}: check RANK in each of them")


class _Patience:
    """How long a rank waits for others; it says for whom now and then, as no launcher may do that."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout.total_seconds()
        self._end = time.monotonic() + self._timeout_s
        self._pause_s = _SILENT_S
        self._say_at = time.monotonic() + self._pause_s

    @property
    def left_s(self) -> float:
        """Negative once it has waited long enough."""
        return self._end - time.monotonic()

    def wait_for(self, ranks: Sequence[int]) -> None:
        """Wait a little for these ranks. NotMetError if they have had their time."""
        if self.left_s < 0:
            raise NotMetError(
                f"rank {self._rank} waited {self._timeout_s:.0f} s for {len(ranks)} of {self._world_size} "
                f"ranks, which never came: {rank_words(ranks)}"
            )
        self.say(rank_words(ranks))
        time.sleep(_POLL_S)

    def say(self, whom: str) -> None:
        """Say it if it is time to; each pause is twice as long as the one before."""
        if time.monotonic() < self._say_at:
            return
        self._pause_s *= 2
        self._say_at = time.monotonic() + self._pause_s
        line = f"rank {self._rank} of {self._world_size} waits for {whom}"
        if self._timeout_s < timedelta.max.total_seconds():  # which a rank that joins has
            line += f"; it gives up in {max(0, self.left_s):.0f} s"
        with contextlib.suppress(OSError):  # nobody reads it
            say(line)


def root_store(store: dist.Store) -> dist.Store:
    """The store below all prefixes, as a launcher sees it."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _served_by_launcher(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _meeting_point(world: World) -> tuple[str, int, str | None]:
    """Address and port, and the job's name if the port was derived from it."""
    if world.master_addr is not None and world.master_port is not None:
        return world.master_addr, world.master_port, world.job
    parent = _mpi_parent()
    if world.local_world_size < world.world_size or parent is None:
        raise UserError(
            f"{world.launcher} started {world.world_size} ranks and did not say where they meet: "
            "give MASTER_ADDR (rank 0's host) and MASTER_PORT in the environment"
        )
    return world.master_addr or LOOPBACK, world.master_port or derived_port(parent), parent


def _mpi_parent() -> str | None:
    """A name of the MPI launcher's process above this one, which all ranks of a job on this host share."""
    for process in psutil.Process().parents():
        if process.name().startswith(_MPI_PARENTS):
            return f"{process.name()} {process.pid} {process.create_time()}"
    return None


def _serve(address: str, port: int, world: World, timeout: timedelta) -> dist.Store:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:  # UnicodeError: this is no host name at all
        raise UserError(f"MASTER_ADDR={address} is not a host that rank 0 can find: {error}") from None
    target = str(found)
    one_host = world.local_world_size == world.world_size
    if target.startswith("127.") and not address.startswith(("127.", "localhost")) and not one_host:
        target = "0.0.0.0"  # many hosts resolve their own name to 127.0.1.1, where the others cannot reach it
    try:
        store = serve(listen(target, port))
    except OSError as error:
        raise UserError(
            f"rank 0 cannot listen on {target} port {port} ({error.strerror}): choose another MASTER_PORT"
        ) from None
    store.set_timeout(timeout)
    return store


def _await_port(address: str, port: int, world: World, timeout: timedelta) -> None:
    """Wait until something listens: a TCPStore that finds nothing prints pages of C++ frames."""
    patience = _Patience(world.rank, world.world_size, timeout)
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except UnicodeError as error:
            raise UserError(f"MASTER_ADDR={address} is no host's name: {error}") from None
        except OSError as error:  # a name that nobody knows too: it may become known with its host
            if patience.left_s < 0:
                raise NotMetError(
                    f"rank {world.rank} of {world.world_size} found no rank 0 at {address} port {port} "
                    f"within {timeout.total_seconds():.0f} s ({error}): check MASTER_ADDR and MASTER_PORT"
                ) from None
            patience.say(f"rank 0 at {address} port {port} ({error.strerror or error})")
        time.sleep(_POLL_S)
