"""A model and its optimizers as named tensors and slices, whatever the strategy and the number of ranks.

A rank hands in what it holds, by the names in names.py: whole tensors that are equal on all ranks, of which
`deal` gives it a share to write; or slices that it alone owns (sliced.py). So nothing is gathered, and a
loading rank asks for the elements that it owns.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from imece.checkpoint.deal import Slice
from imece.checkpoint.load import Source
from imece.checkpoint.state.base import Base, Expected, as_tensor, in_memory
from imece.checkpoint.state.divided import as_part, in_parts
from imece.checkpoint.state.kept import Entry, Kept, are_alike, key_of, makers, shape_of, tag_of
from imece.checkpoint.state.names import BESIDE, EXTRA, LEFT_OUT, MODEL, OPTIMIZER
from imece.checkpoint.state.numbers import Numbers
from imece.checkpoint.state.plain import plain
from imece.checkpoint.state.sliced import slices_of
from imece.checkpoint.state.staged import of_all_stages, place_of
from imece.checkpoint.state.weights import (
    buffers_of,
    check_shapes,
    fill,
    kept_names,
    keys_of,
    on_all,
    shaped,
    with_extra_state,
)
from imece.data_parallel.optimizer import optimizers_of, parameters_of
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.parts import Part
from imece.errors import UserError
from imece.listing import kind_of, some
from imece.model_parallel.divided import divided_parameters

_STATE = "state"


class TrainingState:
    """What a checkpoint holds of one wrapped model and its optimizers."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        frozen: bool = True,
    ) -> None:
        """optimizers: all that step the model; [] for a state without what they keep.

        frozen: False leaves the base under adapters out of checkpoints: parameters that were frozen when the
        model was wrapped and have not changed since the first `tensors()` or `load` of this object.
        Checkpoints have their digests instead, and a model with another base is refused. Parameters that
        changed meanwhile, by an average of weights, say, stay in; but a change by `.data` is not noticed.

        For a model that is divided along the mesh's axes tensor and pipeline, all ranks of the mesh have such
        a state and save into one checkpoint, which any other number of ranks can load. It leaves nothing out.

        TypeError if the model is not wrapped, and for what is no optimizer. ValueError if only some of the
        optimizers that step a sharded model are given, or one that steps another model. A warning if the
        model is replicated and none of these steps some trained parameter.
        """
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is around it
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"TrainingState: {kind_of(model)} is not wrapped: give what imece.parallelize or "
                "imece.DistributedDataParallel returned"
            )
        self._place = place_of(model)
        if (divided_parameters(model.module) or self._place is not None) and not frozen:
            raise ValueError(
                "TrainingState(frozen=False): of a model that is divided along the axis tensor or pipeline "
                "each rank has a part of the base: save all of it"
            )
        given = optimizers_of(optimizers, "TrainingState")
        self._model, self._optimizers = model, [(each, Kept(each)) for each in given]
        self._names: dict[Tensor, str] = {each: name for name, each in model.module.named_parameters()}
        self._numbers = Numbers(given, self._names, self._place)
        self._extra = list(with_extra_state(model.module))
        self._left_out = set[object]()  # what was warned about
        self._own: dict[str, Tensor | Slice] = {}
        self._own_lay: list[tuple[Tensor, int]] = []  # what `own` was made of, and where in memory
        self._base = Base(model, is_left_out=not frozen)
        self._check_given(given)

    def tensors(self) -> dict[str, Tensor | Slice]:
        """The whole state, as this rank has it. All ranks call this, after equally many steps."""
        model = self._model
        found: dict[str, Tensor | Slice] = dict(self._whole_parameters())
        found |= self._sharded(model) if isinstance(model, ShardedDataParallel) else self._kept_whole()
        digests = self._base.of()
        for name in digests[LEFT_OUT]:
            del found[MODEL + name]
        for prefix, of in digests.items():
            found |= {prefix + name: as_tensor(digest) for name, digest in of.items()}
        found |= self._of_rank_0() | self._numbers.tensors()
        plain = model.module
        if divided_parameters(plain) or self._place is not None:
            found = in_parts(found, plain, model.process_group)
        return of_all_stages(found, self._place) if self._place is not None else found

    def _sharded(self, model: ShardedDataParallel) -> dict[str, Tensor | Slice]:
        kept = {each: (of.made_by, self._entries(name, each, of)) for name, each, of in self._stepped()}
        return slices_of(model, kept)

    def _kept_whole(self) -> dict[str, Tensor | Slice]:
        found: dict[str, Tensor | Slice] = {}
        for name, parameter, kept in self._stepped():
            entries = self._entries(name, parameter, kept)
            for key, entry in entries.items():
                found[key_of(name, key)] = entry.tensor
            found |= tag_of(name, kept.made_by if entries else "")
        return found

    def own(self) -> dict[str, Tensor | Slice]:
        """The part of `tensors()` on this rank, without asking others: for a copy after each step.

        Those of all ranks are the whole. A Tensor is whole, and equal on each rank that has it (except
        buffers: rank 0's count); a Slice says which elements it is. Replicas return the same elements. With
        `kinds` and `deal(own, kinds, 0, 1)` the pieces can be described and laid into one buffer.

        For a sharded model without the frozen parameters: see `still`.

        Returns the same object again if everything lies where it lay: see `forget`.
        """
        lay = self._lay()
        if lay is None or not _are_same(lay, self._own_lay):
            self._own, self._own_lay = self._find_own(), lay or []
        return self._own

    def still(self) -> dict[str, Tensor | Slice]:
        """The part of `tensors()` that only this rank has and no step changes: its parts of frozen
        parameters, if they are gathered. In memory that ranks share, frozen parameters are whole on each."""
        model = self._model
        if not isinstance(model, ShardedDataParallel) or model.sharding.common_parameters:
            return {}
        return {
            MODEL + part.name: Slice(part.parameter.detach(), part.shape, part.start)
            for part in model.frozen_parts
        }

    def forget(self) -> None:
        """Let go of what `own` has found, whose memory is to be freed."""
        self._own, self._own_lay = {}, []

    def _lay(self) -> list[tuple[Tensor, int]] | None:
        """What `own` finds of a sharded model, and where; None if some of it is made on request."""
        found = list(self._parts())
        if not found or self._extra:
            return None
        for module in self._model.module.modules():
            found += [each for each in module._buffers.values() if each is not None]
        for _, stepped, kept in self._stepped():
            for value in kept.state(stepped).values():
                if type(value) is Tensor:
                    found.append(value)
                elif value is not None:
                    return None
        with torch._C.DisableTorchFunctionSubclass():  # parts may be coming
            lies_flat = all(map(Tensor.is_contiguous, found))
            return [(each, each.data_ptr()) for each in found] if lies_flat else None

    def _find_own(self) -> dict[str, Tensor | Slice]:
        parts = self._parts()
        is_whole = not self._model.sharded_names
        found: dict[str, Tensor | Slice] = dict(self._whole_parameters()) if is_whole else {}
        found |= self._of_modules()
        for part in parts.values():
            found[MODEL + part.name] = Slice(part.values, part.shape, part.start)
        for name, stepped, kept in self._stepped():
            of = parts.get(stepped)
            for key, (value, per) in self._entries(name, stepped, kept).items():
                found[key_of(name, key)] = (
                    Slice(value.contiguous(), shape_of(of.shape, per), of.start // per)
                    if of is not None and per
                    else value
                )
        return found

    @torch.no_grad()
    def load(self, saved: Source, *, frozen: bool = True) -> None:
        """Fill parameters and optimizers from a checkpoint of any world and strategy. All ranks call this.

        frozen: False: `frozen_names` may be missing.

        UserError, with the first names and shapes that differ, for a checkpoint of another model; also for
        another optimizer's state, for states in blocks of another kind, and for another base if the
        checkpoint leaves a frozen base out.
        """
        if isinstance(saved, str | Path | dict | None):
            raise TypeError(
                f"TrainingState.load: {kind_of(saved)} is no checkpoint: open it, as newest(folder) or "
                "open_checkpoint(folder) do; newest returns None where there is none"
            )
        saved = as_part(saved, self._model.module)
        shapes = {name: tuple(each.shape) for name, each in shaped(self._model).items()}
        skipped = set() if frozen else self.frozen_names() - set(saved.names())
        check_shapes(saved, {name: shape for name, shape in shapes.items() if MODEL + name not in skipped})
        self._base.begin()
        if any(name.startswith((LEFT_OUT, BESIDE)) for name in saved.names()):
            expected = on_all(self._model, lambda: Expected.by(saved))
            expected.check(self._model, self._base.digests, saved.folder)
        if isinstance(self._model, ShardedDataParallel):
            # A mistake may be in a part that one rank has: the others would wait for it below.
            on_all(self._model, lambda: self._fill(saved))
            self._model.take_over_masters()
        else:
            self._fill(saved)

    def _fill(self, saved: Source) -> None:
        keys = keys_of(saved, OPTIMIZER)
        parts, steps = self._parts(), list(self._stepped())
        made_by = makers(saved)
        for name, stepped, kept in steps:  # before anything is changed here
            maker = made_by.get(name, kept.made_by)
            if not are_alike(maker, kept.made_by):
                then, now = (each.partition(".")[0] for each in (maker, kept.made_by))
                raise UserError(
                    f"{saved.folder}: {name} was stepped by {then}, not by {now}: take {then} again, or the "
                    "weights alone with imece.load_weights"
                )
            if lacking := kept.lacks(stepped, keys.get(name, ())):
                raise UserError(
                    f"{saved.folder}: {name} was stepped without {lacking}=True, which cannot begin amid a "
                    "run: make the optimizer as it was, or take the weights alone with imece.load_weights"
                )
        fill(self._model, saved)
        of_model = kept_names(saved)  # in memory without frozen ones
        for name, stepped, kept in steps:
            found, of = {}, parts.get(stepped)
            whole = of.shape if of is not None else tuple(stepped.shape)
            for key in keys.get(name, ()):
                per = kept.per(key, saved.shape(key_of(name, key)), whole)
                found[key] = _read(saved, key_of(name, key), per, of, stepped)
            dtype = saved.dtype(MODEL + name) if name in of_model else None
            try:
                kept.put(stepped, found, dtype)
            except ValueError as error:
                raise UserError(f"{saved.folder}: {name} had another optimizer: {error}") from error
        self._numbers.load(saved)

    def _entries(self, name: str, stepped: Tensor, kept: Kept) -> Mapping[str, Entry]:
        """Everything kept for a parameter, or nothing: a step count without the rest would do harm."""
        try:
            return kept.entries(stepped)
        except TypeError as error:
            who = kept.made_by.partition(".")[0]
            self._warn(kept, f"what {who} keeps of {name} is left out, and of others alike: {error}")
            return {}

    def _of_modules(self) -> dict[str, Tensor]:
        """Buffers and extra states."""
        found = {MODEL + name: each.detach() for name, each in buffers_of(self._model.module)}
        for name, module in self._extra:
            try:
                found |= plain(f"{EXTRA}{name}/{_STATE}", module.get_extra_state())
            except TypeError as error:
                what = f"the extra state of {name or 'the model'} ({type(module).__name__})"
                self._warn(type(module), f"{what} is left out, and of others alike: {error}")
        return found

    def _of_rank_0(self) -> dict[str, Tensor | Slice]:
        """The others get rank 0's buffers in a forward."""
        first = self._model.process_group.rank() == 0
        return {
            name: Slice(each.contiguous() if first else each.new_empty(0), tuple(each.shape), 0)
            for name, each in self._of_modules().items()
        }

    def _warn(self, of: object, text: str) -> None:
        """Warn once about each, or every checkpoint would repeat it."""
        if of not in self._left_out:
            self._left_out.add(of)
            warnings.warn(
                f"TrainingState: {text}, which is not made of tensors, numbers and texts", stacklevel=5
            )

    def base_digest(self) -> str:
        """A digest of the frozen base that checkpoints leave out, in hex. All ranks call this."""
        return self._base.digest()

    def frozen_names(self) -> set[str]:
        """Parameters that are not trained, by their saved names. `own` leaves out those of a
        sharded model."""
        if self._model.sharded_names:
            shared_out = {MODEL + name for name in self._model.frozen_names}
            return {name for name, _ in self._whole_parameters()} | shared_out
        return {MODEL + name for name, _ in in_memory(self._model.frozen)}

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters that every rank has whole, by their saved names."""
        sharded = {*self._model.sharded_names}
        named = ((MODEL + name, each.detach()) for each, name in self._names.items() if name not in sharded)
        return in_memory(named)

    def _check_given(self, given: Sequence[Optimizer]) -> None:
        """A missing optimizer is not saved, which nobody would notice before the state is loaded."""
        if isinstance(self._model, ShardedDataParallel):
            its = [each.optimizer for each in self._model.stepped]
            lacking = [each for each in its if all(each is not other for other in given)] if given else []
            foreign = [each for each in given if all(each is not other for other in its)]
        else:
            lacking = []
            stepped = {each for optimizer in given for each in parameters_of(optimizer)}
            foreign = [each for each in given if not self._names.keys() >= {*parameters_of(each)}]
            left = [name for name, each in self._model.trained if each not in stepped] if given else []
            if left and not foreign:
                warnings.warn(
                    f"TrainingState: none of the optimizers given steps {some(left, 1)}: if another one "
                    "does, give it too, or what it keeps is not saved",
                    stacklevel=3,
                )
        for optimizers, what in (
            (lacking, "steps this model too: give it with the others, or what it keeps is not saved"),
            (foreign, "steps what is none of this model's: give each state the optimizers of its own model"),
        ):
            for each in optimizers[:1]:
                raise ValueError(f"TrainingState: {type(each).__name__} {what}")

    def _parts(self) -> dict[Tensor, Part]:
        return {part.parameter: part for part in self._model.parts}

    def _stepped(self) -> Iterator[tuple[str, Tensor, Kept]]:
        """What is stepped, by the name of the whole parameter."""
        parts = self._parts()
        for optimizer, kept in self._optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    yield parts[each].name if each in parts else self._names[each], each, kept


def _read(saved: Source, name: str, per: int, part: Part | None, parameter: Tensor) -> Tensor:
    """What is kept for this part, from a tensor with one element for each `per` of the parameter."""
    if part is None or not per:
        return saved.tensor(name)
    shape, expected = saved.shape(name), shape_of(part.shape, per)
    if math.prod(shape) != math.prod(expected):
        if part.numel == math.prod(part.shape):
            return saved.tensor(name)
        raise UserError(f"{saved.folder}: {name} should be {list(expected)}, it has {list(shape)}")
    found = saved.slice(name, part.start // per, math.ceil(part.stop / per))
    return found.view(parameter.shape) if per == 1 else found


def _are_same(lay: Sequence[tuple[Tensor, int]], other: Sequence[tuple[Tensor, int]]) -> bool:
    """Whether these are the same objects at the same places; == would compare the tensors' elements."""
    return len(lay) == len(other) and all(
        a is b and at == then for (a, at), (b, then) in zip(lay, other, strict=True)
    )
