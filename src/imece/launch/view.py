"""A running job as a thread beside it sees it: `launch(..., watch=...)`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from imece.launch.crew import Crew
from imece.launch.processes import Ending
from imece.membership.roster import Generation, Roster
from imece.world import LOOPBACK


class Place(NamedTuple):
    """Where a member is."""

    slot: int
    """By which a person knows the rank."""
    pid: int
    host: int | None = None
    """If there are several."""


class View:
    """Who lives, who has ended and how, and what the members say. Only the roster asks the store."""

    def __init__(self, port: int, crew: Crew, endings: Mapping[int, Ending]) -> None:
        """`endings` of all members so far; the job adds to it."""
        import torch.distributed as dist

        # A connection of its own: the job must not wait for what a watcher asks.
        self._roster = Roster(dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False))
        self.over = threading.Event()
        """Set once every rank has ended."""
        self._crew, self._endings = crew, endings

    @property
    def roster(self) -> Roster:
        """What members say."""
        return self._roster

    def living(self) -> dict[int, Place]:
        """The members that have not ended."""
        return {
            member: Place(process.slot, process.pid) for member, process in list(self._crew.living.items())
        }

    def ending(self, member: int) -> Ending | None:
        """How it ended; None as long as it lives, or if there is none."""
        return self._endings.get(member)

    def signal(self, member: int, number: int) -> bool:
        """Send it a signal; False if it has ended."""
        return hit(self._crew, member, number)

    def end(self) -> None:
        """End the job as a person's SIGTERM would."""
        os.kill(os.getpid(), signal.SIGTERM)


def hit(crew: Crew, member: int, number: int) -> bool:
    """Send a member a signal, from any thread; False if it has ended."""
    process = crew.living.get(member)
    if process is None:
        return False
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # Only now: one that is still among the living was not reaped before the line above.
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
    """Run `watch` in a thread as long as the block; it has to return soon after `over` is set.

    What it raises is raised at the block's end.
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
