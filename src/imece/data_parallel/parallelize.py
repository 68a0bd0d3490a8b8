"""`imece.parallelize`: one call for every strategy from DDP to ZeRO-3 and hybrid sharding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.collectives.wire_formats import WireName
from imece.data_parallel import torch_calls
from imece.data_parallel.across import AcrossModel, is_across, refuse_whole_matrices
from imece.data_parallel.alone import refuse_what_nobody_sums, warn_of_steps_alone
from imece.data_parallel.arguments import bucket_caps, check_way
from imece.data_parallel.auto import Given, choose
from imece.data_parallel.average import Over, check_over
from imece.data_parallel.closure import check_closures
from imece.data_parallel.optimizer import complete, refuse_of_all, stepped_by
from imece.data_parallel.other_models import refuse_gathered
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel, ShardOptions
from imece.data_parallel.sharding.cast import MixedPrecision
from imece.data_parallel.sharding.gathering import GatherOptions
from imece.data_parallel.sharding.meta import Init, is_meta
from imece.data_parallel.sharding.offload import Offload, check_steps_on_host, check_strategy, offload_of
from imece.data_parallel.sharding.units import Wanted
from imece.data_parallel.strategy import ShardGroups, Strategy, find_strategy
from imece.device import home_among
from imece.footprint import OFFLOADS
from imece.listing import kind_of, shown
from imece.mesh import Mesh
from imece.model_parallel.cutting import Part

Model = TypeVar("Model", bound=nn.Module)
Stepped = TypeVar("Stepped", bound=Optimizer | Sequence[Optimizer])
"""An optimizer or several, of the kind that is given, or that the given function makes."""


def parallelize(
    model: Model,
    optimizer: Stepped | Callable[[Iterable[nn.Parameter]], Stepped],
    strategy: str = "auto",
    mesh: Mesh | dist.ProcessGroup | None = None,
    *,
    average: Over = "ranks",
    bucket_cap_mb: float | None = None,
    precision: MixedPrecision | None = None,
    wire: WireName | None = None,
    overlap: bool | None = None,
    units: Wanted = None,
    reshard_after_forward: bool = True,
    gathers_in_flight: int | None = None,
    gather: bool = False,
    init: Init | None = None,
    offload: Literal["optimizer", "parameters"] | Offload | None = None,
    activation_bytes: int | None = None,
) -> tuple[DistributedDataParallel[Model], Stepped]:
    """Make a model and its optimizer train as one on all ranks: `loss.backward(); optimizer.step()` as ever.

    Returns the wrapped model, and the given (or newly made) optimizer, which now steps this rank's part.

        strategy      other name            parameters   gradients   optimizer   a step moves
        replicate     DDP, NO_SHARD         whole        whole       whole       2M
        zero1         ZeRO-1                whole        whole       1/N         2M
        zero2         SHARD_GRAD_OP         whole        1/N         1/N         2M
        zero3         FSDP, FULL_SHARD      1/N          1/N         1/N         3M
        hybrid        HYBRID_SHARD          1/G          1/G         1/G         3M in a host, 2M/G between
        hybrid_zero2  _HYBRID_SHARD_ZERO2   whole        1/G         1/G         2M in a host, 2M/G between

    (M: bytes of the model, N: ranks, G: ranks of a host.) If the optimizer is divided, a parameter's own
    .grad is None after backward: this rank's part of each gradient is in the optimizer's groups, and
    `model.clip_grad_norm_` clips. In `no_sync` each rank keeps whole gradients, and nothing moves.

    model: on its device, with the same shapes on all ranks; all ranks get rank 0's values. Its parameters
        move into flat memory, in place. A model on the meta device gets its memory here, unit by unit: no
        rank ever holds all of it.
    optimizer: one of torch's, a list of them, or a function that makes one from parameters.
    strategy: a name of the table, or "auto": the usual one (zero1; between the CPUs of several hosts
        replicate) if its parameters, gradients and optimizer state fit into the memory that is free now, else
        the first of zero1, replicate, zero2 and zero3 that fits. Rank 0 decides, and says on stderr why.
    mesh: by default that of imece.init(); given a process group, the model is sharded over its ranks instead.
    average: what the mean of gradients is over, as for DistributedDataParallel.
    bucket_cap_mb: MiB of a bucket. By default as for DistributedDataParallel; but 5 if gradients are sharded
        on CPUs, and with zero1 and zero2 on GPUs a 32nd of all gradients, up to 100, if that is more.
    precision: dtypes of a sharded model, of its gradients and of its buffers; by default its own.
    wire: "bf16" or "int8": gradients travel in two bytes or in one, and are summed in fp32; in hybrid
        strategies and on the CPUs of several hosts only between hosts.
    overlap: as for DistributedDataParallel. If parameters are whole, it also lets a step over a network
        return while they are still gathered. Any use of a parameter waits for it; a tensor made from one
        before the step, such as `parameter.detach()`, cannot wait.
    units: zero3 and hybrid gather parameters by unit: a module whose parameters are whole only while it runs.
        Give classes of modules, or how many elements a unit has at least; by default the model's repeated
        blocks. All ranks must run the same units, in one order, forward and backward: a unit whose output
        gets a gradient on some ranks gets one on all.
    reshard_after_forward: False: keep gathered parameters from forward until backward.
    gathers_in_flight: gathered units at a time, including those gathered ahead: by default 2, and 3 between
        CPUs of several hosts.
    gather: True: gather on the CPUs of one host too, where parameters otherwise lie in memory that all ranks
        of the host share.
    init: fills one module of a model on the meta device; by default the module's `reset_parameters`.
    offload: for a model on a GPU. "optimizer": what the optimizer steps (this rank's part of masters, summed
        gradients and state) lies in the host's memory and is stepped there. "parameters": so does this rank's
        part of the parameters, if units are gathered.
    activation_bytes: for "auto": what forward keeps on a rank at most; by default a quarter of the memory.

    ValueError: an unknown strategy, one that is impossible on this mesh, an optimizer that cannot be sharded
    or offloaded, offload of a model on the CPU, a model that another wrapped model gathers by unit; for
    "auto" that nothing fits, with what would. TypeError: arguments of other types. MismatchError: models or
    optimizers that differ between ranks; later, in backward, learning rates that differ.
    """
    _refuse_wrapped(model)
    refuse_gathered(model)
    arranged = mesh if mesh is not None else meshes.current()
    _check_kinds(strategy, arranged, init, activation_bytes, precision)
    named = find_strategy(strategy) if strategy.lower() != "auto" else None
    made: Stepped = _made(optimizer, model)
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    if not optimizers:
        raise ValueError("there is no optimizer: give one, a list of them, or a function that makes one")
    check_way(None, wire, overlap)
    bucket_caps(bucket_cap_mb, None)
    for each in optimizers:
        complete(each)
    check_over(average)  # before anything is taken apart
    for each in optimizers if is_across(arranged) else ():
        refuse_of_all(each, "step a part of a model", "another optimizer")
    refuse_whole_matrices(model, optimizers)
    offload_name = _name_of(offload)
    options = GatherOptions(units, reshard_after_forward, gathers_in_flight, gather)
    chosen = named or choose(
        Given(
            model, optimizers, arranged, _home(model, arranged), options, precision, offload_name,
            bucket_cap_mb, activation_bytes,
        )
    )  # fmt: skip
    if isinstance(model, Part):
        _check_part(chosen, average)
    if precision is not None and not chosen.optimizer:
        raise ValueError(
            f"precision is for sharded strategies, such as zero1, not for {chosen.name!r}: leave it out "
            f"there, and run forward inside of torch.autocast"
        )
    partial = isinstance(arranged, Mesh) and arranged.world.is_partial  # its hosts are not what they will be
    groups, meta = ShardGroups.of(chosen, arranged, spread=partial), is_meta(model)
    home = _home(model, arranged) if meta else None
    hosted = _offload(offload, chosen, model, optimizers, home) if offload is not None else None
    if not chosen.optimizer:
        if meta:
            raise ValueError("strategy='replicate' takes no model on the meta device: sharded ones do")
        stepped_by(optimizers, model)  # as sharded strategies ask: none may be of another model
        replicated = DistributedDataParallel(
            model, process_group=groups.world, average=average, bucket_cap_mb=bucket_cap_mb,
            wire=wire, overlap=overlap,
        )  # fmt: skip
        for each in optimizers:
            warn_of_steps_alone(each, replicated)
            refuse_what_nobody_sums(each, replicated)
            check_closures(each, replicated)
        return _known(replicated, arranged, optimizers), made
    wrapped = ShardedDataParallel(
        model,
        optimizers,
        groups,
        ShardOptions(chosen, precision or MixedPrecision(), options, home=home, init=init, offload=hosted),
        average=average,
        bucket_cap_mb=bucket_cap_mb,
        wire=wire,
        overlap=overlap,
    )
    torch_calls.watch(wrapped)
    return _known(wrapped, arranged, optimizers), made


def _refuse_wrapped(model: nn.Module) -> None:
    """ValueError for a model that something else synchronises already; TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{kind_of(model)} is no model: imece.parallelize(model, optimizer, ...)")
    if isinstance(model, DistributedDataParallel | nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"the model is {kind_of(model)} already: give imece.parallelize the model in it, with an "
            f"optimizer that was made of that model's parameters"
        )


