"""A bit that flips on one rank is noticed within K steps, named, and repaired if most ranks agree."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import imece
from imece.data_parallel.sharded import ShardedDataParallel
from imece.train.step import Step
from imece.train.watch.drift import Drift, DriftError
from tests.ranks import run_ranks
from tests.train.command import in_fork, train
from tests.train.compare import exact, last, records
from tests.train.small import options

EVERY = 5


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """One bit of a float32 tensor."""
    words = tensor.data.view(-1).view(torch.int32)
    words[element] ^= 1 << bit if bit < 31 else -(2**31)


class Bench:
    """A wrapped model whose optimizer has made a step, and its Drift."""

    def __init__(self, strategy: str, every: int = EVERY, on_hosts: int = 1) -> None:
        if on_hosts > 1:
            at = int(os.environ["RANK"]) * on_hosts // int(os.environ["WORLD_SIZE"])
            os.environ["IMECE_HOST"] = f"host-{at}"
        self.mesh = imece.init()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        self.module = torch.nn.Sequential(self.first, self.second)
        self.second.bias.requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in self.module.parameters() if each.requires_grad])
        self.wrapped, self.optimizer = imece.parallelize(self.module, optimizer, strategy, self.mesh)
        self.step()
        self.drift = Drift(self.wrapped, [self.optimizer], every)
        self.now = 0

    def step(self) -> None:
        self.wrapped(torch.ones(2, 7) * (1 + self.mesh.rank)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def looks(self) -> bool:
        """What the loop does after a step."""
        self.now += 1
        mine = torch.tensor([self.drift.digest(self.now), self.drift.key], dtype=torch.float64)
        rows = mine.new_empty(self.mesh.world_size * 2)
        imece.all_gather(rows, mine, group=self.mesh.world_group)
        digests, keys = zip(*rows.view(-1, 2).tolist(), strict=True)
        return Drift.differs(digests, keys)

    def looks_until_seen(self) -> int:
        """After how many steps a difference is seen; 0: not within EVERY."""
        return next((step for step in range(1, EVERY + 1) if self.looks()), 0)


def every_parameter() -> int:
    """Flips bits of all parameters of a replicated model, on each rank in turn."""
    bench, flips = Bench("replicate"), 0
    assert bench.looks_until_seen() == 0
    for name, parameter in bench.module.named_parameters():
        for element in range(0, parameter.numel(), 10):
            odd, bit = flips % bench.mesh.world_size, (9 * flips) % 32
            if bench.mesh.rank == odd:
                before = parameter.detach().clone()
                flip(parameter, element, bit)
            assert bench.looks_until_seen(), (name, element, bit)
            assert bench.drift.mend(bench.now) == [f"{name} of rank {odd} differed from that of 2 others"]
            if bench.mesh.rank == odd:
                assert torch.equal(before.view(torch.int32), parameter.detach().view(torch.int32))
            assert bench.looks_until_seen() == 0
            flips += 1
    return flips


def optimizer_goes_with_it() -> list[Any]:
    """A flip in AdamW's memory is seen once parameters differ by it, and taken back too."""
    bench = Bench("replicate")
    weight = bench.first.weight
    if bench.mesh.rank == 1:
        flip(bench.optimizer.state[weight]["exp_avg"], 3, 29)
        flip(bench.optimizer.state[weight]["exp_avg_sq"], 3, 29)
    bench.step()
    assert bench.looks_until_seen()
    said = bench.drift.mend(7)
    bench.step()
    bench.step()
    bench.wrapped.check_parameters()
    return [said, bench.looks_until_seen()]


def no_majority() -> str:
    bench = Bench("replicate")
    if bench.mesh.rank:
        flip(bench.first.bias, 2, 0)
    assert bench.looks_until_seen()
    with pytest.raises(DriftError) as refused:
        bench.drift.mend(140)
    return str(refused.value)


def sharded() -> dict[str, Any]:
    """Under each strategy, what is on several ranks."""
    found: dict[str, Any] = {}
    for strategy in ("zero1", "zero2", "zero3"):
        bench = Bench(strategy)
        assert bench.looks_until_seen() == 0
        trained, frozen = bench.first.weight, bench.second.bias
        seen = []
        for tensor in (trained, frozen):
            if bench.mesh.rank == 2:
                flip(tensor, 0, 30)
            seen.append(bool(bench.looks_until_seen()))
            if seen[-1]:
                bench.drift.mend(bench.now)
            elif bench.mesh.rank == 2:
                flip(tensor, 0, 30)
            imece.barrier()  # it may be memory that all look at
            bench.wrapped.check_parameters()
        found[strategy] = seen
    return found


def hybrid(hosts: int) -> list[Any]:
    """A rank has its parts in common with one other on each host."""
    bench = Bench("hybrid", on_hosts=hosts)
    assert len(bench.mesh.hosts) == hosts and bench.looks_until_seen() == 0
    if bench.mesh.rank == 1:
        assert isinstance(bench.wrapped, ShardedDataParallel)
        flip(bench.wrapped.sharding.parts[0].parameter, 0, 30)
    seen = bench.looks_until_seen()
    try:
        said = bench.drift.mend(3)
        bench.step()
        bench.wrapped.check_parameters()
        return [bool(seen), said, bench.looks_until_seen()]
    except DriftError as refused:
        return [bool(seen), str(refused), 0]


