"""The loop over steps: update, compare ranks, validate, save, until the last step or a signal."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from imece.collectives import ops
from imece.collectives.texts import gather_json
from imece.membership.recovery import MovedOnError, Recovered
from imece.observe.events import VAL_LOSS_OF
from imece.train.dividing import part_of
from imece.train.evaluate import evaluate, of_all, of_each
from imece.train.model.schedule import learning_rate
from imece.train.sending import sent
from imece.train.session import Session
from imece.train.step import Outcome
from imece.train.watch.clock import Lap
from imece.train.watch.drift import Drift, DriftError
from imece.train.watch.peak import flops_per_token, measured_peak
from imece.train.watch.stopping import Stop
from imece.train.watch.stragglers import PHASES, Stragglers
from imece.train.watch.used_memory import UsedMemory
from imece.train.watch.watching import Watching


class NotFiniteError(Exception):
    """Too many steps in a row had no finite gradient to go on."""


@dataclass(frozen=True)
class _Together:
    """What all ranks know together of one step."""

    loss: float  # nats per target that counts
    tokens: int  # of all sequences
    memory_bytes: int  # of the rank that uses most
    signal: int  # one that some rank got, or 0
    newest: float = 0.0  # for Recovery
    anew: float = 0.0
    owes_save: bool = False  # some rank owes a save, or has waited long enough for one
    drifted: bool = False  # ranks hold different bits where they should not
    own: tuple[tuple[float, ...], ...] = ()  # for each rank its own times of the step before, by PHASES


class Loop:
    """Runs the steps of a session. Every rank has one, and all do the same."""

    def __init__(self, session: Session, watching: Watching, stop: Stop) -> None:
        self._session, self._watching, self._stop = session, watching, stop
        self._save_s: float | None = None  # how long a save has delayed the next step
        self._saved_at = time.monotonic()
        mesh = session.mesh
        self._memory = UsedMemory(mesh)
        session.step.meanwhile = watching.tell
        self._pending: dict[str, Any] | None = None  # the record of a step that is made and not yet reported
        self._made: tuple[int, Outcome, float] | None = None  # the newest step
        self._recovered: Recovered | None = None  # a recovery since the last step
        self._own: tuple[float, ...] | None = None  # this rank's own times of the last step, by PHASES
        self._stragglers = Stragglers(session.config.watch.slow_ratio, mesh.size("pipeline"))
        self._drift = self._new_drift()
        peak = measured_peak(mesh.device, session.precision.dtype)
        frozen = session.config.lora.rank > 0
        flops = flops_per_token(session.model.config, session.plan.seq, frozen=frozen)
        self._tokens_per_s_of_rank = peak / flops

    def run(self) -> int:
        """Run to the last step. Returns the signal that ended it before, or 0.

        NotFiniteError after `bad_steps` failed updates in a row; DriftError.
        """
        try:
            return self._run()
        finally:
            self._watching.tell()

    def _run(self) -> int:
        session, config = self._session, self._session.config
        self._watching.start(session.done)
        if self._pending is not None:
            self._tell(self._pending)
        session.clock.lap()
        while not session.is_over:
            index = session.done
            rate = learning_rate(index, config.steps, config.optimizer)
            outcome = session.step.run(index, rate)
            self._count_bad(outcome)  # before a rank that joins can copy it
            session.step_done()
            self._made = session.done, outcome, rate
            together = self._gather(outcome)
            record = self._pending = self._record(outcome, together, rate)
            self._watch(together, record)
            moves_on = session.recovery is not None and session.recovery.border(
                session.done, together.newest, together.anew
            )
            if session.is_over or _due(session.done, config.validate.every):
                self._validate_now(record)
            session.step_judged()
            if outcome.skipped:
                self._skipped(index, outcome, record)
            self._tell(record)
            last = session.is_over  # a validation may have ended it
            ends = last or together.signal > 0
            owes = together.owes_save or session.owes_save
            if ends or owes or _due(session.done, config.checkpoint.every):
                # Before the checkpoint: a run that is killed and resumes from there would never have the
                # record.
                self._watching.tell()
                began = time.perf_counter()
                if self._save(ends):
                    self._save_s = time.perf_counter() - began
                    session.clock.lap()  # save and validation are no part of the next step
            if together.signal:
                return together.signal
            if moves_on and not last:
                raise MovedOnError(f"a newer generation takes over after step {session.done}")
        return 0

    def recovered(self, recovered: Recovered) -> None:
        """The session is in a new generation, in which `run` goes on."""
        session, generation = self._session, recovered.generation
        self._recovered = recovered
        self._drift, self._own = self._new_drift(), None
        self._stragglers.clear()
        self._watching.take_over(session.mesh.rank, session.done)
        ranks = session.mesh.world_size
        for line in generation.lost:
            self._watching.note(line)
        self._watching.note(
            f"generation {generation.number}: {ranks} rank{'s go' if ranks > 1 else ' goes'} on after step "
            f"{session.done} ({recovered.seconds:.2f} s); {session.plan.describe()}"
        )
        owed = self._make_up()
        last = session.is_over
        if owed or last or _due(session.done, session.config.checkpoint.every):
            self._save(last)

    def _save(self, ends: bool) -> bool:
        """Save if it is due; returns whether it was. All ranks call this.

        Not after a skipped step: if many steps are skipped, their checkpoints would push out the good ones.
        The next step that is made catches up. But if the run `ends`, it saves, so that nothing is lost.
        """
        session = self._session
        if session.skipped_steps and not ends:
            session.owes_save = True
            return False
        session.save()
        self._saved_at = time.monotonic()
        if session.mesh.rank == 0:
            self._put_back()
        return True

    def _put_back(self) -> None:
        """Restore the run folder if somebody removed or moved it: checkpoints alone would be useless."""
        folder = self._session.folder
        try:
            gone = folder.put_back(self._session.config, self._session.prepared.tokenizer)
        except OSError as error:
            self._watching.note(f"warning: {folder.path}: cannot be written ({error.strerror})")
            return
        if gone:
            self._watching.note(
                f"warning: {folder.path} was moved or removed in the middle of the run: its config.toml and "
                "tokenizer.json are there anew, beside checkpoints from now on; all else that it held is not"
            )

    def _make_up(self) -> bool:
        """Report the step after which a rank died, by ranks that have its figures, and agree on the newest
        validation. All ranks call this.

        Returns whether a save is still to be made.
        """
        made = self._made
        mine = made if made is not None and made[0] == self._session.done else None
        _, outcome, rate = mine or (0, Outcome(0.0, 0, math.nan), math.nan)
        together = self._gather(outcome)
        self._session.agree_on_validation()
        if together.tokens and self._session.counted < self._session.done:
            self._pending = self._record(outcome, together, rate)
        return together.owes_save

    def _tell(self, record: dict[str, Any]) -> None:
        """Report a step; on a GPU only after the next one is queued, because reporting would delay that."""
        self._pending = None
        self._watching.step(record, self._session.mesh.device.type == "cuda")

    def validate(self, most_tokens: int) -> tuple[float, dict[str, float]]:
        """Nats per token of the held-out part, and by source if there are several: over all ranks, and the
        same on all of them."""
        session, group = self._session, self._session.mesh.data_group
        part = session.prepared.tokens.validation
        mine = [
            evaluate(
                session.wrapped.module,
                each,
                session.plan.seq,
                session.plan.at_once,
                session.precision,
                rank=group.rank(),
                world_size=group.size(),
                most_tokens=of_each(part, most_tokens),
                nats=session.step.passes.nats,
                separate=session.config.data.separates,
            )
            for each in part.sources
        ]
        both = torch.tensor(mine, dtype=torch.float64, device=session.mesh.device)  # [sources, 2]
        ops.all_reduce(both, group=group, label="validation loss")
        # Ranks that compute the same parts of a model may round otherwise, and must not end at other steps.
        ops.broadcast(both, group=session.mesh.world_group, label="validation loss of rank 0")
        sums = both.tolist()
        self._check_came()
        losses = [float(total / count) for total, count in sums]
        return of_all(part, losses), {
            each.source: loss for each, loss in zip(part.divided, losses, strict=False)
        }

    def _check_came(self) -> None:
        """PeerLostError if the last sums over GPUs may be wrong."""
        if self._session.recovery is not None:
            self._session.recovery.member.aborting.check()

    def _gather(self, outcome: Outcome) -> _Together:
        mesh, recovery = self._session.mesh, self._session.recovery
        device, group = mesh.device, mesh.world_group
        part, parts = part_of(mesh)
        owes = self._session.owes_save or self._is_time_to_save()
        said = (*(recovery.says() if recovery is not None else (0.0, 0.0)), float(owes))
        own = self._own or (math.nan,) * len(PHASES)
        row = [
            outcome.nats,
            outcome.learned,
            outcome.tokens,
            self._memory.most_bytes(),
            self._stop.signal,
            *said,
            *own,
            self._drift.key * parts + part,
            0.0,
        ]
        mine = sent(torch.tensor(row, dtype=torch.float64), device)
        mine[-1:] = self._drift.digest(self._session.done)  # in one element the host would wait for a number
        everybodys = mine.new_empty(mesh.world_size * len(mine))
        with self._session.clock.phase("exposed"):  # waits for the slowest rank
            ops.all_gather(everybodys, mine, group=group, label="loss of each rank")
        rows = everybodys.view(-1, len(mine)).tolist()
        self._check_came()
        nats, learned, tokens, *most, keys, digests = zip(*rows, strict=True)
        memory, signal, newest, anew, owes = map(max, most[:5])
        return _Together(
            sum(nats) / max(1.0, sum(learned)), int(sum(tokens)) // parts, int(memory),
            int(signal), newest, anew, bool(owes),
            Drift.differs(digests, keys), tuple(zip(*most[5:], strict=True)),
        )  # fmt: skip

    def _is_time_to_save(self) -> bool:
        """By this rank's clock. The others hear of it, so that all save after the same step."""
        most_s = 60 * self._session.config.checkpoint.minutes
        return 0 < most_s <= time.monotonic() - self._saved_at

    def _record(self, outcome: Outcome, together: _Together, rate: float) -> dict[str, Any]:
        session = self._session
        lap = session.clock.lap()
        step_s, phases = lap.seconds, lap.phases
        self._own = self._own_times(lap, outcome)
        session.seconds += step_s
        session.tokens += together.tokens
        session.counted = session.done
        record: dict[str, Any] = {
            "step": session.done,
            "loss": together.loss,
            "tokens": together.tokens,
            "tokens_per_s": together.tokens / step_s,
            "lr": rate,
            "grad_norm": outcome.grad_norm,
            "epoch": session.batches.epoch(session.done),
            "time": time.time(),
            "step_s": step_s,
            **{f"{name}_s": seconds for name, seconds in phases.items()},
            "other_s": step_s - sum(phases.values()),
            "memory_bytes": together.memory_bytes,
            "mfu": together.tokens / step_s / (self._tokens_per_s_of_rank * session.mesh.world_size),
        }
        if self._recovered is not None:
            record |= {
                "generation": self._recovered.generation.number,
                "ranks": session.mesh.world_size,
                "recovery_s": self._recovered.seconds,
                "lost_steps": self._recovered.lost_steps,
            }
            self._recovered = None
        if self._save_s is not None:
            record["save_s"], self._save_s = self._save_s, None
        if outcome.skipped:
            record["skipped"] = outcome.skipped
        return record

    def _own_times(self, lap: Lap, outcome: Outcome) -> tuple[float, ...] | None:
        """By PHASES, scaled to an even share of the global batch: a rank with more work is not slow."""
        plan = self._session.plan
        share = outcome.computed * plan.ranks * plan.mesh.context / plan.tokens
        return tuple(lap.own.get(phase, 0.0) / share for phase in PHASES) if share else None

    def _new_drift(self) -> Drift:
        session = self._session
        return Drift(session.wrapped, session.optimizers, session.config.watch.drift_every)

    def _watch(self, together: _Together, record: dict[str, Any]) -> None:
        """Find slow ranks and drift; notes them, and adds them to the record."""
        if self._session.config.watch.slow_ratio and not math.isnan(sum(map(sum, together.own))):
            before = self._stragglers.slow
            if self._stragglers.add(together.own):
                slow = self._stragglers.slow
                gone = f"rank {before.rank} is as fast as the others again" if before is not None else ""
                self._watching.note(slow.describe() if slow is not None else gone)
        if self._stragglers.slow is not None:
            record |= self._stragglers.slow.figures()
        if together.drifted:
            self._mend(record)

    def _mend(self, record: dict[str, Any]) -> None:
        """All ranks call this and end together: ranks with other parts of the model do not see the drift."""
        step, mesh = self._session.done, self._session.mesh
        try:
            mine = [self._drift.mend(step), []]
        except DriftError as error:
            mine = [[], [str(error)]]
        every = gather_json(mine, mesh.world_group, mesh.device, "drift of parts of the model")
        said, errors = (list(dict.fromkeys(itertools.chain(*each))) for each in zip(*every, strict=True))
        if errors:
            self._watching.step(record | {"drift": errors[0]})
            raise DriftError(errors[0])
        for line in said:
            self._watching.note(
                f"warning: step {step}: {line}, though nothing should change it on one rank alone: theirs is "
                "used, with what the optimizer keeps of it"
            )
        record["drift"] = "; ".join(said)

    def _validate_now(self, record: dict[str, Any]) -> None:
        """Validate, so that the checkpoint can be judged. At the end `finish` reads everything held out
        instead."""
        session = self._session
        if not len(session.prepared.tokens.validation.tokens):
            return
        began = time.perf_counter()
        val_loss, by_source = self.validate(session.config.validate.tokens)
        session.validated(val_loss)
        record["val_loss"] = val_loss
        record |= {f"{VAL_LOSS_OF}{source}": loss for source, loss in by_source.items()}
        record["val_s"] = time.perf_counter() - began
        session.clock.lap()

    def _count_bad(self, outcome: Outcome) -> None:
        session = self._session
        if not outcome.skipped:
            session.skipped_steps = session.bad_steps = 0
            return
        session.skipped_steps += 1
        if self._is_bad():
            session.bad_steps += 1

    def _is_bad(self) -> bool:
        """Whether a skipped step was bad, i.e. had another cause than a loss too large for fp16."""
        session = self._session
        # The loss is a sum over a micro-batch, so its scale may fall this far below 1 without anything being
        # wrong.
        return session.step.scale * session.plan.micro * session.plan.seq < 1

    def _skipped(self, index: int, outcome: Outcome, record: dict[str, Any]) -> None:
        session = self._session
        self._watching.note(f"step {session.done} skipped on all ranks: {outcome.skipped}")
        if not self._is_bad():
            return  # the loss was too large for fp16; its scale is smaller now
        lines = session.step.blame(index)
        session.clock.lap()
        for line in lines or ["no rank when computed once more: a fault of the hardware, or of the sum?"]:
            self._watching.note(f"  brought by {line}")
        record["skipped"] = "; ".join([outcome.skipped, *lines])
        most = session.config.compute.bad_steps
        if session.bad_steps >= most:
            self._watching.step(record)
            raise NotFiniteError(
                f"{most} steps in a row had no finite gradient, the last one was step {session.done}: the "
                "run ends; the usual cure is a new run with a lower --optimizer.lr"
            )


def _due(done: int, every: int) -> bool:
    return every > 0 and done > 0 and done % every == 0
