"""Finds ranks whose bits differ where they should be equal: a part each step, all in some steps.

    alike    parameters that several ranks hold: all of a replicated model; of a sharded one, what each rank
             has whole, or the shards that its replica on another host has too
    digest   a number for one part; it travels with what ranks tell each other after each step anyway

A bit that flips in one rank's memory stays, because all ranks make the same updates, and spoils every later
gradient. Where parameters are gathered after each step (zero1, zero2), the next gather replaces it. Where
only one rank holds a shard, nothing can detect it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from imece.collectives.texts import gather_json
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.same import digest, sync_from
from imece.data_parallel.sharded import ShardedDataParallel
from imece.listing import rank_words, some

_SHOWN = 3  # differences in a message
_CHUNK = 2**20  # elements hashed at once
_EXACT = 2**52 - 1  # bits of a digest: a float64 holds them exactly


class DriftError(Exception):
    """Ranks that should hold the same do not, and there is no majority to tell who is right."""


@dataclass(frozen=True)
class _Difference:
    """One parameter that differs within a set of ranks."""

    name: str
    ranks: list[int]  # of the set, ascending
    odd: list[int]  # ranks that differ from the majority; all of them if there is none
    root: int | None  # one rank of the majority

    def describe(self) -> str:
        who = rank_words(self.odd)
        if self.root is None:
            return f"{self.name} differs between {who}"
        return f"{self.name} of {who} differed from that of {len(self.ranks) - len(self.odd)} others"


class Drift:
    """Watches one wrapped model. Create a new one when the ranks change."""

    def __init__(self, model: DistributedDataParallel, optimizers: Sequence[Optimizer], every: int) -> None:
        """every: steps in which everything is compared once; 0: never."""
        self._model, self._optimizers, self._every = model, list(optimizers), every
        self._named, self.key, self._group = _alike(model)
        if self._group.size() == 1 or every == 0:
            self._named = []
        self._parts = _cut([each for _, each in self._named], every)

    @torch.no_grad()
    def digest(self, step: int) -> Tensor | float:
        """The digest of this step's part: if all is well, the same on all ranks with the same `key`."""
        total: Tensor | None = None
        for tensor, start, stop in self._parts[step % self._every] if self._parts else ():
            piece = digest(tensor.detach().reshape(-1)[start:stop])
            total = piece if total is None else 31 * total + piece
        return (total & _EXACT).double() if total is not None else 0.0

    @staticmethod
    def differs(digests: Sequence[float], keys: Sequence[float]) -> bool:
        """Whether any ranks with the same key have different digests. Both are lists by rank."""
        return len(set(zip(digests, keys, strict=True))) > len(set(keys))

    def mend(self, step: int) -> list[str]:
        """All ranks call this when digests differ: ranks in the minority receive what the majority holds.

        The optimizer states of these parameters are replaced too. Returns what differed. DriftError, with
        nothing changed, if there is a tie.
        """
        mine = [[self.key], *([name, int(digest(each))] for name, each in self._named)]
        world, device = self._model.process_group, self._model.device
        said = gather_json(mine, world, device, "drift")
        found: list[_Difference] = []
        for key in sorted({texts[0][0] for texts in said}):
            ranks = [rank for rank, texts in enumerate(said) if texts[0][0] == key]
            of_set = _differences(ranks, [dict(said[rank][1:]) for rank in ranks])
            found += of_set
            if key == self.key:
                own, members = of_set, ranks
        texts = [each.describe() for each in found]
        if any(each.root is None for each in found):
            raise DriftError(self._refusal(step, texts))
        tensors = dict(self._named)
        model = self._model
        model.settle()
        for each in own:
            assert each.root is not None
            kept = self._kept(tensors[each.name])
            label = f"{each.name} as most ranks hold it"
            at = members.index(each.root)
            sync_from(at, [tensors[each.name], *kept], self._group, label, model.device)
        if found and isinstance(model, ShardedDataParallel) and model.sharding.strategy.parameters:
            model.take_over_masters()
        return texts

    def _refusal(self, step: int, texts: Sequence[str]) -> str:
        return (
            f"step {step}: {some(texts, _SHOWN, '; ')}, and there is no majority: the run ends. Something "
            f"changed bits on one rank alone after step {max(0, step - self._every)}, memory that fails say; "
            "the same command goes on from the last checkpoint, which is the same for all ranks"
        )

    def _kept(self, tensor: Tensor) -> list[Tensor]:
        """The optimizer state of a parameter, if an optimizer steps the parameter itself."""
        states = [each.state[tensor] for each in self._optimizers if tensor in each.state]
        values = [value for state in states for value in state.values()]
        return [each for each in values if isinstance(each, Tensor) and each.device == tensor.device]


def _alike(
    model: DistributedDataParallel,
) -> tuple[list[tuple[str, Tensor]], int, dist.ProcessGroup]:
    """(tensors that this rank should hold as others do, a number that these ranks have in common, their
    group)."""
    everything: list[tuple[str, Tensor]] = list(model.module.named_parameters())
    if not isinstance(model, ShardedDataParallel) or not model.sharding.strategy.parameters:
        return everything, 0, model.process_group
    sharding = model.sharding
    if sharding.groups.replicas is None:
        sharded = {*model.sharded_names}
        return [each for each in everything if each[0] not in sharded], 0, model.process_group
    parts: list[tuple[str, Tensor]] = [
        (part.name, part.parameter) for part in (*model.parts, *model.frozen_parts)
    ]
    return parts, sharding.groups.shard.rank(), sharding.groups.replicas


def _cut(tensors: Sequence[Tensor], every: int) -> list[list[tuple[Tensor, int, int]]]:
    """`every` parts with equally many elements: lists of (tensor, first element, end)."""
    total = sum(each.numel() for each in tensors)
    if not total:
        return []
    parts: list[list[tuple[Tensor, int, int]]] = [[] for _ in range(every)]
    size, before = math.ceil(total / every), 0
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            at = before + start
            stop = min(tensor.numel(), start + _CHUNK, start + size - at % size)
            parts[at // size].append((tensor, start, stop))
            start = stop
        before += tensor.numel()
    return parts


def _differences(ranks: Sequence[int], digests: Sequence[dict[str, int]]) -> list[_Difference]:
    """digests: for each of the ranks, by parameter."""
    found = []
    for name in digests[0]:
        votes = [each.get(name) for each in digests]
        if len(set(votes)) == 1:
            continue
        ((most, count), *_) = Counter(votes).most_common()
        decided = 2 * count > len(ranks)
        odd = [rank for rank, vote in zip(ranks, votes, strict=True) if not decided or vote != most]
        found.append(_Difference(name, list(ranks), odd, ranks[votes.index(most)] if decided else None))
    return found
