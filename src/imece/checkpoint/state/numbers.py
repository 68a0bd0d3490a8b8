"""The numbers of the optimizers' parameter groups that schedulers change: lr, momentum, betas, ...

    numbers/NAME/KEY       NAME: that of the first of the group's parameters, in the model's order

So a group is found by name and not by position: another program may order groups differently.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from torch import Tensor
from torch.optim import Optimizer

from imece.checkpoint.load import Source
from imece.checkpoint.state.names import NUMBERS
from imece.checkpoint.state.plain import by_key, plain, quoted, value_of
from imece.checkpoint.state.staged import names_of_groups
from imece.checkpoint.state.weights import keys_of
from imece.data_parallel.optimizer import numbers_by_key, set_number
from imece.data_parallel.sharding.stepped import whole_groups
from imece.model_parallel.cutting import Place


class Numbers:
    """The numbers of all optimizers of one model."""

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], place: Place | None
    ) -> None:
        """names: of the model's parameters, in its order. place: of this stage, if the model is cut."""
        self._optimizers, self._names, self._place = optimizers, names, place

    def tensors(self) -> dict[str, Tensor]:
        """The numbers as a checkpoint has them. All ranks call this."""
        return {
            name: tensor
            for of, group in self._groups()
            for key, value in numbers_by_key(group).items()
            for name, tensor in plain(f"{NUMBERS}{of}/{quoted(key)}", value)
        }

    def load(self, saved: Source) -> None:
        """Load them, so that a scheduler goes on from there. Groups that differ keep their own, with
        a warning.

        There is no warning for keys that only one side has: schedulers add some, such as initial_lr.
        """
        kept = keys_of(saved, NUMBERS)
        if not kept:  # in memory, where `imece.steps` has them
            return
        groups = dict(self._groups())
        for of, group in groups.items():
            found = {key: saved.tensor(f"{NUMBERS}{of}/{key}") for key in kept.get(of, ())}
            for key, value in by_key(found).items():
                set_number(group, unquote(key), value_of(value))
        if other := groups.keys() ^ kept.keys():
            names = ", ".join(sorted(other - {""}))  # "": before groups had names
            warnings.warn(
                f"{saved.folder}: it has other parameter groups than the optimizers here: of those that "
                f"begin with {names} nothing is taken: learning rates and what else schedulers change stay",
                stacklevel=4,
            )

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        """Each group with the name that it goes by, also one of which this stage has no parameter."""
        groups: list[dict[str, Any]] = []
        found: list[str | None] = []
        places = {id(each): at for at, each in enumerate(self._names)}
        names = list(self._names.values())
        for optimizer in self._optimizers:
            for group, parameters in whole_groups(optimizer):
                of = [places[id(each)] for each in parameters if id(each) in places]
                found.append(names[min(of)] if of else None)
                groups.append(group)
        of_model = names_of_groups(found, self._place) if self._place is not None else found
        return [(name, group) for name, group in zip(of_model, groups, strict=True) if name is not None]
