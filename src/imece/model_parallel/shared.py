"""Parameters that several stages use, such as an embedding that is the head too: one of each on each rank.

Each rank has a gradient of its own part of the graph. Their sum, in the order of ranks, has the same bits on
all of them, so optimizers keep them equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imece.collectives.messages import Recv, Send, exchange
from imece.collectives.ops import all_reduce


class Shared:
    """Those of this rank that others of the pipeline have too."""

    def __init__(self, parts: Sequence[Sequence[dict[str, nn.Module]]], group: dist.ProcessGroup) -> None:
        """parts: of each rank its stages' modules by name. The first rank's values count. All ranks of the
        group construct together; it is connected."""
        self._group, self._rank = group, group.rank()
        holders: defaultdict[int, list[int]] = defaultdict(list)
        parameters: dict[int, nn.Parameter] = {}
        for rank, stages in enumerate(parts):
            found = [each for named in stages for module in named.values() for each in module.parameters()]
            for parameter in dict.fromkeys(found):  # all ranks in one order
                holders[id(parameter)].append(rank)
                parameters[id(parameter)] = parameter
        self._mine = [
            (parameters[key], ranks)
            for key, ranks in holders.items()
            if len(ranks) > 1 and self._rank in ranks
        ]
        self._older: list[Tensor | None] = [None] * len(self._mine)
        self._summed = False  # what is in .grad
        with torch.no_grad():
            for parameter, ranks in self._mine:
                values = self._exchanged(parameter.detach(), ranks)
                parameter.copy_(values[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients of a step are there when `sum` was called."""
        return [parameter for parameter, _ in self._mine]

    def before_step(self) -> None:
        """Gradients that were summed before are not to be summed again."""
        for at, (parameter, _) in enumerate(self._mine):
            if parameter.grad is None:  # zeroed
                self._older[at] = None
            elif self._summed:
                self._older[at], parameter.grad = parameter.grad.clone(), None
        self._summed = False

    def sum(self) -> None:
        """All backwards of a step are done."""
        for at, (parameter, ranks) in enumerate(self._mine):
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            total, *others = self._exchanged(mine.contiguous(), ranks)
            total = total.clone()
            for each in others:
                total += each
            older, self._older[at] = self._older[at], None
            parameter.grad = total if older is None else total.add_(older)
        self._summed = True

    def _exchanged(self, mine: Tensor, ranks: list[int]) -> list[Tensor]:
        """What each of these ranks brings, in their order."""
        values = [mine if rank == self._rank else torch.empty_like(mine) for rank in ranks]
        others = [(rank, value) for rank, value in zip(ranks, values, strict=True) if rank != self._rank]
        messages = [Send(mine, rank) for rank, _ in others] + [Recv(value, rank) for rank, value in others]
        exchange(messages, group=self._group, label="gradient of a shared parameter")
        return values


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL connects the ranks of a group in the first call, which waits for all of them. Messages between
    some, as of shared parameters or in torch's schedules, would wait for ranks that wait for them."""
    if group.size() > 1:
        all_reduce(torch.zeros(1, device=device), group=group, label="first call of a pipeline")
