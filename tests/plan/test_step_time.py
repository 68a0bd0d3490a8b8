"""Laws for any step: nothing beats the roofline, parts add up, more of a thing costs more."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.plan.hardware import Cluster
from imece.plan.memory.frameworks import IMECE as KEPT
from imece.plan.memory.held import held, stage_layers
from imece.plan.memory.memory import FOUR_BIT
from imece.plan.models.by_name import find_model
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster, find_gpu
from imece.plan.setup import (
    FP32,
    Attention,
    Parallel,
    Precision,
    Recipe,
    Recomputation,
    Setup,
    Strategy,
    Wire,
)
from imece.plan.speed.communication import Group, Op, along, collective_s, send_s, sent_bytes
from imece.plan.speed.compute import flops_a_token, layer_time, product_s, stream_s
from imece.plan.speed.manner import IMECE, MEGATRON, NANOTRON, TORCHTITAN, Manner
from imece.plan.speed.stage import stage_time, stages
from imece.plan.speed.step_time import step_time
from imece.plan.speed.synchronise import synchronise, trained_parameters
from imece.plan.speed.timeline import ends, exposed_after, exposed_before
from tests.plan.test_moved_bytes import moved_bytes

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
    """By more than 4 %: waiting for the CPU is dealt to forward and backward by what the device does in them,
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
        assert step_time(setup, cluster, manner).total >= 0.96 * found


def test_a_slightly_faster_gpu_is_not_slower() -> None:
    """What waits for gathers in backward has gradients leave meanwhile."""
    model = find_model("7B")
    for gpu, gpus, hosts in (("A100-80", 2, 16), ("H100", 2, 4), ("A100-80", 8, 4)):
        cluster = find_cluster(gpu, gpus, hosts)
        setup = Setup(model, Parallel("zero3", cluster.gpus, cluster.gpus), Recipe(2048, 1, 4))
        last = math.inf
        for rate in (0.98, 1.0, 1.02, 1.05, 1.1):
            peak, moved = rate * cluster.gpu.peak, rate * cluster.gpu.memory_bandwidth
            faster = replace(cluster.gpu, name=f"{rate}", peak=peak, memory_bandwidth=moved)
            found = step_time(setup, replace(cluster, gpu=faster)).total
            assert found <= last, (gpu, rate)
            last = found


def test_stages_wait_for_the_cpu_with_each_of_their_own_layers() -> None:
    setup = Setup(find_model("gpt2-xl"), Parallel(pipeline=24), Recipe(1024))
    assert {2, 3} <= {*stage_layers(setup, "dealt")}  # the largest stages wait longer than the others
    endless = replace(CLUSTER.gpu, name="endless", peak=1e20, memory_bandwidth=1e20)
    found = stage_time(setup, replace(CLUSTER, gpu=endless), IMECE)
    assert found.all_stages == pytest.approx(48 * IMECE.layer_host_s, rel=0.05)
    assert found.waiting == pytest.approx(3 * IMECE.layer_host_s, rel=0.05)
    compiled = replace(setup, recipe=replace(setup.recipe, compiled=True))
    shorter = stage_time(compiled, replace(CLUSTER, gpu=endless), IMECE)
    assert shorter.waiting == pytest.approx(found.waiting / 2, rel=0.05)  # fewer kernels to start


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
    assert found["hybrid"] < 0.6 * found["zero3"]  # 2M(K-1)/K in place of 3M over K = 4 hosts


_SHARDS: dict[Strategy, int] = {"zero3": 32, "hybrid": 8}


