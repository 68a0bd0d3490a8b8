"""Loads only a model's weights from a checkpoint, without optimizer state: into any model, wrapped or not.

held    what a rank has of a tensor: all of it, or the part that it owns
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from imece.checkpoint.load import Saved, Source, newest, open_checkpoint
from imece.checkpoint.manifest import MANIFEST
from imece.checkpoint.state.base import Digests, Expected, in_memory
from imece.checkpoint.state.divided import as_part
from imece.checkpoint.state.names import EXTRA, LEFT_OUT, MODEL
from imece.checkpoint.state.plain import by_key, value_of
from imece.checkpoint.state.staged import unwrapped
from imece.collectives.mistakes import tried
from imece.collectives.texts import gather_texts, of_ranks
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.listing import some
from imece.saying import say

Result = TypeVar("Result")

_SHOWN = 3


@dataclass(frozen=True)
class Loaded:
    """The result of `load_weights`: the checkpoint's step, and the names that only one side has."""

    step: int
    missing: tuple[str, ...]
    """Names in the model but not in the checkpoint; they are unchanged."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint but not in the model; they were not read."""


def load_weights(model: nn.Module, source: Path | str | Saved, *, strict: bool = True) -> Loaded:
    """Fill a model's parameters, buffers and extra states from a checkpoint of any world and any strategy.

    model: any, or one that `imece.parallelize` or `imece.DistributedDataParallel` has wrapped; then all ranks
    call this, and each reads what it holds. source: a checkpoint; or a folder of checkpoints or a run folder,
    of which the newest undamaged one is taken, with a line on standard error for each newer damaged one.

    UserError, with the first names and shapes, if a tensor has another shape; if strict, also if one side has
    names that the other lacks, and if the checkpoint leaves out a frozen base that is not the model's (not
    strict, this is not checked). Also if there is no checkpoint that can be read. An error on one rank is
    raised on all. ValueError for a model on the meta device.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is around it
    for name, each in shaped(model).items():
        if each.is_meta:
            raise ValueError(f"{name} is on the meta device, without memory: call to_empty() first")
    shapes = {name: tuple(each.shape) for name, each in shaped(model).items()}

    damaged: list[str] = []

    def look() -> tuple[Saved, Expected]:
        saved = source if isinstance(source, Saved) else find(Path(source), damaged)
        check_shapes(as_part(saved, model), shapes, strict)
        return saved, Expected.by(saved)

    saved, expected = on_all(model, look)
    # All have found the same, so one rank reports what was passed over. And no rank writes into shared memory
    # while another still reads.
    _check_same(model, saved)
    if not isinstance(model, DistributedDataParallel) or model.process_group.rank() == 0:
        for line in damaged:
            say(f"damaged, so an older checkpoint is used: {line}")
    if strict:
        expected.check(model, Digests(model), saved.folder)
    on_all(model, lambda: fill(model, as_part(saved, model)))
    if isinstance(model, DistributedDataParallel):
        model.take_over_masters()
    kept = kept_names(saved)
    missing = tuple(name for name in shapes if name not in kept)
    return Loaded(saved.step, missing, tuple(sorted(kept - shapes.keys())))


def find(path: Path, damaged: list[str]) -> Saved:
    """The checkpoint in this folder; or the newest undamaged one in it, or in the run that it belongs to.

    damaged: gets a line for each newer one that is damaged. UserError if there is none.
    """
    if os.path.exists(path / MANIFEST):
        return open_checkpoint(path)
    for folder in (path, path / "checkpoints"):
        if (found := newest(folder, damaged.append)) is not None:
            return found
    why = f" that can be read: {damaged[0]}" if damaged else ": name a checkpoint, or a run folder"
    raise UserError(f"{path} has no checkpoint{why}")


def shaped(model: nn.Module) -> dict[str, Tensor]:
    """All that a checkpoint has under MODEL, by its name in the plain model; for shapes only.

    A tensor with several names goes by the first.
    """
    plain = unwrapped(model)
    return dict(in_memory(plain.named_parameters())) | dict(buffers_of(plain))


def buffers_of(plain: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers in the state dict: running means, but no tables that can be computed again."""
    known: set[int] = set()
    for prefix, module in plain.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set and id(buffer) not in known:
                known.add(id(buffer))
                yield name, buffer


