"""What the slow pipelines have in common, counted: in the published runs, and in some that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from imece.plan.accuracy.stalls import Stalls, stalls
from imece.plan.accuracy.steps import Case, row, ultrascale

Slower = Callable[[int, Case], float]  # seconds that every message of a run takes longer


def made_up(slower: Slower) -> Stalls:
    """Runs of 2 hosts that take what is predicted, and so much more."""
    cases = []
    for at, case in enumerate(each for each in ultrascale() if each.cell.endswith(" 2 hosts")):
        setup = case.setups[0]
        stages, predicted = setup.parallel.pipeline, row(replace(case, sequences=0)).predicted
        messages = 0.0
        if stages > 1:
            messages = (2 if stages == 2 else 4) * (setup.recipe.accumulation + (stages - 1) / 2)
        cases.append(replace(case, measured_s=predicted + messages * slower(at, case)))
    return stalls(cases)


def test_stalls_are_counted() -> None:
    found = made_up(lambda at, case: 0.25 if at % 3 == 0 else 0.0)
    assert 0 < found.stalled < found.pipelines == found.stalled + found.free
    assert found.seconds == pytest.approx(0.25)
    assert set(found.order.values()) == {1.0}, "who knows which are stalled, knows their order"
    assert 0 < found.twins_apart <= found.twins and found.hosts == (2, 2)
    assert sum(found.apart_by_zero[2]) == found.twins_apart and list(found.apart_by_zero) == [2]
    assert 0 < found.alike_apart < found.alike and 0 < found.alike_by_chance < found.alike / 2
    assert all(found.ceiling[cell] < 1.0 for cell in found.order), "without it, the others alone"


def test_what_depends_on_bytes_is_no_stall() -> None:
    found = made_up(lambda at, case: 0.25 if at == 1 else 0.01 * case.setups[0].recipe.micro_batch * (at % 2))
    assert found.stalled <= 2 < found.free


def test_the_published_runs() -> None:
    """Nearly all slow runs have the same thing, and those without it have nothing of it."""
    found = stalls()
    assert found.slow_stalled > 0.9 * found.slow_pipelines > 0.8 * found.slow
    assert found.stalled + found.free > 0.9 * found.pipelines
    assert found.twins_apart > found.twins / 2, "it is not the arrangement"
    assert min(found.order.values()) > 0.8
    assert found.alike_apart < found.alike_by_chance / 2, "it is not by lot"
    assert sum(sum(each) for each in found.apart_by_zero.values()) == found.twins_apart
    assert all(found.ceiling[cell] < found.order[cell] for cell in found.order if cell.endswith(" 32 hosts"))
