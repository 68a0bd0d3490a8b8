"""Puts a session together: what it reads, the model, what trains it, and the newest checkpoint."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from imece.checkpoint.state.training_state import TrainingState
from imece.data.prepare import prepare, reopen
from imece.data_parallel.average import Over
from imece.data_parallel.parallelize import parallelize
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharding.meta import is_meta
from imece.data_parallel.strategy import find_strategy
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.context import ContextParallel
from imece.models.language_model import LanguageConfig, LanguageModel, give_memory, move_buffers
from imece.models.transformer import Transformer
from imece.train.agreeing import together
from imece.train.alike import check_same_tokens
from imece.train.choosing import accumulating, strategy_of
from imece.train.config import TrainConfig
from imece.train.dividing import dealt, divided, train_units
from imece.train.inputs import Inputs, read_inputs
from imece.train.model.adapters import begin_beside
from imece.train.model.beginning import new_model, zero
from imece.train.model.compiling import compile_now
from imece.train.model.optimizer import make_optimizers
from imece.train.model.origin import open_base
from imece.train.model.precision import Precision, choose_precision
from imece.train.passes import InPipeline, InTurn, Passes, StageLoss
from imece.train.prediction import Given, machine_of
from imece.train.run.folder import RunFolder
from imece.train.session import Session
from imece.train.step import Step
from imece.train.watch.clock import Clock


def open_session(config: TrainConfig, mesh: Mesh) -> Session:
    """Everything at step 0, or at the newest whole checkpoint. All ranks call this.

    A rank that joins is alone here; `Session.recover` brings it to where the others are. UserError for
    unusable data, batch or checkpoint.
    """

    def read() -> tuple[Inputs, Precision]:
        # The others read the tokens that were there when they began; the text may have changed since.
        get = reopen if mesh.world.joining else prepare
        inputs = read_inputs(config, first_ranks(config, mesh), get)
        return inputs, choose_precision(config.compute.dtype, mesh.device)

    inputs, precision = together(mesh, read)
    check_same_tokens(inputs.prepared, mesh)
    session = _built(inputs, precision, mesh)
    session.take_up()
    return session


def first_ranks(config: TrainConfig, mesh: Mesh) -> int:
    """The number of ranks that the run began with; a rank that joins, and is alone, takes it from its
    launcher."""
    if not mesh.world.joining:
        return mesh.world_size
    return config.ranks or mesh.world.full_size or 1


def _built(inputs: Inputs, precision: Precision, mesh: Mesh) -> Session:
    config, shape, plan, batches = inputs.config, inputs.shape, inputs.plan, inputs.batches
    folder, separate = RunFolder(config.folder), config.data.separates
    model, bare = _new_model(config, shape, precision, mesh)
    model.checkpoint_blocks = config.compute.recompute
    compile_s = 0.0
    if config.compute.compile:
        compile_s = together(mesh, lambda: compile_now(model, plan, precision, mesh.device, separate))
    scaler = precision.scaler()
    loss = StageLoss(scaler)
    pipeline = together(mesh, lambda: dealt(model, config, plan, mesh, loss))
    own = model if pipeline is None else pipeline.part  # the part that this rank trains
    # Importing them loads torch's libraries.
    optimizers = make_optimizers(own, config.optimizer, mesh.device)
    machine = machine_of(mesh, sum(each.nbytes for each in own.parameters() if not each.is_meta))
    given = Given(config, shape, plan, precision, machine)
    strategy = strategy_of(given, mesh)
    plan = accumulating(strategy, given, mesh)
    if bare and not find_strategy(strategy).optimizer:  # each rank keeps the whole optimizer state
        give_memory(model, mesh.device)
        optimizers = make_optimizers(own, config.optimizer, mesh.device)
    # Contains collectives, but what it refuses, it refuses on all ranks before the first of them.
    wrapped = together(mesh, lambda: _parallelize(own, optimizers, strategy, config, mesh))
    adapters = config.lora.rank > 0
    if bare and adapters:
        together(mesh, lambda: begin_beside(config, open_base(config, folder), wrapped))
    clock, context = Clock(mesh.device), ContextParallel(mesh)
    passes: Passes = (
        InTurn(wrapped, precision, scaler, clock, context, plan.seq)
        if pipeline is None
        else InPipeline(pipeline, loss, wrapped, precision, clock)
    )
    clip = config.optimizer.clip
    step = Step(wrapped, optimizers, batches, plan, passes, scaler, clip, clock, context, mesh, separate)
    state = TrainingState(wrapped, optimizers, frozen=not adapters)
    return Session(
        config, folder, mesh, inputs.prepared, plan, precision, machine, model, wrapped, optimizers, batches,
        clock, state, step, deque(),
        compile_s=compile_s, base=state.base_digest() if adapters else "", pipeline=pipeline,
    )  # fmt: skip


def _new_model(
    config: TrainConfig, shape: LanguageConfig, precision: Precision, mesh: Mesh
) -> tuple[LanguageModel, bool]:
    """(the model with this rank's part of each matrix, whether it still has no memory). All ranks call
    this."""
    model, divide = together(mesh, lambda: new_model(config, shape, mesh.device, precision)), config.mesh
    bare = is_meta(model)
    # All layers of a pipeline together need not fit on this rank's device.
    home = mesh.device if divide.pipeline == 1 or divide.tensor > 1 else torch.device("cpu")
    if bare and divide.deals:  # it is divided now and gets its values later in any case
        give_memory(model, home)
        bare = False
    if bare:
        move_buffers(model, home)
    else:
        model.to(home)
    return together(mesh, lambda: divided(model, config, mesh)), bare


def _parallelize(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    strategy: str,
    config: TrainConfig,
    mesh: Mesh,
) -> DistributedDataParallel:
    offload = config.offload
    # All micro-batches of a pipeline have equally many tokens, so their mean is the mean over tokens. Where
    # only some tokens count, the pipeline's loss is weighed so that it still is.
    over: Over = "ranks" if config.mesh.pipeline > 1 else "tokens"
    try:
        wrapped, _ = parallelize(
            model, optimizers, strategy, mesh, average=over, wire=config.wire, offload=offload, init=zero,
            units=train_units(config, model.config) if isinstance(model, Transformer) else None,
        )  # fmt: skip
    except ValueError as error:  # a strategy that these hosts cannot have
        option = f" --offload {offload}" if offload is not None else ""
        raise UserError(f"--strategy {strategy}{option}: {error}") from None
    wrapped.forward_sync_buffers = False  # a foreign model's are tables that each rank has computed
    return wrapped
