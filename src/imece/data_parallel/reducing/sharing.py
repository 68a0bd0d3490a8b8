"""Parameters in several wrapped models: an encoder used by two, a module wrapped within another, or
wrapped anew.

In one backward, one model reduces such a parameter: the first one with it that the backward reaches, which is
the same on every rank. The buckets of the others leave with zeros in its place, and they leave its `.grad`
alone. A backward that reaches only one of the models does not concern the others.
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
    """All reducers that exist."""
    return list(_living)


def summed() -> set[int]:
    """The ids of all parameters that some wrapped model sums the gradients of."""
    return {id(slot.parameter) for reducer in living() for slot in reducer.slots}


class Sharing:
    """The parameters that one reducer shares with others; for most reducers there are none."""

    def __init__(self, reducer: Reducer) -> None:
        self._mine = weakref.ref(reducer)
        self._common: weakref.WeakKeyDictionary[Reducer, dict[int, int]] = weakref.WeakKeyDictionary()
        """For each other reducer: {number of a parameter here: its number there}."""
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
        """The reducers that share any parameter with this one."""
        return list(self._common) if self._common else []

    def with_parameter(self, index: int) -> list[Reducer]:
        """The other reducers of this parameter."""
        return [other for other, common in self._common.items() if index in common] if self._common else []

    def taken(self) -> set[int]:
        """Parameters that others reduce in the backward that reaches this reducer now.

        RuntimeError if they would leave something else in `.grad` than this one.
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
        """Whether this gradient lies where another reducer put it."""
        return any(
            other.slots[self._common[other][index]].holds(gradient) for other in self.with_parameter(index)
        )
