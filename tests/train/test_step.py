"""One update: over the whole global batch, made by all ranks or by none."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import imece
from imece.checkpoint import Slice, TrainingState
from imece.checkpoint.state.names import NUMBERS
from imece.data.batches import Batches
from imece.data.tokens import Part
from imece.data_parallel.average import Over
from imece.launchers import read_world
from imece.models.cross_entropy import cross_entropy
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.batch import BatchPlan, plan_batch, shared_among
from imece.train.config import BatchSection, MeshSection, OptimizerSection, TrainConfig
from imece.train.dividing import axes_of, dealt
from imece.train.evaluate import evaluate
from imece.train.model.optimizer import make_optimizers
from imece.train.model.precision import Precision
from imece.train.passes import InPipeline, InTurn, Passes, StageLoss
from imece.train.step import Step
from imece.train.watch.clock import Clock
from tests.ranks import run_ranks

SEQ, SEQUENCES = 8, 12
FP32 = Precision("fp32", "cpu")
Found = dict[str, list[Any]]


def text() -> Part:
    """60 documents of 10 to 20 tokens."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 21, 60)
    tokens = draw.integers(0, 256, lengths.sum()).astype(np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens[offsets[1:] - 1] = 256
    return Part("train", tokens, offsets, 256, len(tokens))


class Bench:
    """A small model and its Step, as a Session has them."""

    def __init__(
        self,
        micro: int = 0,
        clip: float = 0.0,
        optimizers: Sequence[str] = (),
        precision: Precision = FP32,
        strategy: str = "replicate",
        plan: BatchPlan | None = None,
        divide: MeshSection = MeshSection(),  # noqa: B008 - it is frozen
    ) -> None:
        """optimizers: "adamw" or "muon"; none: one that only moves by the gradient itself. divide: how ranks
        work together."""
        mesh = imece.init(axes_of(divide, read_world().world_size))
        config = dataclasses.replace(PRESETS["tiny"], vocab_size=257, width=16, mlp_width=24, max_seq=SEQ)
        self.model = Transformer(config, generator=torch.Generator().manual_seed(1))
        section = BatchSection(sequences=SEQUENCES, micro=micro)
        self.plan = plan or plan_batch(section, SEQ, mesh.batch_ranks, divide)
        scaler = precision.scaler()
        loss = StageLoss(scaler)
        pipeline = dealt(self.model, TrainConfig(mesh=divide), self.plan, mesh, loss)
        own = self.model if pipeline is None else pipeline.part
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(own.parameters())]
        for kind in optimizers:
            self.optimizers = make_optimizers(own, OptimizerSection(kind=kind))  # type: ignore[arg-type]
        self.batches = Batches(text(), SEQ, self.plan.sequences, seed=1)
        self.clock = Clock(mesh.device)
        over: Over = "tokens" if pipeline is None else "ranks"
        self.wrapped, _ = imece.parallelize(own, self.optimizers, strategy, mesh, average=over)
        ring = imece.ContextParallel(mesh)
        passes: Passes = (
            InTurn(self.wrapped, precision, scaler, self.clock, ring, SEQ)
            if pipeline is None
            else InPipeline(pipeline, loss, self.wrapped, precision, self.clock)
        )
        self.step = Step(
            self.wrapped,
            self.optimizers,
            self.batches,
            self.plan,
            passes,
            scaler,
            clip,
            self.clock,
            ring,
            mesh,
        )

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def state(self) -> dict[str, Tensor]:
        """Copies of parameters and of all that the optimizers keep."""
        state = TrainingState(self.wrapped, self.optimizers).tensors()
        own = {name: each.tensor if isinstance(each, Slice) else each for name, each in state.items()}
        return {name: each.detach().clone() for name, each in own.items() if not name.startswith(NUMBERS)}

    def whole_batch(self, index: int) -> tuple[float, list[Tensor]]:
        """Loss and gradient by one process: the mean over all tokens of the step."""
        alone = copy.deepcopy(self.model)
        sequences = torch.from_numpy(self.batches.sequences(index))
        loss = cross_entropy(alone(sequences[:, :-1]), sequences[:, 1:])
        return loss.item(), list(torch.autograd.grad(loss, list(alone.parameters())))


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of all together, relative to the length of what is expected."""
    length = torch.cat([each.flatten() for each in expected]).norm()
    apart = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm()
    return float(apart / length)


def against_one_process(micros: list[int], index: int) -> list[dict[str, float]]:
    found = []
    for micro in micros:
        bench = Bench(micro)
        loss, expected = bench.whole_batch(index)
        _, another = bench.whole_batch(index + 1)
        outcome = bench.step.run(index, lr=0.0)
        found.append(
            {
                "micro": bench.plan.micro,
                "accumulation": bench.plan.accumulation,
                "apart": distance(bench.gradients(), expected),
                "apart from another step": distance(bench.gradients(), another),
                "norm": outcome.grad_norm,
                "expected norm": float(torch.cat([each.flatten() for each in expected]).norm()),
                "nats": outcome.nats,
                "tokens": outcome.tokens,
                "loss": loss,
            }
        )
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_gradient_is_that_of_one_process(ranks: int) -> None:
    share = SEQUENCES // ranks
    micros = [micro for micro in range(1, share + 1) if share % micro == 0]
    by_rank = run_ranks(against_one_process, ranks, args=(micros, 3))
    for each in zip(*by_rank, strict=True):
        first = each[0]
        assert first["micro"] * first["accumulation"] == share
        for rank in each:
            assert rank["apart"] < 1e-6 < 0.1 < rank["apart from another step"]
            assert rank["norm"] == first["norm"] == pytest.approx(rank["expected norm"], rel=1e-6)
        assert [rank["tokens"] for rank in each] == [share * SEQ] * ranks
        nats = sum(rank["nats"] for rank in each)
        assert nats / (SEQUENCES * SEQ) == pytest.approx(first["loss"], rel=1e-6)


def unequal() -> list[Any]:
    """7 sequences, as after a death: 3 + 1 for rank 0 and 3 for rank 1; and 3 batches that are held out."""
    plan = shared_among(BatchPlan(SEQ, 7, ranks=3, micro=3, accumulation=1), 2)
    assert plan.accumulation == 2
    alone = Bench(plan=plan)
    loss, expected = alone.whole_batch(3)
    norm = float(torch.cat([each.flatten() for each in expected]).norm())
    nats, _ = evaluate(alone.model, text(), SEQ, 2, FP32, most_tokens=5 * SEQ)
    found: list[Any] = []
    for strategy, stays in (("replicate", True), ("zero3", True), ("zero2", False), ("zero3", False)):
        bench = Bench(plan=dataclasses.replace(plan, whole=stays), strategy=strategy)
        rank = int(os.environ["RANK"])
        shares = evaluate(bench.model, text(), SEQ, 2, FP32, rank=rank, world_size=2, most_tokens=5 * SEQ)
        with mock.patch.object(bench.clock, "exposed", wraps=bench.clock.exposed) as exposed:
            outcome = bench.step.run(3, lr=0.0)
        assert exposed.call_count == (1 if stays else 2), "once for each sum over the ranks"
        found.append([outcome.nats, outcome.tokens, outcome.computed, outcome.grad_norm, *shares])
        assert bench.step.blame(3) == []
    return [[loss * 7 * SEQ, norm, nats], *found]


def test_ranks_with_unequal_shares_make_as_many_forwards() -> None:
    """Where units are gathered each forward is a collective."""
    first, second = run_ranks(unequal, 2, backend=None, env={"IMECE_BACKEND": "cpu:gloo"})
    loss, norm, held_out = first[0]
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one[1:3] == [4 * SEQ] * 2 and other[1:3] == [3 * SEQ, 4 * SEQ], "one that does not count"
        assert one[0] + other[0] == pytest.approx(loss, rel=1e-6)
        assert one[3] == other[3] == pytest.approx(norm, rel=1e-6)
        assert one[4] + other[4] == pytest.approx(held_out, rel=1e-6)
        assert [one[5], other[5]] == [3 * SEQ, 2 * SEQ]


def drops() -> list[Any]:
    """With dropout: steps 3, 4 and 3 again, in micro-batches of 3. Of each: nats and gradient norm."""
    bench = Bench(micro=3)
    _, without = bench.whole_batch(3)

    def drop(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.nn.functional.dropout(output, training=module.training)

    bench.model.blocks[0].register_forward_hook(drop)
    outcomes = [bench.step.run(index, lr=0.0) for index in (3, 4, 3)]
    apart = distance(bench.gradients(), without)
    return [[outcome.nats, outcome.grad_norm] for outcome in outcomes] + [apart]


def test_what_is_dropped_is_a_step_s_own() -> None:
    sums = []
    for ranks in (1, 2):  # of 4 and of 2 micro-batches
        by_rank = run_ranks(drops, ranks)
        for first, another, again, apart in by_rank:
            assert first == again != another, "a step that is made again drops the same"
            assert apart > 0.1, "nothing was dropped"
        sums.append([sum(rank[0][0] for rank in by_rank), by_rank[0][0][1]])
    assert sums[0] == pytest.approx(sums[1], rel=1e-6), "whichever rank computes a micro-batch"


def reads() -> dict[str, Any]:
    """What is read and updated, in order; and how many tokens are computed as ranks come."""
    bench, done = Bench(), list[str]()
    read = bench.batches.for_rank

    def noted(index: int, rank: int, world_size: int) -> Any:
        done.append(f"read {index}")
        return read(index, rank, world_size)

    bench.optimizers[0].register_step_pre_hook(lambda *_: done.append("update"))
    with mock.patch.object(bench.batches, "for_rank", noted):
        computed = [bench.step.run(index, lr=0.0).computed for index in (3, 4, 4)]
        bench.step.take_over(shared_among(bench.plan, 2))
        computed.append(bench.step.run(5, lr=0.0).computed)
    return {"done": done, "computed": computed}


def test_the_next_step_is_read_before_the_update() -> None:
    """When a GPU has still to compute; and anew where another step comes next, or for other ranks."""
    (found,) = run_ranks(reads, 1)
    assert found["done"] == [
        "read 3", "read 4", "update", "read 5", "update",
        "read 4", "read 5", "update",
        "read 5", "read 6", "update",
    ]  # fmt: skip
    assert found["computed"] == [SEQUENCES * SEQ] * 3 + [SEQUENCES * SEQ // 2]


def cases() -> dict[str, Any]:
    return {"clipped": clipped(), "overflows": overflows(), "phases": phases(), "spoilt": spoilt_weights()}


@pytest.fixture(scope="module")
def by_two_ranks() -> Found:
    """What each of `cases` found, by rank: one start for their tests."""
    both = run_ranks(cases, 2)
    return {name: [found[name] for found in both] for name in both[0]}


def clipped() -> list[float]:
    """Without clip, with a loose and a tight one: the norm that an update tells of, and how far it goes."""
    found = []
    for clip in (0.0, 1e9, 0.125):
        bench = Bench(clip=clip)
        before = list(bench.state().values())
        norm = bench.step.run(0, lr=1.0).grad_norm
        moved = [new - old for new, old in zip(bench.state().values(), before, strict=True)]
        found += [norm, float(torch.cat([each.flatten() for each in moved]).norm())]
    return found


def test_clipping(by_two_ranks: Found) -> None:
    for norm, free, norm_again, loose, last_norm, tight in by_two_ranks["clipped"]:
        assert norm == norm_again == last_norm > 0.2
        assert free == loose == pytest.approx(norm, rel=1e-4)
        assert tight == pytest.approx(0.125, rel=1e-4)


class NaNForWeight(torch.autograd.Function):
    """Passes x on; what comes back for a weight is not finite, and nothing else shows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full((24, 16), float("inf"))


