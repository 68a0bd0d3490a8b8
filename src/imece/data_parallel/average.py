"""The mean of gradients over ranks, samples or tokens. Ranks that have run out of inputs count nothing.

With weights w (1 for ranks; the number of samples or tokens that a loss is the mean of) the gradient is

    sum over ranks and micro-batches of w * grad  /  sum of w

`Average.weigh` multiplies the loss, and so the gradients, by w. The ranks agree on the sum of all w while
backward runs, and each gradient is divided by that sum on its way into the bucket. So different counts on
different ranks, several losses in one backward, gradient accumulation and ranks that ended early are one
case.

That sum is over what one synchronised backward reduces. Where several of them make a step, the script says
the sum of all w of the step, its `total`, and each gradient is divided by that.
"""

from __future__ import annotations

import math
import weakref
import zlib
from array import array
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending
from imece.collectives.texts import gather_texts, of_ranks
from imece.data_parallel.reducing import task
from imece.data_parallel.same import by_rank
from imece.errors import MismatchError
from imece.listing import kind_of

Over = Literal["ranks", "samples", "tokens"]
OVER: tuple[Over, ...] = ("ranks", "samples", "tokens")

_ROUNDING = 1e-9  # by which counts that are not whole may add up to more than their total
_DIGESTS = 2**20  # so that the squares of some thousand ranks' add up without rounding


