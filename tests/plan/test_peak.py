"""Bytes of activations, logits and messages at the peak of a step, beside those that the engine takes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import imece
from imece.models.cross_entropy import cross_entropy
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.plan.memory.frameworks import IMECE_CPU
from imece.plan.memory.memory import memory
from imece.plan.models.model import from_shape
from imece.plan.setup import Parallel, Recipe, Setup
from tests.live import Live
from tests.ranks import run_ranks

MICRO_BATCHES, SEQ = 8, 256
WIDE, LAYERS = 256, 8  # of a model that keeps little for backward


def shape(vocabulary: int, layers: int, mlp_width: int = 176, seq: int = SEQ) -> TransformerConfig:
    return TransformerConfig(vocabulary, layers, 64, 4, 4, mlp_width, max_seq=seq, tied_head=False)


def model_of(config: TransformerConfig, recompute: bool) -> Transformer:
    model = Transformer(config)
    for block in model.blocks if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def planned(config: TransformerConfig, recompute: bool, parallel: Parallel, stage: int, times: int) -> int:
    recipe = Recipe(
        config.max_seq, accumulation=times, precision=IMECE_CPU.precision,
        recompute="full" if recompute else "none",
    )  # fmt: skip
    found = memory(Setup(from_shape("small", config), parallel, recipe), stage, IMECE_CPU)
    return found.activations + found.logits + found.received


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("vocabulary", "mlp_width"), [(128, 176), (128, 512), (4096, 176), (4096, 512)])
def test_logits_or_a_layers_backward(vocabulary: int, mlp_width: int, recompute: bool) -> None:
    """They are not there at the same time: the larger counts."""
    config = shape(vocabulary, 4, mlp_width, 512)
    model, tokens = model_of(config, recompute), torch.arange(512).view(1, 512) % vocabulary
    cross_entropy(model(tokens), tokens).backward()  # from now on gradients of parameters are there
    with Live() as live:
        cross_entropy(model(tokens), tokens).backward()
    assert planned(config, recompute, Parallel(), 0, 1) == pytest.approx(live.most, rel=0.03)


def second_backwards() -> list[int]:
    """What the backward of a step's second micro-batch takes at its peak, beyond that of its first, in bytes.
    Each layer is a bucket."""
    imece.init()
    found = []
    for strategy, gather in (("zero2", False), ("zero3", False), ("zero3", True)):
        with Live() as live:
            layers = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE) for _ in range(LAYERS)))
            optimizer = torch.optim.AdamW(layers.parameters())
            model, optimizer = imece.parallelize(
                layers, optimizer, strategy, gather=gather, bucket_cap_mb=0.1, units=(torch.nn.Linear,)
            )
            for _ in range(2):
                optimizer.zero_grad()
                peaks = []
                for _ in range(2):
                    loss = model(torch.ones(1, WIDE)).sum()
                    before = live.most = live.now
                    loss.backward()
                    peaks.append(live.most - before)
                optimizer.step()
        found.append(peaks[1] - peaks[0])
    return found


def test_sums_of_earlier_micro_batches_go_bucket_by_bucket() -> None:
    """As is planned: there is no second shard of sums, but those of buckets that are under way."""
    shard = 4 * WIDE * (WIDE + 1) // 2  # of a layer
    for found in run_ranks(second_backwards, 2, backend=None):
        assert max(found) <= 2.1 * shard < 0.3 * LAYERS * shard


CASES = [("1f1b", 1), ("interleaved", 2)]


def peaks(ranks: int, layers: int) -> list[int]:
    """Of this rank, for each of CASES without recomputation and with it."""
    mesh, found = imece.init({"pipeline": ranks}), []
    tokens = torch.arange(MICRO_BATCHES * SEQ).view(MICRO_BATCHES, SEQ) % 128
    for (schedule, chunks), recompute in itertools.product(CASES, (False, True)):
        pipeline = imece.Pipeline(
            model_of(shape(128, layers), recompute), mesh, micro_batches=MICRO_BATCHES, loss=cross_entropy,
            seq=SEQ, schedule=schedule, chunks=chunks if chunks > 1 else None,
        )  # fmt: skip
        pipeline.step(tokens, tokens)
        with Live() as live:
            pipeline.step(tokens, tokens)
        found.append(live.most)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_stages_with_what_goes_between_them(ranks: int) -> None:
    layers = 2 * ranks
    found: list[list[int]] = run_ranks(peaks, ranks, args=(ranks, layers), backend=None)
    for stage, of_rank in enumerate(found):
        cases: Any = itertools.product(CASES, (False, True))
        for ((_, chunks), recompute), most in zip(cases, of_rank, strict=True):
            parallel = Parallel(pipeline=ranks, interleave=chunks, sequence=False)
            expected = planned(shape(128, layers), recompute, parallel, stage, MICRO_BATCHES)
            room = 0.05 if chunks == 1 else 0.12  # in which a hidden state more or less came early
            assert expected == pytest.approx(most, rel=room), (stage, chunks, recompute)
