"""What strategy "auto" chooses: what fits, what was measured to be faster, what others already have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from imece.mesh import Mesh
from imece.plan.check import PLAN_FILE
from imece.plan.presets import find_cluster
from imece.train import choosing, prediction
from imece.train.batch import BatchPlan, plan_batch
from imece.train.choosing import accumulating, choose, chosen_before
from imece.train.config import MeshSection
from imece.train.prediction import Given, Machine, Prediction, predict
from tests.train.test_prediction import BF16, CONFIG, ONE_HOST, SHAPE, TWO_HOSTS, machine, of


def chosen(monkeypatch: pytest.MonkeyPatch, on: Machine, usual: str = "zero1", mesh: Mesh = ONE_HOST) -> str:
    monkeypatch.setattr(choosing, "usual_strategy", lambda mesh: SimpleNamespace(name=usual))
    return choose(Given(CONFIG, SHAPE, plan_batch(CONFIG.batch, SHAPE.max_seq, 2), BF16, on), mesh)


def slower(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    """Each strategy takes so many times as long as is predicted."""
    true = prediction.predict

    def other(strategy: str, *rest: Any) -> Prediction:
        found = true(strategy, *rest)
        time = found.candidate.time
        assert time is not None
        stretched = replace(time, total=1.0 * times.get(strategy, 9.0))
        return replace(found, candidate=replace(found.candidate, time=stretched))

    monkeypatch.setattr(choosing, "predict", other)


def test_auto_is_the_usual_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, {"zero2": 0.5, "zero1": 1.0})
    assert chosen(monkeypatch, machine()) == "zero1"
    assert chosen(monkeypatch, machine(), usual="replicate", mesh=TWO_HOSTS) == "replicate"


def test_auto_takes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {name: of(name, machine()).candidate.needed for name in ("replicate", "zero1", "zero2", "zero3")}
    assert needs["replicate"] > needs["zero1"]
    between = (needs["replicate"] + needs["zero1"]) // 2
    assert chosen(monkeypatch, machine(int(between / 0.96)), usual="replicate") == "zero1"
    least = min(needs, key=lambda name: needs[name])
    assert chosen(monkeypatch, machine(1000)) == least, "where none fits, what needs least"


def test_auto_takes_what_was_measured_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, {"zero1": 1.0, "replicate": 0.9, "zero2": 0.95})
    assert chosen(monkeypatch, machine(is_measured=True)) == "replicate"
    slower(monkeypatch, {"zero1": 1.0, "replicate": 0.99})
    assert chosen(monkeypatch, machine(is_measured=True)) == "zero1", "no prediction is better than 2 %"


def test_hybrid_is_considered_on_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Machine(replace(find_cluster("CPU", 1, 2)), True)
    slower(monkeypatch, {"hybrid_zero2": 0.1})
    assert chosen(monkeypatch, on, mesh=TWO_HOSTS) == "hybrid_zero2"
    assert chosen(monkeypatch, on, mesh=ONE_HOST) != "hybrid_zero2"


def test_auto_takes_what_can_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    slower(monkeypatch, {"replicate": 0.1, "zero2": 0.5})
    plan, on = plan_batch(CONFIG.batch, SHAPE.max_seq, 2), machine(is_measured=True)
    for offload, wanted in (("none", "replicate"), ("optimizer", "zero2"), ("parameters", "zero3")):
        config = replace(CONFIG, compute=replace(CONFIG.compute, offload=cast(Any, offload)))
        assert choose(Given(config, SHAPE, plan, BF16, on), ONE_HOST) == wanted
        assert choose(Given(config, SHAPE, plan, BF16, machine()), ONE_HOST) in ("zero1", "zero3")


TWICE = BatchPlan(256, 16, 2, 4, 2)


def accumulates(strategy: str, asked: str, on: Machine, plan: BatchPlan = TWICE) -> bool:
    """Whether gradients accumulate whole."""
    config = replace(CONFIG, compute=replace(CONFIG.compute, accumulate=cast(Any, asked)))
    return accumulating(strategy, Given(config, SHAPE, plan, BF16, on), ONE_HOST).whole


def test_gradients_accumulate_whole_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "gather_texts", lambda mine, *_: [mine, ["not asked"]])
    on = machine()
    needs = [
        predict("zero2", Given(CONFIG, SHAPE, replace(TWICE, whole=whole), BF16, on)).candidate.needed
        for whole in (False, True)
    ]
    tight = machine(int(sum(needs) / 2 / 0.96))
    assert accumulates("zero2", "auto", on) and not accumulates("zero2", "auto", tight)
    assert accumulates("zero2", "whole", tight) and not accumulates("zero2", "sharded", on)
    assert accumulates("zero1", "auto", machine(1)), "it shards no gradients"
    stages = replace(TWICE, mesh=MeshSection(pipeline=2))
    assert accumulates("zero2", "auto", machine(1), stages), "they are summed once"


def test_auto_counts_gradients_as_they_will_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where zero1 does not fit, zero2 does if its gradients are summed after each micro-batch."""
    slower(monkeypatch, {"zero2": 0.5, "zero3": 0.6})
    sharded = predict("zero2", Given(CONFIG, SHAPE, replace(TWICE, whole=False), BF16, machine()))
    tight = machine(int(sharded.candidate.needed / 0.96) + 10**6, is_measured=True)
    for asked, wanted in (("auto", "zero2"), ("sharded", "zero2"), ("whole", "zero1")):
        config = replace(CONFIG, compute=replace(CONFIG.compute, accumulate=cast(Any, asked)))
        assert choose(Given(config, SHAPE, TWICE, BF16, tight), ONE_HOST) == wanted
    config = replace(CONFIG, compute=replace(CONFIG.compute, accumulate="sharded"))
    assert choose(Given(config, SHAPE, TWICE, BF16, machine()), ONE_HOST) == "zero2", "zero1 shards none"


def test_no_plan_was_chosen_before(tmp_path: Path) -> None:
    assert chosen_before(tmp_path) is None
    for text in ("", "[]", '{"predicted": 1}'):
        (tmp_path / PLAN_FILE).write_text(text)
        assert chosen_before(tmp_path) is None
