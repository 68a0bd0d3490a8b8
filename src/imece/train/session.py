"""Everything that one rank holds while it trains: puts it together, saves it, and restores it."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from imece.checkpoint.commit import METRIC_ON, METRIC_OVER
from imece.checkpoint.load import Saved
from imece.checkpoint.save import Checkpoints
from imece.checkpoint.training_state import TrainingState
from imece.collectives.texts import gather_json
from imece.data.batches import Batches
from imece.data.prepare import Prepared, prepare, reopen
from imece.data_parallel.average import Over
from imece.data_parallel.parallelize import parallelize
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharding.meta import is_meta
from imece.data_parallel.strategy import find_strategy
from imece.errors import UserError
from imece.listing import many
from imece.membership.member import Member, keeps_roster
from imece.membership.recovery import MovedOnError, Recovered, Recovery
from imece.membership.unwatched import say_unwatched
from imece.mesh import Mesh
from imece.model_parallel.context import ContextParallel
from imece.model_parallel.pipeline import Pipeline
from imece.models.language_model import LanguageConfig, LanguageModel, give_memory, move_buffers
from imece.models.transformer import Transformer
from imece.train.adapters import begin_beside, check_targets
from imece.train.agreeing import together
from imece.train.alike import check_same_tokens
from imece.train.batch import BatchPlan, batches_of, plan_batch, shared_among
from imece.train.beginning import begin_again, begin_with, new_model, zero
from imece.train.choosing import strategy_of
from imece.train.clock import Clock
from imece.train.compiling import compile_now
from imece.train.config import TrainConfig
from imece.train.dividing import check_divided, dealt, divided, train_units
from imece.train.evaluate import windows_read
from imece.train.optimizer import make_optimizers
from imece.train.origin import keep, open_base, sequence_length, shape_of
from imece.train.passes import InPipeline, InTurn, Passes, StageLoss
from imece.train.peak import measured_peak
from imece.train.precision import Precision, choose_precision
from imece.train.prediction import Given, Machine, Prediction, machine_of, predict
from imece.train.resuming import newest_for
from imece.train.run_folder import RunFolder, shape_as_json
from imece.train.same_run import computed_with
from imece.train.step import Step

_NOTHING = -1  # steps finished by a rank that has just started
_POLL_S = 0.01


@dataclass
class Session:
    """One rank's part of a run."""

    config: TrainConfig
    folder: RunFolder
    mesh: Mesh
    prepared: Prepared
    plan: BatchPlan
    precision: Precision
    machine: Machine
    model: LanguageModel
    wrapped: DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    batches: Batches
    clock: Clock
    training_state: TrainingState
    step: Step
    alarms: deque[str]  # messages of the saving thread, which the loop shows
    done: int = 0  # optimizer steps so far
    first: int = 0  # of them, made before this command
    skipped_steps: int = 0  # the latest steps in a row without update, because the gradient was not finite
    bad_steps: int = 0  # of those, the latest in a row that fp16's range does not explain
    counted: int = 0  # steps that `seconds` and `tokens` count
    seconds: float = 0.0  # spent on them
    tokens: int = 0  # that they read
    compile_s: float = 0.0  # before the first step
    base: str = ""  # digest of the model beside adapters
    pipeline: Pipeline | None = None  # this rank has a part of it
    best_val_loss: float | None = None
    since_best: int = 0  # validations since that one, of which none was lower
    val_loss: tuple[int, float | None] = (_NOTHING, None)  # (steps done, loss): decides which is the best
    owes_save: bool = False  # left out after a skipped step, given up when ranks changed, or for the best
    checkpoints: Checkpoints = field(init=False)  # on a rank that joins: from `begin` on
    recovery: Recovery | None = None  # None: the launcher does not replace ranks

    @classmethod
    def open(cls, config: TrainConfig, mesh: Mesh) -> Session:
        """Everything at step 0, or at the newest whole checkpoint. All ranks call this.

        A rank that joins is alone here; `recover` brings it to where the others are.
        UserError for unusable data, batch or checkpoint.
        """
        folder = RunFolder(config.folder)
        config, prepared, shape, plan, batches, precision = together(
            mesh, lambda: _inputs(config, folder, mesh)
        )
        check_same_tokens(prepared, mesh)
        model, bare = _new_model(config, shape, precision, mesh)
        model.checkpoint_blocks = config.compute.recompute
        compile_s = 0.0
        if config.compute.compile:
            assert isinstance(model, Transformer)
            separate = config.data.separates
            compile_s = together(mesh, lambda: compile_now(model, plan, precision, mesh.device, separate))
        scaler = precision.scaler()
        loss = StageLoss(scaler)
        pipeline = together(mesh, lambda: dealt(model, config, plan, mesh, loss))
        own = model if pipeline is None else pipeline.part  # the part that this rank trains
        # Importing them loads torch's libraries.
        optimizers = make_optimizers(own, config.optimizer, mesh.device)
        machine = machine_of(mesh, sum(each.nbytes for each in own.parameters() if not each.is_meta))
        strategy = strategy_of(Given(config, shape, plan, precision, machine), mesh)
        if bare and not find_strategy(strategy).optimizer:  # each rank keeps the whole optimizer state
            give_memory(model, mesh.device)
            optimizers = make_optimizers(own, config.optimizer, mesh.device)
        # Contains collectives, but what it refuses, it refuses on all ranks before the first of them.
        wrapped = together(mesh, lambda: _parallelize(own, optimizers, strategy, config, mesh))
        if bare and config.lora.rank:
            together(mesh, lambda: begin_beside(config, open_base(config, folder), wrapped))
        clock, alarms = Clock(mesh.device), deque[str]()
        state = TrainingState(wrapped, optimizers, frozen=not config.lora.rank)
        context = ContextParallel(mesh)
        passes: Passes = (
            InTurn(wrapped, precision, scaler, clock, context, plan.seq)
            if pipeline is None
            else InPipeline(pipeline, loss, wrapped, precision, clock)
        )
        clip = config.optimizer.clip
        session = cls(
            config, folder, mesh, prepared, plan, precision, machine, model, wrapped, optimizers, batches,
            clock,
            state,
            Step(
                wrapped, optimizers, batches, plan, passes, scaler, clip, clock, context, mesh,
                config.data.separates,
            ),
            alarms,
            compile_s=compile_s,
            base=state.base_digest() if config.lora.rank else "",
            pipeline=pipeline,
        )  # fmt: skip
        session._take_up()
        return session

    def _take_up(self) -> None:
        """Goes on from the newest checkpoint if there is one. From then on, ranks that die are replaced."""
        if not self.mesh.world.joining:
            if not self._resume():
                self._begin()  # before there is a folder for checkpoints: a run that cannot begin is none
            self.checkpoints = self._open_checkpoints()
            together(self.mesh, self.checkpoints.check_writable)
            self.first = self.done
        if keeps_roster(self.mesh):
            self.replace_by(Recovery(
                Member(self.mesh, self.done), self.wrapped, self.optimizers,
                state=self._counters, take=self._take_counters, fallback=self._from_checkpoint,
                frozen=not self.config.lora.rank,
            ))  # fmt: skip
        else:
            say_unwatched(self.mesh)

    # Ranks that come and go.

    def replace_by(self, recovery: Recovery) -> None:
        """From now on, ranks that die are replaced."""
        self.recovery = recovery
        self.step.when_summed = recovery.member.aborting.came

    def begin(self) -> Recovered | None:
        """All ranks are about to make steps. A rank that joins comes to where the others are, and says
        how."""
        if self.recovery is None:
            return None
        if self.recovery.member.is_joining:
            measured_peak(self.mesh.device, self.precision.dtype)  # now, so that nobody waits later
            return self.recover(None)
        self.recovery.begin(self.done)
        if (why := self.recovery.without_copies) and self.recovery.needs_copies:
            self.alarms.append(
                f"no copies in memory ({why}): a rank that dies takes the run back to a checkpoint"
            )
        return None

    def step_done(self) -> None:
        """This rank has made one more optimizer step."""
        self.done += 1
        if self.recovery is not None:
            with self.clock.phase("copy"):
                self.recovery.finished(self.done)

    def validated(self, loss: float) -> None:
        """The newest step has this validation loss. With `patience`, a new lowest one is to be saved."""
        finite = math.isfinite(loss)
        self.val_loss = self.done, loss if finite else None
        if self.skipped_steps:  # these weights were there before, and are not saved again
            return
        if finite and (self.best_val_loss is None or loss < self.best_val_loss):
            self.best_val_loss, self.since_best = loss, 0
            self.owes_save |= self.config.validate.patience > 0
        else:
            self.since_best += 1

    @property
    def why_early(self) -> str:
        """Why the run is over before its last step; "" if it is not."""
        validate = self.config.validate
        if not 0 < validate.patience <= self.since_best or self.done >= self.config.steps:
            return ""
        lowest = "been finite" if self.best_val_loss is None else f"fallen below {self.best_val_loss:.3f}"
        return f"the validation loss has not {lowest} in {many(self.since_best, 'validation')}"

    @property
    def is_over(self) -> bool:
        """Whether there is no step left to make."""
        return self.done >= self.config.steps or bool(self.why_early)

    def agree_on_validation(self) -> None:
        """Some ranks may have died, or joined, while others had the newest validation already: all take what
        the one that is furthest knows of it. All ranks call this."""
        mine = [*self.val_loss, self.best_val_loss, self.since_best]
        every = gather_json(mine, self.mesh.world_group, self.mesh.device, "newest validation")
        step, loss, self.best_val_loss, self.since_best = max(every, key=lambda each: each[0])
        self.val_loss = step, loss

    def step_judged(self) -> None:
        """All that will be known of the newest step is known; a rank that joins gets it, too."""
        if self.recovery is not None:
            self.recovery.note_state(self.done)

    def recover(self, error: BaseException | None) -> Recovered:
        """Go into the next generation, with the same steps and global batches. error: None if this rank
        joins.

        Raises `error` if no rank's end explains it.
        """
        if self.recovery is None:
            assert error is not None
            raise error
        if error is not None:
            self.owes_save |= self.checkpoints.is_saving
            self.checkpoints.close("the ranks changed")  # a save under way can never become whole
        recovered = self.recovery.recover(error, self.done if error is not None else _NOTHING)
        self.done = recovered.step
        self.wrapped.train()  # it may have been interrupted in a validation
        self.plan = shared_among(self.plan, self.mesh.world_size)
        self.step.take_over(self.plan)
        self.checkpoints = self._open_checkpoints()
        return recovered

    def _open_checkpoints(self) -> Checkpoints:
        return Checkpoints(
            self.folder.checkpoints,
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            keep=self.config.checkpoint.keep,
            alarm=self.alarms.append,
        )

    def _counters(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "first": self.first,
            "skipped_steps": self.skipped_steps,
            "bad_steps": self.bad_steps,
            "counted": self.counted,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "best_val_loss": self.best_val_loss,
            "since_best": self.since_best,
            "val_loss": self.val_loss,
            "scaler": self.step.scaler_state,
            "micro": self.plan.micro,
            "text": self.prepared.tokens.identity,
            "base": self.base,
        }

    def _take_counters(self, state: dict[str, Any]) -> None:
        assert self.recovery is not None
        tokens = self.prepared.tokens
        if state["text"] != tokens.identity:
            raise UserError(
                f"{tokens.folder}: not the text that the other ranks read: give this host the text that they "
                "began with, or start the run again, which then goes on with the text as it is now"
            )
        if state["base"] != self.base:
            raise UserError(
                f"{self.config.model.weights}: not the model beside which the other ranks train adapters: "
                "give this host the one that they began with"
            )
        if state["done"] != self.recovery.member.steps:  # otherwise its own values may be newer
            self.counted, self.seconds, self.tokens = state["counted"], state["seconds"], state["tokens"]
            self.best_val_loss, self.val_loss = state["best_val_loss"], state["val_loss"]
            self.since_best = state["since_best"]
        # Otherwise ranks would save and end at different steps.
        self.first, self.skipped_steps, self.bad_steps = (
            state[name] for name in ("first", "skipped_steps", "bad_steps")
        )
        self.step.load_scaler(state["scaler"])
        self.plan = replace(self.plan, micro=state["micro"])  # never more at once than the first ranks had

    def _from_checkpoint(self) -> int:
        """Go back to the newest checkpoint, because nobody has the state in memory; without one, begin
        again."""
        assert self.recovery is not None
        if self.config.lora.rank and self.wrapped.frozen_names:  # frozen shards, which no checkpoint has
            base = together(self.mesh, lambda: open_base(self.config, self.folder))
            together(self.mesh, lambda: begin_beside(self.config, base, self.wrapped))
        if self._resume():
            back = f"back to the checkpoint of step {self.done}"
        else:
            self._begin_again()
            back = "back to the beginning, as nothing was saved yet"
        lost = self.recovery.member.steps - self.done  # a rank that has just joined had made none
        also = f": {lost} steps are lost" if lost > 0 else ""
        self.alarms.append(f"{back}{also}")
        return self.done

    def _begin(self) -> None:
        """Load the parameters of the folder that the run begins from, if there is one. All ranks call
        this."""
        start = together(self.mesh, lambda: begin_with(self.config))
        if start is not None:
            # Contains collectives, but what it refuses, it refuses on all ranks before the first of them.
            together(self.mesh, lambda: self.training_state.load(start))

    def _begin_again(self) -> None:
        """Return to the state after `open`. All ranks call this."""
        begin_again(self.training_state, self.optimizers, self.config, self.model)
        if (scaler := self.precision.scaler()) is not None:
            self.step.load_scaler(scaler.state_dict())
        self.done = self.first = self.skipped_steps = self.bad_steps = self.counted = self.tokens = 0
        self.seconds, self.best_val_loss, self.val_loss, self.since_best = 0.0, None, (_NOTHING, None), 0

    # Checkpoints.

    def finish_save(self) -> bool:
        """Wait for the save under way; whether the newest checkpoint is on the disk. All ranks call this.

        MovedOnError if a rank has ended, because its part will never come.
        """
        while self.recovery is not None and self.checkpoints.is_saving:
            if self.recovery.is_over:
                raise MovedOnError("a rank has ended in the middle of a save")
            time.sleep(_POLL_S)
        return self.checkpoints.finish()

    def save(self) -> None:
        """Begin to save; `finish_save` waits until the checkpoint is on the disk.

        After a skipped step no older checkpoint is removed for this one, because the weights may already be
        spoilt.
        """
        step, val_loss = self.val_loss
        with self.recovery.saving() if self.recovery is not None else contextlib.nullcontext():
            # A collective, so before the wait: whether there is one differs between ranks.
            tensors = self.training_state.tensors()
            self.finish_save()
            metric = val_loss if step == self.done else None
            keep_all = self.skipped_steps > 0
            self.checkpoints.save(self.done, tensors, self._state(), {}, metric=metric, keep_all=keep_all)
        self.owes_save = False

    @property
    def strategy(self) -> str:
        """The strategy's own name, also if "auto" chose it."""
        return self.wrapped.strategy

    @property
    def prediction(self) -> Prediction:
        """The planner's prediction for this run with its current ranks."""
        given = Given(self.config, self.model.config, self.plan, self.precision, self.machine)
        copies = self.recovery is not None and self.recovery.needs_copies
        return predict(self.strategy, given, copies=copies)

    def _state(self) -> dict[str, Any]:
        return {
            "model": shape_as_json(self.model.config),
            "tokenizer_hash": self.prepared.tokenizer.hash,
            "world_size": self.mesh.world_size,
            "strategy": self.strategy,
            "seed": self.config.seed,
            "computed_with": computed_with(self.config),
            "counters": {"seconds": self.seconds, "tokens": self.tokens},
            "best_val_loss": self.best_val_loss,
            "since_best": self.since_best,
            "scaler": self.step.scaler_state,
            METRIC_ON: self.prepared.tokens.identity,
            METRIC_OVER: self._metric_over,
        }

    @property
    def _metric_over(self) -> int:
        """Windows of the validations by which checkpoints are compared."""
        return windows_read(self.prepared.tokens.validation, self.plan.seq, self.config.validate.tokens)

    def _resume(self) -> bool:
        """Restore the newest checkpoint; whether there is one. All ranks call this."""
        saved = newest_for(self.config, self.prepared.tokenizer, self.mesh, self.alarms.append)
        if saved is not None:
            together(self.mesh, lambda: self._load(saved))
        return saved is not None

    def _load(self, saved: Saved) -> None:
        """Load the states. The place in the data and all random draws follow from the step's number."""
        self.training_state.load(saved)
        self.step.load_scaler(saved.state["scaler"])
        self.done = self.counted = saved.step
        self.skipped_steps = self.bad_steps = 0
        self.best_val_loss, self.val_loss = saved.state["best_val_loss"], (saved.step, saved.metric)
        self.since_best = saved.state.get("since_best", 0)  # older versions did not count
        text, over = self.prepared.tokens.identity, self._metric_over
        then = saved.state.get(METRIC_OVER, over)
        changed = ""
        if saved.state.get(METRIC_ON, text) != text:
            changed = f"the text has changed since step {saved.step}: its order begins anew, and"
        elif then != over:
            changed = f"validation reads {over:,} windows of {self.plan.seq} tokens now, not {then:,}:"
        if changed:
            self.best_val_loss, self.val_loss, self.since_best = None, (_NOTHING, None), 0
            if self.mesh.rank == 0:
                self.alarms.append(f"{changed} validation losses do not compare with those before")
        self.seconds, self.tokens = saved.state["counters"]["seconds"], saved.state["counters"]["tokens"]


