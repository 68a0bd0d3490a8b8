"""Any torch optimizer on the parts that a rank owns.

The user's own optimizer goes on: its groups, hooks and schedulers stay. Only the contents of its groups
change, from parameters to this rank's parts of them. So its state is 1/N. If an optimizer's update of an
element depends on that element alone, matrices may be cut anywhere; an optimizer that looks at whole matrices
gets whole ones.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from imece.collectives import ops
from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.reducing import refusals
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.block_wise import followed
from imece.data_parallel.sharding.cut_state import by_index, cut_state, is_of_whole, part_of_state, whose
from imece.data_parallel.sharding.moved import Moved

if TYPE_CHECKING:
    from imece.data_parallel.sharded import ShardedDataParallel

_TORCHS_STATE_DICTS = "torch.distributed.checkpoint.state_dict"
_WHOSE = "imece"  # key in an optimizer's state dict, beside torch's "state" and "param_groups"


class SteppedParts:
    """One of the user's optimizers, which from now on steps this rank's parts.

    The optimizer keeps this object alive, by its hooks and methods. This object must not keep the optimizer:
    when nobody has it any more, its state must be freed at once, not when the garbage collector runs.
    """

    def __init__(self, optimizer: Optimizer, number: int, model: ShardedDataParallel) -> None:
        """Hooks the optimizer's steps, to bring the parts of other ranks."""
        self._known_optimizer, self._number = weakref.ref(optimizer), number
        self._module = model.module
        self._known = weakref.ref(model)  # the model must go when nobody else has it
        self.ids_of_parts: set[int] = set()  # empty between leave() and regroup()
        self._ids_of_rest: set[int] = set()  # of whole parameters that want no gradient
        self._in_step: Optimizer | None = None  # this optimizer, or one that shares its groups
        self._whole: list[dict[str, list[Any]]] = []  # by group: its contents before it was divided
        self._moved = Moved()
        self.divide(model.sharding)
        optimizer.register_step_pre_hook(self._before)
        first = optimizer.register_step_post_hook(self.after)
        # Runs before the user's hooks: an average of weights there would find only this rank's parts stepped.
        optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
        self._zero = _unkept(optimizer.zero_grad)
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._add = _unkept(optimizer.add_param_group)
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        optimizer.register_state_dict_post_hook(self._say_whose)
        # Not by torch's hook: bitsandbytes has its own method and runs none.
        self._load = _unkept(optimizer.load_state_dict)
        optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        self._is_asking = False
        self._takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        # A scaler of torch's skips the step of a rank whose part is not finite, unless the optimizer says
        # that it does so itself: then all ranks come to `_before`, which refuses it.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer._imece_stepped = self  # type: ignore[attr-defined]

    @staticmethod
    def of(optimizer: Optimizer) -> SteppedParts | None:
        """The SteppedParts of an optimizer; None if it steps whole parameters."""
        return getattr(optimizer, "_imece_stepped", None)

    @property
    def is_divided(self) -> bool:
        """Whether parts lie in its groups: not between leave() and regroup()."""
        return bool(self._whole)

    @property
    def whole(self) -> Sequence[Mapping[str, list[Any]]]:
        """For each group, the parameters that the program gave it, and their names if it has them."""
        return self._whole

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that steps these parts."""
        optimizer = self._known_optimizer()
        assert optimizer is not None, "it keeps this"
        return optimizer

    @property
    def _model(self) -> ShardedDataParallel:
        """The model. RuntimeError if it is gone."""
        model = self._known()
        if model is None:
            raise RuntimeError(
                f"the model that parallelize returned with this {type(self.optimizer).__name__} is gone, and "
                f"with it what sums its gradients: keep it as long as its optimizer"
            )
        return model

    def divide(self, sharding: Sharding) -> None:
        """Put parts in place of parameters, in the groups and in the state."""
        optimizer, self._sharding = self.optimizer, sharding
        index = {id(each): at for at, (_, each) in enumerate(sharding.trained.named)}
        self._parameters = [each for each in parameters_of(optimizer) if id(each) in index]
        parts = by_index(sharding.parts)
        follow = followed(optimizer)
        for group in optimizer.param_groups:
            self._whole.append({key: list(group[key]) for key in ("params", "param_names") if key in group})
            mine: list[tuple[torch.Tensor, str]] = []
            for parameter, name in zip(group["params"], group.get("param_names", repeat("")), strict=False):
                if id(parameter) not in index:
                    mine.append((parameter, name))  # wants no gradient: nothing steps it
                    self._ids_of_rest.add(id(parameter))
                    continue
                state = optimizer.state.pop(parameter, None)
                for part in parts.get(index[id(parameter)], []):
                    self.ids_of_parts.add(id(part.parameter))
                    follow(parameter, part.parameter)
                    mine.append((part.parameter, name))
                    if state is not None:
                        optimizer.state[part.parameter] = part_of_state(state, part)
            # In place: the optimizer may keep this list too, as torch's LBFGS does.
            group["params"][:] = [parameter for parameter, _ in mine]
            if "param_names" in group:
                group["param_names"] = [name for _, name in mine]
        self._watch_state()

    def restore(self) -> None:
        """Put parameters in place of parts, as before `divide`; the state of the parts is dropped.

        The hooks stay, to keep their place among the user's.
        """
        for part in self._sharding.parts:
            self.optimizer.state.pop(part.parameter, None)
        del self._sharding
        self.ids_of_parts.clear()
        # By position: load_state_dict makes new groups in the same order.
        for group, whole in zip(self.optimizer.param_groups, self._whole, strict=False):
            group["params"][:] = whole["params"]
            group.update({key: kept for key, kept in whole.items() if key != "params"})
        self._whole = []

    def ask_all(self, flag: torch.Tensor) -> None:
        """flag: whether this rank's gradients are not finite, a float32 scalar; afterwards, whether any
        rank's are."""
        if self._model._join_config.enable:
            raise RuntimeError(
                "GradScaler inside of join(): ranks that have ended do not unscale their parts of the "
                "gradient; use strategy='replicate', or the same number of steps on all ranks"
            )
        ops.all_reduce(flag, "max", group=self._sharding.groups.world, label="overflow of scaled gradients")

    @contextlib.contextmanager
    def by_asking(self) -> Iterator[None]:
        """Inside, a scaler that has asked all ranks may step it."""
        self._is_asking = True
        self.optimizer._step_supports_amp_scaling = self._takes_scale  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._is_asking = False
            self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    # torch.compile, of a step or of what makes one, passes over what all ranks do together.

    @torch._disable_dynamo(recursive=True)
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Hook of its step. Ranks that have left theirs must not write what a closure here still reads."""
        self.before(optimizer)

        def waiting(given: Any) -> Any:
            def closure() -> Any:
                found = given()
                self._sharding.before_step((self._number,))
                return found

            return closure if callable(given) else given

        return (
            (optimizer, *map(waiting, args[1:])),
            {key: waiting(value) for key, value in kwargs.items()},
        )

    def before(self, optimizer: Optimizer) -> None:
        """A step begins: its own, or that of an optimizer that shares its groups, perhaps inside of
        its own."""
        if optimizer is not self.optimizer and self._in_step not in (None, optimizer):
            return
        if self._model.reducer.has_unsummed and self._parameters:
            first = next(s for s in self._sharding.slots if s.parameter is self._parameters[0])
            raise refusals.early(self.optimizer, first)
        self._model.before_step(self._number)
        if hasattr(self.optimizer, "found_inf") and not self._is_asking:
            raise RuntimeError(
                "torch's GradScaler sees only this rank's part of a sharded model's gradient, so ranks would "
                "not step together: use imece.GradScaler in its place"
            )
        self._refuse_late()
        self._check_summed()
        self._sharding.refuse_mixed((self._number,))
        self._sharding.written.check()
        self._sharding.before_step((self._number,))
        self._in_step = optimizer
        self._moved.begin(optimizer)

    def _check_summed(self) -> None:
        """RuntimeError if the step would leave out gradients that were not summed over ranks."""
        if self._model.has_joined or not any(each.grad is not None for each in self._parameters):
            return
        mine = {id(each) for each in self._parameters}
        alone = [
            s.name for s in self._sharding.slots if id(s.parameter) in mine and s.parameter.grad is not None
        ]
        if alone:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} would leave out the gradient of {alone[0]}, which is of "
                f"this rank alone: {refusals.FROM_ONE_RANK}. If your own code set it, let it set those of "
                f"the parts, which are in optimizer.param_groups. If torch's DistributedDataParallel is "
                f"around this model, as accelerator.prepare and fabric.setup put it, leave that out"
            )

    @torch._disable_dynamo(recursive=True)
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """A step is over, its own or that for which `before` was called."""
        if optimizer is not self.optimizer and optimizer is not self._in_step:
            return
        self._in_step = None
        with torch.no_grad():
            self._sharding.after_step((self._number,))
        self._sharding.accumulated.stepped(self._number)
        self._moved.end(optimizer, self._parameters)

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """ValueError: parts were cut, and gradients are summed, for the parameters given to `parallelize`."""
        given = param_group["params"]
        for each in [given] if isinstance(given, torch.Tensor) else given:
            raise self._late(each[1] if isinstance(each, tuple) else each)
        self._add(param_group)

    def _late(self, parameter: torch.Tensor) -> ValueError:
        names = {id(each): name for name, each in self._module.named_parameters()}
        name = names.get(id(parameter), f"of shape {list(parameter.shape)}, none of the model's,")
        return ValueError(
            f"parameter {name} is given to {type(self.optimizer).__name__} after parallelize, and its "
            f"gradient would not come here: give it before parallelize, wanting a gradient. To train it "
            f"later only, freeze it after parallelize, and thaw it in its turn"
        )

    def _refuse_late(self) -> None:
        """ValueError for what somebody wrote into the groups by hand."""
        for each in parameters_of(self.optimizer):
            if id(each) not in self.ids_of_parts and id(each) not in self._ids_of_rest:
                raise self._late(each)

    def _say_whose(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Note whose parts these are: other ranks' state dicts have the same keys and mostly the
        same shapes."""
        if self.is_divided:
            state[_WHOSE] = whose(self.optimizer, self._sharding)

    def _load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load this rank's own state; that of whole parameters, from a plain optimizer, is cut. ValueError
        for other parts."""
        found = state_dict.get(_WHOSE)
        if found is not None and found["parts"] != (mine := whose(self.optimizer, self._sharding))["parts"]:
            raise ValueError(
                f"this optimizer's state dict is of the parts of rank {found['rank']} of {found['size']}, "
                f"and rank {mine['rank']} of {mine['size']} has others: load on each rank what it has saved, "
                f"or save with imece.checkpoint.TrainingState, which loads on any rank"
            )
        if found is None and is_of_whole(state_dict, self.optimizer, self._whole, self._sharding.parts):
            if self._sharding.trained.blocks.get(self._number, 1) > 1:
                name = type(self.optimizer).__name__
                raise ValueError(
                    f"this is the state of whole parameters, and what {name} keeps in blocks cannot be cut: "
                    f"save and load it with imece.checkpoint.TrainingState"
                )
            state_dict = cut_state(state_dict, self._whole, self._sharding)
        self._load(state_dict, *args, **kwargs)
        self._watch_state()

    def _watch_state(self) -> None:
        """Make a lookup of a whole parameter raise: as a defaultdict, the state would add an entry that
        breaks `state_dict()`."""
        optimizer = self.optimizer
        # An optimizer with another one inside may share its state with that.
        shares = any(isinstance(each, Optimizer) for each in vars(optimizer).values())
        if type(optimizer.state) is defaultdict and not shares:
            state = _StateOfParts(dict, optimizer.state)
            state.stepped = weakref.ref(self)
            optimizer.state = state

    def name_of(self, parameter: object) -> str | None:
        """The name of a whole parameter of which it, or the optimizer of another rank, steps a part."""
        named = self._sharding.trained.named if self.is_divided else ()
        return next((name for name, each in named if each is parameter), None)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if (model := self._known()) is not None:
            model.before_zero(self._number, set_to_none)
        self._zero(set_to_none)
        self._sharding.zeroed((self._number,), set_to_none)
        for parameter in self._parameters:  # gradients from no_sync that were not summed
            parameter.grad = None


def whole_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    """Its groups, each with the parameters that the program gave it, whatever parts they hold now."""
    stepped = SteppedParts.of(optimizer)
    groups = optimizer.param_groups
    whole = stepped._whole if stepped is not None and stepped.is_divided else groups
    for group, given in zip(groups, whole, strict=False):
        yield group, given["params"]


class _StateOfParts(defaultdict[Any, Any]):
    """What an optimizer keeps, by part."""

    stepped: weakref.ref[SteppedParts] | None = None

    def __bool__(self) -> bool:
        """RuntimeError if torch's get_state_dict or set_state_dict asks whether there is any state: they
        would look for whole parameters next, and say only `KeyError: 0`.
        """
        stepped = self.stepped() if self.stepped is not None else None
        asks = sys._getframe(1).f_globals.get("__name__")
        if asks == _TORCHS_STATE_DICTS and stepped is not None and stepped.is_divided:
            raise RuntimeError(
                f"{type(stepped.optimizer).__name__} steps this rank's parts of parameters, which "
                f"{_TORCHS_STATE_DICTS} does not know: save and load by imece.checkpoint.TrainingState; or "
                f"imece.full_optimizer_state(model, optimizer) is the whole state, on rank 0, and "
                f"optimizer.load_state_dict takes it on all ranks"
            )
        return len(self) > 0

    def __missing__(self, key: Any) -> Any:
        """RuntimeError for a whole parameter."""
        stepped = self.stepped() if self.stepped is not None else None
        name = stepped.name_of(key) if stepped is not None else None
        if stepped is not None and name is not None:
            raise RuntimeError(
                f"{type(stepped.optimizer).__name__} keeps nothing of parameter {name}: it steps this rank's "
                f"parts, which are in optimizer.param_groups. imece.checkpoint.TrainingState saves and loads "
                f"what it keeps of whole parameters"
            )
        return super().__missing__(key)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _unkept(method: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's method as it is now, as a function that does not keep the optimizer alive."""
    if getattr(method, "__self__", None) is None:
        return method  # somebody has put another function in its place
    known: Callable[[], Any] = weakref.WeakMethod(method)
    return lambda *args, **kwargs: known()(*args, **kwargs)
