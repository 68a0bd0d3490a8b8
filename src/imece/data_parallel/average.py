"""The mean of gradients over ranks, samples or tokens. Ranks that have run out of inputs count nothing.

With weights w (1 for ranks; the number of samples or tokens that a loss is the mean of) the gradient is

    sum over ranks and micro-batches of w * grad  /  sum of w

`Average.weigh` multiplies the loss, and so the gradients, by w. The ranks agree on the sum of all w while
backward runs, and each gradient is divided by that sum on its way into the bucket. So different counts on
different ranks, several losses in one backward, gradient accumulation and ranks that ended early are one
case.
"""

from __future__ import annotations

import weakref
from numbers import Real
from typing import Any, Literal

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending
from imece.data_parallel.reducing import task
from imece.listing import kind_of

Over = Literal["ranks", "samples", "tokens"]
OVER: tuple[Over, ...] = ("ranks", "samples", "tokens")


def check_over(over: Over) -> Over:
    """ValueError if `over` is none of OVER."""
    if over not in OVER:
        raise ValueError(f"average={over!r}: one of {', '.join(OVER)}")
    return over


def _check_weighable(loss: object, count: object, over: Over) -> None:
    """TypeError unless these can be multiplied: they may have changed places."""
    if not isinstance(loss, torch.Tensor) or not isinstance(count, Real | torch.Tensor):
        raise TypeError(
            f"weigh(loss, count): a tensor and a number of {over}, not {kind_of(loss)} and {kind_of(count)}"
        )


class Average:
    """The divisor of one reducer's gradients."""

    def __init__(self, over: Over, group: dist.ProcessGroup, device: torch.device) -> None:
        """ValueError if `over` is none of OVER."""
        self.over = check_over(over)
        self.present_only = False  # under join: ranks that have ended do not count
        self._group, self._device = group, host_device(group, device)
        self._world_size = group.size()
        self._ended: list[float] = []  # weights of all losses since the last synchronisation
        self._under_way: weakref.WeakValueDictionary[int, _Weights] = weakref.WeakValueDictionary()  # by task
        self._losses: weakref.WeakSet[Any] = weakref.WeakSet()  # _Weighed nodes whose graphs are still alive
        self._agreeing: Pending | None = None
        self._factor: float | None = None

    def weigh(self, loss: torch.Tensor, count: float) -> torch.Tensor:
        """`loss`, the mean over `count` samples or tokens, ready for backward.

        The count enters the mean only when backward reaches it: a loss without a backward does not count.
        """
        if self.over == "ranks":
            raise ValueError("weigh() is for average='samples' or 'tokens'; this model averages over ranks")
        _check_weighable(loss, count, self.over)
        if not count >= 0 or count == float("inf"):
            raise ValueError(f"a loss is the mean over a number of {self.over}, not over {count}")
        weighed = loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if weighed.requires_grad:
            weighed = _Weighed.apply(weighed, self, count)  # type: ignore[no-untyped-call]
            self._losses.add(weighed.grad_fn)
        return weighed

    def came(self, loss: Any) -> None:
        """The gradient of a `_Weighed` loss has come."""
        weights = self._of_this_backward()
        weights.nothing = weights.nothing or not loss.count
        if task.writes(loss.next_functions):
            self._count(loss)

    def _count(self, loss: Any) -> None:
        """Count a loss, once in each backward."""
        now = task.current()
        if loss.counted_in != now:
            loss.counted_in = now
            self._of_this_backward().counts.append(loss.count)

    def _of_this_backward(self) -> _Weights:
        now = task.current()
        weights = self._under_way.get(now)
        if weights is None:
            weights = self._under_way[now] = _Weights(self._ended)
            task.at_end(weights)
        return weights

    def cleaned(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What to use in place of a gradient that reached an output of the model; None: the gradient itself.

        The gradient of a loss over nothing should be 0, but the mean over nothing has made it 0 / 0.
        """
        nothing = any(each.nothing for each in self._under_way.values())
        return gradient.nan_to_num(0.0, 0.0, 0.0) if nothing else None

    def forget(self) -> None:
        """Drop what was counted before the current backward, if any: somebody threw those gradients away."""
        self._ended.clear()

    @property
    def agrees(self) -> bool:
        """Whether the divisor depends on what the ranks bring, so that they must exchange it."""
        return self.over != "ranks" or self.present_only

    def begin(self, *, present: bool = True) -> None:
        """At the start of a synchronised backward. present: False on a rank that has run out of inputs."""
        self._factor = None
        if not self.agrees:
            self._factor = 1.0 / self._world_size
            return
        if task.is_running():  # of several losses, some may come after the first gradient
            for loss in list(self._losses):
                if torch._C._will_engine_execute_node(loss):
                    self._count(loss)
        counted = [self._ended, *(each.counts for each in self._under_way.values())]
        weight = float(present) if self.over == "ranks" else sum(map(sum, counted))
        forgot = float(present and self.over != "ranks" and not any(counted))
        total = torch.tensor([weight, forgot], dtype=torch.float64, device=self._device)
        self._agreeing = ops.all_reduce(
            total, group=self._group, async_op=True, label=f"number of {self.over}"
        )
        for counts in counted:
            counts.clear()

    def give_up(self) -> None:
        """Nobody will ask for the divisor that is being agreed on."""
        if self._agreeing is not None:
            self._agreeing.give_up()
            self._agreeing = None

    def factor(self) -> float:
        """The factor for each gradient; waits until the ranks have agreed."""
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


class _Weights:
    """The weights of one backward's losses. They go with a backward that raises: its gradients enter
    no mean."""

    def __init__(self, ended: list[float]) -> None:
        self.counts: list[float] = []
        self.nothing = False  # whether a loss over no samples or tokens is among them
        self._ended = ended

    @task.uncompiled
    def __call__(self) -> None:
        """The backward is over."""
        self._ended += self.counts
        self.counts, self.nothing = [], False


class _Weighed(torch.autograd.Function):
    """(loss, average, count) -> loss. Its node in the graph notices when the gradient of the loss comes."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, average: Average, count: float) -> torch.Tensor:
        ctx.average, ctx.count, ctx.counted_in = average, count, task.NO_TASK
        return loss.view_as(loss)

    @staticmethod
    @task.uncompiled
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.average.came(ctx)
        return gradients[0], None, None
