"""A running job as seen by another thread: `launch(..., watch=...)`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from imece import status
from imece.launch.crew import Crew
from imece.launch.endings import Ending
from imece.launch.processes import is_in_group
from imece.membership.roster import Generation, Roster
from imece.world import LOOPBACK

if TYPE_CHECKING:  # a launcher does not wait for torch before it starts ranks
    import torch.distributed as dist


class Place(NamedTuple):
    """Where a member is."""

    slot: int
    """The number by which people know the rank."""
    pid: int
    host: int | None = None
    """The host, if there are several."""


class View:
    """Who lives, who has ended and how, and what the members say."""

    def __init__(self, port: int, crew: Crew, endings: Mapping[int, Ending]) -> None:
        """endings: of all members so far; the job adds to it."""
        import torch.distributed as dist

        # A connection of its own: the job must not wait for a watcher's questions.
        self._store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        self.roster = Roster(self._store)
        """What members say."""
        self.over = threading.Event()
        """Set once every rank has ended."""
        self._crew, self._endings = crew, endings

    def living(self) -> dict[int, Place]:
        """The members that have not ended."""
        living = list(self._crew.living.items())
        pids = [known_pid(self._store, member, process.pid) or process.pid for member, process in living]
        return {member: Place(process.slot, pid) for (member, process), pid in zip(living, pids, strict=True)}

    def ending(self, member: int) -> Ending | None:
        """How it ended; None while it lives, or if there is no such member."""
        return self._endings.get(member)

    def signal(self, member: int, number: int) -> bool:
        """Send it a signal; False if it has ended."""
        return hit(self._crew, member, number, self._store)

    def end(self) -> None:
        """End the job as SIGTERM to the launcher would."""
        os.kill(os.getpid(), signal.SIGTERM)


def known_pid(store: dist.Store, member: int, started: int) -> int | None:
    """The process that a living member says it is: `started`, or one that this has started (if it is
    a wrapper)."""
    pid = status.pid_of(store, member)
    return pid if pid is not None and is_in_group(pid, started) else None


def hit(crew: Crew, member: int, number: int, store: dist.Store) -> bool:
    """Send a member a signal, from any thread; False if it has ended."""
    process = crew.living.get(member)
    if process is None:
        return False
    try:
        pidfd = os.pidfd_open(known_pid(store, member, process.pid) or process.pid)
    except ProcessLookupError:
        return False
    try:
        # Only now: whoever is still among the living was not reaped before the line above.
        if member not in crew.living:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


class Says(Protocol):
    """What members have said, by their numbers; see Roster."""

    def newest(self) -> int: ...
    def generation(self, number: int) -> Generation: ...
    def all_resilient(self, members: Iterable[int]) -> bool: ...
    def beat(self, member: int) -> tuple[int, int] | None: ...
    def went_on(self, member: int, generation: int) -> tuple[float, int] | None: ...


class Watched(Protocol):
    """A running job, on one host (View) or several (hosts/wide_view.py)."""

    over: threading.Event

    @property
    def roster(self) -> Says: ...
    def living(self) -> dict[int, Place]: ...
    def ending(self, member: int) -> Ending | None: ...
    def signal(self, member: int, number: int) -> bool: ...
    def end(self) -> None: ...


Seen = TypeVar("Seen", bound=Watched)


@contextlib.contextmanager
def watched(watch: Callable[[Seen], None] | None, view: Callable[[], Seen]) -> Iterator[None]:
    """Run `watch` in a thread during the block; it must return soon after `over` is set.

    Its exception is raised at the block's end.
    """
    if watch is None:
        yield
        return
    seen = view()
    with ThreadPoolExecutor(1, "imece-watch") as threads:
        watching = threads.submit(watch, seen)
        try:
            yield
        finally:
            seen.over.set()
    watching.result()