def test_fewer_bytes_of_gradients_are_sent() -> None:
    """A quarter of fp32's takes a quarter of the time; in hybrid strategies between hosts alone."""
    one_each, cluster = find_cluster("A100-80", 1, 8), find_cluster("A100-80", 8, 8)
    model = find_model("1.3b")

    def exposed(strategy: Strategy, wire: Wire | None, on: Cluster) -> float:
        shard = {"replicate": 1, "zero1": on.gpus}.get(strategy, on.gpus_per_host)
        recipe = Recipe(2048, precision=FP32, wire=wire)
        setup = Setup(model, Parallel(strategy, on.gpus, shard), recipe)
        manner = replace(IMECE, overlap_gradients=False)
        return step_time(setup, on, manner).exposed["gradients"]

    for strategy in ("replicate", "zero1"):
        assert exposed(strategy, "int8", one_each) == pytest.approx(
            exposed(strategy, None, one_each) / 4, rel=0.1
        )
    saved = exposed("hybrid_zero2", None, cluster) - exposed("hybrid_zero2", "int8", cluster)
    between = along(cluster, 8, 8)
    whole = collective_s(cluster, "all_reduce", 4 * model.parameters / 8, between)
    assert saved == pytest.approx(0.75 * whole, rel=0.1)


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
    most, last = stages(Setup(MODEL, Parallel(pipeline=pipeline), RECIPE), manner)
    assert MODEL.layers - last <= most * (pipeline - 1)
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