def _check_kinds(strategy: Any, mesh: Any, init: Any, activation_bytes: Any, precision: Any) -> None:
    """TypeError, or ValueError for a number, for arguments of `parallelize` that are of another kind."""
    if not isinstance(strategy, str):
        raise TypeError(f"strategy={shown(strategy)}: a name, such as 'zero2'")
    if not (isinstance(mesh, dist.ProcessGroup) or hasattr(mesh, "data_group")):
        raise TypeError(f"mesh={shown(mesh)}: what imece.init() returned, or a process group")
    if init is not None and not callable(init):
        raise TypeError(f"init={shown(init)}: a function that fills one module")
    if activation_bytes is not None and not (isinstance(activation_bytes, int) and activation_bytes >= 0):
        raise ValueError(f"activation_bytes={shown(activation_bytes)}: a whole number from 0")
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise TypeError(
            f"precision={shown(precision)}: imece.MixedPrecision(param=..., reduce=...) of dtypes"
        )


def _made(given: Any, model: nn.Module) -> Any:
    """The given optimizer or optimizers, or those that the given function makes. TypeError for
    anything else."""
    makes_one = callable(given) and not isinstance(given, Optimizer | Sequence)
    made = given(model.parameters()) if makes_one else given
    for each in made if isinstance(made, Sequence) else [made]:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"{kind_of(each)} is no optimizer: give one of torch's, a list of them, or a "
                f"function that makes one of parameters"
            )
    return made


