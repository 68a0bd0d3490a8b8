"""A script's writes into parameters of which each rank has a copy of its own.

A state dict that rank 0 alone loads, or a new head that each rank fills with its own random values, and from
then on the ranks train models that differ. What optimizers write in their steps is not meant: it is the same
on all ranks. Writes through `.data` are not counted.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_REMEMBERED = 8  # counts: a loop that clamps weights has the same one in each step, or two in turns


class ScriptWrites:
    """Counts such writes into some parameters, from one synchronised forward to the next."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [each for each in parameters if not each.is_inference()]  # those count no writes
        self._noted, self._count = self._versions(), 0
        self._usual = deque([0], maxlen=_REMEMBERED)
        _watch_steps()
        _living.add(self)

    def is_unusual(self) -> bool:
        """Whether the script wrote since the last call, and not as often as it did lately. Then the ranks had
        better compare what they have: who compares after every write reads all parameters in each step of a
        loop that writes in each."""
        self.count()
        count, self._count = self._count, 0
        if count in self._usual:
            return False
        self._usual.append(count)
        return True

    def has_more(self) -> bool:
        """Whether the script wrote since `is_unusual` was called."""
        self.count()
        return self._count > 0

    def count(self) -> None:
        """What was written until now was written by the script."""
        before, self._noted = self._noted, self._versions()
        self._count += self._noted - before

    def pass_over(self) -> None:
        """What was written since `count` was written by an optimizer."""
        self._noted = self._versions()

    def _versions(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():  # does not wait for one that is coming
            return sum([each._version for each in self._parameters])


_living: weakref.WeakSet[ScriptWrites] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch._disable_dynamo(recursive=True)
def _before_step(*_: Any) -> None:
    for each in list(_living):
        each.count()


@torch._disable_dynamo(recursive=True)
def _after_step(*_: Any) -> None:
    for each in list(_living):
        each.pass_over()
