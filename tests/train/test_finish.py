"""What the end of a run says, as far as it needs no run."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imece.train.config import TrainConfig
from imece.train.finish import next_commands


@pytest.mark.parametrize(("run", "word"), [("runs/my run", "runs/my run"), ("-x", "./-x"), ("/a/b", "/a/b")])
def test_commands_can_be_copied(run: str, word: str) -> None:
    session: Any = SimpleNamespace(folder=SimpleNamespace(path=Path(run)), config=TrainConfig(steps=3))
    commands = dict(next_commands(session))
    assert shlex.split(commands["next"]) == ["imece", "sample", word, "--prompt", "class Queue("]
    assert shlex.split(commands["longer"]) == ["imece", "train", "--run", word, "--steps", "6"]