def test_every_parameter_of_a_replica() -> None:
    assert run_ranks(every_parameter, 3, backend=None) == [4 + 1 + 2 + 1] * 3


def test_what_the_optimizer_keeps_is_taken_back_too() -> None:
    assert run_ranks(optimizer_goes_with_it, 3, backend=None) == [
        [["0.weight of rank 1 differed from that of 2 others"], 0]
    ] * 3  # fmt: skip


def test_two_ranks_cannot_outvote_each_other() -> None:
    said = run_ranks(no_majority, 2, backend=None)
    assert said == [
        "step 140: 0.bias differs between ranks 0, 1, and there is no majority: the run ends. Something "
        "changed bits on one rank alone after step 135, memory that fails say; the same command goes on from "
        "the last checkpoint, which is the same for all ranks"
    ] * 2  # fmt: skip


def test_sharded_models() -> None:
    """zero3 has parameters once, frozen ones too, in memory that all ranks of the host share."""
    whole, once = [True, True], [False, False]
    assert run_ranks(sharded, 3, backend=None) == [{"zero1": whole, "zero2": whole, "zero3": once}] * 3


@pytest.mark.slow
def test_replicas_of_parts() -> None:
    for seen, said, _ in run_ranks(hybrid, 4, args=(2,), backend=None):
        assert seen and "0.weight differs between ranks 1, 3, and there is no majority" in said, said
    mended = [True, ["1.weight of rank 1 differed from that of 2 others"], 0]
    assert run_ranks(hybrid, 3, args=(3,), backend=None) == [mended] * 3


def test_never() -> None:
    assert run_ranks(never, 2, backend=None) == [0, 0]


def never() -> int:
    bench = Bench("replicate", every=0)
    if bench.mesh.rank:
        flip(bench.first.bias, 2, 0)
    return bench.looks_until_seen()


AFTER, ODD, NAME = 6, 1, "blocks.0.mlp.down.weight"


def flipping() -> None:
    """After step AFTER a bit of one rank's memory changes, as memory that fails does it."""
    run = Step.run

    def spoilt(self: Step, index: int, *args: Any) -> Any:
        if index == AFTER and os.environ["RANK"] == str(ODD):
            flip(self._model.module.get_parameter(NAME), 11, 20)
        return run(self, index, *args)

    mock.patch.object(Step, "run", spoilt).start()


def real(folder: str) -> None:
    path = Path(folder)
    usual = ["--strategy=replicate", f"--watch.drift-every={EVERY}", "--validate.every=0", "--steps=20"]
    assert train(options(path, "whole", *usual, "--ranks=3"), path).status == 0
    outcome = train(options(path, "three", *usual, "--ranks=3"), path, fault=flipping)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    found = records(path / "three")
    (seen,) = [record for record in found if "drift" in record]
    assert AFTER < seen["step"] <= AFTER + EVERY
    assert seen["drift"] == f"{NAME} of rank 1 differed from that of 2 others"
    assert f"warning: step {seen['step']}: {seen['drift']}, though nothing should" in outcome.out
    whole = exact(path / "whole")
    assert exact(path / "three")[:AFTER] == whole[:AFTER]
    assert exact(path / "three") != whole, "the bit did not matter"

    outcome = train(options(path, "two", *usual, "--ranks=2", "--checkpoint.every=2"), path, fault=flipping)
    assert outcome.status == 1 and "Traceback" not in outcome.err, outcome
    (line,) = {line.split("] ")[-1] for line in outcome.err.splitlines() if "no majority" in line}
    step = len(records(path / "two"))
    assert line.startswith(f"imece: step {step}: {NAME} differs between ranks 0, 1, and there is no")
    assert AFTER < step <= AFTER + EVERY
    assert last(path / "two").step < step
    outcome = train(["--run", path / "two"], path)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert len(records(path / "two")) == 20


def test_a_bit_flips_in_a_run(tmp_path: Path) -> None:
    in_fork(real, str(tmp_path))


def in_stages(folder: str) -> None:
    """Of two stages with two ranks each, the second one of the first stage: the others see nothing of it."""
    path = Path(folder)
    usual = ["--strategy=replicate", f"--watch.drift-every={EVERY}", "--validate.every=0", "--steps=20"]
    stages = ["--ranks=4", "--mesh.pipeline=2", "--batch.micro=3"]
    outcome = train(options(path, "stages", *usual, *stages), path, fault=flipping)
    assert outcome.status == 1 and "Traceback" not in outcome.err, outcome
    (line,) = {line.split("] ")[-1] for line in outcome.err.splitlines() if "no majority" in line}
    step = len(records(path / "stages"))
    assert line.startswith(f"imece: step {step}: {NAME} differs between ranks 0, 1, and there is no")
    assert AFTER < step <= AFTER + EVERY


def test_a_bit_flips_in_a_stage(tmp_path: Path) -> None:
    in_fork(in_stages, str(tmp_path))
