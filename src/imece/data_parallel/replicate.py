"""DistributedDataParallel: torch's interface over imece's reducer."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import TypeVar

from imece.buckets import default_cap_bytes
from imece.collectives.calls import group_or_default
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.wire_formats import WireName
from imece.data_parallel import arguments, other_models, script
from imece.data_parallel.across import AcrossModel, refuse_other_parts
from imece.data_parallel.average import Average, Over
from imece.data_parallel.batch_norm import meet_in, refuse_uneven
from imece.data_parallel.buffers import BufferSync
from imece.data_parallel.joining import DDPJoinHook, agree, common_rank
from imece.data_parallel.norm import check_limit, norm_of, rounded
from imece.data_parallel.optimizer import rates_of
from imece.data_parallel.outputs import tensors_in, when_gradient_comes
from imece.data_parallel.reducer import Reducer
from imece.data_parallel.reducing import in_backward, task
from imece.data_parallel.reducing.buckets import Gradients
from imece.data_parallel.reducing.comm_hook import CommHook, Hook
from imece.data_parallel.reducing.finite import Finite
from imece.data_parallel.reducing.line import Line, Suspicion
from imece.data_parallel.reducing.trace import StepTrace
from imece.data_parallel.reducing.used import Alike
from imece.data_parallel.reducing.watch import Watch
from imece.data_parallel.reducing.way import (
    HIERARCHICAL,
    Way,
    best_schedule,
    has_spare_core,
    leave_together,
)
from imece.data_parallel.reducing.whole import WholeGradients
from imece.data_parallel.registered import Newcomers
from imece.data_parallel.regroup import Kept, make_usable, release, wanting_gradients
from imece.data_parallel.same import (
    apart_by_writes,
    check_drift,
    check_same_shapes,
    sync_from,
    written_alike,
)
from imece.data_parallel.script_writes import ScriptWrites
from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.parts import Part
from imece.data_parallel.torch_names import TorchNames
from imece.layout import MIB
from imece.listing import kind_of, many
from imece.mesh import Mesh
from imece.model_parallel.divided import divided_parameters

FIRST_BUCKET_BYTES = MIB
Model = TypeVar("Model", bound=nn.Module, default=nn.Module, covariant=True)
"""What is wrapped: `model.module` keeps its class for type checkers."""


class DistributedDataParallel(nn.Module, TorchNames, Joinable, Generic[Model]):
    """One model on every rank, trained as one: after backward each .grad is the mean over all ranks.

    Takes the arguments of torch.nn.parallel.DistributedDataParallel, in its order, and has its methods. The
    differences: .grad is always a view into a bucket; unused parameters need no flag; a rank whose model
    differs is an error that names the parameter. torch's flags for the rest are accepted.
    """

    sharding: Sharding | None = None
    """How the model lies on the ranks, if it is sharded, except between `leave` and `regroup`."""
    _home: torch.device | None = None  # where a model on the meta device will be
    _has_written = False  # the script, into parameters of this rank, since ranks compared

    def __init__(
        self,
        module: Model,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | Sequence[float] | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        average: Over = "ranks",
        wire: WireName | None = None,
        schedule: str | None = None,
        overlap: bool | None = None,
        drift_check_every: int = 0,
        check_finite: bool = False,
    ) -> None:
        """module: has at least one parameter that wants a gradient; all ranks construct at the same time.

        bucket_cap_mb: MiB of gradients that travel together; a list gives one cap per bucket. By default 25,
        hierarchically 5, without `overlap` on "shm" 4; the first bucket has 1. "auto": chosen after the first
        backward, from its times and the measured links.
        average: "ranks", as in torch; "samples" or "tokens": say with `weigh` how many each loss is the mean
        of, and the gradient is that of one process on all of them.
        wire, schedule: as for imece.all_reduce; by default "hierarchical" between the CPUs of several hosts.
        overlap: whether a bucket leaves while backward goes on. By default it does, but not between ranks of
        one host whose threads fill its cores: there it would slow backward down by more than it hides. Never
        on CPUs with synchronised batch norms that meet in the same group, nor with find_unused_parameters if
        backward makes collectives of its own; docs/ddp.md says why.
        drift_check_every: compare all ranks' parameters, bit for bit, every so many synchronised forwards.
        check_finite: after each backward `nonfinite` says which ranks brought NaN or Inf in which parameters.

        TypeError, ValueError, RuntimeError: arguments or a model that this class cannot train, with the
        reason.
        MismatchError: the ranks' models differ.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"{kind_of(module)} is no model: imece.DistributedDataParallel(model)")
        if not isinstance(drift_check_every, int) or drift_check_every < 0:
            raise ValueError(f"drift_check_every={drift_check_every!r}: a whole number, 0 for never")
        nn.Module.__init__(self)
        Joinable.__init__(self)
        arguments.refuse(
            delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, check_reduction
        )
        self.process_group = arguments.group_of(process_group, device_mesh)
        refuse_other_parts(module, self.process_group)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module: Model = module
        self.dim = dim
        self.parameters_to_ignore: set[str] = set(
            getattr(module, "_ddp_params_and_buffers_to_ignore", None) or ()
        )
        # Parameters that want a gradient now, each once; they keep their buckets if they are frozen later.
        self.trained = arguments.trained(module, self.parameters_to_ignore)
        self.frozen = [(name, each) for name, each in module.named_parameters()
                        if not each.requires_grad and name not in self.parameters_to_ignore]  # fmt: skip
        self._refuse_shared()
        if self.process_group.size() > 1:
            arguments.warn_of_max_norm(module)
        self.device = self._home or self.trained[0][1].device
        self.device_type = self.device.type
        devices = {each.device for _, each in self.trained}
        self.is_multi_device_module = len(devices) > 1
        self.device_ids, self.output_device = arguments.device_indices(device_ids, output_device, devices)
        flags = arguments.buffer_flags(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers, sync_buffers_now = flags
        self.find_unused_parameters = find_unused_parameters
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.static_graph = static_graph
        self.mixed_precision = None
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.drift_check_every = drift_check_every
        arguments.check_way(schedule, wire, overlap)
        self._asked_way = schedule, wire, overlap
        self._asked_caps = bucket_cap_mb, bucket_cap_mb_list
        self._choose_way()
        self._over: Over = average
        self._check_finite = check_finite
        self._kept: Kept | None = None  # between leaving one group and joining another
        self.across: AcrossModel | None = None  # set by `parallelize`
        self.stepped_by: list[weakref.ref[Optimizer]] = []  # likewise
        self.buffer_sync = BufferSync(module, self.parameters_to_ignore)
        self.synchronised = 0  # forwards whose backward is synchronised
        if init_sync:
            check_same_shapes(self._alike(), self.process_group, self.device)
            states = self.states(buffers=sync_buffers_now)
            sync_from(0, states, self.process_group, "the model at construction")
            if isinstance(self.process_group, SharedMemoryGroup):
                self.process_group.give_back()
        self._make_reducer()
        other_models.watch(self)

    def extra_repr(self) -> str:
        """In the model's repr: how it is trained, and on how many ranks."""
        group: dist.ProcessGroup | None = self.__dict__.get("process_group")  # none after `leave`
        return f"{self.strategy}, {many(group.size() if group is not None else 0, 'rank')}"

    # Training.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients enabled and outside of no_sync its backward will be
        synchronised."""
        inputs, kwargs = self._before_forward(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        return self._after_forward(output)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside stay on their rank; the first backward outside adds to them and
        reduces all."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, loss: torch.Tensor, count: float, total: float | None = None) -> torch.Tensor:
        """With average="samples" or "tokens": `model.weigh(loss, count).backward()`.

        loss: the mean over `count` samples or tokens of this rank; count may be 0. The result is a sum, for
        backward only; gradients become those of the mean over all ranks, and over micro-batches in no_sync.

        total: the number in the whole global batch, of all ranks and micro-batches; the same in all of them,
        otherwise MismatchError. Then micro-batches outside of no_sync add up to that mean too. ValueError if
        one backward brings more than that.
        """
        return self.reducer.average.weigh(loss, count, total)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops in which ranks run out of inputs at different times.

        Ranks that have left the loop take part in the others' collectives with nothing to give. At its end
        they get the model of the others, and what the optimizers keep that `parallelize` was given.
        divide_by_initial_world_size: divide gradients by the number of all ranks; otherwise by those still
        there. With average="samples" or "tokens" neither matters. throw_on_early_termination: all ranks
        raise RuntimeError as soon as the first one has ended. Ranks that have ended clip, step and zero their
        parts of a sharded model as the others do.

        ValueError with a synchronised batch norm in training mode. RuntimeError if units are gathered.
        """
        if enable:
            self._refuse_join()
        return Join(
            [self], enable, throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )  # fmt: skip

    def _refuse_join(self) -> None:
        refuse_uneven(self.module)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """`hook(state, bucket)` reduces each bucket instead of imece, and returns a future of the result.

        bucket: has the methods of torch's GradBucket, so torch's own hooks run. TypeError or ValueError if
        `hook` is not a hook; RuntimeError if there is one already.
        """
        checked = CommHook.of(state, hook)
        if self.reducer.leaving.hook is not None:
            raise RuntimeError(
                "register_comm_hook: this model has a communication hook already: give one that does both"
            )
        self.reducer.leaving.hook = checked

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Shorten the gradient to `max_norm` if it is longer. Returns its norm before, a scalar on the
        model's device. All ranks call this.

        The result has the same bits with every strategy. A norm that is not finite changes nothing.
        norm_type, ValueError, RuntimeError: as for `gradient_norm`. TypeError or ValueError for a `max_norm`
        that is no number from 0.
        """
        check_limit(max_norm)
        norm = self.gradient_norm(norm_type=norm_type)
        if max_norm < (length := float(norm)) < math.inf:
            self.scale_gradients(max_norm / length)
        return norm

    @torch._disable_dynamo(recursive=True)
    def gradient_norm(self, only: Collection[int] | None = None, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradient, a scalar: fp64, true to 1e-12, if parameters have 64 bits, else fp32. All
        ranks call this.

        Whichever ranks hold parts of the gradient, or of a model divided along tensor or pipeline: it is the
        norm over all parts, the same on all ranks.

        only: the numbers of some parameters; by default all. norm_type: above 0, otherwise ValueError; inf is
        the largest magnitude. RuntimeError for a divided model whose mesh is unknown, and for `only` some
        parameters of a sharded one inside of `join`: ended ranks follow with all of theirs.
        """
        mine = norm_of(self._gradients(self._counted(only)), self.device, norm_type)
        return self._rounded(self._across_model(mine, norm_type))

    def scale_gradients(self, factor: float, only: Collection[int] | None = None) -> None:
        """Multiply the gradient, or the gradients of `only` some parameters, by `factor`."""
        if gradients := self._gradients(only):
            torch._foreach_mul_(gradients, factor)

    def _gradients(self, only: Collection[int] | None) -> list[torch.Tensor]:
        stepped = self.reducer.slots if self.sharding is None else self.sharding.parts
        return [
            each.parameter.grad
            for each in stepped
            if each.parameter.grad is not None and (only is None or each.index in only)
        ]

    def _counted(self, only: Collection[int] | None) -> Collection[int] | None:
        """The numbers of the parameters whose gradients this rank counts in a norm."""
        return only if self.across is None else self.across.counted(only)

    def _across_model(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm over all parts of the model. norm: that of the part on this rank and its replicas."""
        if self.across is not None:
            return self.across.norm(norm, norm_type)
        if divided_parameters(self.module):
            raise RuntimeError(
                "this model is divided along the axis tensor, and who has its other parts is not known here: "
                "wrap it by imece.parallelize(model, optimizer, strategy, mesh)"
            )
        return norm

    def _rounded(self, norm: torch.Tensor) -> torch.Tensor:
        wide = any(slot.parameter.dtype.to_real() is torch.float64 for slot in self.reducer.slots)
        return rounded(norm, wide=wide)

    # What differs where parameters are sharded, so that one script works with every strategy.

    @property
    def strategy(self) -> str:
        """imece's name of the strategy: "replicate" here."""
        return "replicate"

    @property
    def parts(self) -> Sequence[Part]:
        """This rank's parts of sharded parameters, which only it keeps and steps."""
        return self.sharding.parts if self.sharding is not None else ()

    @property
    def frozen_parts(self) -> Sequence[Part]:
        """This rank's parts of sharded frozen parameters, which nothing steps."""
        return self.sharding.frozen_parts if self.sharding is not None else ()

    @property
    def sharded_names(self) -> list[str]:
        """Names of parameters that are kept in parts: trained ones first, then frozen ones, each in
        registration order."""
        return (
            [slot.name for slot in self.sharding.slots] + self.frozen_names
            if self.sharding is not None
            else []
        )

    @property
    def frozen_names(self) -> list[str]:
        """Names of frozen parameters that are kept in parts, in registration order: none here."""
        return []

    @contextlib.contextmanager
    def gathered(self, write: bool = False) -> Iterator[None]:
        """Inside, all parameters are whole on every rank; here they always are.

        write: what is written into them inside, the same on all ranks, stays. MismatchError if it is not
        the same, as where one rank alone writes.
        """
        with self._written_alike() if write else contextlib.nullcontext():
            yield

    def _written_alike(self, by: str = "gathered(write=True)") -> contextlib.AbstractContextManager[None]:
        named = [each for each in self.module.named_parameters() if each[0] not in self.parameters_to_ignore]
        return written_alike(named, self.process_group, self.device, by)

    def take_over_masters(self) -> None:
        """After something other than their optimizer wrote `parts`: give all ranks the new values."""

    def settle(self) -> None:
        """Wait for whatever the latest steps began, such as a gather."""
        if self.sharding is not None:
            self.sharding.settle()

    # Other ranks.

    def regroup(self, ranks: Mesh | dist.ProcessGroup) -> None:
        """Go on with other ranks: the same model, optimizers and options on another mesh or group.

        All ranks of the new group call this, newcomers too, outside of forward, backward and join. If the old
        group was not left before, it is now; see `leave`. No values move: the caller must bring about the
        same values on all ranks. Options that imece chooses are chosen anew. If this raises, since a rank may
        die meanwhile, it can be called again.

        MismatchError: the ranks' models differ. RuntimeError: inside of a backward.
        """
        group = ranks.data_group if isinstance(ranks, Mesh) else group_or_default(ranks)
        self.leave()
        self._join_group(group)

    def _join_group(self, group: dist.ProcessGroup) -> None:
        """After `leave`. If this raises, the next `leave` starts from what is there."""
        kept = self._kept
        assert kept is not None
        self.process_group = group
        kept.move(group)
        self.require_forward_param_sync = True
        self.synchronised = 0  # newcomers count from here too
        self._choose_way()
        with wanting_gradients(self.trained):  # which of them do may differ between one step and the next
            check_same_shapes(self._alike(), group, self.device)
            self._make_reducer()
        self.reducer.leaving.watch, self.reducer.leaving.hook = kept.watch, kept.hook
        self._kept = None

    def leave(self) -> None:
        """Let go of the ranks until now. Only `regroup` may follow.

        The ranks may be gone: nobody is asked. What a failed backward has left is dropped, gradients too.
        Call this before the group is destroyed and outside of `except`: while anything refers to a Gloo
        group, its connections stay open, and ranks that wait for this one do not see that it has left.

        RuntimeError: inside of a backward.
        """
        if task.is_running():
            raise RuntimeError("regroup() or leave() inside of backward: call it when backward is over")
        if self._kept is None:  # else a `regroup` has raised
            self._kept = Kept.of(self.reducer, self.module, self.buffer_sync.hook, self.process_group)
            self._let_go()
        for _, parameter in self.trained:
            parameter.grad = None
        for _, parameter in (*self.trained, *self.frozen):
            make_usable(parameter)
        self._kept.move(None)
        self.__dict__.pop("device_mesh", None)
        self._join_config = _JoinConfig.construct_disabled_join_config()  # a failed join leaves it on
        release(self._pop_groups())

    def record_trace(self, record: bool = True) -> None:
        """From now on `last_trace` holds the times of the latest synchronised step."""
        self.reducer.leaving.watch = Watch(self.device) if record else None

    @property
    def last_trace(self) -> StepTrace | None:
        """The times of the latest step since record_trace()."""
        return self.reducer.leaving.watch.last if self.reducer.leaving.watch is not None else None

    @property
    def backward_computed(self) -> torch.cuda.Event | None:
        """On a GPU, with record_trace(): the end of the latest backward, before it waits for
        communication."""
        return self.reducer.leaving.watch.computed if self.reducer.leaving.watch is not None else None

    @property
    def nonfinite(self) -> dict[int, list[str]]:
        """With check_finite: {rank in the world: parameters in which it brought NaN or Inf} in the last
        backward."""
        return self.reducer.leaving.finite.brought if self.reducer.leaving.finite is not None else {}

    def check_parameters(self) -> None:
        """MismatchError that names ranks and parameters unless all ranks hold the same bits; all ranks
        call this."""
        check_drift(self.trained, self.process_group, self.synchronised)

    # Around forward: torch.compile leaves both methods alone and compiles the module between them.

    @torch._disable_dynamo(recursive=True)
    def _before_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with temporarily_clear_interpreter_stack():  # torch.func's transforms let nobody write into buckets
            self._before_forward_of_all()
        if not self.device_ids:
            return inputs, kwargs
        moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
        return moved[0], moved_kwargs[0]

    def _before_forward_of_all(self) -> None:
        """Do what all ranks do together before a forward."""
        synchronise = torch.is_grad_enabled() and self.require_backward_grad_sync
        joining = self._join_config.enable
        if torch.is_grad_enabled():
            self.reducer.recover()
            self._refuse_thawed()
        if not self.synchronised:
            self.reducer.stepping = in_backward.take_over(each for _, each in self.trained)
        self._tell_joined()
        if not self.buffer_sync.after_forward and self.will_sync_module_buffers():
            self.sync_buffers(joining)
        if joining:
            agree(self, synchronise)
        if synchronise:
            self.synchronised += 1
            if self.drift_check_every and self.synchronised % self.drift_check_every == 0 and not joining:
                self.check_parameters()
            self._newcomers.look()
            if not joining:
                self._check_written()
                self._has_written |= self.script_writes.is_unusual()
            self.reducer.prepare()
        self.reducer.inside = synchronise

    @property
    def known_optimizers(self) -> list[Optimizer]:
        """Those that `parallelize` was given with this model, if somebody still has them."""
        return [each for known in self.stepped_by if (each := known()) is not None]

    def tell_backward(self) -> None:
        """For the reducer: nobody follows."""

    def to_compare(self) -> Alike:
        """For the reducer: what must be the same on all ranks."""
        return Alike(rates_of(self.known_optimizers), written=self._has_written)

    def _check_written(self) -> None:
        """If the script has written on some rank, a collective: do all ranks hold the same bits?"""
        used = self.reducer.used
        if used.written:
            mine, self._has_written, used.written = self._has_written, False, False
            named, more = self._of_each_rank(), self._has_more_written()
            if said := apart_by_writes(named, self.process_group, self.device, wrote=mine, more=more):
                self._tell_apart(said)

    def _tell_apart(self, said: str) -> None:
        """A warning: as with torch's, each rank goes on with what it has, and a script may mean that."""
        if self.process_group.rank() == 0:
            warnings.warn(said, stacklevel=script.level())

    def _has_more_written(self) -> bool:
        """Whether ranks may differ for now by what the script does: it wrote once more since it was asked, as
        where it looks at other values for a while, in one forward."""
        return self.script_writes.has_more()

    def _of_each_rank(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters of which each rank has a copy of its own, which are to be the same."""
        return [*self.trained, *self.frozen]

    def _refuse_thawed(self) -> None:
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when the model was wrapped and wants a gradient now, which "
                    f"no other rank would see: wrap it with requires_grad=True, and freeze it after that"
                )

    def refuse_newcomers(self) -> None:
        """For the reducer: a backward is over."""
        self._newcomers.refuse(self.parameters_to_ignore)

    def _tell_joined(self) -> None:
        """Let ranks that have run out of inputs take part in what follows."""
        Join.notify_join_context(self)

    @torch._disable_dynamo(recursive=True)
    def _after_forward(self, output: Any) -> Any:
        if self.buffer_sync.after_forward and self.will_sync_module_buffers():
            with temporarily_clear_interpreter_stack():
                self.sync_buffers(self._join_config.enable)
        synchronise = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = synchronise
        if torch.is_grad_enabled():
            reducer = self.reducer
            for tensor in tensors_in(output):
                if tensor is not None and tensor.grad_fn is not None:
                    prepared = partial(reducer.on_output_gradient, task.behind(tensor))
                    when_gradient_comes(tensor, prepared if synchronise else reducer.on_local_gradient)
            reducer.arm(synchronise)
        return output

    # Buffers and the end of uneven inputs.

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.buffer_sync.named)

    def sync_buffers(self, joining: bool, *, present: bool = True) -> None:
        root = common_rank(self, present) if joining else 0
        self.reducer.awaited += self.buffer_sync.sync(root, self.process_group)

    def states(self, *, buffers: bool) -> list[torch.Tensor]:
        """All parameters and, if wanted, all buffers, without ignored ones."""
        found: list[torch.Tensor] = [
            each for name, each in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]
        return found + self.buffer_sync.tensors if buffers else found

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's Join."""
        return DDPJoinHook(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    # Construction.

    def _choose_way(self) -> None:
        """Choose what the user left open, for this group."""
        schedule, wire, overlap = self._asked_way
        self._way = Way(
            schedule or best_schedule(self.process_group, self.device),
            wire,
            has_spare_core(self.process_group, self.device) if overlap is None else overlap,
        )
        meets = meet_in(self.module, self.process_group)
        on_cpu = self.device_type == "cpu"  # on a GPU buckets gain more by leaving early
        if meets and not self.static_graph and (on_cpu or self.find_unused_parameters):
            Line.of(self.process_group).crossing.add(self.module)
        caps, single, self._choose_cap = arguments.bucket_caps(*self._asked_caps)
        together = leave_together(self._way, self.process_group, self.device)
        default = default_cap_bytes(over_hosts=self._way.schedule == HIERARCHICAL, together=together)
        self.bucket_bytes_cap = max(caps, default=default)
        self.bucket_bytes_cap_list = [] if single else caps
        self.bucket_bytes_cap_default = not caps

    def _let_go(self) -> None:
        """Let go of what belongs to the ranks until now."""
        self.reducer.close()
        del self.reducer

    def _pop_groups(self) -> list[dist.ProcessGroup]:
        """All groups that this object refers to; it forgets them."""
        group = self.__dict__.pop("process_group", None)
        return [] if group is None else [group]

    def _alike(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that must have the same shapes on all ranks."""
        everything = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [(name, each) for name, each in everything if name not in self.parameters_to_ignore]

    def _refuse_shared(self) -> None:
        """ValueError that names a parameter which another model shards, or which has no memory yet."""
        arguments.refuse_meta(self._alike())
        other_models.refuse_shared(self.module, (), shards_parameters=False)

    def _make_reducer(self) -> None:
        self._newcomers = Newcomers(self.module, (each for _, each in (*self.trained, *self.frozen)))
        self.reducer = Reducer(
            self._make_gradients(),
            self.process_group,
            Average(self._over, self.process_group, self.device),
            self,
            overlap=self._way.overlap,
            static_graph=self.static_graph,
            finite=Finite(self.process_group) if self._check_finite else None,
            suspicion=self._suspicion() if self._way.overlap else None,
        )
        have_copies = self.process_group.size() > 1
        self.script_writes = ScriptWrites(each for _, each in (self._of_each_rank() if have_copies else ()))
        self._has_written = False

    def _make_gradients(self) -> Gradients:
        """Where gradients lie among these ranks."""
        first = [FIRST_BUCKET_BYTES] if self.bucket_bytes_cap_default else []
        return WholeGradients(
            self.trained,
            self.process_group,
            self.bucket_bytes_cap_list or [*first, self.bucket_bytes_cap],
            self._way,
            choose_cap=self._choose_cap,
        )

    def _suspicion(self) -> Suspicion | None:
        """What the first backward has to find out: with find_unused_parameters ranks use different
        parameters, and nobody sees beforehand which collectives a module makes in backward."""
        if self.static_graph or not self.find_unused_parameters or meet_in(self.module, self.process_group):
            return None
        return Suspicion(self.module, self.process_group, self.device)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: without the group, which must be the default one, and what belongs to it, and
        without the optimizers and the compiled code of this very model."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "only a model on the default process group can be pickled: pickle model.module"
            )
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["process_group"], state["reducer"], state["script_writes"], state["_newcomers"]
        return state | {"stepped_by": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = group_or_default(None)
        self._choose_way()
        with wanting_gradients(self.trained):
            self._make_reducer()
