"""When units are gathered and freed: around their forward, around their backward, ahead of both.

    forward    a unit is gathered before it runs, and the units that ran after it last time are started; it is
               freed when it has run. The root stays until backward is over; so do the last units, as many as
               the first gradient would start to gather again
    backward   the first gradient that reaches an output of a unit gathers it again, and starts the units that
               ran before it. It is freed when all of its gradients have left; a unit with frozen parameters,
               which have no gradients to tell, when a gradient reaches a unit before it. At the end all are
    step       nothing is gathered after it

All ranks must run the same units in the same order, as their gathers are collectives. If a checkpoint runs a
unit's forward inside of backward, the unit is gathered there, and that forward frees nothing.

Ranks may differ in which parameters of a unit have gradients, and so in when its buckets are full. So these
leave when the unit is over, which all ranks know alike: autograd goes back in the opposite order of forward,
so a gradient that reaches an output of one unit shows that everything entered after that unit was left is
over. Inside of `gathered` nothing is known: a backward of several forwards may go in any order there, as does
the backward of a gradient's gradient; buckets leave at its end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.forward_ad import unpack_dual
from torch.utils.hooks import RemovableHandle

from imece.buckets import units_at_once
from imece.data_parallel.outputs import tensors_in, when_gradient_comes
from imece.data_parallel.reducing import task
from imece.data_parallel.reducing.way import HIERARCHICAL
from imece.data_parallel.sharding.units import State, Unit, Wanted, check_wanted
from imece.data_parallel.strategy import Strategy


@dataclass(frozen=True)
class GatherOptions:
    """How sharded parameters are gathered."""

    units: Wanted = None
    """None: found automatically; classes of modules; or the least number of elements of a unit."""
    reshard_after_forward: bool = True
    """False: units gathered by forward stay for backward; more memory, one gather less."""
    in_flight: int | None = None
    """Units gathered at a time in forward, with those that are coming; at least 1. None: `units_at_once`."""
    always: bool = False
    """Gather even if the ranks share memory, where nothing needs to be gathered."""

    def __post_init__(self) -> None:
        check_wanted(self.units)
        for name, flag in (("reshard_after_forward", self.reshard_after_forward), ("gather", self.always)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r}: True or False")
        if self.in_flight is not None and not isinstance(self.in_flight, int):
            raise TypeError(f"gathers_in_flight={self.in_flight!r}: a whole number, at least 1")
        if self.in_flight is not None and self.in_flight < 1:
            raise ValueError(f"gathers_in_flight is {self.in_flight}; it must be at least 1")

    def wanted(self, strategy: Strategy, in_common: bool) -> bool:
        """Whether parameters are gathered by unit; otherwise sharded ones lie in shared memory."""
        return strategy.parameters and (self.always or not in_common)


class Gathering:
    """The hooks on the modules of all units, and what they gather and free."""

    def __init__(
        self,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        options: GatherOptions,
        schedule: str | None,
    ) -> None:
        """units: the root first; their buckets are added later. schedule: as for ops.all_gather."""
        self.units, self._group, self.options, self._schedule = list(units), group, options, schedule
        self.in_flight = options.in_flight or units_at_once(over_hosts=schedule == HIERARCHICAL)
        self._ahead = self.in_flight - 1
        self._order: list[Unit] = []  # the order of units in the last complete forward
        self._path: list[Unit] = []  # their order in this one
        self._held = 0  # number of open `gathered` contexts
        self.most_bytes = 0  # of units that were gathered at a time
        self._ending = False  # all will be freed when this backward is over
        self._clock = 0  # counts units entered and left
        self._training = False  # in a forward of the root with gradients
        self._came: list[tuple[Unit, int]] = []  # calls whose gradients came in this backward
        self.when_over: Callable[[set[int]], None] | None = None  # told the numbers of units
        self._handles: list[RemovableHandle] = []

    def hook(self) -> None:
        """From now on modules gather and free."""
        for unit in self.units:
            if not unit.flats and unit.number:
                continue
            self._handles += [
                unit.module.register_forward_pre_hook(_Hook(unit, self._enter), prepend=True),
                unit.module.register_forward_hook(_Hook(unit, self._leave)),
                unit.module.register_forward_hook(_Hook(unit, self._has_left), always_call=True),
            ]
            trained = [pair for flat in unit.flats if not flat.is_frozen for pair in flat.named]
            self._handles += [
                each.register_post_accumulate_grad_hook(_refuse_early(weakref.ref(unit), name))
                for name, each in trained if each.requires_grad
            ]  # fmt: skip

    def let_go(self) -> None:
        """Let go of the modules and of all memory, whatever is under way; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.when_over = None
        del self._group
        for unit in self.units:
            unit.let_go()

    @property
    def is_held(self) -> bool:
        """Whether the caller is inside of `gathered`."""
        return bool(self._held)

    # Forward. If a unit calls itself, its forward, outside of a backward, is the outermost call.

    def begin_forward(self) -> None:
        """A forward of the whole model begins: no unit runs, even if the last forward was interrupted."""
        for unit in self.units:
            unit.depth = 0

    def _has_left(self, unit: Unit, _inputs: Any, _output: Any) -> None:
        """A unit's call is over, or has raised."""
        unit.depth = max(0, unit.depth - 1)

    def _enter(self, unit: Unit, _inputs: Any) -> None:
        unit.depth += 1
        if task.is_running():
            unit.entered = max(unit.calls, default=0)  # a checkpoint runs this one again
            self._gather(unit, unit.earlier)
            return
        if unit.depth > 1:
            return
        self._clock += 1
        unit.entered = self._clock
        if unit.number == 0:
            self._recover()
            self._free(each for each in self.units if each.kept)  # no backward came, or it comes later
            self._path, self._training = [], torch.is_grad_enabled()
            self._gather(unit, self._order[: self._ahead], at_end=False)
            return
        unit.earlier = tuple(self._path[::-1][: self._ahead])
        self._path.append(unit)
        at = len(self._path)
        expected = self._order[at - 1 : at] == [unit]
        self._gather(unit, self._order[at : at + self._ahead] if expected else (), at_end=False)

    def _leave(self, unit: Unit, inputs: tuple[Any, ...], output: Any) -> None:
        in_backward = task.is_running()
        if not in_backward:
            if unit.depth > 1:
                return
            if unit.number == 0:
                unit.earlier = tuple(self._path[::-1][: self._ahead])
                self._order = self._path
            self._clock += 1
            # A re-entrant checkpoint first runs it without gradients.
            if self._training or torch.is_grad_enabled():
                unit.calls[unit.entered] = self._clock
        comes = torch.is_grad_enabled() and self._await_backward(unit, inputs, output)
        if in_backward:
            return
        unit.awaited = comes or unit.pinned or (self._training and not torch.is_grad_enabled())
        if unit.number == 0:
            if not self._training:
                torch.clear_autocast_cache()  # as _end does
            self._training = False
            self._free(each for each in self.units if each.state is State.COMING)  # it did not run
            self._free(each for each in self.units if each.kept and each not in unit.earlier)
        stays = comes and (unit.number == 0 or not self.options.reshard_after_forward)
        unit.kept = comes and not stays and self._is_among_last(unit)
        if not (stays or unit.kept or unit.pinned):
            self._free([unit])

    def _is_among_last(self, unit: Unit) -> bool:
        """Whether the first gradient would start to gather it, if this forward is like the last."""
        at = len(self._path)
        return self._order[at - 1 : at] == [unit] and len(self._order) - at < self._ahead

    def _await_backward(self, unit: Unit, inputs: tuple[Any, ...], output: Any) -> bool:
        """Whether a backward may come through this output, and gather the unit."""
        earlier, entered, left = unit.earlier, unit.entered, unit.calls.get(unit.entered)
        comes = False

        @task.uncompiled
        def on_gradient(_gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled() and not self._held:
                raise RuntimeError(
                    f"a backward with create_graph=True came to {unit}, which is freed before the backward "
                    f"of its result: run the forward and both of them inside of `with model.gathered():`"
                )
            self._came.append((unit, entered))
            if left is not None and self.when_over is not None and not self._held:
                over = [each for each in self.units if min(each.calls, default=0) > left]
                self.when_over({each.number for each in over})
                self._free(each for each in over if each.has_frozen)
            self._gather(unit, [each for each in earlier if each.awaited])

        for tensor in chain(tensors_in(output), _kept_in(unit, self.units, inputs)):
            if tensor is None:
                unit.pinned = True
                continue
            # In forward-mode autograd a tangent has a graph of its own, which reads the parameters as well.
            for each in (tensor, unpack_dual(tensor).tangent):
                if each is not None and each.grad_fn is not None:
                    when_gradient_comes(each, on_gradient)
                    comes = True
        return comes

    # Backward.

    def begin(self) -> None:
        """A synchronised backward begins."""
        for unit in self.units:
            unit.left = 0

    def bucket_left(self, number: int) -> None:
        """A bucket of this unit has left, with all its gradients."""
        unit = self.units[number]
        unit.left += 1
        if unit.left == len(unit.flats):  # never with frozen ones, whose buckets do not leave
            self._free([unit])

    def settle(self) -> None:
        """When this returns, nothing is under way.

        A gather ahead leaves when all ranks are known to make it. A hook's collective does not wait for that:
        it could come before the gather on one rank and after it on another.
        """
        for unit in self.units:
            unit.settle()

    @task.uncompiled
    def _end(self) -> None:
        for unit, entered in self._came:
            unit.calls.pop(entered, None)
        # Otherwise the next forward in the same autocast would reuse casts from this one, and their gradients
        # would come late: when the units of this forward are over.
        torch.clear_autocast_cache()
        self._free_all()

    def _recover(self) -> None:
        """Clean up if the last backward raised."""
        if self._ending:
            self._free_all()

    def _free_all(self) -> None:
        self._ending = False
        self._came.clear()
        for unit in self.units:
            unit.pinned = False
        self._free(self.units)

    # What is there.

    def _gather(self, unit: Unit, then: Iterable[Unit], *, at_end: bool = True) -> None:
        """Gather a unit now and start others. at_end: the caller is inside of a backward, whose end frees
        the unit."""
        if at_end and not self._ending:
            self._ending = True
            task.at_end(self._end)
        with temporarily_clear_interpreter_stack():  # torch.func's transforms let nobody write into units
            unit.gather(self._group, self._schedule)
            for each in then:
                each.start(self._group, self._schedule)
        self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in self.units if each.is_there))

    def _free(self, units: Iterable[Unit]) -> None:
        """Free units. Afterwards RuntimeError that names a parameter into which somebody wrote: that
        is lost."""
        if self._held:
            return
        lost = [(name, unit) for unit in units if (name := unit.free()) is not None]
        for name, unit in lost:
            raise RuntimeError(
                f"parameter {name} was written into, which is lost as {unit} is freed: do it inside of `with "
                f"model.gathered(write=True):`"
            )

    def note_versions(self) -> None:
        """Accept writes into gathered parameters until now: they are kept, or need not be."""
        for unit in self.units:
            if unit.state is State.GATHERED:
                for flat in unit.flats:
                    flat.note_versions()

    def before_step(self) -> None:
        """Free everything that the step is about to change."""
        if self._held:
            raise RuntimeError(
                "an optimizer's step, or a load from a checkpoint, inside of gathered(): what is gathered "
                "would not change; do it behind the `with`"
            )
        for unit in self.units:
            unit.calls.clear()
        self._free_all()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all units are gathered, and nothing is freed.

        RuntimeError that names a parameter that was written into, unless `note_versions` was called after
        that.
        """
        if task.is_running():
            raise RuntimeError("gathered() inside of backward: enter it before, around forward and backward")
        self._held += 1
        try:
            for unit in self.units:
                unit.gather(self._group, self._schedule)
            yield
        except BaseException:
            self.note_versions()  # or freeing would raise, and hide the first error
            raise
        finally:
            self._held -= 1
            self._free(self.units)


class _Hook:
    """A hook on the module of a unit. In a copy or pickle of the module, which has parameters of its own, the
    hook does nothing.
    """

    def __init__(self, unit: Unit | None = None, run: Callable[..., None] | None = None) -> None:
        self._unit, self._run = unit, run

    @torch._disable_dynamo(recursive=True)
    def __call__(self, module: nn.Module, *given: Any) -> None:
        if self._unit is not None and self._run is not None and self._unit.known() is module:
            self._run(self._unit, *given)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _kept_in(unit: Unit, units: Sequence[Unit], inputs: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """What the unit's modules keep of a forward for others to find, such as the loss of a router.

    Not one of the inputs: its gradient comes when the unit has been freed, which would gather it once more.
    """
    others = {id(each.module) for each in units}
    waiting = [unit.module]
    while waiting:
        module = waiting.pop()
        waiting += (each for each in module.children() if id(each) not in others)
        for value in vars(module).values():
            is_kept = isinstance(value, torch.Tensor) and value.grad_fn is not None
            if is_kept and not any(value is given for given in inputs):
                yield value


def _refuse_early(known: weakref.ref[Unit], name: str) -> Callable[[torch.Tensor], None]:
    """A hook on a parameter's gradient, which must not keep the unit, as that keeps the parameter."""

    @task.uncompiled
    def on_gradient(_parameter: torch.Tensor) -> None:
        unit = known()
        if unit is not None and unit.state is State.COMING:
            raise RuntimeError(
                f"backward used {name} while {unit} was still being gathered: it came by a tensor that the "
                f"unit's forward has not returned, but kept elsewhere, a loss in a list say. "
                f"Return it too, or run forward and backward inside of `with model.gathered():`"
            )

    return on_gradient
