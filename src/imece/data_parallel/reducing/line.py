"""The order in which buckets leave when one backward brings more to a group than one model's buckets.

Among several models, the one that backward reached first sends first, on every rank. A rank knows its unused
parameters only at the end, and these must not decide whose buckets come first. Nor may they decide whether a
bucket comes before a collective of the module's own: if there are such collectives, all buckets leave when
backward is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from imece.collectives.calls import collectives_made
from imece.data_parallel.reducing import task


class Sender(Protocol):
    """A reducer, as far as the line knows it."""

    def let_go(self) -> None:
        """Send the buckets that are ready, if it is its turn."""


class Line:
    """The reducers of one group that have buckets to send in the current backward, in order."""

    def __init__(self) -> None:
        self._waiting: list[Sender] = []
        self.crossing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that make collectives of their own on the group in backward. For a parameter that a rank
        does not use, the bucket might leave after such a collective there, and before it on another rank. So
        no bucket leaves early."""
        self._turn = threading.RLock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Line:
        """The line of a group, shared by all its reducers."""
        return _lines.setdefault(group, cls())

    def stand(self, reducer: Sender) -> None:
        """Put a reducer at the end of the line."""
        if reducer not in self._waiting:
            self._waiting.append(reducer)

    def is_first(self, reducer: Sender) -> bool:
        """Whether a reducer's buckets may leave; no longer once all of them have left."""
        return self._waiting[:1] == [reducer]

    def ahead_of(self, reducer: Sender) -> list[Sender]:
        """The reducers that have buckets to send before this one."""
        return self._waiting[: self._waiting.index(reducer)] if reducer in self._waiting else []

    def pass_over(self, ahead: list[Sender]) -> None:
        """Remove those `ahead`, whose backward has raised."""
        del self._waiting[: len(ahead)]

    def leave(self, reducer: Sender) -> None:
        """All buckets of a reducer have left: let the ready ones of the next leave."""
        self._waiting.remove(reducer)
        if self._waiting:
            self._waiting[0].let_go()

    def clear(self) -> None:
        """No backward is under way any more."""
        self._waiting.clear()

    def in_turn(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Lets one gradient of the line through at a time: in backward each GPU has a thread of its own."""

        @task.uncompiled
        def in_turn(parameter: torch.Tensor) -> None:
            with self._turn:
                hook(parameter)

        return in_turn


class Suspicion:
    """The suspicion that a module makes collectives of its own in backward. In the first backward its buckets
    leave at the end; if there was no such collective, they leave early from then on."""

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = weakref.ref(module), group, device
        self._made: int | None = None
        Line.of(group).crossing.add(module)

    def begin(self) -> None:
        """A backward begins."""
        self._made = collectives_made(self._group, self._device)

    def end(self) -> None:
        """The backward is over, and no bucket has left."""
        module, made = self._module(), collectives_made(self._group, self._device)
        if module is not None and made is not None and made == self._made:
            Line.of(self._group).crossing.discard(module)


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()
