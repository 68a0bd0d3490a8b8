"""How far a run is: its counters, when it is over, and what others are told of it."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from imece.checkpoint.load import Saved
from imece.listing import many
from imece.train.config import TrainConfig

NOTHING = -1  # steps finished by a rank that has just started


@dataclass
class Progress:
    """The counters of a run, which all ranks have alike once they know of the same step."""

    config: TrainConfig
    _: KW_ONLY
    done: int = 0  # optimizer steps so far
    first: int = 0  # of them, made before this command
    skipped_steps: int = 0  # the latest steps in a row without update, because the gradient was not finite
    bad_steps: int = 0  # of those, the latest in a row that fp16's range does not explain
    counted: int = 0  # steps that `seconds` and `tokens` count
    seconds: float = 0.0  # spent on them
    tokens: int = 0  # that they read
    best_val_loss: float | None = None
    since_best: int = 0  # validations since that one, of which none was lower
    val_loss: tuple[int, float | None] = (NOTHING, None)  # (steps done, loss): decides which is the best
    owes_save: bool = False  # left out after a skipped step, given up when ranks changed, or for the best

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

    def counters(self) -> dict[str, Any]:
        """For a rank that joins."""
        names = (
            "done", "first", "skipped_steps", "bad_steps", "counted", "seconds", "tokens", "best_val_loss",
            "since_best", "val_loss",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def take_counters(self, told: dict[str, Any], newer: bool) -> None:
        """Take over another rank's counters, all but `done`. newer: they are of a step that this rank has not
        made; otherwise its own may be newer."""
        if newer:
            self.counted, self.seconds, self.tokens = told["counted"], told["seconds"], told["tokens"]
            self.best_val_loss, self.val_loss = told["best_val_loss"], told["val_loss"]
            self.since_best = told["since_best"]
        # Otherwise ranks would save and end at different steps.
        self.first, self.skipped_steps, self.bad_steps = (
            told[name] for name in ("first", "skipped_steps", "bad_steps")
        )

    def reset_counters(self) -> None:
        """The run begins anew."""
        self.done = self.first = self.skipped_steps = self.bad_steps = self.counted = self.tokens = 0
        self.seconds = 0.0
        self.forget_validations()

    def forget_validations(self) -> None:
        """Those that are to come do not compare with those before."""
        self.best_val_loss, self.val_loss, self.since_best = None, (NOTHING, None), 0

    def kept_counters(self) -> dict[str, Any]:
        """For a checkpoint's state."""
        return {
            "counters": {"seconds": self.seconds, "tokens": self.tokens},
            "best_val_loss": self.best_val_loss,
            "since_best": self.since_best,
        }

    def load_counters(self, saved: Saved) -> None:
        """Go on from a checkpoint."""
        state = saved.state
        self.done = self.counted = saved.step
        self.skipped_steps = self.bad_steps = 0
        self.seconds, self.tokens = state["counters"]["seconds"], state["counters"]["tokens"]
        self.best_val_loss, self.val_loss = state["best_val_loss"], (saved.step, saved.metric)
        self.since_best = state["since_best"]
