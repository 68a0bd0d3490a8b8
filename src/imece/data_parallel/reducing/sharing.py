"""Parameters that are in several wrapped models: an encoder of two, a module wrapped within another, or anew.

In one backward one model reduces such a parameter: the first of those that have it and that this backward
reaches, which is the same one on every rank. The buckets of the others leave with zeros in its place, and its
`.grad` is left alone by them. A backward that reaches one of them alone is none of the others'.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from imece.data_parallel.reducing import refusals

if TYPE_CHECKING:
    from imece.data_parallel.reducer import Reducer

_living: weakref.WeakSet[Reducer] = weakref.WeakSet()


def living() -> list[Reducer]:
    """All there are."""
    return list(_living)


class Sharing:
    """What one reducer has in common with others; empty for most."""

    def __init__(self, reducer: Reducer) -> None:
        self._mine = weakref.ref(reducer)
        self._common: weakref.WeakKeyDictionary[Reducer, dict[int, int]] = weakref.WeakKeyDictionary()
        """Of each other one: {number of a parameter here: its number there}."""
        numbers = {id(slot.parameter): slot.index for slot in reducer.slots}
        for other in list(_living):
            common = {
                numbers[id(slot.parameter)]: slot.index
                for slot in other.slots
                if id(slot.parameter) in numbers
            }
            if common:
                self._common[other] = common
                other.sharing._common[reducer] = {there: here for here, there in common.items()}
        _living.add(reducer)

    def others(self) -> list[Reducer]:
        """Those that have any parameter of this one."""
        return list(self._common) if self._common else []

    def with_parameter(self, index: int) -> list[Reducer]:
        """Those that have this one."""
        return [other for other, common in self._common.items() if index in common] if self._common else []

    def taken(self) -> set[int]:
        """Parameters that others reduce in the backward that reaches this one now.

        RuntimeError if what they would leave in `.grad` is not what this one would.
        """
        mine, taken = self._mine(), set[int]()
        assert mine is not None
        for other in self.others():
            if other.is_reducing:
                common = self._common[other]
                if other.group is not mine.group or not (mine.takes_plain_mean and other.takes_plain_mean):
                    raise refusals.shared(mine.slots[next(iter(common))])
                taken.update(common)
        return taken

    def has_reduced(self, index: int, gradient: torch.Tensor) -> bool:
        """Whether this gradient lies where another reducer has left it."""
        return any(
            other.slots[self._common[other][index]].holds(gradient) for other in self.with_parameter(index)
        )