def _check_part(strategy: Strategy, average: Over) -> None:
    """ValueError for options with which a pipeline's part cannot be trained."""
    if strategy.parameters:
        raise ValueError(
            f"strategy {strategy.name!r} would gather the parts of a pipeline anew for each micro-batch: use "
            "zero1 or zero2"
        )
    if average != "ranks":
        raise ValueError(
            f"average={average!r}: a pipeline's gradient is the mean over micro-batches and ranks"
        )


def _known(
    wrapped: DistributedDataParallel[Model], ranks: Mesh | dist.ProcessGroup, optimizers: Sequence[Optimizer]
) -> DistributedDataParallel[Model]:
    """Tell the pipeline that owns this part of the model, and tell the part which ranks have the others."""
    wrapped.stepped_by = [weakref.ref(each) for each in optimizers]
    if is_across(ranks):
        wrapped.across = AcrossModel(ranks, wrapped.module, wrapped.reducer.slots, optimizers)
        torch_calls.install()
    if isinstance(wrapped.module, Part):
        wrapped.module.wrapped_by(wrapped)
    return wrapped


def _home(model: nn.Module, ranks: Mesh | dist.ProcessGroup) -> torch.device:
    """The device the model is on, or will be on if it has no memory yet."""
    first = next(model.parameters(), None)
    if first is not None and not is_meta(model):
        return first.device
    return ranks.device if isinstance(ranks, Mesh) else home_among(ranks)


def _name_of(offload: str | Offload | None) -> Literal["optimizer", "parameters"] | None:
    """ValueError for an unknown name."""
    if offload is None or isinstance(offload, Offload):
        return offload.name if offload is not None else None
    for name in OFFLOADS:
        if name == offload:
            return name
    raise ValueError(f"unknown offload {offload!r}: None, {' or '.join(map(repr, OFFLOADS))}")


def _offload(
    asked: str | Offload,
    strategy: Strategy,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    home: torch.device | None,
) -> Offload:
    """The offload that was asked for; ValueError if it is impossible. home: where a model on the meta device
    will be."""
    check_strategy(asked if isinstance(asked, str) else asked.name, strategy)
    check_steps_on_host(optimizers)
    if isinstance(asked, Offload):
        return asked
    return offload_of(asked, [home] if home is not None else {each.device for each in model.parameters()})
