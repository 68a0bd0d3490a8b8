"""Which gradients have come since they were zeroed, and which of them an optimizer has already stepped with.

kind     the number of an optimizer
summed   a parameter that may have a gradient on some rank, so that a step may write it
mixed    a kind for which a backward has added to gradients that it had stepped with
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

from imece.data_parallel import script


class Accumulated:
    """This state for the parameters of one sharded model, by their numbers."""

    def __init__(self, kinds: Sequence[int]) -> None:
        """kinds: the optimizer of each parameter."""
        self._kinds = kinds
        self.summed: set[int] = set()
        self._stepped: set[int] = set()  # kinds that have stepped since their gradients were zeroed
        self._added_to: set[int] = set()  # parameters whose stepped gradients this backward adds to
        self._mixed: set[int] = set()
        self._has_warned = False

    def begin(self, live: Collection[int]) -> None:
        """A synchronised backward begins. live: parameters with gradients that it will add to."""
        self._mixed &= {self._kinds[at] for at in live}
        self._added_to = {at for at in live if self._kinds[at] in self._stepped}

    def came(self, summed: Collection[int], frozen: Collection[int]) -> None:
        """The backward is over. summed: parameters that some rank used; frozen: parameters that
        nothing steps."""
        self.summed.update(summed)
        self._mixed |= {self._kinds[at] for at in self._added_to.intersection(summed).difference(frozen)}

    def stepped(self, kind: int) -> None:
        """An optimizer has stepped with the gradients that are there."""
        self._stepped.add(kind)
        if kind in self._mixed and not self._has_warned:  # only once: it may be intended
            self._has_warned = True  # clearing a parameter's `.grad`, which is None, leaves no trace
            warnings.warn(
                "backward adds to gradients that an optimizer has stepped with: call optimizer.zero_grad() "
                "or model.zero_grad() in each step. parameter.grad = None and model.module.zero_grad() do "
                "not reach the parts of a sharded model, which hold its gradients",
                stacklevel=script.level(),
            )

    def zeroed(self, kinds: Collection[int], set_to_none: bool) -> None:
        """The gradients of these optimizers were zeroed."""
        self._stepped.difference_update(kinds)
        self._mixed.difference_update(kinds)
        if set_to_none:
            self.summed -= {at for at, kind in enumerate(self._kinds) if kind in kinds}
