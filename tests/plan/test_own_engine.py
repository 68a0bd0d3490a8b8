"""The planner's bytes of imece's engine, compared with earlier counts and with a real run."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

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
from imece.plan.accuracy.memory import own_engine
from imece.plan.accuracy.statistics import summary
from imece.plan.memory.frameworks import IMECE_CPU
from imece.plan.memory.held import stage_layers
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import find_model
from imece.plan.models.from_code import of_module
from imece.plan.models.model import from_shape
from imece.plan.setup import Parallel, Recipe, Setup, Strategy
from imece.train.config import OptimizerSection
from imece.train.optimizer import make_optimizers
from tests.ranks import run_ranks

RANKS = 2
STRATEGIES: tuple[tuple[Strategy, bool], ...] = (
    ("replicate", False), ("zero1", False), ("zero2", False), ("zero3", False), ("zero3", True),
)  # fmt: skip


def test_what_was_counted_of_three_models_on_2_and_4_ranks_was_predicted() -> None:
    rows = own_engine()
    assert len(rows) == 3 * 2 * 5 + 3 * 2 * 4  # fp32, and bf16, which replicate does not have
    found = summary(rows)
    assert found.mape <= 0.002
    assert abs(found.worst[0].error) <= 0.01


def counted_bytes() -> list[dict[str, int]]:
    imece.init()
    found = []
    for strategy, gathers in STRATEGIES:
        model = new_decoder(REFERENCE)
        wrapped, optimizer = imece.parallelize(
            model, optimizer_of(model), strategy, bucket_cap_mb=5, gather=gathers
        )
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
    recipe = Recipe(64, precision=IMECE_CPU.precision, bucket_bytes=5 * 2**20)
    for rank in run_ranks(counted_bytes, RANKS, backend=None):
        for (strategy, gathers), found in zip(STRATEGIES, rank, strict=True):
            framework = replace(IMECE_CPU, name=f"test {gathers}", gathers=gathers)
            shard = RANKS if DIVIDED[strategy].optimizer else 1
            planned = memory(Setup(model, Parallel(strategy, RANKS, shard), recipe), framework=framework)
            predicted = planned.total - planned.activations - planned.logits
            assert sum(found.values()) == pytest.approx(predicted, rel=0.02), (strategy, gathers)


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
