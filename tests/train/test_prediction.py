"""The planner's prediction of a run, and the file that has it beside the measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from imece.footprint import Footprint
from imece.models.shape import TransformerConfig
from imece.models.transformer import LARGE_TABLE, Block, Transformer
from imece.observe.units import gigabytes
from imece.plan import here
from imece.plan.check import read_plan, rows
from imece.plan.here import cluster_of, keep, to_toml
from imece.plan.models.model import from_shape
from imece.plan.presets import find_cluster
from imece.train import prediction
from imece.train.batch import BatchPlan, plan_batch
from imece.train.choosing import chosen_before
from imece.train.config import LoraSection, MeshSection, OptimizerSection, TrainConfig
from imece.train.dividing import train_units
from imece.train.model.precision import Precision
from imece.train.prediction import Given, Machine, Prediction, compared, measured, predict
from tests.meshes import FakeMesh
from tests.plan.test_here import FIGURES, NOW, without_home

CONFIG = TrainConfig()
SHAPE = CONFIG.model.shape(4096)
BF16 = Precision("bf16", "cpu")
ONE_HOST, TWO_HOSTS = FakeMesh({"replicate": 2}), FakeMesh(hosts=((0,), (1,)))
CPU = find_cluster("CPU", 2)
TINY = TransformerConfig(vocab_size=8, layers=1, width=8, heads=1, kv_heads=1, mlp_width=8, max_seq=8)


def machine(memory_bytes: int = 10**12, is_measured: bool = False) -> Machine:
    return Machine(replace(CPU, gpu=replace(CPU.gpu, memory_bytes=memory_bytes)), is_measured)


def of(strategy: str, on: Machine) -> Prediction:
    return predict(strategy, Given(CONFIG, SHAPE, plan_batch(CONFIG.batch, SHAPE.max_seq, 2), BF16, on))


def test_what_is_offloaded_is_said() -> None:
    config = replace(CONFIG, compute=replace(CONFIG.compute, offload="optimizer"))
    gpus = Machine(find_cluster("H100", 2), False)
    said = predict("zero2", Given(config, SHAPE, plan_batch(CONFIG.batch, SHAPE.max_seq, 2), BF16, gpus))
    host = said.candidate.memory.host
    assert said.as_json()["counted_bytes"]["host"] == host > 4 * SHAPE.parameter_count
    assert f"and {host / 1e9:.2f} GB of the host's memory" in said.describe()


@pytest.mark.parametrize("targets", [(), ("q", "v")])
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3"])
def test_the_base_of_adapters_is_frozen(strategy: str, targets: tuple[str, ...]) -> None:
    """The base and adapters, gradients and the optimizer of adapters, each divided or not."""
    plan, on = plan_batch(CONFIG.batch, SHAPE.max_seq, 2), machine()
    sides = {"q": SHAPE.q_width, "k": SHAPE.kv_width, "v": SHAPE.kv_width, "out": SHAPE.q_width}
    chosen = targets or (*sides, "gate", "up", "down")
    wide = sum(SHAPE.width + sides.get(name, SHAPE.mlp_width) for name in chosen)
    trained, base = 4 * 16 * wide * SHAPE.layers, 4 * SHAPE.parameter_count
    config = replace(CONFIG, lora=LoraSection(rank=16, targets=targets), optimizer=OptimizerSection("adamw"))
    found = predict(strategy, Given(config, SHAPE, plan, BF16, on)).as_json()
    counted = found["counted_bytes"]
    assert found["strategy"] == strategy and found["plan"].endswith("LoRA")
    held = 2 if strategy == "zero3" else 1
    assert counted["parameters"] == pytest.approx((base + trained) / held, rel=0.01)
    divided = 2 if strategy in ("zero2", "zero3") else 1
    assert counted["gradients"] == pytest.approx(trained / divided, rel=0.03)
    assert counted["communication"] == pytest.approx(trained * (divided == 2), rel=0.03), "in one bucket"
    assert counted["optimizer"] == pytest.approx(
        2 * trained / (1 if strategy == "replicate" else 2), rel=0.03
    )
    four = replace(config, lora=LoraSection(rank=16, targets=targets, quantize="nf4"))
    blocks = SHAPE.parameter_count - SHAPE.vocab_size * SHAPE.width
    quantised = predict(strategy, Given(four, SHAPE, plan, BF16, on)).as_json()["counted_bytes"]["parameters"]
    assert quantised == pytest.approx(counted["parameters"] - (3.5 / held - 0.016) * blocks, rel=0.02)
    shared = replace(on, shares_memory=True)
    mapped = predict(strategy, Given(config, SHAPE, plan, BF16, shared), copies=True).mapped
    in_common = base / 2 if strategy == "zero3" else 0
    assert in_common < mapped < in_common + 10 * trained, "where it is shared out it lies once for all"


def test_a_machine_is_what_was_kept_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    monkeypatch.setenv("IMECE_HERE", str(path))
    unknown = prediction.machine_of(ONE_HOST)
    assert not unknown.is_measured and unknown.cluster.gpus == 2
    keep(to_toml(cluster_of(FIGURES), FIGURES, NOW), path)
    known = prediction.machine_of(ONE_HOST)
    assert known.is_measured and known.cluster.gpu.name == FIGURES["device"] and known.cluster.gpus == 2
    memory = FIGURES["ranks"] * FIGURES["memory_bytes"] // 2
    assert known.cluster.gpu.memory_bytes == memory, "two have what four had"
    with monkeypatch.context() as contained:
        contained.setattr(here, "allowed_bytes", lambda: memory)
        less = prediction.machine_of(ONE_HOST).cluster.gpu.memory_bytes
        assert less == memory // 2, "of a container that has less than was measured"
    assert not prediction.machine_of(TWO_HOSTS).is_measured, "nothing is known of the wire between hosts"
    for damaged in ("no TOML", '[gpu]\ngpus_per_host = "x"\n', "[gpu]\nlike = 5\n"):
        path.write_text(damaged)
        assert not prediction.machine_of(ONE_HOST).is_measured
    without_home(monkeypatch)
    assert not prediction.machine_of(ONE_HOST).is_measured


def test_the_state_is_that_of_the_engine() -> None:
    """fp32 weights and gradients whole, moments halved: as tests/data_parallel count them."""
    counted = of("zero1", machine()).as_json()["counted_bytes"]
    size = 4 * SHAPE.parameter_count
    assert counted["parameters"] == pytest.approx(size, rel=0.01)
    assert counted["gradients"] == pytest.approx(size, rel=0.01)
    assert counted["communication"] == 0


def test_a_rank_that_has_too_little_memory_is_warned_of() -> None:
    """What ranks of a host share lies there once, and is not counted again for each of them."""
    said = of("zero1", machine())
    assert not said.lacks
    needed = said.candidate.needed

    def with_memory(nbytes: int) -> Prediction:
        cluster = said.machine.cluster
        gpu = replace(cluster.gpu, memory_bytes=nbytes)
        return replace(said, machine=replace(said.machine, cluster=replace(cluster, gpu=gpu)), mapped=9**9)

    assert not with_memory(needed).lacks
    line = with_memory(needed // 2).lacks
    assert f"need {gigabytes(needed)} and has {gigabytes(needed // 2)}: fewer --ranks" in line


@pytest.mark.parametrize(("strategy", "whole"), [("zero2", True), ("zero2", False), ("zero1", True)])
def test_what_helps_a_rank_that_keeps_whole_gradients(strategy: str, whole: bool) -> None:
    plan, on = BatchPlan(256, 16, 2, 4, 2, whole=whole), machine(1000)
    line = predict(strategy, Given(CONFIG, SHAPE, plan, BF16, on)).lacks
    assert ("GB: --accumulate sharded, fewer --ranks" in line) == (whole and strategy == "zero2")
    assert "fewer --ranks" in line


@pytest.mark.parametrize(("whole", "nbytes"), [(True, 4), (False, 0)])
def test_micro_batches_are_accumulated_as_the_plan_says(whole: bool, nbytes: int) -> None:
    """Whole, or in this rank's part; nothing of it is left after a step, when the engine counts."""
    once, twice = (
        predict(
            "zero2",
            Given(CONFIG, SHAPE, BatchPlan(256, 8 * times, 2, 4, times, whole=whole), BF16, machine()),
        )
        for times in (1, 2)
    )
    more = twice.candidate.memory.gradients - once.candidate.memory.gradients
    assert more == twice.needed - once.needed == pytest.approx(nbytes * SHAPE.parameter_count, rel=0.02)
    assert twice.as_json()["counted_bytes"] == once.as_json()["counted_bytes"]


