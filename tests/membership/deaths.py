"""Ranks of `imece train` that kill themselves, at a step and a place in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from imece.checkpoint.save import Checkpoints
from imece.checkpoint.writer import Writer
from imece.models.transformer import Block
from imece.train.evaluate import mean_nats
from imece.train.finish import finish
from imece.train.loop import Loop
from imece.train.session import Session
from imece.train.step import Step
from tests.train.compare import last

BEFORE = {
    "update": (Step, "_update"),  # the sum is there, the optimizer has not stepped
    "border": (Loop, "_gather"),  # it has, and the others do not know
    "validation": (Loop, "validate"),
    "save": (Session, "save"),
    "saving": (Checkpoints, "save"),  # within it: what is to be saved is there
    "writing": (Writer, "_write"),  # on the thread that saves
    "start": (Session, "begin"),
}
PLACES = ("forward", "backward", *BEFORE, "finish")


def death(
    place: str, members: Collection[int], step: int, number: int = signal.SIGKILL
) -> Callable[[], None]:
    """For a forked launcher: these members get a signal in update `step`, from 0, at this place."""

    def prepare() -> None:
        now = {"step": -1}
        run = Step.run

        def noting(self: Step, index: int, *args: Any) -> Any:
            now["step"] = index
            return run(self, index, *args)

        def is_due() -> bool:
            return int(os.environ.get("IMECE_MEMBER", -1)) in members and now["step"] >= step

        def die(*_: Any) -> None:
            if is_due():
                os.kill(os.getpid(), number)

        def before(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                die()
                return call(*args, **kwargs)

            return wrapped

        mock.patch.object(Step, "run", noting).start()
        if place in BEFORE:
            where, name = BEFORE[place]
            mock.patch.object(where, name, before(getattr(where, name))).start()
        elif place == "finish":
            mock.patch("imece.train.start.finish", before(finish)).start()
        else:

            def deadly(*args: Any, **kwargs: Any) -> torch.Tensor:
                if place == "forward":
                    die()
                loss: torch.Tensor = mean_nats(*args, **kwargs)
                loss.register_hook(die)  # when backward begins: the others' buckets are on their way
                return loss

            mock.patch("imece.train.passes.mean_nats", deadly).start()

    return prepare


def dropping() -> None:
    """In all ranks: half of what a block makes is dropped while it trains."""
    forward = Block.forward

    def drops(self: Block, *args: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(forward(self, *args), training=self.training)

    mock.patch.object(Block, "forward", drops).start()


def slower(seconds: float, ranks: int) -> Callable[[], None]:
    """Each update of fewer ranks takes so much longer: there is time to join."""

    def prepare() -> None:
        run = Step.run

        def slow(self: Step, *args: Any) -> Any:
            time.sleep(seconds if self._plan.ranks < ranks else 0.0)
            return run(self, *args)

        mock.patch.object(Step, "run", slow).start()

    return prepare


def difference(run: Path, other: Path) -> float:
    """The largest between the last checkpoints' parameters, as a share of the parameter's largest element."""
    one, two = last(run), last(other)
    assert one.step == two.step and one.names() == two.names()
    names = [name for name in one.names() if name.startswith("model/")]
    assert names
    return max(
        float((one.tensor(name) - two.tensor(name)).abs().max() / two.tensor(name).abs().max())
        for name in names
    )
