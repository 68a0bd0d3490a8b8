"""`imece train --mesh.pipeline`: ranks that divide the layers train like one, and resume as others."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from imece.cli.train import read_config
from imece.errors import UserError
from imece.footprint import StrategyName
from imece.train.batch import plan_batch
from imece.train.config import (
    BatchSection,
    ComputeSection,
    LoraSection,
    MeshSection,
    OptimizerSection,
    TrainConfig,
)
from imece.train.dividing import axes_of, check_divided, dealt, groups_of
from imece.train.model import optimizer as train_optimizer
from tests.meshes import FakeMesh
from tests.train.command import Outcome, in_fork, train
from tests.train.compare import last, records, summary
from tests.train.small import options
from tests.train.test_dividing import curve, rank_1_dies

NEAR = 1e-6  # fp32, summed in another order
USUAL = [
    "--steps=10",
    "--model.layers=3",
    "--batch.micro=3",
    "--checkpoint.every=5",
    "--validate.every=5",
    "--optimizer.schedule=constant",  # as long as all of them may be in two goes
]


def went_well(outcome: Outcome) -> Outcome:
    assert outcome.status == 0, outcome
    return outcome


def with_muon(folder: str) -> str:
    """The head is tied. Runs on one rank, on stages, and on first these then others.

    Where a processor has bf16, Muon rounds to it what is summed in another order, and 1e-4 comes of that:
    in this fork and its ranks it does as on all others.
    """
    mock.patch.object(train_optimizer, "multiplies_bf16", lambda _: False).start()
    path, stages = Path(folder), ["--ranks=2", "--mesh.pipeline=2"]
    ways = {
        "one": ["--ranks=1"],
        "two": stages,
        "data": ["--ranks=4", "--mesh.pipeline=2", "--strategy=zero2", "--compute.recompute"],
        "gpipe": [*stages, "--mesh.schedule=gpipe", "--strategy=replicate", "--steps=5"],
        "wider": ["--ranks=1", "--steps=5"],
    }
    out = [went_well(train(options(path, name, *USUAL, *more), path)).out for name, more in ways.items()]
    for name, more in {
        "gpipe": ["--ranks=1", "--mesh.pipeline=1"],
        "wider": [*stages, "--mesh.schedule=interleaved"],
    }.items():
        again = went_well(train(["--run", path / name, *more, "--steps=10"], path))
        assert "going on after step 5" in again.out, again
    return out[2]


def with_adamw(folder: str) -> list[str]:
    """The head is not tied, and of 257 entries not divided. On one rank, and on all that can be together; on
    stages of which one dies. Then a head that is both, on one rank and on all."""
    path = Path(folder)
    os.environ["FLAG"] = str(path / "died")
    usual = [*USUAL, "--optimizer.kind=adamw", "--model.kv-heads=2", "--model.tied-head=False"]
    every = ["--ranks=4", "--mesh.pipeline=2", "--mesh.tensor=2", "--mesh.sequence"]
    found = []
    tied = ["--data.tokenizer=bpe", "--data.vocab-size=300", "--model.tied-head=True", "--steps=3"]
    for name, more, fault in (
        ("one", ["--ranks=1"], lambda: None),
        ("all", [*every, "--steps=5"], lambda: None),
        ("dies", ["--ranks=2", "--mesh.pipeline=2"], lambda: rank_1_dies(3)),
        ("tied one", [*tied, "--ranks=1"], lambda: None),
        ("tied all", [*tied, *every], lambda: None),
    ):
        found.append(went_well(train(options(path, name, *usual, *more), path, fault=fault)).err)
    alone = ["--ranks=3", "--mesh.pipeline=3", "--mesh.tensor=1", "--mesh.no-sequence", "--steps=10"]
    went_well(train(["--run", path / "all", *alone], path))
    start: list[str | Path] = ["--run", path / "from", "--from", path / "all", "--data", path / "text.jsonl"]
    went_well(train([*start, "--ranks=2", "--mesh.pipeline=2", "--batch.sequences=2", "--steps=1"], path))
    return found


def check_curves(path: Path, names: list[str]) -> None:
    expected = np.array(curve(path / "one"))
    assert len(expected) == 10 * 2 + 2
    for name in names:
        assert np.abs(np.array(curve(path / name)) - expected).max() < NEAR, name
        assert {record["tokens"] for record in records(path / name)} == {12 * 16}, name


def test_the_losses_are_those_of_one_rank(tmp_path: Path) -> None:
    out = in_fork(with_muon, str(tmp_path))
    check_curves(tmp_path, ["two", "data", "gpipe", "wider"])
    assert "12 sequences x 16 = micro-batch 3 x 2 in the pipeline x 2 groups of 2 ranks, 192 tokens" in out
    assert "embedding, layers 0 to 1 | layer 2, head; 1f1b, ranks wait 33 % of a step at least" in out
    assert "on a rank of the first stage" in out
    one, data = last(tmp_path / "one"), last(tmp_path / "data")
    assert one.names() == data.names()
    for name in one.names():
        assert torch.allclose(one.tensor(name).double(), data.tensor(name).double(), atol=2e-5), name
    assert summary(tmp_path / "two")["sample"] == summary(tmp_path / "one")["sample"]


@pytest.mark.slow  # eight trainings
def test_beside_tensor_and_after_a_death(tmp_path: Path) -> None:
    dies = in_fork(with_adamw, str(tmp_path))[2]
    check_curves(tmp_path, ["all", "dies"])
    tied = [np.array(curve(tmp_path / f"tied {name}")) for name in ("one", "all")]
    assert len(tied[0]) == 3 * 2 + 1 and np.abs(tied[0] - tied[1]).max() < NEAR
    assert dies.count("was killed by signal 9 (SIGKILL)") == 3, (
        "steps were finished in between: no row of deaths"
    )
    assert dies.count("all 2 ranks start again now") == 3
    (first,) = records(tmp_path / "from")
    assert abs(first["val_loss"] - records(tmp_path / "one")[-1]["val_loss"]) < 0.05, "it began with that"


def refused(config: TrainConfig, said: str, **shape: Any) -> None:
    with pytest.raises(UserError, match=rf"^{said}$"):
        check_divided(config, replace(config.model.shape(4096), **shape), 256)


def test_what_cannot_be_dealt() -> None:
    config = TrainConfig(mesh=MeshSection(pipeline=2))
    check_divided(config, config.model.shape(4096), 256)
    strategy: StrategyName
    for strategy in ("zero1", "SHARD_GRAD_OP", "ddp"):
        check_divided(replace(config, strategy=strategy), config.model.shape(4096), 256)
    for strategy in ("zero3", "hybrid", "hybrid_zero2"):
        refused(
            replace(config, strategy=strategy), rf"--mesh\.pipeline 2 and --strategy {strategy}: .*zero1, .*"
        )
    refused(
        replace(config, mesh=MeshSection(pipeline=2, context=2)),
        r"--mesh\.pipeline 2 and --mesh\.context 2: stages .*: --mesh\.context 1, or --mesh\.pipeline 1",
    )
    refused(replace(config, lora=LoraSection(rank=4)), r"--mesh\.pipeline 2 and --lora\.rank 4: .*")
    refused(
        replace(config, compute=ComputeSection(compile=True)),
        r".* and --compute\.compile: .*: --compute\.no-compile",
    )
    refused(
        replace(config, mesh=MeshSection(pipeline=5)), r".*: 3 layers .* 5 stages: at most --.* 4", layers=3
    )
    four = MeshSection(pipeline=2, schedule="interleaved")
    refused(
        replace(config, mesh=four),
        r".*: 2 layers .* 4 stages, 2 for each rank: --mesh\.schedule 1f1b, with one stage .*",
        layers=2,
    )
    both = replace(config, mesh=MeshSection(pipeline=2, tensor=2))
    refused(both, r"--mesh\.pipeline 2 and --mesh\.tensor 2 and Muon: its update .*")
    check_divided(replace(both, optimizer=OptimizerSection(kind="adamw")), config.model.shape(4096), 256)


def test_a_schedule_without_stages(tmp_path: Path) -> None:
    """What one command says is meant; what a file or run has kept is not."""
    for words in (["--mesh.schedule", "gpipe"], ["--mesh.tensor=2", "--mesh.schedule=1f1b"]):
        with pytest.raises(
            UserError, match=r"^--mesh\.schedule \w+ is for .*: give --mesh\.pipeline, 2 or more$"
        ):
            read_config(["--data", "text", *words])
    kept = tmp_path / "run.toml"
    kept.write_text('[mesh]\npipeline = 2\nschedule = "interleaved"\n')
    assert read_config([str(kept), "--mesh.schedule=gpipe"]).mesh.schedule == "gpipe"
    assert read_config([str(kept), "--mesh.pipeline", "1"]).mesh.chunks == 1
    assert read_config(["--mesh.schedule=gpipe", "--mesh.pipeline=1", "--data", "text"]).mesh.pipeline == 1


def test_stages_on_one_gpu() -> None:
    mesh = FakeMesh({"pipeline": 2}, device="cuda")
    config: Any = TrainConfig(mesh=MeshSection(pipeline=2))
    unused: Any = None
    with pytest.raises(UserError, match=r"^--mesh\.pipeline 2: Gloo, .* start one rank for each GPU and"):
        dealt(unused, config, unused, mesh, unused)


def test_groups_of_stages() -> None:
    axes = axes_of(MeshSection(pipeline=2, tensor=3), 12)
    assert axes == {"pipeline": 2, "replicate": 2, "context": 1, "tensor": 3}
    with pytest.raises(UserError, match=r"^--mesh\.pipeline 4: 6 ranks cannot .*: --ranks 4 or 8$"):
        groups_of(MeshSection(pipeline=4), 6)


@pytest.mark.parametrize(
    ("sequences", "schedule", "micro"),
    [
        (32, "1f1b", 4),
        (64, "1f1b", 8),
        (16, "1f1b", 2),
        (4, "1f1b", 1),
        (2, "gpipe", 1),
        (12, "interleaved", 1),
    ],
)
def test_micro_batches_of_a_pipeline(sequences: int, schedule: Any, micro: int) -> None:
    mesh = MeshSection(pipeline=2, schedule=schedule)
    plan = plan_batch(BatchSection(sequences=3 * sequences), 8, 3, mesh)
    assert (plan.micro, plan.micro * plan.accumulation, plan.at_once) == (micro, sequences, sequences)
    assert math.prod((plan.micro, plan.accumulation, plan.ranks)) == plan.sequences


def test_too_few_micro_batches() -> None:
    mesh = MeshSection(pipeline=4)
    with pytest.raises(
        UserError,
        match=r"^--mesh\.pipeline 4: 2 micro-batches of 4 sequences a step cannot go through 4 stages by "
        r"--mesh\.schedule 1f1b: --batch\.micro 1 or 2, or --mesh\.schedule gpipe$",
    ):
        plan_batch(BatchSection(sequences=16, micro=4), 8, 2, mesh)
    with pytest.raises(
        UserError, match=r"2 micro-batches of 1 sequence a .*: at least --batch\.sequences 8,"
    ):
        plan_batch(BatchSection(sequences=4), 8, 2, mesh)
    with pytest.raises(UserError, match=r"5 micro-batches of 1 .*interleaved: --batch\.micro 5, or"):
        plan_batch(BatchSection(sequences=5, micro=1), 8, 1, MeshSection(pipeline=2, schedule="interleaved"))
    plan_batch(BatchSection(sequences=16, micro=4), 8, 2, replace(mesh, schedule="gpipe"))