def with_extra_state(plain: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have more in a state dict than parameters and buffers."""
    for name, module in plain.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def held(model: nn.Module) -> Iterator[tuple[str, int, Tensor]]:
    """(name, first element, memory) of what this rank has; for a sharded parameter, its part's master."""
    sharded = set[str]()
    if isinstance(model, DistributedDataParallel):
        sharded.update(model.sharded_names)
        for part in (*model.parts, *model.frozen_parts):
            yield part.name, part.start, part.parameter.detach()
    for name, each in shaped(model).items():
        if name not in sharded:
            yield name, 0, each.detach()


def fill(model: nn.Module, saved: Source) -> None:
    """Fill all that this rank holds and the checkpoint has; shapes must be equal.

    The other ranks do not learn of it: see `ShardedDataParallel.take_over_masters`.
    """
    if isinstance(model, DistributedDataParallel):
        model.settle()  # a gather may still read a part
    kept = kept_names(saved)
    for name, start, memory in held(model):
        if name in kept:
            saved.fill(memory, MODEL + name, start)
    extra = keys_of(saved, EXTRA)
    for name, module in with_extra_state(unwrapped(model)):
        found = {key: saved.tensor(f"{EXTRA}{name}/{key}") for key in extra.get(name, ())}
        for value in by_key(found).values():
            module.set_extra_state(value_of(value))


def keys_of(saved: Source, prefix: str) -> dict[str, list[str]]:
    """{NAME: [KEY]} for tensors named prefix + NAME/KEY."""
    keys: dict[str, list[str]] = defaultdict(list)
    for name in saved.names():
        if name.startswith(prefix):
            of, _, key = name.removeprefix(prefix).rpartition("/")
            keys[of].append(key)
    return keys


def kept_names(saved: Source) -> set[str]:
    """Names of the model's tensors in a checkpoint."""
    return {name.removeprefix(MODEL) for name in saved.names() if name.startswith(MODEL)}


def check_shapes(saved: Source, wanted: Mapping[str, tuple[int, ...]], strict: bool = True) -> None:
    """UserError unless a checkpoint has these tensors and no others. Not strict: only shapes of common
    names count.

    `Expected.check` looks at a frozen base that was left out.
    """
    kept = kept_names(saved)
    left_out = {name.removeprefix(LEFT_OUT) for name in saved.names() if name.startswith(LEFT_OUT)}
    wrong = [
        f"{name} should be {list(shape)}, the checkpoint has "
        f"{list(saved.shape(MODEL + name)) if name in kept else 'none'}"
        for name, shape in wanted.items()
        if (saved.shape(MODEL + name) != shape if name in kept else strict and name not in left_out)
    ]
    if strict:
        wrong += [f"it has {name} too" for name in sorted(kept - wanted.keys())]
    if wrong:
        raise UserError(
            f"{saved.folder} is of another model: {some(wrong, _SHOWN, '; ')}. Name another run folder"
        )


def on_all(model: nn.Module, call: Callable[[], Result]) -> Result:
    """Run `call()`, which makes no collective, on all ranks of a model; a UserError on one is raised
    on all."""
    if not isinstance(model, DistributedDataParallel):
        return call()
    return tried(call, model.process_group, model.device, "reading a checkpoint").on_all()


def _check_same(model: nn.Module, saved: Saved) -> None:
    """UserError, on all ranks, unless all have found the same checkpoint."""
    if not isinstance(model, DistributedDataParallel):
        return
    mine = [f"step {saved.step} ({saved.attempt})"]
    group = model.process_group
    said = of_ranks(group, gather_texts(mine, group, model.device, "which checkpoint it is"))
    first = next(iter(said))
    for rank, (which,) in said.items():
        if which != said[first][0]:
            raise UserError(
                f"rank {first} found {said[first][0]}, rank {rank} found {which}: name one checkpoint's own "
                "folder, and check that all hosts see the same disk"
            )
