"""What must hold of any step: nothing beats the roofline, parts add up, more of a thing costs more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.plan.hardware import Cluster, find_cluster, find_gpu
from imece.plan.models.by_name import find_model
from imece.plan.models.model import Model
from imece.plan.setup import Attention, Parallel, Precision, Recipe, Recomputation, Setup, Strategy
from imece.plan.speed.communication import along, collective_s, sent_bytes
from imece.plan.speed.compute import flops_a_token, product_s
from imece.plan.speed.manner import IMECE, MEGATRON, NANOTRON, TORCHTITAN, Manner
from imece.plan.speed.stage import stages
from imece.plan.speed.step_time import step_time
from imece.plan.speed.timeline import ends, exposed_after, exposed_before

MODEL = Model("1B", 16, 2048, 32, 8, 64, 5632, gated=True, vocab_size=32000)
CLUSTER = find_cluster("H100", 8, 4)
RECIPE = Recipe(2048, 2, 4)

_STRATEGIES: tuple[Strategy, ...] = ("replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")
_RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")
_ATTENTIONS: tuple[Attention, ...] = ("flash", "plain")
manners = st.sampled_from((IMECE, NANOTRON, MEGATRON, TORCHTITAN))
few = settings(max_examples=60, deadline=None)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    tensor = draw(st.sampled_from((1, 2, 4, 8)))
    pipeline = draw(st.sampled_from((1, 2, 4)))
    data = 32 // tensor // pipeline
    strategy = draw(st.sampled_from(_STRATEGIES))
    parallel = Parallel(strategy, data, min(data, 4), tensor, draw(st.booleans()), pipeline=pipeline)
    recompute = draw(st.sampled_from(_RECOMPUTATIONS))
    recipe = Recipe(
        draw(st.sampled_from((512, 2048, 8192))), draw(st.integers(1, 8)), draw(st.integers(1, 8)),
        recompute, draw(st.sampled_from(_ATTENTIONS)), compiled=draw(st.booleans()),
    )  # fmt: skip
    return Setup(MODEL, parallel, recipe)


@few
@given(setups(), manners)
def test_parts_add_up_to_the_whole_and_none_is_negative(setup: Setup, manner: Manner) -> None:
    found = step_time(setup, CLUSTER, manner)
    parts = [found.compute, found.waiting, found.bubble, found.optimizer, found.data, *found.exposed.values()]
    assert min(parts) >= 0 and found.hidden >= 0 and found.recompute <= found.compute
    assert math.isclose(sum(parts), found.total, rel_tol=1e-9)
    assert math.isclose(found.tokens_per_s * found.total, setup.tokens_a_step)


@few
@given(setups(), manners)
def test_no_step_beats_the_roofline(setup: Setup, manner: Manner) -> None:
    found = step_time(setup, CLUSTER, manner)
    tables = (
        6 * MODEL.table_parameters + MODEL.other_parameters * 6
    )  # looked up, not multiplied, where not tied
    scores = 6 * MODEL.layers * MODEL.heads * MODEL.head_width * setup.recipe.seq  # half: causal
    least = flops_a_token(MODEL, setup.recipe.seq) - tables - scores
    rate = CLUSTER.gpu.peak * CLUSTER.gpu.reachable * setup.parallel.ranks
    assert found.total > least * setup.tokens_a_step / rate


@few
@given(setups(), manners)
def test_slower_hardware_is_not_faster(setup: Setup, manner: Manner) -> None:
    """By more than 3 %: waiting for the CPU is dealt to forward and backward by what the device does in them,
    so that with a slower device a little more can be hidden behind one of the two."""
    found = step_time(setup, CLUSTER, manner).total
    gpu = CLUSTER.gpu
    slower: tuple[Cluster, ...] = (
        replace(CLUSTER, gpu=replace(gpu, name="less FLOP/s", peak=gpu.peak / 2)),
        replace(CLUSTER, gpu=replace(gpu, name="less GB/s", memory_bandwidth=gpu.memory_bandwidth / 2)),
        replace(CLUSTER, inside=replace(CLUSTER.inside, bandwidth=CLUSTER.inside.bandwidth / 2)),
        replace(CLUSTER, between=replace(CLUSTER.between, bandwidth=CLUSTER.between.bandwidth / 2)),
    )
    for cluster in slower:
        assert step_time(setup, cluster, manner).total >= 0.97 * found


def test_recomputation_costs_a_forward() -> None:
    parallel = Parallel("replicate", 32)
    none = step_time(Setup(MODEL, parallel, RECIPE), CLUSTER)
    full = step_time(Setup(MODEL, parallel, replace(RECIPE, recompute="full")), CLUSTER)
    assert none.recompute == 0
    assert full.compute - none.compute == pytest.approx(full.recompute)
    assert 0.2 < full.recompute / none.compute < 0.4


def test_slow_network_between_hosts_prefers_hybrid() -> None:
    slow = find_cluster("H100", 8, 4, "ethernet-10g")
    found = {
        strategy: step_time(Setup(MODEL, Parallel(strategy, 32, shard), RECIPE), slow).total
        for strategy, shard in _SHARDS.items()
    }
    assert found["hybrid"] < found["zero3"] / 2


_SHARDS: dict[Strategy, int] = {"zero3": 32, "hybrid": 8}


def test_one_rank_talks_to_nobody() -> None:
    found = step_time(Setup(MODEL, Parallel("zero3"), RECIPE), find_cluster("H100", 1, 1))
    assert sum(found.exposed.values()) == 0 and found.hidden == 0 and found.bubble == 0


def test_more_micro_batches_make_the_bubble_a_smaller_part() -> None:
    parallel = Parallel("replicate", 8, pipeline=4)
    parts = []
    for accumulation in (4, 8, 32):
        found = step_time(Setup(MODEL, parallel, replace(RECIPE, accumulation=accumulation)), CLUSTER)
        parts.append(found.bubble / found.total)
    assert parts[0] > parts[1] > parts[2] > 0


def test_chunks_divide_the_bubble() -> None:
    plain, chunked = (
        step_time(Setup(MODEL, Parallel("replicate", 8, pipeline=4, interleave=chunks), RECIPE), CLUSTER)
        for chunks in (1, 2)
    )
    assert 0.4 < chunked.bubble / plain.bubble < 0.6


@few
@given(st.integers(1, 16), st.sampled_from((IMECE, NANOTRON)))
def test_stages_hold_all_layers(pipeline: int, manner: Manner) -> None:
    most, last, others = stages(MODEL, manner, pipeline)
    assert last + others == MODEL.layers
    assert others <= most * max(0, pipeline - 1)
    if pipeline > 1:
        assert last <= most


@few
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000))
def test_products_reach_at_most_the_best_rate(rows: int, columns: int, terms: int) -> None:
    gpu = find_gpu("A100-80")
    flops = 2 * rows * columns * terms
    assert product_s(gpu, rows, columns, terms) >= flops / (gpu.peak * gpu.reachable * gpu.sustained) * 0.999


def test_a_wave_of_tiles_that_is_not_full_takes_as_long() -> None:
    gpu = find_gpu("A100-80")
    assert gpu.multiprocessors == 108
    full, nearly = (product_s(gpu, 256 * 9, 128 * columns, 8192) for columns in (12, 13))
    assert nearly > 1.3 * full  # 108 tiles, and 117: a second wave for 9 of them


@few
@given(
    st.sampled_from(("all_reduce", "all_gather", "reduce_scatter")), st.integers(2, 32), st.floats(1e3, 1e10)
)
def test_no_collective_beats_its_slowest_link(op: str, ranks: int, size: float) -> None:
    group = along(CLUSTER, ranks, 1)
    link = CLUSTER.inside if group.hosts == 1 else CLUSTER.between
    ports = 1 if group.hosts == 1 else group.ranks_per_host
    best = max(link.bandwidth * ports, CLUSTER.inside.bandwidth if group.hosts > 1 else 0.0)
    moved = sent_bytes(op, size, ranks)  # type: ignore[arg-type]
    assert collective_s(CLUSTER, op, size, group) > moved / best  # type: ignore[arg-type]


def test_groups_are_neighbours_first() -> None:
    assert along(CLUSTER, 8, 1).hosts == 1
    assert along(CLUSTER, 16, 1).hosts == 2
    spread = along(CLUSTER, 4, 8)
    assert (spread.hosts, spread.ranks_per_host) == (4, 1)
    assert along(CLUSTER, 8, 4).ranks_per_host == 2


@few
@given(st.floats(0.01, 10), st.integers(1, 50), st.floats(0.0001, 1))
def test_closed_forms_are_the_timeline(compute_s: float, pieces: int, piece_s: float) -> None:
    share = compute_s / pieces
    ready = [share * (number + 1) for number in range(pieces)]
    late = ends(ready, [piece_s] * pieces)[-1] - compute_s
    assert exposed_after(compute_s, pieces, piece_s) == pytest.approx(late, rel=1e-6, abs=1e-9)
    now = piece_s  # the first is waited for; each next one comes while the one before computes
    for _ in range(pieces - 1):
        now += max(share, piece_s)
    assert exposed_before(compute_s, pieces, piece_s) == pytest.approx(
        now + share - compute_s, rel=1e-6, abs=1e-9
    )


def test_products_in_fp32_go_at_the_rate_for_fp32() -> None:
    cluster = find_cluster("V100", 1, 1)
    times = {
        size: step_time(
            Setup(find_model("llama-8b"), Parallel(), Recipe(2048, precision=Precision(4, 4, 0, 0, 4, size))),
            cluster,
        ).compute
        for size in (2, 4)
    }
    assert times[4] / times[2] > 0.5 * cluster.gpu.peak / cluster.gpu.peak_fp32
