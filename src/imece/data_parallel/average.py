"""What the mean of gradients is over: ranks, samples or tokens; ranks that have run out count nothing.

With weights w (1 for ranks; the number of samples or tokens that a loss is the mean of) the gradient is

    sum over ranks and micro-batches of w * grad  /  sum of w

`Average.weigh` multiplies the loss, and so the gradients, by w; the sum of w over all ranks is agreed while
backward runs, and each gradient is divided by it on its way into the bucket. So ranks with different counts,
gradient accumulation and ranks that have ended early are one case.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, cast

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending

Over = Literal["ranks", "samples", "tokens"]
OVER: tuple[Over, ...] = ("ranks", "samples", "tokens")


class Average:
    """The divisor of one reducer's gradients."""

    def __init__(self, over: Over, group: dist.ProcessGroup, device: torch.device) -> None:
        """ValueError for an `over` that is none of OVER."""
        if over not in OVER:
            raise ValueError(f"average={over!r}: one of {', '.join(OVER)}")
        self.over = over
        self.present_only = False  # under join: ranks that have ended do not count
        self._group, self._device = group, host_device(group, device)
        self._world_size = group.size()
        self._weight = 0.0  # of this rank's micro-batches since the last synchronisation
        self._weighed = False  # whether there were any
        self._nothing = False  # whether a loss over no samples or tokens is among those of this backward
        self._agreeing: Pending | None = None
        self._factor: float | None = None

    def weigh(self, loss: torch.Tensor, count: float) -> torch.Tensor:
        """`loss`, the mean over `count` samples or tokens, as backward is to be called on it.

        They count when backward comes: a loss that is only looked at, or left out, does not.
        """
        if self.over == "ranks":
            raise ValueError("weigh() is for average='samples' or 'tokens'; this model averages over ranks")
        if not count >= 0 or count == float("inf"):
            raise ValueError(f"a loss is the mean over a number of {self.over}, not over {count}")
        weighed = loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if weighed.requires_grad:
            weighed.register_hook(partial(self._came, count))
        return weighed

    def _came(self, count: float, _gradient: torch.Tensor) -> None:
        self._weight += count
        self._weighed = True
        self._nothing = self._nothing or not count

    def cleaned(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What comes to an output of the model, if it is to be something else.

        The gradient of a loss over nothing is 0, but the mean over nothing has made it 0 / 0.
        """
        return gradient.nan_to_num(0.0, 0.0, 0.0) if self._nothing else None

    def end(self) -> None:
        """A backward is over."""
        self._nothing = False

    def forget(self) -> None:
        """What was counted since the last synchronisation: those gradients were thrown away."""
        self._weight, self._weighed = 0.0, False

    @property
    def agrees(self) -> bool:
        """Whether the divisor depends on what the ranks bring, so that they must exchange it."""
        return self.over != "ranks" or self.present_only

    def begin(self, *, present: bool = True) -> None:
        """At the start of a synchronised backward. present: False for a rank that has run out."""
        self._factor = None
        if not self.agrees:
            self._factor = 1.0 / self._world_size
            return
        weight = float(present) if self.over == "ranks" else self._weight
        forgot = float(present and self.over != "ranks" and not self._weighed)
        total = torch.tensor([weight, forgot], dtype=torch.float64, device=self._device)
        self._agreeing = cast(
            Pending, ops.all_reduce(total, group=self._group, async_op=True, label=f"number of {self.over}")
        )
        self._weight, self._weighed = 0.0, False

    def give_up(self) -> None:
        """Nobody will ask for what is being agreed on."""
        if self._agreeing is not None:
            self._agreeing.give_up()
            self._agreeing = None

    def factor(self) -> float:
        """What each gradient is multiplied by; waits for the ranks to agree."""
        if self._factor is None:
            assert self._agreeing is not None, "factor() comes after begin()"
            total = self._agreeing.wait()
            self._agreeing = None
            assert total is not None
            amount, forgot = total.tolist()
            if forgot:
                raise ValueError(
                    f"average={self.over!r}: {forgot:.0f} of {self._world_size} ranks did not say how many "
                    f"{self.over} their loss is the mean over; call model.weigh(loss, count).backward()"
                )
            self._factor = 1.0 / amount if amount else 0.0
        return self._factor
