"""Bytes of rank 0 of many: as the engine and the planner predict; on a GPU, as its allocator counts."""

from __future__ import annotations

import gc

import pytest
import torch

from imece.models import transformer
from imece.models.shape import TransformerConfig
from imece.plan.setup import Strategy
from tests.gpu.fake_world import measure, peak_of_fully_shard

SMALL = TransformerConfig(vocab_size=256, layers=6, width=128, heads=4, kv_heads=2, mlp_width=384, max_seq=64)
SMALL_BUCKET_MB = 0.125  # a matrix, as 25 MB are of a 7B model
# In the proportions of a 7B model with sequences of 1024, but with fewer layers.
NARROW = TransformerConfig(
    vocab_size=375, layers=12, width=128, heads=4, kv_heads=4, mlp_width=344, max_seq=128
)
NARROW_SEQ = 32
# Llama 2's 7B.
LARGE = TransformerConfig(
    vocab_size=32000, layers=32, width=4096, heads=32, kv_heads=32, mlp_width=11008, max_seq=4096
)
STRATEGIES: tuple[Strategy, ...] = ("zero1", "zero2", "zero3")
ROOM = 0.05


@pytest.mark.parametrize("world_size", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_live_storages_take_what_was_predicted_and_planned(strategy: Strategy, world_size: int) -> None:
    found = measure("cpu", SMALL, world_size, strategy, 8, SMALL_BUCKET_MB)
    total = sum(found.counted.values())
    assert total == pytest.approx(sum(found.predicted.values()), rel=ROOM)
    assert total == pytest.approx(found.planned, rel=ROOM)
    for name in ("parameters", "gradients", "optimizer"):
        assert found.counted[name] == pytest.approx(found.predicted[name], rel=0.001), name


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gpu_has_allocated_what_was_predicted_and_planned_of_7b(
    strategy: Strategy, world_size: int
) -> None:
    _needs_bytes(70e9 if strategy == "zero1" else 50e9)
    found = measure("cuda", LARGE, world_size, strategy, 1024, 25)
    assert found.held == pytest.approx(sum(found.predicted.values()) - found.gone, rel=ROOM)
    assert found.peak == pytest.approx(found.planned_peak, rel=ROOM)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [8, 64])
def test_a_gpu_has_allocated_less_of_7b_than_with_fully_shard(world_size: int) -> None:
    _needs_bytes(50e9)
    ours = measure("cuda", LARGE, world_size, "zero3", 1024, 25).peak
    gc.collect()
    torch.cuda.empty_cache()
    assert ours < peak_of_fully_shard("cuda", LARGE, world_size, 1024)


@pytest.mark.parametrize("world_size", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_no_more_lives_at_a_time_than_with_fully_shard(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "LARGE_TABLE", 0)
    ours = measure("cpu", NARROW, world_size, "zero3", NARROW_SEQ, SMALL_BUCKET_MB)
    assert ours.peak < peak_of_fully_shard("cpu", NARROW, world_size, NARROW_SEQ)
    total = sum(ours.counted.values())
    assert total == pytest.approx(sum(ours.predicted.values()), rel=ROOM)
    assert total == pytest.approx(ours.planned, rel=ROOM)


def test_what_a_gpu_lets_go_of() -> None:
    """Sums come when activations go, buckets when they fill, and each gather casts masters."""
    found = measure("cpu", NARROW, 8, "zero3", NARROW_SEQ, SMALL_BUCKET_MB)
    kept = measure("cpu", NARROW, 8, "zero3", NARROW_SEQ, SMALL_BUCKET_MB, as_on_a_gpu=False)
    parts = kept.counted["parameters"]
    assert 0 < parts == sum(kept.counted.values()) - sum(found.counted.values())
    assert found.counted == kept.counted | {"parameters": 0}
    assert found.peak < kept.peak - found.counted["gradients"] - parts
    assert found.gone > kept.gone, "nor are buckets when backward begins"


def _needs_bytes(nbytes: float) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of a GPU, {free / 1e9:.0f} GB are free")