@pytest.mark.parametrize(("size", "stride"), [(6, 1), (3, 2), (12, 1), (5, 1), (18, 1), (10, 2)])
def test_groups_that_hosts_do_not_divide_are_those_that_cross_most(size: int, stride: int) -> None:
    """As counted over all groups of so many ranks, one after the other, on hosts of eight."""
    found = along(find_cluster("H100", 8, 100), size, stride)
    groups = [
        Counter((first + at * stride) // 8 for at in range(size))
        for block in range(0, 720, size * stride) for first in range(block, block + stride)
    ]  # fmt: skip
    assert found.hosts == max(len(hosts) for hosts in groups) > 1
    assert found.ranks_per_host == min(min(hosts.values()) for hosts in groups if len(hosts) > 1)
    alone = along(find_cluster("H100", 8, 1), 6, 1)
    assert (alone.hosts, alone.ranks_per_host) == (1, 6)


def test_a_pipeline_of_stages_smaller_than_a_host_sends_from_host_to_host() -> None:
    """Two hosts, four stages: of their three neighbours two are on one host, and one is not."""
    cluster = find_cluster("A100-40", 8, 2, "ethernet-10g")
    setup = Setup(MODEL, Parallel(tensor=4, pipeline=4), replace(RECIPE, micro_batch=1))
    size = 2048 * MODEL.width * 2 // 4
    far, near = (2 * send_s(cluster, size, between) for between in (True, False))
    assert far > 10 * near
    found = stage_time(setup, cluster, IMECE)
    assert found.sends == far
    one_host = stage_time(setup, find_cluster("A100-40", 16, 1), IMECE)
    assert one_host.sends == near
    assert found.all_stages - one_host.all_stages == pytest.approx(far - near)
    assert step_time(setup, cluster).exposed["pipeline"] == pytest.approx(RECIPE.accumulation * far)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_sums_what_its_first_stage_holds_and_a_tied_table_with_its_last(tied: bool) -> None:
    """Whichever stage is the slowest to compute: with this table it is the last, of the fewest layers."""
    cluster = find_cluster("RTX-4090", 2, 3, "ethernet-10g")
    in_sight = replace(IMECE, name="gradients in sight", overlap_gradients=False)
    wide = replace(MODEL, name="wide", vocab_size=131072, tied_head=tied)
    setup = Setup(wide, Parallel("replicate", 2, pipeline=3), RECIPE)
    stage = stage_time(setup, cluster, in_sight)
    assert (stage.layers, held(setup, 0, KEPT.stages).layers) == (2, 7)
    held_bytes = 2 * held(setup, 0, KEPT.stages).total
    expected = collective_s(cluster, "all_reduce", held_bytes, along(cluster, 2, 1))
    if tied:
        expected += collective_s(cluster, "all_reduce", 2 * wide.table_parameters, Group(2, 1, 2))
    found = synchronise(setup, cluster, in_sight, stage).gradients
    assert found == pytest.approx(expected, rel=1e-4)  # the last norm is not on the first stage


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2"])
def test_a_tied_tables_gradients_leave_after_a_pipelines_backwards(strategy: Strategy) -> None:
    """All else hides behind them here; what the stages exchange before is whole, as the engine keeps it."""
    cluster = find_cluster("H100", 2, 2)
    recipe = replace(RECIPE, micro_batch=32, accumulates_whole=True)
    wide = replace(MODEL, name="wide", vocab_size=262144)
    parallel = Parallel(strategy, 2, pipeline=2)
    untied, tied = (Setup(replace(wide, tied_head=each), parallel, recipe) for each in (False, True))
    at_once = replace(IMECE, name="at no cost", contention=0.0)
    stage = stage_time(tied, cluster, at_once)
    before, after = (synchronise(each, cluster, at_once, stage) for each in (untied, tied))
    assert before.gradients < 0.2 * before.hidden
    nbytes = 2 * wide.table_parameters
    op: Op = "all_reduce" if strategy == "replicate" else "reduce_scatter"
    late = collective_s(cluster, op, nbytes, along(cluster, 2, 1))
    exchanged = collective_s(cluster, "all_reduce", nbytes, Group(2, 1, 2))
    assert after.gradients - before.gradients == pytest.approx(late + exchanged, rel=0.05)


@pytest.mark.parametrize(("more", "parts"), [(0, 2), (1, 1)])
def test_a_tied_table_that_cannot_be_divided_is_exchanged_whole(more: int, parts: int) -> None:
    model = replace(MODEL, vocab_size=MODEL.vocab_size + more, tied_head=True)
    cluster, parallel = find_cluster("H100", 4, 1), Parallel("replicate", 1, tensor=2, pipeline=2)
    setup = Setup(model, parallel, RECIPE)
    found = synchronise(setup, cluster, IMECE, stage_time(setup, cluster, IMECE)).gradients
    expected = collective_s(cluster, "all_reduce", 2 * model.table_parameters / parts, Group(2, 2, 1))
    assert found == pytest.approx(expected)


def test_switch_gains_no_more_than_the_bytes_that_it_spares() -> None:
    cluster = find_cluster("H100", 8, 1)
    plain = replace(cluster, inside=replace(cluster.inside, switch=1.0))
    for ranks, gain in ((2, 1.0), (4, 1.2), (8, 14 / 9)):
        slow, fast = (collective_s(c, "all_reduce", 2**34, along(c, ranks, 1)) for c in (plain, cluster))
        assert slow / fast == pytest.approx(gain, rel=0.01)


def test_recomputation_sends_keys_and_values_round_again() -> None:
    cluster = find_cluster("H100", 8, 4, "ethernet-10g")
    none, full = (
        step_time(Setup(MODEL, Parallel(context=32), Recipe(32768, recompute=recompute)), cluster).exposed[
            "context"
        ]
        for recompute in ("none", "full")
    )
    assert full == pytest.approx(none * 4 / 3, rel=0.01)  # nearly all is in sight


def test_what_experts_read_and_give_out_is_put_in_order() -> None:
    """Beside a model whose one MLP is as wide as those that a token goes through."""
    mixture = replace(MODEL, name="mixture", experts=8, active_experts=2)
    around = []
    for model in (mixture, replace(MODEL, name="dense", mlp_width=2 * MODEL.mlp_width)):
        found = layer_time(CLUSTER.gpu, model, IMECE, Recipe(4096), 1, 1, False)
        around.append(found.forward - found.products - found.core)
    more = IMECE.elementwise * 3 * 2 * 4096 * MODEL.width * 2 / (0.85 * CLUSTER.gpu.memory_bandwidth)
    assert around[0] - around[1] == pytest.approx(more)


def test_norms_of_queries_and_keys_move_as_much_as_their_rotation() -> None:
    gpu, normed = CLUSTER.gpu, replace(MODEL, head_norms=True)
    plain, more = (layer_time(gpu, each, IMECE, RECIPE, 1, 1, True).forward for each in (MODEL, normed))
    moved = 2 * 2 * RECIPE.micro_batch * RECIPE.seq * (MODEL.q_width + MODEL.kv_width)  # bytes
    assert more - plain == pytest.approx(IMECE.elementwise * stream_s(gpu, moved))


def test_attention_is_fastest_with_heads_of_128() -> None:
    """As published, a tenth slower with half and with twice as many channels."""
    core = {}
    for width in (64, 128, 256):
        model = replace(MODEL, name=f"heads of {width}", heads=2048 // width, kv_heads=1, head_width=width)
        core[width] = layer_time(CLUSTER.gpu, model, IMECE, Recipe(16384), 1, 1, False).core
    assert 1.08 < core[64] / core[128] < 1.15 and 1.08 < core[256] / core[128] < 1.15


def test_what_blocks_give_is_added_up() -> None:
    """Each of four ranks has a fourth of all scores, and adds up what four blocks give."""
    recipe = Recipe(32768, 2)
    alone, shared = (layer_time(CLUSTER.gpu, MODEL, IMECE, recipe, ranks, 1, False) for ranks in (1, 4))
    elements = 2 * 32768 * MODEL.width
    rate = 0.85 * CLUSTER.gpu.memory_bandwidth
    assert shared.core - alone.core / 4 == pytest.approx(28 * elements / rate)
    assert shared.core_backward - alone.core_backward / 4 == pytest.approx(35 * elements / rate)


def test_keys_and_values_go_round_while_the_gpu_waits_for_the_cpu() -> None:
    cluster = find_cluster("B200", 4, 1)
    endless = replace(cluster, inside=replace(cluster.inside, bandwidth=1e18, latency=0.0))
    setup = Setup(find_model("llama-3.2-1b"), Parallel(context=4), Recipe(4096, accumulation=4))
    real, none = (step_time(setup, each) for each in (cluster, endless))
    assert real.waiting > 0 and real.exposed["context"] > 2 * none.exposed["context"]
    passes = [each.total - each.exposed["gradients"] for each in (real, none)]
    assert passes[0] == pytest.approx(passes[1])


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
    now = 0.0  # the first is there, and the next one comes while it computes
    for _ in range(pieces - 1):
        now += max(share, piece_s)
    assert exposed_before(compute_s, pieces, piece_s, 1) == pytest.approx(
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


_FP32 = Precision(4, 4, 0, 0, 4, 4)


def test_in_fp32_what_moves_is_twice_as_much_and_the_peak_another() -> None:
    cluster = find_cluster("A100-80", 8, 2, "ethernet-10g")
    setups = [
        Setup(MODEL, Parallel(tensor=2, pipeline=4, context=2), Recipe(16384, accumulation=8, precision=each))
        for each in (Precision(), _FP32)
    ]
    bf16, fp32 = (step_time(setup, cluster) for setup in setups)
    for name in ("tensor", "pipeline"):  # but for latency
        assert 1.7 < fp32.exposed[name] / bf16.exposed[name] < 2.001, name
    flops = flops_a_token(MODEL, 16384) * fp32.tokens_per_s / 16
    assert fp32.mfu == pytest.approx(flops / cluster.gpu.peak_fp32) and fp32.mfu < 1
    endless = replace(cluster.gpu, name="only moves", peak=1e30)
    assert product_s(endless, 9, 9, 9, 4) == pytest.approx(2 * product_s(endless, 9, 9, 9))
    times = [layer_time(endless, MODEL, IMECE, setup.recipe, 1, 1, False).forward for setup in setups]
    assert times[1] == pytest.approx(2 * times[0])


def test_ring_attention_sends_elements_of_the_activations() -> None:
    cluster = find_cluster("H100", 8, 2, "ethernet-1g")
    bf16, fp32 = (
        step_time(Setup(MODEL, Parallel(context=16), Recipe(16384, precision=each)), cluster)
        for each in (Precision(), _FP32)
    )
    moving = [each.exposed["context"] + each.hidden for each in (bf16, fp32)]
    assert moving[1] / moving[0] == pytest.approx(2, rel=0.1)


def test_what_is_frozen_makes_no_gradients_and_counts_no_work_for_them() -> None:
    """No GPU uses more of its peak than the best product reaches."""
    gpu = find_gpu("A100-40")
    recipe = Recipe(2048, 4, 4, adapters="lora")
    found = step_time(Setup(find_model("7B"), Parallel(), recipe), find_cluster("A100-40", 1, 1))
    assert 0.3 < found.mfu < gpu.reachable * gpu.sustained
    scores = 12 * MODEL.layers * MODEL.heads * MODEL.head_width * 2048
    assert flops_a_token(MODEL, 2048, frozen=True) - scores == 4 * MODEL.parameters


def test_four_bits_are_gathered_as_four_bits() -> None:
    """In what is counted, and in what is timed where nothing is hidden."""
    cluster, open_manner = (
        find_cluster("H100", 8, 4, "ethernet-1g"),
        replace(IMECE, name="in sight", overlap_gathers=False),
    )
    moved, took = [], []
    for kind in ("lora", "qlora"):
        setup = Setup(MODEL, Parallel("zero3", 32, 32), replace(RECIPE, adapters=kind))
        stage = stage_time(setup, cluster, open_manner)
        moved.append(moved_bytes(setup, open_manner)["all_gather"])
        took.append(synchronise(setup, cluster, open_manner, stage).parameters)
    layers = (2 * MODEL.layers - IMECE.kept_units) * MODEL.layer_parameters
    assert moved[0] - moved[1] == pytest.approx(RECIPE.accumulation * layers * (2 - FOUR_BIT))
    assert took[1] / took[0] == pytest.approx(moved[1] / moved[0], rel=0.02)


def test_four_bits_are_unpacked_once_more_if_forward_is_computed_again() -> None:
    def longer(recompute: Recomputation) -> float:
        """Seconds that 4 bits add to a micro-batch."""
        recipe = replace(RECIPE, recompute=recompute, adapters="lora")
        lora, qlora = (Setup(MODEL, Parallel(), each) for each in (recipe, replace(recipe, adapters="qlora")))
        return stage_time(qlora, CLUSTER, IMECE).compute - stage_time(lora, CLUSTER, IMECE).compute

    assert longer("none") > 0
    assert longer("full") == pytest.approx(1.5 * longer("none"))


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "hybrid", "hybrid_zero2"])
def test_in_no_sync_the_last_micro_batch_alone_reduces(strategy: Strategy) -> None:
    """With all in sight, what is gathered is as ever and what is reduced is 1/accumulation of it."""
    in_sight = replace(IMECE, name="in sight", overlap_gathers=False, overlap_gradients=False)
    parallel = Parallel(strategy, 32, 8 if strategy.startswith("hybrid") else 32)
    each = Setup(MODEL, parallel, replace(RECIPE, accumulation=4))
    last = replace(each, recipe=replace(each.recipe, accumulates_whole=True))
    stage = stage_time(each, CLUSTER, in_sight)
    (moved, found), (moved_last, found_last) = (
        (moved_bytes(setup, in_sight), synchronise(setup, CLUSTER, in_sight, stage)) for setup in (each, last)
    )
    assert moved_last == {op: size if op == "all_gather" else size / 4 for op, size in moved.items()}
    assert found_last.parameters == pytest.approx(found.parameters)
    assert found_last.gradients == pytest.approx(found.gradients / 4)


def test_adapters_of_experts_are_trained_too() -> None:
    mixture = replace(MODEL, name="moe", experts=8, active_experts=2)
    setup = Setup(mixture, Parallel(), replace(RECIPE, adapters="lora"))
    expected = mixture.layers * RECIPE.adapter_rank * mixture.adapter_parameters
    assert trained_parameters(setup, IMECE) == expected


def test_a_vocabulary_that_ranks_cannot_divide_is_summed_whole() -> None:
    odd = replace(MODEL, name="odd", vocab_size=50257)
    even, whole = (
        trained_parameters(Setup(each, Parallel(tensor=2), RECIPE), IMECE)
        for each in (replace(odd, name="even", vocab_size=50256), odd)
    )
    assert whole - even == pytest.approx((50257 - 50256 / 2) * MODEL.width)


def test_adapters_take_six_operations_a_parameter_and_token() -> None:
    model, recipe = find_model("llama-8b"), Recipe(2048, adapters="lora")
    gpu, took = CLUSTER.gpu, []
    for rank in (1024, 2048):
        setup = Setup(model, Parallel(), replace(recipe, adapter_rank=rank))
        took.append(stage_time(setup, CLUSTER, IMECE).compute)
    more = model.layers * 1024 * model.adapter_parameters
    at_best = 6 * more * recipe.seq / (gpu.peak * gpu.reachable * gpu.sustained)
    assert at_best < took[1] - took[0] < 1.3 * at_best


def test_the_experts_that_work_are_all_read() -> None:
    """Of a few tokens most experts have one, and a product takes as long as its matrix is read."""
    mixture = replace(MODEL, name="128 experts", experts=128, active_experts=8)
    found, of_two = (
        layer_time(CLUSTER.gpu, replace(mixture, active_experts=number), IMECE, Recipe(64), 1, 1, False)
        for number in (8, 2)
    )
    one = 3 * MODEL.width * MODEL.mlp_width * 2
    assert found.products > 128 * one / CLUSTER.gpu.memory_bandwidth
    assert of_two.products == pytest.approx(found.products, rel=0.05)
    single = replace(mixture, experts=1, active_experts=1)
    ours, dense = (layer_time(CLUSTER.gpu, each, IMECE, RECIPE, 1, 1, False) for each in (single, MODEL))
    assert ours.products == dense.products


def test_muon_on_a_host_is_slower_by_its_products() -> None:
    cluster, times = find_cluster("A100-80", 8, 1), []
    for optimizer in ("adamw", "muon"):
        recipe = replace(RECIPE, offload="optimizer", optimizer=optimizer)
        times.append(step_time(Setup(MODEL, Parallel("zero1", 8, 8), recipe), cluster).optimizer)
    assert times[1] - times[0] == pytest.approx(30 * MODEL.width * MODEL.parameters / 4e12, rel=1e-6)


def test_the_memory_of_a_host_is_shared_by_its_ranks() -> None:
    """28 bytes a parameter through what is theirs of it, besides what goes to the host and back."""
    times = []
    for gpus in (1, 8):
        cluster = find_cluster("A100-80", gpus, 1)
        setup = Setup(MODEL, Parallel("zero1", gpus, gpus), replace(RECIPE, offload="optimizer"))
        times.append(gpus * step_time(setup, cluster).optimizer / MODEL.parameters)
    assert times[1] - times[0] == pytest.approx(28 * (8 / 410e9 - 1 / 100e9), rel=1e-6)


def test_a_host_adds_up_what_each_micro_batch_brings() -> None:
    """24 bytes a parameter for each but the first: the earlier ones' sums are copied aside and added. In
    ZeRO-1 micro-batches are summed on the GPU."""
    asked: tuple[tuple[Strategy, int], ...] = (("zero1", 0), ("zero2", 24 * 3))
    for strategy, more in asked:
        one, four = (
            step_time(
                Setup(
                    MODEL, Parallel(strategy, 8, 8), replace(RECIPE, offload="optimizer", accumulation=times)
                ),
                find_cluster("A100-80", 8, 1),
            ).optimizer
            for times in (1, 4)
        )
        assert four - one == pytest.approx(more * MODEL.parameters / 410e9, rel=1e-6)


def test_windows_leave_out_what_is_far_away() -> None:
    """Of 8,192 tokens a window of 1,024: counted pair by pair, in five layers of six."""
    model = replace(MODEL, name="windows", window=1024, windowed=5 / 6)
    seq = 8192
    seen = sum(min(at + 1, 1024) for at in range(seq)) / sum(at + 1 for at in range(seq))
    assert model.scores_part(seq) == pytest.approx(1 / 6 + 5 / 6 * seen, rel=1e-3)
    assert model.scores_part(1024) == MODEL.scores_part(seq) == 1.0
    ours, whole = (layer_time(CLUSTER.gpu, each, IMECE, Recipe(seq), 1, 1, False) for each in (model, MODEL))
    assert ours.core / whole.core == pytest.approx(model.scores_part(seq))
    assert flops_a_token(model, seq) < flops_a_token(MODEL, seq)
