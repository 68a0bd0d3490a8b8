"""The planner's bytes of imece's engine, compared with earlier counts and with a real run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

import imece
from imece.bench.reference_model import REFERENCE, batch, new_decoder, optimizer_of
from imece.data_parallel.footprint import counted
from imece.footprint import DIVIDED
from imece.model_parallel.cutting import pieces_of
from imece.models.cross_entropy import cross_entropy
from imece.models.dealing import deal
from imece.models.presets import preset
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.plan.accuracy import memory as accuracy_memory
from imece.plan.accuracy.statistics import summary
from imece.plan.answer.search import framework_on, with_usual_buckets
from imece.plan.memory.frameworks import IMECE_CPU
from imece.plan.memory.held import stage_layers
from imece.plan.memory.memory import counted_bytes, memory
from imece.plan.models.by_name import find_model
from imece.plan.models.from_code import of_module
from imece.plan.models.model import from_shape
from imece.plan.presets import find_cluster
from imece.plan.setup import Optimizer, Parallel, Precision, Recipe, Setup, Strategy
from imece.train.config import OptimizerSection
from imece.train.model.optimizer import make_optimizers
from tests.ranks import run_ranks

RANKS = 2
STRATEGIES: tuple[tuple[Strategy, bool], ...] = (
    ("replicate", False), ("zero1", False), ("zero2", False), ("zero3", False), ("zero3", True),
)  # fmt: skip


def test_what_was_counted_of_three_models_on_2_and_4_ranks_was_predicted() -> None:
    rows = accuracy_memory.rows("own_engine")
    assert len(rows) == 3 * 2 * 5 + 3 * 2 * 4  # fp32, and bf16, which replicate does not have
    found = summary(rows)
    assert found.mape <= 0.002
    assert abs(found.worst[0].error) <= 0.01


def counted_of_strategies() -> list[dict[str, int]]:
    imece.init()
    found = []
    for strategy, gathers in STRATEGIES:
        model = new_decoder(REFERENCE)
        wrapped, optimizer = imece.parallelize(model, optimizer_of(model), strategy, gather=gathers)
        for step in range(2):
            wrapped(batch(REFERENCE, 64, step)).backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        found.append(asdict(counted(wrapped, [optimizer])))
    return found


@pytest.mark.slow
def test_what_is_counted_of_a_real_run_is_predicted() -> None:
    with torch.device("meta"):
        model = of_module(new_decoder(REFERENCE), "reference")
    recipe, cluster = Recipe(64, precision=IMECE_CPU.precision), find_cluster("CPU", RANKS)
    for rank in run_ranks(counted_of_strategies, RANKS, backend=None):
        for (strategy, gathers), found in zip(STRATEGIES, rank, strict=True):
            framework = replace(IMECE_CPU, name=f"test {gathers}", gathers=gathers)
            shard = RANKS if DIVIDED[strategy].optimizer else 1
            setup = with_usual_buckets(Setup(model, Parallel(strategy, RANKS, shard), recipe), cluster)
            planned = memory(setup, framework=framework)
            predicted = planned.total - planned.activations - planned.logits
            assert sum(found.values()) == pytest.approx(predicted, rel=0.02), (strategy, gathers)


@dataclass(frozen=True)
class Case:
    """A way of training: axes of ranks, and what decides the buckets."""

    axes: dict[str, int]
    strategy: Strategy
    optimizer: Optimizer
    bf16: bool = False
    tied: bool = True
    accumulation: int = 1

    def setup(self, ranks: int) -> Setup:
        """As the planner has it."""
        tensor, pipeline = (self.axes.get(axis, 1) for axis in ("tensor", "pipeline"))
        data = ranks // (tensor * pipeline)
        shard = self.axes.get("shard", data) if DIVIDED[self.strategy].optimizer else 1
        recipe = Recipe(
            SEQ, accumulation=self.accumulation, optimizer=self.optimizer, accumulates_whole=True,
            precision=Precision() if self.bf16 else IMECE_CPU.precision,
            bucket_bytes=int(CAP_MB * 2**20),
        )  # fmt: skip
        parallel = Parallel(self.strategy, data, shard, tensor, False, pipeline=pipeline)
        return Setup(from_shape("small", small(self.tied)), parallel, recipe)


SEQ, CAP_MB = 16, 0.1  # with this cap a few tensors fill a bucket


def small(tied: bool) -> TransformerConfig:
    return TransformerConfig(512, 4, 64, 4, 2, 176, max_seq=SEQ, tied_head=tied)


def held_by_ranks(cases: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What this rank holds after a backward that follows a step, in each case; all have the same axes."""
    cases = [asdict(Case(**each)) for each in cases]
    mesh, found = imece.init(cases[0]["axes"] or None), []
    for case in cases:
        model, times = Transformer(small(case["tied"])), case["accumulation"]
        if mesh.size("tensor") > 1:
            model = imece.tensor_parallel(model, mesh, divided_logits=True)
        pipeline = None
        if mesh.size("pipeline") > 1:
            pipeline = imece.Pipeline(model, mesh, micro_batches=times, loss=cross_entropy, seq=SEQ)
        part = model if pipeline is None else pipeline.part
        optimizers = make_optimizers(part, OptimizerSection(kind=case["optimizer"]), mesh.device)
        dtype = torch.bfloat16 if case["bf16"] else None
        precision = imece.MixedPrecision(dtype, dtype) if dtype is not None else None
        wrapped, _ = imece.parallelize(
            part, optimizers, case["strategy"], mesh, bucket_cap_mb=CAP_MB, precision=precision
        )
        for step in range(2):
            words = torch.arange(times * SEQ).view(times, SEQ) % 512
            if pipeline is not None:
                pipeline.step(words, words)
            for at in range(times if pipeline is None else 0):
                with wrapped.no_sync() if at + 1 < times else contextlib.nullcontext():
                    (cross_entropy(wrapped(words[at : at + 1]), words[at : at + 1]) / times).backward()
            for each in optimizers if step == 0 else ():
                each.step()
                each.zero_grad()
        found.append(asdict(counted(wrapped, optimizers)) | {"stage": mesh.coordinate("pipeline")})
        del pipeline, part, wrapped, optimizers, model
    return found


