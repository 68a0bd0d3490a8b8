"""The learning rate at the places that matter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.train.config import OptimizerSection, Schedule
from imece.train.model.schedule import learning_rate

SCHEDULES: tuple[Schedule, ...] = ("cosine", "linear", "wsd", "constant")


def rates(steps: int, schedule: Schedule, warmup: int = 10, min_lr: float = 0.1) -> list[float]:
    section = OptimizerSection(lr=2.0, schedule=schedule, warmup=warmup, min_lr=min_lr)
    return [learning_rate(index, steps, section) for index in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup(schedule: Schedule) -> None:
    """Linear, without an update at 0, and the tenth update has all of it."""
    assert rates(100, schedule)[:10] == pytest.approx([0.2 * (index + 1) for index in range(10)])
    assert rates(100, schedule, warmup=0)[0] == pytest.approx(2.0, rel=1e-2)
    assert rates(3, schedule, warmup=10) == pytest.approx([2 / 3, 4 / 3, 2.0])


def test_cosine() -> None:
    all_rates = rates(110, "cosine")
    assert all_rates[9] == 2.0
    assert all_rates[59] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half the way
    assert all_rates[34] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))))
    assert all_rates[-1] == pytest.approx(0.2)
    assert rates(20, "cosine", min_lr=0.0)[-1] == pytest.approx(0.0)


def test_linear() -> None:
    all_rates = rates(110, "linear")
    assert all_rates[9] == 2.0
    assert all_rates[10:] == pytest.approx([2.0 * (1 - 0.9 * (index + 1) / 100) for index in range(100)])
    assert rates(20, "linear", min_lr=0.0)[-1] == pytest.approx(0.0)


def test_wsd() -> None:
    all_rates = rates(100, "wsd")
    assert all_rates[10:80] == [2.0] * 70
    assert all_rates[80:] == pytest.approx([2.0 * (1 - 0.9 * (index + 1) / 20) for index in range(20)])
    assert all_rates[-1] == pytest.approx(0.2)


def test_constant() -> None:
    assert rates(100, "constant")[10:] == [2.0] * 90


@given(
    steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    schedule=st.sampled_from(SCHEDULES),
    min_lr=st.floats(0, 1),
)
def test_it_rises_and_then_falls(steps: int, warmup: int, schedule: Schedule, min_lr: float) -> None:
    all_rates = rates(steps, schedule, warmup, min_lr)
    top = min(warmup, steps)
    assert all(0 <= rate <= 2.0 for rate in all_rates)
    assert all_rates[:top] == sorted(all_rates[:top])
    assert all_rates[top:] == sorted(all_rates[top:], reverse=True)
    if schedule != "constant" and steps > warmup:
        assert all_rates[-1] == pytest.approx(2.0 * min_lr)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_longer_run(schedule: Schedule) -> None:
    """It goes on from wherever it is; a level or constant rate is that of the shorter run."""
    short, long = rates(100, schedule), rates(200, schedule)
    assert long[:10] == short[:10]
    assert all(longer >= shorter for longer, shorter in zip(long, short, strict=False))
    if schedule in ("wsd", "constant"):
        assert long[:80] == short[:80]
    # Past the end, which `steps` is raised before: it stays at the last rate.
    section = OptimizerSection(lr=2.0, schedule=schedule, warmup=10)
    assert learning_rate(150, 100, section) == pytest.approx(short[-1])
