"""Everything that one rank holds while it trains, through deaths and joins; saves it, and restores it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from imece.checkpoint.commit import METRIC_ON, METRIC_OVER
from imece.checkpoint.load import Saved
from imece.checkpoint.save import Checkpoints
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives.texts import gather_json
from imece.data.batches import Batches
from imece.data.prepare import Prepared
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.membership.beating import show
from imece.membership.member import Member, keeps_roster
from imece.membership.recovery import MovedOnError, Recovered, Recovery
from imece.membership.unwatched import say_unwatched
from imece.membership.where import Where
from imece.mesh import Mesh
from imece.model_parallel.pipeline import Pipeline
from imece.models.language_model import LanguageModel
from imece.train.agreeing import together
from imece.train.batch import BatchPlan, shared_among
from imece.train.choosing import accumulating
from imece.train.evaluate import windows_read
from imece.train.model.adapters import begin_beside
from imece.train.model.beginning import begin_again, begin_with
from imece.train.model.origin import open_base
from imece.train.model.precision import Precision
from imece.train.prediction import Given, Machine, Prediction, predict
from imece.train.progress import NOTHING, Progress
from imece.train.run.folder import RunFolder, shape_as_json
from imece.train.run.resuming import newest_for
from imece.train.run.same import computed_with
from imece.train.step import Step
from imece.train.watch.clock import Clock
from imece.train.watch.peak import measured_peak

_POLL_S = 0.01


@dataclass
class Session(Progress):
    """One rank's part of a run; `opening.open_session` makes it."""

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
    compile_s: float = 0.0  # before the first step
    base: str = ""  # digest of the model beside adapters
    pipeline: Pipeline | None = None  # this rank has a part of it
    checkpoints: Checkpoints = field(init=False)  # on a rank that joins: from `begin` on
    recovery: Recovery | None = None  # None: the launcher does not replace ranks
    where: Where | None = None  # for the launcher; without `recovery`, which has its own

    def take_up(self) -> None:
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
                state=self._said, take=self._take, fallback=self._from_checkpoint,
                frozen=not self.config.lora.rank,
            ))  # fmt: skip
        else:
            say_unwatched(self.mesh)
            self.where = show(self.mesh, lambda: self.done, self.wrapped, self.optimizers)

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
        elif self.where is not None:
            self.where.note("between steps")

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
        recovered = self.recovery.recover(error, self.done if error is not None else NOTHING)
        self.done = recovered.step
        self.wrapped.train()  # it may have been interrupted in a validation
        given = replace(self._given, plan=shared_among(self.plan, self.mesh.world_size))
        self.plan = accumulating(self.strategy, given, self.mesh)
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

    def _said(self) -> dict[str, Any]:
        """What a rank that joins is told."""
        return self.counters() | {
            "scaler": self.step.scaler_state,
            "micro": self.plan.micro,
            "text": self.prepared.tokens.identity,
            "base": self.base,
        }

    def _take(self, state: dict[str, Any]) -> None:
        """Take over what a rank has said that this rank joins. UserError if it trains something else."""
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
        self.take_counters(state, newer=state["done"] != self.recovery.member.steps)
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
        """Return to the state before the first step. All ranks call this."""
        begin_again(self.training_state, self.optimizers, self.config, self.model)
        if (scaler := self.precision.scaler()) is not None:
            self.step.load_scaler(scaler.state_dict())
        self.reset_counters()

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
        copies = self.recovery is not None and self.recovery.needs_copies
        return predict(self.strategy, self._given, copies=copies)

    @property
    def _given(self) -> Given:
        return Given(self.config, self.model.config, self.plan, self.precision, self.machine)

    def _state(self) -> dict[str, Any]:
        return self.kept_counters() | {
            "model": shape_as_json(self.model.config),
            "tokenizer_hash": self.prepared.tokenizer.hash,
            "world_size": self.mesh.world_size,
            "strategy": self.strategy,
            "seed": self.config.seed,
            "computed_with": computed_with(self.config),
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
        self.load_counters(saved)
        text, over = self.prepared.tokens.identity, self._metric_over
        then = saved.state[METRIC_OVER]
        changed = ""
        if saved.state[METRIC_ON] != text:
            changed = f"the text has changed since step {saved.step}: its order begins anew, and"
        elif then != over:
            changed = f"validation reads {over:,} windows of {self.plan.seq} tokens now, not {then:,}:"
        if changed:
            self.forget_validations()
            if self.mesh.rank == 0:
                self.alarms.append(f"{changed} validation losses do not compare with those before")