def _inputs(
    config: TrainConfig, folder: RunFolder, mesh: Mesh
) -> tuple[TrainConfig, Prepared, LanguageConfig, BatchPlan, Batches, Precision]:
    """What a run reads and how, before there is a model; the config has the steps of its epochs. UserError
    for what does not fit together."""
    keep(config)
    # The others read the tokens that were there when they began; the text may have changed since.
    get = reopen if mesh.world.joining else prepare
    prepared = get(config.data.source(), folder.tokenizer_file, folder.tokens(config))
    shape = shape_of(config, prepared.tokenizer.vocab_size)
    seq, divide = sequence_length(config, shape), config.mesh
    check_divided(config, shape, seq)
    check_targets(config, shape)
    groups = _first_ranks(config, mesh) // divide.size
    plan = plan_batch(config.batch, seq, groups, divide)
    batches = batches_of(config, prepared, plan)
    windows_read(prepared.tokens.validation, plan.seq, 0)  # refuses records of which none fits
    precision = choose_precision(config.compute.dtype, mesh.device)
    return folder.with_steps(config, batches), prepared, shape, plan, batches, precision


def _first_ranks(config: TrainConfig, mesh: Mesh) -> int:
    """The number of ranks that the run began with; a rank that joins, and is alone, takes it from its
    launcher."""
    if not mesh.world.joining:
        return mesh.world_size
    return config.ranks or mesh.world.full_size or 1


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
            model, optimizers, strategy, mesh, average=over, offload=offload, init=zero,
            units=train_units(config, model.config) if isinstance(model, Transformer) else None,
        )  # fmt: skip
    except ValueError as error:  # a strategy that these hosts cannot have
        option = f" --offload {offload}" if offload is not None else ""
        raise UserError(f"--strategy {strategy}{option}: {error}") from None
    wrapped.forward_sync_buffers = False  # a foreign model's are tables that each rank has computed
    return wrapped
