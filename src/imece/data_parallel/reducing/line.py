"""What leaves first, where one backward brings more to a group than one model's buckets.

Of several models those of the first that it reached, on every rank: whether a rank has unused parameters,
which are known only at the end, must not decide whose come first. Nor may it decide whether a bucket comes
before a collective of the module's own: where there are such, all buckets leave when backward is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from imece.collectives.calls import collectives_made

if TYPE_CHECKING:
    from imece.data_parallel.reducer import Reducer


class Line:
    """The reducers of one group that have buckets to send in the backward that is under way."""

    def __init__(self) -> None:
        self._waiting: list[Reducer] = []
        self.crossing: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that make collectives of their own on the group in backward. One rank may come to those
        before the bucket of a parameter that it does not use, another one after it: nobody's leave early."""
        self._turn = threading.RLock()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Line:
        """All reducers of a group stand in one."""
        return _lines.setdefault(group, cls())

    def stand(self, reducer: Reducer) -> None:
        """In it, at its end."""
        if reducer not in self._waiting:
            self._waiting.append(reducer)

    def is_first(self, reducer: Reducer) -> bool:
        """Whether its buckets may leave. Not any more once all of them have left."""
        return self._waiting[:1] == [reducer]

    def ahead_of(self, reducer: Reducer) -> list[Reducer]:
        """Who has buckets to send before it."""
        return self._waiting[: self._waiting.index(reducer)] if reducer in self._waiting else []

    def pass_over(self, ahead: list[Reducer]) -> None:
        """Those `ahead` will not come: their backward has raised."""
        del self._waiting[: len(ahead)]

    def leave(self, reducer: Reducer) -> None:
        """All its buckets have left. What is ready of the next one goes."""
        self._waiting.remove(reducer)
        if self._waiting:
            self._waiting[0].let_go()

    def clear(self) -> None:
        """No backward is under way any more."""
        self._waiting.clear()

    def in_turn(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """One gradient of the line after the other: each GPU has a thread of its own in backward."""

        def in_turn(parameter: torch.Tensor) -> None:
            with self._turn:
                hook(parameter)

        return in_turn


class Suspicion:
    """That a module makes collectives of its own on a group in backward: its buckets leave at the end of the
    first one, and if that made none they leave early from then on."""

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = weakref.ref(module), group, device
        self._made: int | None = None
        Line.of(group).crossing.add(module)

    def begin(self) -> None:
        """A backward begins."""
        self._made = collectives_made(self._group, self._device)

    def end(self) -> None:
        """It is over, and no bucket has left."""
        module, made = self._module(), collectives_made(self._group, self._device)
        if module is not None and made is not None and made == self._made:
            Line.of(self._group).crossing.discard(module)


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()
