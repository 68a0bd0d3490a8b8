"""The same run on 1, 2, 3 and 4 ranks: the same global batches, and the same losses up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from imece.cli.train import read_config
from imece.data.batches import Batches, rows
from imece.train.start import run_rank
from imece.train.watch.stopping import Stop
from tests.ranks import run_ranks
from tests.train.command import leave_out
from tests.train.compare import records
from tests.train.small import options

STEPS, SEQUENCES = 16, 12
KINDS = ("adamw", "muon")


def ledgers(runs: list[list[str]]) -> list[list[list[Any]]]:
    """Trains each run as a rank that any launcher started. Of each read: step, rows of the global batch,
    documents, and targets."""
    leave_out()
    entries: list[list[Any]] = []
    for_rank = Batches.for_rank

    def noted(self: Batches, step: int, rank: int, world_size: int) -> Any:
        inputs, targets = for_rank(self, step, rank, world_size)
        first, last = rows(self.global_batch, rank, world_size)
        entries.append([step, first, last, self.names(step, first, last), targets.ravel().tolist()])
        return inputs, targets

    Batches.for_rank = noted  # type: ignore[method-assign]
    found = []
    for words in runs:
        assert run_rank(read_config(words), Stop()) == 0
        found.append(entries.copy())
        entries.clear()
    return found


def global_batches(by_rank: list[list[list[Any]]]) -> list[dict[str, Any]]:
    """What all ranks together have read at each step."""
    ranks, steps = len(by_rank), []
    for step, entries in enumerate(zip(*by_rank, strict=True)):
        assert [entry[0] for entry in entries] == [step] * ranks, "each rank reads each step once"
        bounds = [bound for entry in entries for bound in entry[1:3]]
        assert bounds == [each * SEQUENCES // ranks for rank in range(ranks) for each in (rank, rank + 1)]
        documents = sorted({name for entry in entries for name in entry[3]})
        targets = [token for entry in entries for token in entry[4]]
        steps.append({"documents": documents, "targets": targets})
    return steps


def test_the_number_of_ranks_changes_nothing(tmp_path: Path) -> None:
    read, curves = [], []
    for ranks in (1, 2, 3, 4):
        runs = [
            options(
                tmp_path, f"{kind}-{ranks}", f"--steps={STEPS}", f"--optimizer.kind={kind}",
                "--validate.every=8", "--optimizer.warmup=1",
            )
            for kind in KINDS
        ]  # fmt: skip
        by_rank = run_ranks(ledgers, ranks, args=(runs,), backend=None)
        read += [global_batches(list(of_one_run)) for of_one_run in zip(*by_rank, strict=True)]
        by_kind = [records(tmp_path / f"{kind}-{ranks}") for kind in KINDS]
        keys = ("loss", "val_loss")
        curves.append([[each[key] for key in keys for each in run if key in each] for run in by_kind])
    assert len(read) == 8 and all(steps == read[0] for steps in read)
    assert len({tuple(step["targets"]) for step in read[0]}) == STEPS + 1, "one is read ahead"
    first = np.array(curves[0])  # [kinds, losses]
    assert first.shape == (2, STEPS + 2)
    for curve in curves[1:]:
        apart = np.abs(np.array(curve) - first).max(axis=1)
        # Muon's update is rounded to bf16, where the last bit of fp32 may become the last bit of bf16.
        assert apart[0] <= 1e-5 and apart[1] <= 1e-3, apart
    falls = first[:, 0] - first[:, STEPS - 1]
    assert (falls > 0.3).all(), "a loss that stays would be the same whatever happened"


def test_what_gradients_are_sent_as(tmp_path: Path) -> None:
    """Each wire comes to losses of its own, which are nearly those of gradients as they are."""
    wires = ("none", "bf16", "int8")
    runs = [
        options(
            tmp_path,
            wire,
            "--steps=6",
            "--optimizer.kind=adamw",
            "--optimizer.warmup=1",
            f"--compute.wire={wire}",
        )
        for wire in wires
    ]
    run_ranks(ledgers, 2, args=(runs,), backend=None)
    curves = [[each["loss"] for each in records(tmp_path / wire)] for wire in wires]
    assert len({tuple(curve) for curve in curves}) == len(wires)
    for curve in curves[1:]:
        assert curve[0] == curves[0][0] and np.allclose(curve, curves[0], rtol=0.01)