def cases_of(
    axes: dict[str, int], strategies: Sequence[Strategy], optimizers: Sequence[Optimizer], **more: bool
) -> list[Case]:
    """All of these, in fp32 and, of those that divide the optimizer, in bf16 too."""
    return [
        Case(axes, strategy, optimizer, bf16, accumulation=1 + ("pipeline" in axes or bf16), **more)
        for strategy in strategies
        for optimizer in optimizers
        for bf16 in ((False, True) if DIVIDED[strategy].optimizer else (False,))
    ]


BOTH: tuple[Optimizer, ...] = ("adamw", "muon")
WAYS: list[tuple[int, int, list[Case]]] = [  # ranks, hosts, cases
    (2, 1, cases_of({}, ("replicate", "zero1", "zero2", "zero3"), BOTH, tied=False)),
    (2, 1, [
        *cases_of({"pipeline": 2}, ("replicate", "zero1", "zero2"), BOTH),
        *cases_of({"pipeline": 2}, ("zero2",), BOTH, tied=False),
    ]),
    (4, 1, cases_of({"replicate": 2, "shard": 2}, ("hybrid", "hybrid_zero2"), BOTH)),
    (4, 1, cases_of({"replicate": 2, "tensor": 2}, ("replicate", "zero1", "zero2", "zero3"), ("adamw",))),
    (4, 1, cases_of({"pipeline": 2, "replicate": 2}, ("zero1", "zero2"), BOTH)),
    (4, 2, cases_of({}, ("replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2"), BOTH)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "hosts", "cases"),
    [pytest.param(*way, marks=pytest.mark.slow if way[0] > 2 else ()) for way in WAYS],
    ids=[f"{ranks} on {hosts}, {' '.join(cases[0].axes) or 'data'}" for ranks, hosts, cases in WAYS],
)
def test_what_each_rank_holds_is_predicted(ranks: int, hosts: int, cases: list[Case]) -> None:
    """All of it within 5 % on the rank of a stage that holds most, and what moves within 5 % of all."""
    cluster = find_cluster("CPU", ranks // hosts, hosts)
    asked = [asdict(each) for each in cases]
    found = run_ranks(held_by_ranks, ranks, args=[asked], backend=None, ranks_per_host=ranks // hosts)
    for case, *of_ranks in zip(cases, *found, strict=True):
        setup = case.setup(ranks)
        if hosts > 1 and case.strategy.startswith("hybrid"):
            setup = replace(setup, parallel=replace(setup.parallel, shard=ranks // hosts))
        for stage in range(setup.parallel.pipeline):
            most = max((each for each in of_ranks if each["stage"] == stage), key=total)
            framework = framework_on(cluster, setup.parallel)
            planned = counted_bytes(setup, stage, framework)
            by_unit = DIVIDED[case.strategy].parameters and framework.gathers
            coming = setup.model.layer_parameters * setup.recipe.precision.parameters * by_unit
            room = 0.05 * total(most) + coming  # a unit more or less is on its way
            assert sum(planned.values()) == pytest.approx(total(most), abs=room), (case, stage)
            for name, nbytes in planned.items():
                assert nbytes == pytest.approx(most[name], abs=room), (case, stage, name)


def total(held: dict[str, int]) -> int:
    return sum(held[name] for name in ("parameters", "gradients", "optimizer", "communication"))


def test_muon_keeps_one_state_of_matrices_and_adamw_two_of_the_rest() -> None:
    transformer = Transformer(preset("tiny"))
    optimizers = make_optimizers(transformer, OptimizerSection(kind="muon"))
    words = torch.zeros(1, 8, dtype=torch.long)
    cross_entropy(transformer(words), words).backward()
    for each in optimizers:
        each.step()
    kept = [tensor for each in optimizers for state in each.state.values() for tensor in state.values()]
    large = sum(tensor.nbytes for tensor in kept if tensor.numel() > 1)  # without counts of steps
    recipe = Recipe(64, optimizer="muon", precision=IMECE_CPU.precision)
    assert memory(Setup(find_model("tiny"), Parallel(), recipe), framework=IMECE_CPU).optimizer == large


SHAPES = [
    TransformerConfig(vocabulary, layers, 32, 4, 2, 64, max_seq=64, tied_head=tied, head_norms=tied)
    for vocabulary, layers, tied in ((128, 7, True), (700, 9, False), (4096, 12, True), (1000, 5, False))
]


CUTS = [(64, 2, 1), (16, 2, 1), (64, 3, 1), (64, 2, 2), (16, 4, 1)]  # length, ranks, chunks


def layers_of_ranks(tensor: int) -> list[list[int]]:
    """For each shape, stages, chunks and length: layers of each rank, as imece.Pipeline deals them."""
    mesh, found = imece.init({"tensor": tensor}), []
    for shape in SHAPES:
        model = Transformer(shape)
        costs = {
            seq: pieces_of(imece.tensor_parallel(model, mesh) if seq == 64 else model, seq).costs
            for seq in (64, 16)
        }
        for seq, ranks, chunks in CUTS:
            dealt = deal(costs[seq], ranks * chunks)
            layers = [len(pieces) - (shape.layers in pieces) for pieces in dealt]
            found.append([sum(layers[rank::ranks]) for rank in range(ranks)])
    return found


@pytest.mark.parametrize("tensor", [1, 2])
def test_layers_are_dealt_to_stages_as_the_engine_deals_them(tensor: int) -> None:
    planned = []
    for shape, (seq, ranks, chunks) in itertools.product(SHAPES, CUTS):
        parallel = Parallel(tensor=tensor, pipeline=ranks, interleave=chunks)
        setup = Setup(from_shape("dealt", shape), parallel, Recipe(seq))
        planned.append([*stage_layers(setup, IMECE_CPU.stages)])
    assert run_ranks(layers_of_ranks, tensor, args=[tensor]) == [planned] * tensor
    assert any(layers[0] > layers[-1] + 1 for layers in planned)


def test_ranks_that_divide_matrices_are_dealt_as_much_of_the_head() -> None:
    """Its cost beside that of a layer stays, where both are divided."""
    whole, parts = (
        stage_layers(
            Setup(find_model("llama-8b"), Parallel(tensor=tensor, pipeline=2), Recipe(4096)), "dealt"
        )
        for tensor in (1, 8)
    )
    assert whole == parts == (17, 15)