def test_what_stages_receive_is_no_state_that_is_counted() -> None:
    """It is memory of the whole rank, however many micro-batches there are."""
    config = replace(CONFIG, mesh=MeshSection(pipeline=2))
    few, many = (
        predict("zero2", Given(config, SHAPE, BatchPlan(256, 1, 1, 4, times, config.mesh), BF16, machine()))
        for times in (2, 8)
    )
    wide = predict("zero2", Given(config, SHAPE, BatchPlan(256, 1, 1, 8, 2, config.mesh), BF16, machine()))
    counted = few.as_json()["counted_bytes"]
    assert all(each.as_json()["counted_bytes"] == counted for each in (many, wide))
    assert many.needed == few.needed


def test_large_tables_are_gathered_for_their_own_time() -> None:
    on = Machine(find_cluster("H100", 8), False)
    large = replace(SHAPE, vocab_size=LARGE_TABLE // SHAPE.width, tied_head=False)
    small = replace(large, vocab_size=large.vocab_size - 1)

    config = replace(CONFIG, optimizer=OptimizerSection("adamw"))  # Muon's matrices are whole on a rank

    def gathered(shape: TransformerConfig) -> float:
        plan = plan_batch(config.batch, shape.max_seq, 8)
        return predict("zero3", Given(config, shape, plan, BF16, on)).candidate.memory.gathered

    table = 4 * large.vocab_size * large.width
    block = 4 * from_shape("", large).layer_parameters
    root = 4 * large.width  # the last norm
    assert gathered(small) == pytest.approx(2 * table + 2 * block, rel=0.01)
    assert gathered(large) == pytest.approx(root + sum(sorted([table, table, block, block])[2:]), rel=0.01)
    assert train_units(CONFIG, large) == (Block, type(Transformer(TINY).embed), type(Transformer(TINY).head))
    adapters = replace(CONFIG, lora=LoraSection(rank=2))
    divided = replace(CONFIG, mesh=MeshSection(tensor=2))
    assert train_units(CONFIG, small) is None and train_units(CONFIG, replace(large, tied_head=True)) is None
    assert train_units(adapters, large) is None and train_units(divided, large) is None


def test_predicted_and_measured_are_kept(tmp_path: Path) -> None:
    records = [
        {"step": step, "step_s": 1.0 if step < 5 else 0.5, "memory_bytes": 100 * step}
        for step in range(1, 12)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said = of("zero2", machine(is_measured=True))
    came = measured(tmp_path, Footprint(1, 2, 3, 4), since=0)
    assert came == {
        "memory_bytes": asdict(Footprint(1, 2, 3, 4)),
        "rank_bytes": 1100,
        "step_s": 0.5,
    }
    prediction.keep(tmp_path, said, came)
    assert chosen_before(tmp_path) == "zero2"
    found = {row.what: row for row in rows(read_plan(tmp_path))}
    assert found["step"].predicted == said.step_s and found["step"].measured == 0.5
    assert found["whole rank"].predicted == said.candidate.needed
    assert compared(said, came).endswith("measured 0.00 GB, 500 ms")
    late = measured(tmp_path, Footprint(1, 2, 3, 4), since=10)
    assert late["step_s"] is None and compared(said, late).endswith(" a step; too few steps to compare")


def test_figures_that_cannot_be_read_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    came = measured(tmp_path, Footprint(1, 2, 3, 4), since=0)
    assert (came["rank_bytes"], came["step_s"]) == (None, None)


def test_a_machine_that_was_not_measured_has_no_time(tmp_path: Path) -> None:
    said = of("zero1", machine())
    assert said.step_s is None and "imece plan --here" in said.describe()
    prediction.keep(tmp_path, said)
    content = read_plan(tmp_path)
    assert content["predicted"]["step_s"] is None and content["measured"] is None
    assert content["predicted"]["parts_s"] == {} and content["predicted"]["hardware"] is None


def test_shared_memory_counts_for_each_rank_that_has_it_mapped() -> None:
    """zero1 of 2 ranks: the other's parameters and gradients, and two copies of each rank's part."""
    alone, shared = of("zero1", machine()), replace(machine(), shares_memory=True)
    size, state = 4 * SHAPE.parameter_count, alone.as_json()["counted_bytes"]["optimizer"]
    plan = plan_batch(CONFIG.batch, SHAPE.max_seq, 2)
    plain = predict("zero1", Given(CONFIG, SHAPE, plan, BF16, shared))
    assert plain.needed - alone.needed == pytest.approx(2 * size, rel=0.01)
    safe = predict("zero1", Given(CONFIG, SHAPE, plan, BF16, shared), copies=True)
    assert safe.needed - plain.needed == pytest.approx(2 * 2 * (state + size / 2), rel=0.01)
    whole = predict("replicate", Given(CONFIG, SHAPE, plan, BF16, shared), copies=True)
    assert whole.mapped == pytest.approx(size, rel=0.01), "of replicas only gradients are shared"


def test_what_a_process_has_besides_its_model_is_outside_of_it() -> None:
    with_model, without = (
        prediction.machine_of(ONE_HOST, at).cluster.gpu.overhead_bytes for at in (10**8, 0)
    )
    assert without - with_model == pytest.approx(10**8, abs=2 * 10**7)
    assert without > 100 * 2**20, "torch is in it"
