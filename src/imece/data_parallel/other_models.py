"""Refuses parameters in two wrapped models if one of them moves or frees what the other reads.

If parameters are sharded (zero3, hybrid), those in buckets, frozen ones too, belong to one model: its units
gather and free them, or its ranks share one copy and each writes its own part. If only gradients and
optimizers are sharded, frozen parameters stay as they are, and any number of models may have them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.freed import FreedParameter


class Wrapped(Protocol):
    """A wrapped model, as far as others look at it."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def sharding(self) -> Sharding | None: ...


_wrapped: weakref.WeakSet[Wrapped] = weakref.WeakSet()


def watch(model: Wrapped) -> None:
    """Watch `model` while it exists, or until the same module is wrapped again."""
    for before in [each for each in _wrapped if each.module is model.module]:
        _wrapped.remove(before)
    _wrapped.add(model)


def wrapped() -> list[Wrapped]:
    """All wrapped models, also those that nobody refers to but the garbage collector has not found yet."""
    return list(_wrapped)


def wrapped_beside(model: Wrapped) -> list[Wrapped]:
    """All other wrapped models that somebody still refers to."""
    if any(each is not model for each in _wrapped):
        gc.collect()  # or a model that nobody has any more would count
    return [each for each in _wrapped if each is not model]


def refuse_shared(module: nn.Module, laid: Sequence[torch.Tensor], *, shards_parameters: bool) -> None:
    """ValueError that names a parameter of this module which the wrapped model of another module has too.

    laid: parameters that are to lie in buckets. An older model of the same module does not count: this one
    replaces it.
    """
    if _shared_with(module, laid, shards_parameters) is not None:
        gc.collect()  # or a model that nobody has any more would count
        if (name := _shared_with(module, laid, shards_parameters)) is not None:
            raise ValueError(
                f"parameter {name} is of another wrapped model too, and one of the two is sharded: make one "
                f"module that has both and give that to imece.parallelize, wrap a copy of it, or drop the "
                f"other model before"
            )


def refuse_gathered(module: nn.Module) -> None:
    """ValueError that names a parameter which another model gathers and frees, even if it is gathered now."""
    gathering = (model for model in _wrapped if model.sharding is not None and model.sharding.gathers)
    gathered = {id(each) for model in gathering for each in _laid(model)}
    for name, parameter in module.named_parameters():
        if id(parameter) in gathered or isinstance(parameter, FreedParameter):
            raise ValueError(
                f"parameter {name} is of a sharded model that gathers and frees it: wrap a copy of the "
                f"module, made inside of its `with model.gathered():` by copy.deepcopy(model.module)"
            )


def _shared_with(module: nn.Module, laid: Sequence[torch.Tensor], shards_parameters: bool) -> str | None:
    """The name of a parameter that two models have, if both lay it in buckets or one of them shards it."""
    mine, in_buckets = {id(each): name for name, each in module.named_parameters()}, {*map(id, laid)}
    for model in _wrapped:
        if model.module is module:
            continue
        theirs, their_buckets = {*map(id, model.module.parameters())}, {*map(id, _laid(model))}
        shared = in_buckets & (theirs if shards_parameters else their_buckets)
        if model.sharding is not None and model.sharding.strategy.parameters:
            shared |= mine.keys() & their_buckets
        for key, name in mine.items():
            if key in shared:
                return name
    return None


def _laid(model: Wrapped) -> list[torch.Tensor]:
    """The parameters of a sharded model that lie in buckets, frozen ones too."""
    stores = model.sharding.every_store if model.sharding is not None else []
    return [each for store in stores for each in store.members]
