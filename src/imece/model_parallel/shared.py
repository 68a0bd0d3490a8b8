"""Parameters that several stages use, such as an embedding that is also the head: each rank has its own copy.

A rank's gradient comes from its own part of the graph. The ranks' gradients are summed in the order of ranks,
so the sum has the same bits everywhere and optimizers keep the copies equal.
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
    """The parameters of this rank that other ranks of the pipeline have too."""

    def __init__(self, parts: Sequence[Sequence[dict[str, nn.Module]]], group: dist.ProcessGroup) -> None:
        """parts: for each rank its stages' modules by name. The first rank's values are copied to the others.
        All ranks of the group construct together; the group is already connected."""
        self._group, self._rank = group, group.rank()
        holders: defaultdict[int, list[int]] = defaultdict(list)
        parameters: dict[int, nn.Parameter] = {}
        names: dict[int, str] = {}
        for rank, stages in enumerate(parts):
            found = {  # in one order on all ranks
                parameter: f"{prefix}.{name}"
                for named in stages
                for prefix, module in named.items()
                for name, parameter in module.named_parameters()
            }
            for parameter, name in found.items():
                holders[id(parameter)].append(rank)
                parameters[id(parameter)], names[id(parameter)] = parameter, name
        mine = [
            (parameters[key], ranks)
            for key, ranks in holders.items()
            if len(ranks) > 1 and self._rank in ranks
        ]
        # A frozen one may have no gradient, not even zeros, by which an optimizer would let it decay.
        self._mine = [(parameter, ranks) for parameter, ranks in mine if parameter.requires_grad]
        self._frozen = {
            names[id(parameter)]: parameter for parameter, _ in mine if not parameter.requires_grad
        }
        self._older: list[Tensor | None] = [None] * len(self._mine)
        self._summed = False  # whether .grad holds sums
        with torch.no_grad():
            for parameter, ranks in mine:
                values = self._exchanged(parameter.detach(), ranks)
                parameter.copy_(values[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients of a step are complete only after `sum`."""
        return [parameter for parameter, _ in self._mine]

    def before_step(self) -> None:
        """Set aside gradients that are already summed, so that they are not summed again.

        ValueError if a parameter that was frozen at construction wants a gradient now.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{name}, which several stages have, was frozen when imece.Pipeline was made, and wants "
                    "a gradient now, which they would not sum: freeze it after that"
                )
        for at, (parameter, _) in enumerate(self._mine):
            if parameter.grad is None:  # it was zeroed
                self._older[at] = None
            elif self._summed:
                self._older[at], parameter.grad = parameter.grad.clone(), None
        self._summed = False

    def sum(self) -> None:
        """Sum the gradients; called after all backwards of a step."""
        for at, (parameter, ranks) in enumerate(self._mine):
            mine = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            total, *others = self._exchanged(mine.contiguous(), ranks)
            total = total.clone()
            for each in others:
                total += each
            older, self._older[at] = self._older[at], None
            if older is not None:
                total += older
            elif parameter.grad is None and not parameter.requires_grad:
                continue  # it was frozen since
            parameter.grad = total
        self._summed = True

    def _exchanged(self, mine: Tensor, ranks: list[int]) -> list[Tensor]:
        """Each of these ranks' tensors, in the order of ranks."""
        values = [mine if rank == self._rank else torch.empty_like(mine) for rank in ranks]
        others = [(rank, value) for rank, value in zip(ranks, values, strict=True) if rank != self._rank]
        messages = [Send(mine, rank) for rank, _ in others] + [Recv(value, rank) for rank, value in others]
        exchange(messages, group=self._group, label="gradient of a shared parameter")
        return values


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect all ranks. NCCL connects a group in its first call, which waits for all ranks; if that were a
    message between two of them (shared parameters, torch's schedules), they would wait for ranks that wait
    for them."""
    if group.size() > 1:
        all_reduce(torch.zeros(1, device=device), group=group, label="first call of a pipeline")
