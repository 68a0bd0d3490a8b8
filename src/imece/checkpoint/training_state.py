"""A model and its optimizers as named tensors and slices, whatever the strategy and the number of ranks.

    model/NAME             a parameter, in the dtype in which it is updated; a buffer of the model's state
    optimizer/NAME/KEY     what its optimizer keeps of it: exp_avg, momentum_buffer, step, ... (kept.py)
    made_by/NAME/CLASSES   which optimizer that was: a name without elements
    numbers/NAME/KEY       what schedulers change of a parameter group: lr, momentum, betas, ...; its name is
                           that of the first of its parameters, in the model's order
    extra/NAME/STATE       what a module's get_extra_state gives
    left_out/, beside/     digests of a frozen base: base.py

What is no tensor is made of some, with other keys: plain.py.

A rank hands in what it holds: whole tensors that all ranks have alike, of which `deal` gives it a share to
write; or slices that it alone owns. So nothing is gathered, and whoever loads asks for the elements it owns.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from imece.checkpoint.base import BESIDE, LEFT_OUT, Base, Expected, as_tensor, in_memory
from imece.checkpoint.deal import Slice
from imece.checkpoint.divided import as_part, in_parts
from imece.checkpoint.kept import Entry, Kept, are_alike, shape_of
from imece.checkpoint.load import Source
from imece.checkpoint.plain import by_key, plain, value_of
from imece.checkpoint.staged import names_of_groups, of_all_stages, place_of
from imece.checkpoint.weights import (
    EXTRA,
    MODEL,
    buffers_of,
    check_shapes,
    fill,
    kept_names,
    keys_of,
    shaped,
    together,
    with_extra_state,
)
from imece.collectives.texts import gather_json
from imece.data_parallel.optimizer import numbers_by_key, parameters_of, set_number
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.parts import Part
from imece.data_parallel.sharding.stepped import whole_groups
from imece.errors import UserError
from imece.model_parallel.divided import divided_parameters

OPTIMIZER = "optimizer/"
MADE_BY = "made_by/"
NUMBERS = "numbers/"
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

        frozen: False leaves out of checkpoints the base under adapters: what was frozen when the model was
        wrapped, and is as it was at the first `tensors()` or `load` of this. Digests are in its place, and a
        model with another base is refused. What has been changed meanwhile stays in, as an average of weights
        is; but a change by `.data` is not seen.

        Of a model that is divided along the mesh's axes tensor and pipeline all ranks of the mesh have such
        a state, and save into one checkpoint, which any other number of them can load. It leaves nothing out.

        TypeError for a model that is not wrapped. ValueError for some of the optimizers that step a sharded
        model, and for one that steps another; a warning where the model is replicated, and none of these
        steps some of the parameters that are trained.
        """
        model = getattr(model, "_orig_mod", model)  # torch.compile's is around it
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"TrainingState: a {type(model).__name__} is not wrapped: give what imece.parallelize or "
                "imece.DistributedDataParallel returned"
            )
        self._place = place_of(model)
        if (divided_parameters(model.module) or self._place is not None) and not frozen:
            raise ValueError(
                "TrainingState(frozen=False): of a model that is divided along the axis tensor or pipeline "
                "each rank has a part of the base: save all of it"
            )
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._model, self._optimizers = model, [(each, Kept(each)) for each in given]
        self._names: dict[Tensor, str] = {each: name for name, each in model.module.named_parameters()}
        self._extra = list(with_extra_state(model.module))
        self._left_out = set[object]()  # of which it was said
        self._own: dict[str, Tensor | Slice] = {}
        self._own_lay: list[tuple[Tensor, int]] = []  # what that was made of, and where in memory
        self._base = Base(model, is_left_out=not frozen)
        self._check_given(given)

    def tensors(self) -> dict[str, Tensor | Slice]:
        """All of it, as this rank has it. All ranks call it, after as many steps."""
        model = self._model
        found = self._slices(model) if isinstance(model, ShardedDataParallel) else self._replicated()
        digests = self._base.of()
        for name in digests[LEFT_OUT]:
            del found[MODEL + name]
        for prefix, of in digests.items():
            found |= {prefix + name: as_tensor(digest) for name, digest in of.items()}
        found |= self._of_rank_0() | self._numbers()
        plain = model.module
        if divided_parameters(plain) or self._place is not None:
            found = in_parts(found, plain, model.process_group)
        return of_all_stages(found, self._place) if self._place is not None else found

    def _replicated(self) -> dict[str, Tensor | Slice]:
        found: dict[str, Tensor | Slice] = dict(self._whole_parameters())
        for name, parameter, kept in self._stepped():
            entries = self._entries(name, parameter, kept)
            for key, entry in entries.items():
                found[_key(name, key)] = entry.tensor
            found |= _made_by(name, kept.made_by if entries else "")
        return found

    def own(self) -> dict[str, Tensor | Slice]:
        """What of `tensors()` lies on this rank, without asking another: to be copied after each step.

        All ranks' together are all of it. A Tensor is whole, and each rank that has it has the same (buffers
        may differ: rank 0's count); a Slice says which elements of it it is. Replicas give the same elements.
        With `kinds` and `deal(own, kinds, 0, 1)` the pieces can be described and laid into one buffer.

        Of a sharded model without the frozen parameters: see `still`.

        The same object again if all of it lies where it lay: see `forget`.
        """
        lay = self._lay()
        if lay is None or not _are_same(lay, self._own_lay):
            self._own, self._own_lay = self._find_own(), lay or []
        return self._own

    def still(self) -> dict[str, Tensor | Slice]:
        """What of `tensors()` lies on this rank alone and no step changes: its parts of frozen parameters,
        where they are gathered. In memory that all ranks have in common they are whole on each."""
        model = self._model
        if not isinstance(model, ShardedDataParallel) or model.sharding.common_parameters:
            return {}
        return {
            MODEL + part.name: Slice(part.parameter.detach(), part.shape, part.start)
            for part in model.frozen_parts
        }

    def forget(self) -> None:
        """Do not hold what `own` has found: the memory is to be let go."""
        self._own, self._own_lay = {}, []

    def _lay(self) -> list[tuple[Tensor, int]] | None:
        """What `own` finds of a sharded model, and where; None if some of it has to be made for it."""
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
        return [(each, each.data_ptr()) for each in found] if all(map(Tensor.is_contiguous, found)) else None

    def _find_own(self) -> dict[str, Tensor | Slice]:
        parts = self._parts()
        is_whole = not self._model.sharded_names
        found: dict[str, Tensor | Slice] = dict(self._whole_parameters()) if is_whole else {}
        found |= self._of_modules()
        for part in parts.values():
            found[MODEL + part.name] = Slice(part.parameter.detach(), part.shape, part.start)
        for name, stepped, kept in self._stepped():
            of = parts.get(stepped)
            for key, (value, per) in self._entries(name, stepped, kept).items():
                found[_key(name, key)] = (
                    Slice(value.contiguous(), shape_of(of.shape, per), of.start // per)
                    if of is not None and per
                    else value
                )
        return found

    @torch.no_grad()
    def load(self, saved: Source, *, frozen: bool = True) -> None:
        """Fill parameters and optimizers from a checkpoint of any world and strategy. All ranks call it.

        frozen: False: `frozen_names` need not be there.

        UserError, with the first names and shapes that differ, for a checkpoint of another model; also for
        what another optimizer kept, for states in blocks that are not those of this optimizer, and where the
        checkpoint leaves out a frozen base, for another one.
        """
        if isinstance(saved, str | Path):
            raise TypeError(
                f"TrainingState.load: a {type(saved).__name__} is no checkpoint: open it, as newest(folder, "
                "damaged=print) or open_checkpoint(folder) do"
            )
        saved = as_part(saved, self._model.module)
        shapes = {name: tuple(each.shape) for name, each in shaped(self._model).items()}
        skipped = set() if frozen else self.frozen_names() - set(saved.names())
        check_shapes(saved, {name: shape for name, shape in shapes.items() if MODEL + name not in skipped})
        self._base.begin()
        if any(name.startswith((LEFT_OUT, BESIDE)) for name in saved.names()):
            expected = together(self._model, lambda: Expected.by(saved))
            expected.check(self._model, self._base.digests, saved.folder)
        if isinstance(self._model, ShardedDataParallel):
            # A mistake may be in a part that one rank has: the others would wait for it below.
            together(self._model, lambda: self._fill(saved))
            self._model.take_over_masters()
        else:
            self._fill(saved)

    def _fill(self, saved: Source) -> None:
        keys = keys_of(saved, OPTIMIZER)
        parts, steps = self._parts(), list(self._stepped())
        makers = _makers(saved)
        for name, stepped, kept in steps:  # before anything is changed here
            maker = makers.get(name, kept.made_by)
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
        of_model = kept_names(saved)  # in memory without those that are frozen
        for name, stepped, kept in steps:
            found, of = {}, parts.get(stepped)
            whole = of.shape if of is not None else tuple(stepped.shape)
            for key in keys.get(name, ()):
                per = kept.per(key, saved.shape(_key(name, key)), whole)
                found[key] = _read(saved, _key(name, key), per, of, stepped)
            dtype = saved.dtype(MODEL + name) if name in of_model else None
            try:
                kept.put(stepped, found, dtype)
            except ValueError as error:
                raise UserError(f"{saved.folder}: {name} had another optimizer: {error}") from error
        self._take_numbers(saved)

    def _numbers(self) -> dict[str, Tensor | Slice]:
        return {
            name: tensor
            for of, group in self._groups()
            for key, value in numbers_by_key(group).items()
            for name, tensor in plain(f"{NUMBERS}{of}/{key}", value)
        }

    def _take_numbers(self, saved: Source) -> None:
        """A scheduler goes on from them. Other groups than before keep their own, with a warning.

        Of what only one side has nothing is said: schedulers add some, as initial_lr.
        """
        kept = keys_of(saved, NUMBERS)
        if not kept:  # in memory, where `imece.steps` has them
            return
        groups = dict(self._groups())
        for of, group in groups.items():
            found = {key: saved.tensor(f"{NUMBERS}{of}/{key}") for key in kept.get(of, ())}
            for key, value in by_key(found).items():
                set_number(group, key, value_of(value))
        if other := groups.keys() ^ kept.keys():
            names = ", ".join(sorted(other - {""}))  # "": before groups had names
            warnings.warn(
                f"{saved.folder}: it has other parameter groups than the optimizers here: of those that "
                f"begin with {names} nothing is taken: learning rates and what else schedulers change stay",
                stacklevel=4,
            )

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        """Of all optimizers, by name and not by place: another program may have them in another order."""
        groups: list[dict[str, Any]] = []
        found: list[str | None] = []
        places = {id(each): at for at, each in enumerate(self._names)}
        names = list(self._names.values())
        for optimizer, _ in self._optimizers:
            for group, parameters in whole_groups(optimizer):
                of = [places[id(each)] for each in parameters if id(each) in places]
                found.append(names[min(of)] if of else None)
                groups.append(group)
        of_model = names_of_groups(found, self._place) if self._place is not None else found
        return [
            (name, group)
            for name, own, group in zip(of_model, found, groups, strict=True)
            if name is not None and own is not None
        ]

    def _slices(self, model: ShardedDataParallel) -> dict[str, Tensor | Slice]:
        sharding = model.sharding
        found: dict[str, Tensor | Slice] = dict(self._whole_parameters())
        parts = {part.index: part for part in model.parts}
        states = {each: self._entries(name, each, kept) for name, each, kept in self._stepped()}
        keys = self._all_keys(model, states, {each: kept for _, each, kept in self._stepped()})
        # Ranks that hold the same shard hand in a piece of it each.
        replicas = sharding.groups.replicas
        share, shares = (replicas.rank(), replicas.size()) if replicas is not None else (0, 1)
        for index, slot in enumerate(sharding.slots):
            shape, part = tuple(slot.parameter.shape), parts.get(index)
            low, high = (part.numel * at // shares if part else 0 for at in (share, share + 1))
            start = part.start + low if part else 0
            master = part.parameter.detach() if part else torch.empty(0, dtype=sharding.trained.dtypes[index])
            found[MODEL + slot.name] = Slice(master.view(-1)[low:high], shape, start)
            maker, own_keys = keys.get(slot.name, ("", {}))
            found |= _made_by(slot.name, maker)
            for key, (dtype, per, own_shape) in own_keys.items():
                nothing = torch.empty(0, dtype=getattr(torch, dtype))
                value = states[part.parameter][key].tensor if part else nothing
                if per:
                    low, high = (value.numel() * at // shares for at in (share, share + 1))
                    own = value.contiguous().view(-1)[low:high]
                    start = part.start // per + low if part else 0
                    found[_key(slot.name, key)] = Slice(own, shape_of(shape, per), start)
                else:  # whoever has the first element says it for all
                    says = part is not None and part.start == 0 and share == 0
                    own = value.contiguous() if says else value.new_empty(0)
                    found[_key(slot.name, key)] = Slice(own, tuple(own_shape), 0)
        frozen = {part.name: part for part in model.frozen_parts}
        for name, shape, of in sharding.frozen_items:
            kept, flat = frozen.get(name), torch.empty(0, dtype=of)
            if kept is not None:
                flat = kept.parameter.detach().view(-1)
            low, high = (flat.numel() * at // shares for at in (share, share + 1))
            found[MODEL + name] = Slice(flat[low:high], shape, kept.start + low if kept is not None else 0)
        return found

    def _entries(self, name: str, stepped: Tensor, kept: Kept) -> Mapping[str, Entry]:
        """All that is kept of it, or nothing: a count of steps without what they have left would do harm."""
        try:
            return kept.entries(stepped)
        except TypeError as error:
            who = kept.made_by.partition(".")[0]
            self._warn(kept, f"what {who} keeps of {name} is left out, and of others alike: {error}")
            return {}

    def _of_modules(self) -> dict[str, Tensor]:
        """Buffers, and extra states."""
        found = {MODEL + name: each.detach() for name, each in buffers_of(self._model.module)}
        for name, module in self._extra:
            try:
                found |= plain(f"{EXTRA}{name}/{_STATE}", module.get_extra_state())
            except TypeError as error:
                what = f"the extra state of {name or 'the model'} ({type(module).__name__})"
                self._warn(type(module), f"{what} is left out, and of others alike: {error}")
        return found

    def _of_rank_0(self) -> dict[str, Tensor | Slice]:
        """It is its buffers that the others get in a forward."""
        first = self._model.process_group.rank() == 0
        return {
            name: Slice(each.contiguous() if first else each.new_empty(0), tuple(each.shape), 0)
            for name, each in self._of_modules().items()
        }

    def _warn(self, of: object, text: str) -> None:
        """Once of each, where every checkpoint would say it anew."""
        if of not in self._left_out:
            self._left_out.add(of)
            warnings.warn(
                f"TrainingState: {text}, which is not made of tensors, numbers and texts", stacklevel=5
            )

    def _all_keys(
        self,
        model: ShardedDataParallel,
        states: Mapping[Tensor, Mapping[str, Entry]],
        stepped: Mapping[Tensor, Kept],
    ) -> dict[str, tuple[str, dict[str, tuple[str, int, list[int]]]]]:
        """{parameter: (made by, {key: (dtype, Entry.per, its shape if that is 0)})}, of all ranks."""
        mine = {}
        for part in model.parts:
            if part.start == 0 and (entries := states.get(part.parameter)):  # one rank has it
                kinds = {
                    key: (str(value.dtype).removeprefix("torch."), per, [] if per else list(value.shape))
                    for key, (value, per) in entries.items()
                }
                mine[part.name] = stepped[part.parameter].made_by, kinds
        # Few optimizers keep different things of different parameters: each kind is said once.
        names = defaultdict(list)
        for name, keys in mine.items():
            names[json.dumps(keys)].append(name)
        said = [[json.loads(keys), together] for keys, together in names.items()]
        every = gather_json(said, model.process_group, model.device, "what optimizers keep")
        return {name: keys for keys, together in itertools.chain.from_iterable(every) for name in together}

    def base_digest(self) -> str:
        """Of the frozen base that checkpoints leave out, in hex. All ranks call it."""
        return self._base.digest()

    def frozen_names(self) -> set[str]:
        """Parameters that are not trained, as they are saved. `own` leaves out those of a sharded model."""
        if self._model.sharded_names:
            shared_out = {MODEL + name for name in self._model.frozen_names}
            return {name for name, _ in self._whole_parameters()} | shared_out
        return {MODEL + name for name, _ in in_memory(self._model._frozen)}

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of which every rank has all, by the names under which they are saved."""
        sharded = {*self._model.sharded_names}
        named = ((MODEL + name, each.detach()) for each, name in self._names.items() if name not in sharded)
        return in_memory(named)

    def _check_given(self, given: Sequence[Optimizer]) -> None:
        """What is not given is not saved, which nobody would see before the state is loaded."""
        if isinstance(self._model, ShardedDataParallel):
            its = [each.optimizer for each in self._model.stepped]
            lacking = [each for each in its if all(each is not other for other in given)] if given else []
            foreign = [each for each in given if all(each is not other for other in its)]
        else:
            lacking = []
            stepped = {each for optimizer in given for each in parameters_of(optimizer)}
            foreign = [each for each in given if not self._names.keys() >= {*parameters_of(each)}]
            left = [name for name, each in self._model._trained if each not in stepped] if given else []
            if left and not foreign:
                more = f" and {len(left) - 1} more" if len(left) > 1 else ""
                warnings.warn(
                    f"TrainingState: none of the optimizers given steps {left[0]}{more}: if another one "
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
        """By the name of the whole parameter."""
        parts = self._parts()
        for optimizer, kept in self._optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    yield parts[each].name if each in parts else self._names[each], each, kept


def _key(name: str, key: str) -> str:
    return f"{OPTIMIZER}{name}/{key}"


def _made_by(name: str, classes: str) -> dict[str, Tensor | Slice]:
    """Nothing if there are none, as nothing is kept of the parameter."""
    nothing = Slice(torch.empty(0, dtype=torch.uint8), (0,), 0)
    return {f"{MADE_BY}{name}/{classes}": nothing} if classes else {}


def _makers(saved: Source) -> dict[str, str]:
    """By parameter. None in what is only in memory, and in checkpoints of before there was this."""
    tags = [name.removeprefix(MADE_BY) for name in saved.names() if name.startswith(MADE_BY)]
    return {name: classes for name, _, classes in (tag.rpartition("/") for tag in tags)}


def _read(saved: Source, name: str, per: int, part: Part | None, parameter: Tensor) -> Tensor:
    """What is kept of this part in a tensor of which one element belongs to `per` of the parameter."""
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
    """The same objects at the same places; to compare tensors with == would compare their elements."""
    return len(lay) == len(other) and all(
        a is b and at == then for (a, at), (b, then) in zip(lay, other, strict=True)
    )