def poisoned(kind: str, optimizer: str, bad_rank: int, index: int, number: int) -> dict[str, Any]:
    """Three steps, of which one is spoilt in one micro-batch of one rank."""
    bench = Bench(micro=2, optimizers=[optimizer], clip=1.0)
    first = bad_rank * bench.plan.accumulation * bench.plan.micro + number * bench.plan.micro
    rows = torch.from_numpy(bench.batches.sequences(index)[first : first + bench.plan.micro, :-1])
    fired, seen = 0, rows

    def spoil(module: torch.nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        nonlocal fired
        if kind == "nothing" or not torch.equal(seen, rows):
            return output
        fired += 1
        if kind == "loss":
            return output * float("nan")
        weight = module.weight
        assert isinstance(weight, Tensor)
        return NaNForWeight.apply(output, weight)  # type: ignore[no-any-return, no-untyped-call]

    def see(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal seen
        (seen,) = inputs

    bench.model.register_forward_pre_hook(see)
    where = bench.model if kind == "loss" else bench.model.get_submodule("blocks.1.mlp.up")
    where.register_forward_hook(spoil)
    changed, skipped, lines = [], [], []
    for step in range(3):
        before = bench.state()
        skipped.append(bench.step.run(step, lr=0.01).skipped)
        lines.append(bench.step.blame(step) if skipped[-1] else [])
        after = bench.state()
        changed.append(any(not torch.equal(after[name], before.get(name, after[name])) for name in after))
        assert after.keys() == before.keys() or step == 0
    return {
        "changed": changed,
        "skipped": skipped,
        "lines": lines,
        "fired": fired,
        "documents": bench.batches.names(index, first, first + bench.plan.micro),
        "state": {name: tensor.double().sum().item() for name, tensor in bench.state().items()},
    }


CASES = [(kind, optimizer) for kind in ("loss", "weight", "nothing") for optimizer in ("adamw", "muon")]


def spoilt_weights() -> list[list[str]]:
    """Who is to blame where the weights are not finite before the step: on rank 1 alone, then on all; and
    where they are, but so large that nothing computed with them is."""
    found = []
    for ranks in ([1], [0, 1]):
        bench = Bench()
        if imece.init().rank in ranks:
            with torch.no_grad():
                for name in ("blocks.1.mlp.up.weight", "embed.weight"):
                    bench.model.get_parameter(name)[2, 3] = float("nan")
        found.append(bench.step.blame(0))
    bench = Bench()
    with torch.no_grad():
        bench.model.get_parameter("blocks.1.mlp.up.weight").fill_(3e38)
    found.append(bench.step.blame(0))
    return found


def test_weights_that_are_not_finite_are_named_and_no_document(by_two_ranks: Found) -> None:
    for one, every, large in by_two_ranks["spoilt"]:
        names = "embed.weight and 1 more"
        assert one == [f"rank 1: weights that are not finite: {names}"]
        assert every == [f"weights that are not finite since an earlier update: {names}"]
        assert large == [
            "all 2 micro-batches, so by no document but the weights, as earlier updates left them: up to "
            "3e+38, in blocks.1.mlp.up.weight"
        ]


def all_poisoned(bad_rank: int, index: int, number: int) -> list[dict[str, Any]]:
    return [poisoned(kind, optimizer, bad_rank, index, number) for kind, optimizer in CASES]


def test_all_skip_what_one_spoilt() -> None:
    bad_rank, index, number = 1, 1, 1
    by_rank = run_ranks(all_poisoned, 3, args=(bad_rank, index, number))
    for (kind, _), by_case in zip(CASES, zip(*by_rank, strict=True), strict=True):
        documents = by_case[0]["documents"]
        assert 2 <= len(documents) <= 8
        for rank, found in enumerate(by_case):
            assert found["state"] == by_case[0]["state"] and found["lines"] == by_case[0]["lines"]
            if kind == "nothing":
                assert found["changed"] == [True] * 3 and found["skipped"] == [""] * 3
                assert found["fired"] == 0
                continue
            assert found["changed"] == [True, False, True]
            assert found["skipped"] == ["", "the gradient is not finite", ""]
            assert found["fired"] == (2 if rank == bad_rank else 0), "once in the step, once to find out"
            before, (line,), after = found["lines"]
            assert before == after == []
            who, _, which = line.partition("; documents ")
            assert which == ", ".join(map(str, documents))
            if kind == "loss":
                assert who == f"rank {bad_rank}: loss nan, gradient of embed.weight and 19 more"
            else:
                loss = float(who.split()[3].rstrip(","))
                assert who == f"rank {bad_rank}: loss {loss:g}, gradient of blocks.1.mlp.up.weight"
                assert 5 < loss < 6


def overflows() -> dict[str, list[Any]]:
    """fp16 with a scale that is too large at first: of each step what it skipped, whether anything changed,
    and the scale afterwards."""
    found: dict[str, list[Any]] = {}
    in_parts = dataclasses.replace(plan_batch(BatchSection(SEQUENCES, micro=2), SEQ, 2), whole=False)
    ways = (("adamw", "replicate"), ("muon", "replicate"), ("muon", "zero1"), ("muon", "zero2"))
    for kind, strategy in ways:
        bench = Bench(
            optimizers=[kind], precision=Precision("fp16", "cpu"), clip=1.0, strategy=strategy,
            plan=in_parts if strategy == "zero2" else None,
        )  # fmt: skip
        assert bench.step.scale == bench.step.scaler_state["scale"] == 2.0**16
        bench.step.load_scaler(bench.step.scaler_state | {"scale": 2.0**20})
        for step in range(12):
            before = bench.state()
            skipped = bench.step.run(step, lr=0.01).skipped
            after = bench.state()
            changed = any(not torch.equal(old, after[name]) for name, old in before.items())
            found.setdefault(f"{kind} {strategy}", []).append([skipped, changed, bench.step.scale])
    return found


def one_part_overflows() -> list[float]:
    """The scale after steps of zero1, in the second of which rank 1 alone has Inf in its part."""
    bench = Bench(optimizers=["adamw"], precision=Precision("fp16", "cpu"), strategy="zero1")
    bench.step.load_scaler(bench.step.scaler_state | {"scale": 16.0})
    scaler = bench.step._scaler
    scales: list[float] = []
    assert scaler is not None
    unscale = scaler.unscale_

    def spoil(optimizer: torch.optim.Optimizer) -> None:
        if len(scales) == 1 and os.environ["RANK"] == "1":
            grads = [each.grad for group in optimizer.param_groups for each in group["params"]]
            next(grad for grad in grads if grad is not None).fill_(torch.inf)
        unscale(optimizer)

    with mock.patch.object(scaler, "unscale_", spoil):
        for step in range(3):
            bench.step.run(step, lr=0.01)
            scales.append(bench.step.scale)
    return scales


def test_one_rank_that_overflows_halves_the_scale_of_all() -> None:
    assert run_ranks(one_part_overflows, 2, backend=None) == [[16.0, 8.0, 8.0]] * 2


def test_fp16_finds_its_scale(by_two_ranks: Found) -> None:
    first, second = by_two_ranks["overflows"]
    assert first == second and len(first) == 4
    assert first["muon zero1"] == first["muon replicate"]
    for steps in first.values():
        scale, skips = 2.0**20, 0
        for skipped, changed, scale_after in steps:
            scale /= 2 if skipped else 1
            assert (scale_after, changed) == (scale, not skipped)
            assert skipped == ("" if changed else f"fp16 overflow; the scale is now {scale:g}")
            skips += bool(skipped)
        assert 3 <= skips <= 10


def phases() -> list[Any]:
    bench = Bench(micro=2)
    bench.clock.lap()
    found = []
    for step in range(2):
        bench.step.run(step, lr=0.0)
        lap = bench.clock.lap()
        found.append([lap.seconds, lap.phases, lap.own])
    return found


def test_a_steps_time_is_divided(by_two_ranks: Found) -> None:
    for laps in by_two_ranks["phases"]:
        for whole, parts, own in laps:
            assert parts.keys() == {"data", "forward", "backward", "exposed", "optimizer"}
            assert all(seconds > 0 for seconds in parts.values()), parts
            assert sum(parts.values()) < whole
            assert own.keys() == {"data", "forward", "backward", "optimizer", "other"}
            # What follows the last gradient is "exposed", and not all of it is spent waiting.
            most = parts | {"backward": parts["backward"] + parts["exposed"]}
            assert all(0 < own[name] <= most[name] for name in own.keys() - {"other"}), (parts, own)
            assert sum(own.values()) < whole