class _Weight(NamedTuple):
    """Of a loss: what it is the mean over, and if said, how much that is in the whole global batch."""

    number: float
    total: float | None


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
        self._ended: list[_Weight] = []  # of all losses since the last synchronisation
        self._under_way: weakref.WeakValueDictionary[int, _Weights] = weakref.WeakValueDictionary()  # by task
        self._losses: weakref.WeakSet[Any] = weakref.WeakSet()  # _Weighed nodes whose graphs are still alive
        self._agreeing: Pending | None = None
        self._totals: list[float | None] = []  # that this rank's losses of the last begun backward said
        self._factor: float | None = None

    def weigh(self, loss: torch.Tensor, count: float, total: float | None = None) -> torch.Tensor:
        """`loss`, the mean over `count` samples or tokens, ready for backward. total: of all losses of the
        global batch; None: those that are reduced together are all.

        The count enters the mean only when backward reaches it: a loss without a backward does not count.
        """
        if self.over == "ranks":
            raise ValueError("weigh() is for average='samples' or 'tokens'; this model averages over ranks")
        _check_weighable(loss, count, self.over)
        if not count >= 0 or count == float("inf"):
            raise ValueError(f"a loss is the mean over a number of {self.over}, not over {count}")
        if total is not None:
            total = self._checked(total, count)
        weighed = loss * count if count else loss.nan_to_num(0.0, 0.0, 0.0) * 0.0
        if weighed.requires_grad:
            weighed = _Weighed.apply(weighed, self, _Weight(count, total))  # type: ignore[no-untyped-call]
            self._losses.add(weighed.grad_fn)
        return weighed

    def _checked(self, total: Any, count: float) -> float:
        if not isinstance(total, Real | torch.Tensor):
            raise TypeError(f"weigh(loss, count, total): a number of {self.over}, not {kind_of(total)}")
        number = float(cast(float, total))
        if not count <= number < math.inf:
            raise ValueError(
                f"a loss is the mean over {count} of {total} {self.over}: total is the number in the whole "
                "global batch, of all ranks and micro-batches"
            )
        return number

    def came(self, loss: Any) -> None:
        """The gradient of a `_Weighed` loss has come."""
        weights = self._of_this_backward()
        weights.nothing = weights.nothing or not loss.weight.number
        if task.writes(loss.next_functions):
            self._count(loss)

    def _count(self, loss: Any) -> None:
        """Count a loss, once in each backward."""
        now = task.current()
        if loss.counted_in != now:
            loss.counted_in = now
            self._of_this_backward().counts.append(loss.weight)

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
        weights = [each for counts in counted for each in counts]
        weight = float(present) if self.over == "ranks" else sum(each.number for each in weights)
        forgot = float(present and self.over != "ranks" and not weights)
        self._totals = list(dict.fromkeys(each.total for each in weights))
        told = torch.tensor(
            [weight, forgot, *_Told.of(self._totals)], dtype=torch.float64, device=self._device
        )
        self._agreeing = ops.all_reduce(
            told, group=self._group, async_op=True, label=f"number of {self.over}"
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
            told = self._agreeing.wait()
            self._agreeing = None
            assert told is not None
            weight, forgot, *totals = told.tolist()
            if forgot:
                raise ValueError(
                    f"average={self.over!r}: {forgot:.0f} of {self._world_size} ranks did not say how many "
                    f"{self.over} their loss is the mean over; call model.weigh(loss, count).backward()"
                )
            amount = self._total(weight, _Told(*totals))
            self._factor = 1.0 / amount if amount else 0.0
        return self._factor

    def _total(self, weight: float, told: _Told) -> float:
        """What to divide by. weight: of all losses that are reduced; told: the sum over all ranks.

        MismatchError on every rank if not all said one total.
        """
        if not told.said:
            return weight
        if told.silent or told.said * told.squared != told.digest**2:  # NaN differs too
            texts = gather_texts(self._names(), self._group, self._device, "totals that differ")
            by = {rank: " and ".join(each) for rank, each in of_ranks(self._group, texts).items() if each}
            raise MismatchError(
                f"the ranks differ in the total of {self.over} in the global batch: {by_rank(by)}. Give "
                "model.weigh(loss, count, total) the same one in all micro-batches of a step, on all ranks"
            )
        total = self._totals[0] if self._totals else told.total / told.said
        assert total is not None
        if weight > total * (1 + _ROUNDING):
            raise ValueError(
                f"one backward brought {weight:g} {self.over}, and model.weigh(loss, count, total) was told "
                f"a total of {total:g}: it is the number in the whole global batch, of all ranks and "
                "micro-batches"
            )
        return total

    def _names(self) -> list[str]:
        said = sorted(each for each in self._totals if each is not None)
        return [*(f"{each:.17g}" for each in said), *["none"] * (None in self._totals)]


class _Told(NamedTuple):
    """What a rank tells of the totals that its losses said, or the sum of that over all ranks. Only if all
    digests are alike is their number times the sum of their squares the square of their sum."""

    silent: float = 0.0  # 1 if its losses said none
    said: float = 0.0  # 1 if they said one, or several
    digest: float = 0.0  # NaN if several
    squared: float = 0.0
    total: float = 0.0

    @classmethod
    def of(cls, totals: Sequence[float | None]) -> _Told:
        """totals: each once; None: a loss said none."""
        if not totals:
            return cls()
        if len(totals) > 1:
            return cls(said=1.0, digest=math.nan)
        if totals[0] is None:
            return cls(silent=1.0)
        digest = zlib.crc32(array("d", [totals[0]])) % _DIGESTS
        return cls(said=1.0, digest=digest, squared=digest**2, total=totals[0])


class _Weights:
    """The weights of one backward's losses. They go with a backward that raises: its gradients enter
    no mean."""

    def __init__(self, ended: list[_Weight]) -> None:
        self.counts: list[_Weight] = []
        self.nothing = False  # whether a loss over no samples or tokens is among them
        self._ended = ended

    @task.uncompiled
    def __call__(self) -> None:
        """The backward is over."""
        self._ended += self.counts
        self.counts, self.nothing = [], False


class _Weighed(torch.autograd.Function):
    """(loss, average, weight) -> loss. Its node in the graph notices when the gradient of the loss comes."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, average: Average, weight: _Weight) -> torch.Tensor:
        ctx.average, ctx.weight, ctx.counted_in = average, weight, task.NO_TASK
        return loss.view_as(loss)

    @staticmethod
    @task.uncompiled
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.average.came(ctx)
        return gradients[0], None, None
