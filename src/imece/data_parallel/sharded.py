"""ShardedDataParallel: what `parallelize` makes of a model with any strategy that shards. Each rank keeps
a part."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from imece.buckets import default_cap_bytes
from imece.collectives import ops
from imece.collectives.wire_formats import WireName
from imece.data_parallel import other_models
from imece.data_parallel.average import Over
from imece.data_parallel.compiled import waits_before_compiled
from imece.data_parallel.joining import ShardedJoinHook, Turn, most_of_all, next_turn
from imece.data_parallel.norm import norm_of
from imece.data_parallel.optimizer import numbers_of, set_numbers, who_steps
from imece.data_parallel.reducing import in_backward
from imece.data_parallel.reducing.used import Alike
from imece.data_parallel.reducing.way import HIERARCHICAL, leave_together
from imece.data_parallel.replicate import DistributedDataParallel, Model
from imece.data_parallel.same import check_same_optimizers, check_same_shapes, sync_from
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.cast import (
    MixedPrecision,
    cast_buffers,
    cast_frozen,
    cast_input,
    refuse_batch_norms,
)
from imece.data_parallel.sharding.gathered import fill_state, gathered, loading
from imece.data_parallel.sharding.gathering import Gathering, GatherOptions
from imece.data_parallel.sharding.meta import Filling, Init
from imece.data_parallel.sharding.offload import Offload
from imece.data_parallel.sharding.stepped import SteppedParts
from imece.data_parallel.sharding.stores import Division
from imece.data_parallel.sharding.trained import (
    Trained,
    can_lie_flat,
    refuse_subclasses,
    refuse_tied_by_data,
)
from imece.data_parallel.sharding.units import find_units, owners_of
from imece.data_parallel.strategy import ShardGroups, Strategy
from imece.errors import MismatchError
from imece.mesh import Mesh


@dataclass(frozen=True)
class ShardOptions:
    """How a model is sharded, independent of its ranks."""

    strategy: Strategy
    precision: MixedPrecision
    gather: GatherOptions
    home: torch.device | None
    """Where a model on the meta device will be; None: the model has memory already."""
    init: Init | None
    """Fills one module of a model on the meta device."""
    offload: Offload | None


class ShardedDataParallel(DistributedDataParallel[Model]):
    """DistributedDataParallel with a part of the model on each rank; made by `parallelize`."""

    sharding: Sharding

    def __init__(
        self,
        module: Model,
        optimizers: Sequence[Optimizer],
        groups: ShardGroups,
        options: ShardOptions,
        *,
        average: Over,
        bucket_cap_mb: float | None,
        wire: WireName | None,
        overlap: bool | None,
    ) -> None:
        """Arguments as for `parallelize`. groups: which ranks divide the model, and which hold the
        same shard."""
        self._optimizers, self._groups, self._options = list(optimizers), groups, options
        self._home = options.home
        self._dtypes: list[torch.dtype] | None = None  # dtypes of masters; None until there are any
        self._frozen_shared: list[tuple[str, torch.Tensor]] | None = None
        self._has_frozen: int | None = None  # while ranks change: the rank that has all frozen parameters
        self.stepped: list[SteppedParts] = []
        self._is_compiled = False  # the latest forward was compiled as a whole
        self._elements: Sequence[tuple[str, float]] = ()  # of parameters, for other ranks to compare
        self.has_joined = False  # under join: this rank has ended and follows the others
        super().__init__(
            module, process_group=groups.world, bucket_cap_mb=bucket_cap_mb, average=average, wire=wire,
            overlap=overlap, init_sync=options.home is None,
        )  # fmt: skip

    def _make_gradients(self) -> Sharding:
        is_first = self._dtypes is None  # not when the ranks have changed
        self._check_divisible(self._groups)
        if is_first:
            self._check_model()
        options, home, gathers = self._options, self._home, self._gathers()
        units = find_units(self.module, options.gather.units) if gathers or home is not None else []
        gathering = Gathering(units, self._groups.shard, options.gather, self._schedule) if gathers else None
        fill = Filling(units, home, self.process_group, options.init) if home and is_first else None
        trained = Trained.of(self.trained, self._optimizers, self.module, units, self._dtypes)
        check_same_optimizers(who_steps(self.trained, self._optimizers), self.process_group, self.device)
        frozen = self._frozen_to_share() if options.strategy.parameters else []
        division = Division(
            options.strategy,
            self._groups,
            self._cap_bytes(),
            options.precision,
            replace(self._way, schedule=self._schedule),
            gathering=gathering,
            offload=options.offload,
            root=self._has_frozen,
        )
        self.sharding = Sharding(
            trained,
            Trained.frozen(frozen, self.module, units, options.precision.param),
            division,
            fill=fill,
            may_come_late=weakref.WeakMethod(self._may_come_late),
            owners=owners_of(self.module),
        )
        if fill is not None:
            fill.rest()
            self.sync_rest(0)
        if gathering is not None:
            gathering.hook()
        if is_first:
            self._dtypes = list(trained.dtypes)
            self._begin()
        for stepped in () if is_first else self.stepped:
            stepped.divide(self.sharding)
        return self.sharding

    def _check_model(self) -> None:
        """ValueError, MismatchError for a model that cannot be sharded like this."""
        named, precision = self.trained, self._options.precision
        in_backward.refuse(named)
        refuse_subclasses(named)
        refuse_tied_by_data(named, [each for each in self.frozen if can_lie_flat(each[1])])
        precision.check(named)
        if precision.param is not None:
            refuse_batch_norms(self.module, precision.param, self.device, self.parameters_to_ignore)
        if self._home is not None:  # others were compared before values were sent
            check_same_shapes(self._alike(), self.process_group, self.device)

    def _gathers(self) -> bool:
        """Whether parameters are gathered by unit. ValueError if they are not, and are to lie on the host."""
        options = self._options
        wanted = options.gather.wanted(options.strategy, self._groups.in_common(self.device))
        if options.offload is not None and options.offload.parameters and not wanted:
            raise ValueError("offload='parameters' needs units that are gathered: pass gather=True")
        return wanted

    def _frozen_to_share(self) -> list[tuple[str, torch.Tensor]]:
        """When ranks change, these are the same parameters again, whatever their class is while they
        are freed."""
        if self._frozen_shared is None:
            self._frozen_shared = [each for each in self.frozen if can_lie_flat(each[1])]
        return self._frozen_shared

    def _begin(self) -> None:
        """What happens once and stays when the ranks change."""
        precision = self._options.precision
        if precision.param is not None:
            shared_out = {id(each) for store in self.sharding.frozen for each in store.members}
            cast_frozen((each for _, each in self.frozen if id(each) not in shared_out), precision.param)
        if precision.buffer is not None:
            cast_buffers(self.module, precision.buffer, self.parameters_to_ignore)
        self.stepped = [
            SteppedParts(optimizer, number, self) for number, optimizer in enumerate(self._optimizers)
        ]

    def regroup(
        self, ranks: Mesh | dist.ProcessGroup, spread: bool = False, *, has_frozen: int | None = None
    ) -> None:
        """As in DistributedDataParallel. Parts and optimizer states are cut anew, and are empty.

        spread: see `ShardGroups.of`. has_frozen: the new rank that has whole frozen parameters, such as those
        in shared memory: all ranks get them from it.

        The caller fills parts and states on all ranks, from a checkpoint or from copies of what ranks had
        (see `TrainingState`); frozen parameters too unless `has_frozen` is given. Parameters that are whole
        on each rank, or in shared memory, stay as they are.

        ValueError: the strategy is impossible on these ranks. RuntimeError: inside of a backward or
        `gathered`. Then nothing is changed.
        """
        groups = ShardGroups.of(self._options.strategy, ranks, spread)
        self._check_divisible(groups)
        self.leave()
        self._groups, self._has_frozen = groups, has_frozen
        self._join_group(groups.world)
        self._has_frozen = None

    def leave(self) -> None:
        """As in DistributedDataParallel. This rank's parts and its optimizers' states are dropped."""
        if self._kept is None and self.sharding.gathering is not None and self.sharding.gathering.is_held:
            raise RuntimeError("regroup() or leave() inside of gathered(): call it behind the `with`")
        super().leave()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As in DistributedDataParallel, with inputs in the dtype of the parameters that precision names."""
        self._begin_forward(torch.compiler.is_compiling())
        if (param := self._options.precision.param) is not None:
            inputs = tuple(cast_input(each, param) for each in inputs)
            kwargs = {key: cast_input(each, param) for key, each in kwargs.items()}
        return super().forward(*inputs, **kwargs)

    @torch._disable_dynamo(recursive=True)
    def _begin_forward(self, is_compiling: bool) -> None:
        self._is_compiled = is_compiling
        if not self.synchronised:
            in_backward.refuse(self.trained)
        if self._kept is None:  # else there are no parts, between leave() and regroup()
            self.sharding.divided.end()
            self.sharding.check_parts()
            self._elements = self.sharding.written.own_part_alone()
            if self.sharding.gathering is not None:
                self.sharding.gathering.begin_forward()

    def to_compare(self) -> Alike:
        return super().to_compare()._replace(elements=self._elements)

    def _of_each_rank(self) -> list[tuple[str, torch.Tensor]]:
        laid = {id(each) for store in self.sharding.every_store for each in store.members}
        whole = [each for each in self.frozen if id(each[1]) not in laid]
        return [*self.sharding.of_each_rank, *whole]

    def _tell_apart(self, said: str) -> None:
        """An error: the next step would mix what the ranks have."""
        raise MismatchError(said)

    def _has_more_written(self) -> bool:
        # Into this rank's parts, which all ranks get with the next step.
        parts = any(each.written_part() is not None for each in self.sharding.stores)
        return super()._has_more_written() or parts

    def _may_come_late(self) -> bool:
        """Whether a step may end before its gathers do. Not with compiled code: it is made for ordinary
        parameters, and looks at all of them before it begins."""
        return self._way.overlap and not self._is_compiled and waits_before_compiled(self.module)

    def _refuse_shared(self) -> None:
        shards_parameters = self._options.strategy.parameters
        shared_out = self._frozen_to_share() if shards_parameters else []
        laid = [each for _, each in (*self.trained, *shared_out)]
        other_models.refuse_shared(self.module, laid, shards_parameters=shards_parameters)

    def _check_divisible(self, groups: ShardGroups) -> None:
        elements = sum(each.numel() for _, each in self.trained)
        if elements < groups.shard.size():
            raise ValueError(
                f"a model of {elements} elements cannot be divided among {groups.shard.size()} ranks"
            )

    def _let_go(self) -> None:
        for stepped in self.stepped:
            stepped.restore()
        super()._let_go()
        self.sharding.divided.end()
        del self.sharding
        self.has_joined = False

    def _pop_groups(self) -> list[dist.ProcessGroup]:
        groups: ShardGroups | None = self.__dict__.pop("_groups", None)
        mine = [groups.shard, groups.replicas] if groups is not None else []
        return super()._pop_groups() + [each for each in mine if each is not None]

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        if self._dtypes is None:
            return super()._alike()
        # Parameters without memory have other strides than those of a rank that keeps its memory.
        return [(name, each.new_empty(each.shape, device="meta")) for name, each in super()._alike()]

    def _cap_bytes(self) -> int:
        if not self.bucket_bytes_cap_default:
            return self.bucket_bytes_cap
        borrows = self._options.strategy.gradients
        together = not borrows and leave_together(self._way, self._groups.shard, self.device)
        on_cpu = self.device_type == "cpu"
        precision = self._options.precision
        return default_cap_bytes(
            over_hosts=self._way.schedule == HIERARCHICAL, on_cpu=on_cpu, borrows=borrows, together=together,
            gradients_bytes=0 if on_cpu else precision.gradients_bytes(self.trained),
        )  # fmt: skip

    @property
    def _schedule(self) -> str | None:
        """The schedule was chosen for the group of all ranks, and holds for no other group."""
        return self._way.schedule if self._groups.shard is self._groups.world else None

    def sync_rest(self, root: int) -> None:
        """Give all ranks rank `root`'s values of what is not sharded: buffers and whole frozen parameters.
        A collective."""
        sharded = {id(each) for store in self.sharding.every_store for each in store.members}
        rest = [each for each in self.states(buffers=True) if id(each) not in sharded]
        if rest:
            sync_from(root, rest, self.process_group, "what is not sharded")

    @contextlib.contextmanager
    def gathered(self, write: bool = False) -> Iterator[None]:
        """Inside, all parameters are whole on every rank; all ranks enter and leave together.

        write: what is written into them inside, the same on all ranks, stays. Otherwise they may only
        be read. MismatchError if it is not the same, as where one rank alone writes.
        """
        with gathered(self.sharding, self._written_alike if write else None):
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole tensors, on every rank, in the masters' dtype; all ranks call this.

        Parameters that are gathered, or have fewer bits than their masters, are copies.
        """
        if not self.sharding.stores_to_copy:
            return super().state_dict(*args, **kwargs)
        state = super().state_dict(*args, **kwargs | {"keep_vars": True})
        fill_state(self.sharding, state)
        for key, value in state.items():
            if isinstance(value, nn.Parameter) and not kwargs.get("keep_vars"):
                state[key] = value.detach()
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Every rank loads the same state, into masters with all bits; all ranks call this."""
        written = functools.partial(self._written_alike, "load_state_dict")
        with gathered(self.sharding, written), loading(self.sharding):
            return super().load_state_dict(*args, **kwargs)

    def check_parameters(self) -> None:
        """As in DistributedDataParallel, with whole parameters."""
        with self.gathered():
            super().check_parameters()

    def _refuse_join(self) -> None:
        if self.sharding.gathering is not None:
            name = self._options.strategy.name
            raise RuntimeError(
                f"join: strategy {name!r} gathers parameters in each forward, in which all ranks take part: "
                f"give all equally many batches, as imece.DistributedSampler(uneven='drop') and "
                f"DataLoader(drop_last=True) do, or take strategy 'zero2'"
            )
        super()._refuse_join()

    def _counted(self, only: Collection[int] | None) -> Collection[int] | None:
        if only is not None and self._join_config.enable:
            raise RuntimeError(
                "clipping some parameters of a sharded model inside of join(): clip all of them, by "
                "model.clip_grad_norm_"
            )
        return super()._counted(only)

    def _across_model(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """First over the ranks' parts of the gradient."""
        self._tell_joined(Turn.NORM, norm_type)
        group = self.sharding.groups.shard
        everybody = norm.new_empty(group.size())
        ops.all_gather(everybody, norm, group=group, label="norms of parts of the gradient")
        return super()._across_model(norm_of([everybody], self.device, norm_type), norm_type)

    def scale_gradients(self, factor: float, only: Collection[int] | None = None) -> None:
        """Multiply the gradient, or the gradients of `only` some parameters, by `factor`."""
        self._tell_joined(Turn.SCALE, factor)
        super().scale_gradients(factor, only)

    # Under join: ranks that have run out of inputs do the same to their parts.

    def _tell_joined(self, turn: Turn = Turn.FORWARD, number: float = 0.0) -> None:
        if self._join_config.enable and not self.has_joined:
            super()._tell_joined()
            next_turn(self, turn, number)

    def tell_backward(self) -> None:
        self._tell_joined(Turn.BACKWARD)

    def before_step(self, number: int) -> None:
        """The optimizer of this number steps next."""
        self._tell_joined(Turn.STEP, number)
        if not self._join_config.enable:
            self._check_written()  # after the step all ranks have the owners' values, and nothing would tell
        else:  # schedulers do not run on ranks that have ended
            optimizer = self._optimizers[number]
            mine = [-math.inf if self.has_joined else each for each in numbers_of(optimizer)]
            set_numbers(optimizer, most_of_all(self, mine, "learning rates"))

    def before_zero(self, number: int, set_to_none: bool) -> None:
        self._tell_joined(Turn.ZERO, 2 * number + set_to_none)

    def step(self, number: int) -> None:
        """Step this rank's parts with the optimizer of this number."""
        self._optimizers[number].step()

    def zero_gradients(self, number: int, set_to_none: bool) -> None:
        """Zero the gradients of one optimizer's parts; those of the whole model if no optimizer has
        this number."""
        everything: nn.Module | Optimizer = self
        (self._optimizers[number] if number < len(self._optimizers) else everything).zero_grad(set_to_none)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's Join."""
        return ShardedJoinHook(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def strategy(self) -> str:
        """As in DistributedDataParallel."""
        return self._options.strategy.name

    @property
    def frozen_names(self) -> list[str]:
        """As in DistributedDataParallel, in registration order."""
        return [name for name, _ in self._frozen_shared or ()]

    def take_over_masters(self) -> None:
        """After something other than their optimizer wrote the parts: give all ranks the new values.

        All ranks call this. RuntimeError that names a parameter which was written into in place of its parts.
        """
        self.sharding.written.check_beside_parts()
        kinds = set(self.sharding.trained.kinds)
        self.sharding.before_step(kinds)
        members = [each for store in self.sharding.every_store for each in store.members]
        torch.autograd.graph.increment_version(members)
        with torch.no_grad():
            self.sharding.after_step(kinds)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of this rank's parts, too."""
        self.before_zero(len(self._optimizers), set_to_none)
        super().zero_grad(set_to_none)
        for slot in self.sharding.slots:  # zeros would count as gradients from no_sync, to be summed
            slot.parameter.grad = None
        for part in self.sharding.parts:
            if set_to_none:
                part.parameter.grad = None
            elif part.parameter.grad is not None:
                part.parameter.grad.zero_()
        self.sharding.zeroed(set(self.sharding.trained.kinds), set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            "a sharded model cannot be copied or pickled: each rank has a part of it. Save a checkpoint; for "
            "an average of weights copy model.module, inside of `with model.gathered():`"
        )
