"""`imece train --mesh.context --mesh.tensor`: ranks that divide sequences or matrices train like one."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import imece
from imece.checkpoint.load import all_steps
from imece.errors import UserError
from imece.footprint import StrategyName
from imece.models.transformer import Transformer
from imece.train.config import (
    ComputeSection,
    DataSection,
    MeshSection,
    OptimizerSection,
    TrainConfig,
)
from imece.train.dividing import axes_of, check_divided, divided, groups_of
from imece.train.step import Step
from tests.ranks import run_ranks
from tests.train.command import in_fork, train
from tests.train.compare import records
from tests.train.small import options
from tests.train.test_step import Bench, distance

NEAR = 1e-5  # fp32, summed in another order


def curve(run: Path) -> list[float]:
    return [
        record[key] for record in records(run) for key in ("loss", "grad_norm", "val_loss") if key in record
    ]


def rank_1_dies(times: int = 1) -> None:
    """In the middle of its seventh step, so often, when what was saved after the fourth or fifth is on the
    disk. If more than once its launcher, which looks once a second, has heard of the fifth and the sixth."""
    run = Step.run

    def until_then(self: Step, index: int, lr: float) -> Any:
        flag = Path(os.environ["FLAG"])
        died = len(flag.read_text()) if flag.exists() else 0
        if os.environ["RANK"] == "1" and died < times:
            if times > 1:
                time.sleep({5: 1.5, 6: 0.5}.get(index, 0.0))
            if index == 6:
                flag.write_text("x" * (died + 1))
                while not all_steps(flag.with_name("dies") / "checkpoints"):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        return run(self, index, lr)

    mock.patch.object(Step, "run", until_then).start()


def runs(folder: str) -> dict[str, Any]:
    """On one rank, on ranks that divide sequences, on such of which one dies, and first these then others."""
    path = Path(folder)
    os.environ["FLAG"] = str(path / "died")
    usual = [
        "--steps=8",
        "--model.kv-heads=2",
        "--model.tied-head=False",
        "--checkpoint.every=4",
        "--validate.every=4",
        "--optimizer.kind=adamw",
    ]
    ways = {
        "one": ["--ranks=1"],
        "two": ["--ranks=2", "--mesh.context=2", "--strategy=zero3", "--compute.recompute"],
        "four": ["--ranks=4", "--mesh.context=2", "--strategy=zero1", "--batch.micro=2"],
        "other": ["--ranks=2", "--mesh.context=2", "--steps=4", "--strategy=zero1"],
        "dies": ["--ranks=2", "--mesh.context=2", "--strategy=zero1"],
        "tensor": ["--ranks=2", "--mesh.tensor=2", "--steps=4"],
        "all": ["--ranks=4", "--mesh.tensor=2", "--mesh.sequence", "--mesh.context=2", "--strategy=zero2"],
    }
    found: dict[str, Any] = {}
    for name, more in ways.items():
        fault = rank_1_dies if name == "dies" else lambda: None
        outcome = train(options(path, name, *usual, *more), path, fault=fault)
        assert outcome.status == 0, outcome
        found[name] = [outcome.out, outcome.err, json.loads((path / name / "plan.json").read_bytes())]
    again = train(["--run", path / "other", "--mesh.context=1", "--steps=8"], path)
    assert again.status == 0 and "going on after step 4" in again.out, again
    again = train(["--run", path / "tensor", "--ranks=1", "--mesh.tensor=1", "--steps=8"], path)
    assert again.status == 0 and "going on after step 4" in again.out, again
    start: list[str | Path] = ["--run", path / "from", "--from", path / "all", "--data", path / "text.jsonl"]
    tuned = train([*start, "--ranks=2", "--mesh.tensor=2", "--batch.sequences=2", "--steps=1"], path)
    found["from"] = [tuned.out, tuned.err, None]
    return found


def test_the_losses_are_those_of_one_rank(tmp_path: Path) -> None:
    found = in_fork(runs, str(tmp_path))
    expected = np.array(curve(tmp_path / "one"))
    assert len(expected) == 8 * 2 + 2
    for name in ("two", "four", "other", "dies", "tensor", "all"):
        assert np.abs(np.array(curve(tmp_path / name)) - expected).max() < NEAR, name
    out, err, plan = found["four"]
    assert "12 sequences x 16 = micro-batch 2 x 3 accumulated x 2 groups of 2 ranks, 192 tokens a step" in out
    assert "a mesh with axes of its own cannot change its ranks" in err
    assert plan["predicted"]["plan"].startswith("CP 2 x ZeRO-1") and plan["predicted"]["ranks"] == 4
    out, _, plan = found["all"]
    assert "x 1 group of 4 ranks, 192 tokens a step" in out and "sample" in out
    assert plan["predicted"]["plan"].startswith("TP 2 x CP 2 x ZeRO-2") and plan["predicted"]["ranks"] == 4
    last = records(tmp_path / "one")[-1]["val_loss"]
    (first,) = records(tmp_path / "from")
    assert abs(first["val_loss"] - last) < 0.05, "what was trained is what it began with"
    out, err, _ = found["dies"]
    assert "was killed by signal 9" in err and "all 2 ranks start again now" in err
    assert "going on after step 4" in out


def steps_of_two() -> dict[str, Any]:
    """Gradients of two ranks that divide sequences; and whom they blame."""
    bench = Bench(micro=6, divide=MeshSection(context=2))
    loss, expected = bench.whole_batch(0)
    outcome = bench.step.run(0, lr=0.0)
    nats = torch.tensor([outcome.nats, outcome.tokens], dtype=torch.float64)
    imece.all_reduce(nats)
    found: dict[str, Any] = {
        "apart": distance(bench.gradients(), expected),
        "loss": (nats[0] / nats[1]).item() - loss,
    }
    documents = bench.batches.names(0, 6, 12)
    inputs = torch.from_numpy(bench.batches.sequences(0)[6:, :-1])

    def spoil(module: torch.nn.Module, args: tuple[Tensor], kwargs: Any, output: Tensor) -> Tensor:
        """On rank 1 alone, of the second micro-batch: the other rank meets it in the ring, or not at all."""
        mine = bench.step._context.part(inputs)
        spoilt = dist.get_rank() == 1 and torch.equal(args[0], mine)
        return output * float("nan") if spoilt else output

    hook = bench.model.register_forward_hook(spoil, with_kwargs=True)
    found["skipped"] = bench.step.run(0, lr=0.0).skipped
    found["blamed"] = [line.replace(str(documents)[1:-1], "DOCUMENTS") for line in bench.step.blame(0)]
    hook.remove()
    if dist.get_rank() == 1:
        with torch.no_grad():
            bench.model.get_parameter("embed.weight")[2, 3] = float("nan")
    found["spoilt"] = bench.step.blame(0)
    return found


def test_a_step_of_ranks_that_divide_sequences() -> None:
    for found in run_ranks(steps_of_two, 2):
        assert found["apart"] < NEAR and abs(found["loss"]) < NEAR
        assert found["skipped"] == "the gradient is not finite"
        (line,) = found["blamed"]
        assert line.startswith("ranks 0, 1: loss ") and line.endswith("; documents DOCUMENTS"), line
        assert found["spoilt"] == ["rank 1: weights that are not finite: embed.weight"]


def test_groups_of_ranks() -> None:
    assert axes_of(MeshSection(), 6) is None
    axes = axes_of(MeshSection(context=2), 6)
    assert axes is not None and {name: size for name, size in axes.items() if size > 1} == {
        "replicate": 3,
        "context": 2,
    }
    for ranks, said in ((3, "3 ranks cannot .* --ranks 2 or 4$"), (1, "1 rank cannot .* --ranks 2$")):
        with pytest.raises(UserError, match=f"^--mesh.context 2: {said}"):
            groups_of(MeshSection(context=2), ranks)


def test_gradients_that_cannot_be_summed_after_each_micro_batch() -> None:
    sharded = TrainConfig(compute=ComputeSection(accumulate="sharded"))
    shape = sharded.model.shape(4096)
    strategy: StrategyName
    for strategy in ("auto", "SHARD_GRAD_OP", "zero3"):
        check_divided(replace(sharded, strategy=strategy), shape, 256)
    for strategy in ("ddp", "zero1"):
        with pytest.raises(UserError, match=rf"^--strategy {strategy} and --accumulate sharded: .* leave "):
            check_divided(replace(sharded, strategy=strategy), shape, 256)
    with pytest.raises(UserError, match=r"^--mesh\.pipeline 2 and --accumulate sharded: .* leave "):
        check_divided(replace(sharded, mesh=MeshSection(pipeline=2)), shape, 256)


def test_what_cannot_be_divided() -> None:
    config = TrainConfig(mesh=MeshSection(context=2))
    shape = config.model.shape(4096)
    check_divided(config, shape, 256)
    check_divided(config, replace(shape, window=shape.max_seq), 256)
    check_divided(TrainConfig(compute=ComputeSection(compile=True)), replace(shape, window=8), 255)
    with pytest.raises(
        UserError, match=r"^--mesh\.context 2: sequences of 255 .* the nearest are 252 and 256; --m"
    ):
        check_divided(config, shape, 255)
    records = DataSection(format="answers")
    with pytest.raises(UserError, match=r"^--mesh\.context 2: .* to be separate in them: --data\.separate F"):
        check_divided(replace(config, data=records), shape, 256)
    check_divided(replace(config, data=replace(records, separate=False)), shape, 256)
    with pytest.raises(UserError, match=r"a window of 8 positions"):
        check_divided(config, replace(shape, window=8), 256)
    with pytest.raises(UserError, match=r"--compute\.compile"):
        check_divided(replace(config, compute=ComputeSection(compile=True)), shape, 256)
    with pytest.raises(ValueError, match=r"mesh\.context is 0"):
        MeshSection(context=0)


def logits_of_a_run() -> list[list[int]]:
    mesh = imece.init({"tensor": 2})
    config = TrainConfig(mesh=MeshSection(tensor=2))
    shape = replace(config.model.shape(64), layers=1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    logits = divided(Transformer(shape), config, mesh)(tokens)
    return [list(logits.shape), list(logits.to_local().shape)]


def test_a_rank_has_the_logits_of_its_part_of_the_vocabulary() -> None:
    assert run_ranks(logits_of_a_run, 2) == [[[1, 4, 64], [1, 4, 32]]] * 2


def test_what_cannot_be_divided_by_matrices() -> None:
    adamw = OptimizerSection(kind="adamw")
    config = TrainConfig(mesh=MeshSection(tensor=2, sequence=True), optimizer=adamw)
    shape = config.model.shape(4096)
    check_divided(config, shape, 256)
    for changed, seq, said in (
        (replace(config, optimizer=OptimizerSection()), 256, "Muon: its update is of a whole matrix"),
        (replace(config, compute=ComputeSection(compile=True)), 256, r"and --compute\.compile: "),
        (replace(config, mesh=MeshSection(tensor=3)), 256, "3: heads 4 and kv_heads 2 .*among the 3 ranks"),
        (config, 255, r"255 positions of a rank cannot be .* --model\.max-seq 252$"),
    ):
        with pytest.raises(UserError, match=rf"^--mesh\.tensor .*{said}"):
            check_divided(changed, shape, seq)
    with pytest.raises(UserError, match=r"^--mesh\.tensor 2: 257 entries .*: --model\.tied-head False, or"):
        check_divided(config, replace(shape, vocab_size=257), 256)
    check_divided(config, replace(shape, vocab_size=257, tied_head=False), 256)
    with pytest.raises(
        UserError, match=r"^--mesh\.context 2 and --mesh\.tensor 2: 6 ranks .* --ranks 4 or 8$"
    ):
        groups_of(MeshSection(context=2, tensor=2), 6)
    with pytest.raises(UserError, match=r"^--mesh\.sequence is .* give --mesh\.tensor, 2 or more$"):
        check_divided(TrainConfig(mesh=MeshSection(sequence=True)), shape, 256)
