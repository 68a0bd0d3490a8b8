"""Which elements of a training state a rank needs: its parts, and its optimizers' state for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch.optim import Optimizer

from imece.checkpoint.state.kept import Kept
from imece.checkpoint.state.names import EXTRA, MODEL, OPTIMIZER
from imece.checkpoint.state.weights import held, shaped
from imece.data_parallel.sharded import ShardedDataParallel


class Needs:
    """The needs of one sharded model as it is divided now: what `TrainingState.load` will ask for."""

    def __init__(self, model: ShardedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        self._shapes = {name: tuple(each.shape) for name, each in shaped(model).items()}
        self._held = {name: (start, start + memory.numel()) for name, start, memory in held(model)}
        self._kept = dict(_stepped_by(model, optimizers))

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The needed elements [start, stop) of a tensor of this whole shape; (0, 0) for none."""
        if name.startswith(MODEL):
            return self._held.get(name.removeprefix(MODEL), (0, 0))
        if name.startswith(EXTRA):
            return 0, math.prod(shape)
        of, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if of not in self._held or of not in self._kept:
            return 0, 0
        start, stop = self._held[of]
        per = self._kept[of].per(key, shape, self._shapes[of])
        if not per or stop - start == math.prod(self._shapes[of]):
            return 0, math.prod(shape)
        return start // per, math.ceil(stop / per)


def _stepped_by(model: ShardedDataParallel, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Kept]]:
    names = {id(each): name for name, each in model.module.named_parameters()}
    names |= {id(part.parameter): part.name for part in model.sharding.parts}
    for optimizer in optimizers:
        kept = Kept(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:  # else it stands for a part that this rank has nothing of
                    yield names[id(parameter)], kept
