"""Checks that two runs are identical, and what a run folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from imece.checkpoint.load import Saved, newest
from imece.observe.metrics import read_metrics

# Of a record: what does not depend on how fast it went.
EXACT = ("step", "loss", "tokens", "lr", "grad_norm", "epoch", "val_loss", "skipped")


def last(run: Path) -> Saved:
    """The newest checkpoint. AssertionError if there is none, or one that is damaged."""
    damaged: list[str] = []
    saved = newest(run / "checkpoints", damaged.append)
    assert saved is not None and not damaged, damaged
    return saved


def records(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl. AssertionError unless it has steps 1, 2, ..., each once, and nothing else."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [record["step"] for record in found] == list(range(1, len(found) + 1))
    assert found == read_metrics(run)
    return found


def exact(run: Path) -> list[dict[str, Any]]:
    """Of each step, what must be equal bit for bit."""
    return [{key: record[key] for key in EXACT if key in record} for record in records(run)]


def assert_same_run(run: Path, other: Path) -> None:
    """Bit for bit: the loss of every step, all tensors of the last checkpoint, and the end."""
    assert exact(run) == exact(other)
    one, two = last(run), last(other)
    assert one.step == two.step and one.names() == two.names()
    assert {name.split("/")[0] for name in one.names()} == {"model", "optimizer", "made_by", "numbers"}
    for name in one.names():
        assert torch.equal(one.tensor(name), two.tensor(name)), name
    for name in ("val_loss", "sample", "steps", "tokens", "best_val_loss"):
        assert summary(run)[name] == summary(other)[name], name


def summary(run: Path) -> dict[str, Any]:
    """summary.json"""
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def files(folder: Path) -> dict[str, bytes]:
    """Every file below it, and every folder."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else b"" for name, path in paths.items()}
