"""nanotron's slow pipelines: what they have in common, in published and made-up runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from imece.plan.accuracy import nanotron
from imece.plan.accuracy.stalls import Stalls, stalls
from imece.plan.accuracy.steps import Case, cases_of, row
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster
from imece.plan.setup import Parallel, Recipe, Setup
from imece.plan.speed.manner import NANOTRON
from imece.plan.speed.step_time import step_time

MODEL = Model("1B", 16, 2048, 32, 8, 64, 5632, gated=True, vocab_size=32000)
CLUSTER = find_cluster("H100", 8, 4)
Slower = Callable[[int, Case], float]  # seconds that every message of a run takes longer
Before = Callable[[int], bool]  # whether a run was made before the repair


def made_up(slower: Slower, before: Before) -> Stalls:
    """Runs of 2 hosts that take what is predicted of the later version, and so much more."""
    cases = []
    for at, each in enumerate(each for each in cases_of("ultrascale") if each.cell.endswith(" 2 hosts")):
        case = replace(each, manner=replace(each.manner, message_s=0.0))
        setup = case.setups[0]
        stages, predicted = setup.parallel.pipeline, row(replace(case, sequences=0)).predicted
        messages = 0.0
        if stages > 1:
            messages = (2 if stages == 2 else 4) * (setup.recipe.accumulation + (stages - 1) / 2)
        case = replace(case, measured_s=predicted + messages * slower(at, case))
        cases.append(replace(case, manner=replace(case.manner, message_s=0.25 if before(at) else 0.0)))
    return stalls(cases)


def test_stalls_are_counted_by_version() -> None:
    found = made_up(lambda at, case: 0.25 if at % 3 == 0 else 0.0, lambda at: at % 3 == 0)
    assert 0 < found.before == found.before_stalled and found.before_wide == found.after_stalled == 0
    assert 0 < found.after == found.after_free
    assert found.seconds == {"1B": pytest.approx(0.25), "3B": pytest.approx(0.25)}
    assert found.hosts == (2, 2)
    assert found.unaware == found.ceiling, "the others are met exactly"
    assert all(tau < 1.0 for tau in found.unaware.values()), "without the version, the others alone"


def test_the_other_way_round_nothing_is_explained() -> None:
    found = made_up(lambda at, case: 0.25 if at % 3 == 0 else 0.0, lambda at: at % 2 == 0)
    assert 0 < found.before_stalled < found.before and 0 < found.after_stalled < found.after
    assert found.after == found.after_stalled + found.after_free


def test_what_depends_on_bytes_is_no_stall() -> None:
    def slower(at: int, case: Case) -> float:
        return 0.25 if at % 3 == 0 else 0.005 * case.setups[0].recipe.micro_batch

    found = made_up(slower, lambda at: at % 3 == 0)
    assert found.after_stalled == 0 < found.after_free < found.after
    with pytest.raises(ValueError, match="none of 0 runs"):
        made_up(slower, lambda at: False)


def test_the_published_runs() -> None:
    """All that were made before are stalled but where hosts wait for one another anyway; few after are."""
    found = stalls()
    assert found.before == found.before_stalled + found.before_wide and found.before_stalled > 40
    assert found.after_stalled < 0.07 * found.after < found.after_free / 10
    assert all(abs(each - 0.25) < 0.015 for each in found.seconds.values()), "held out as fitted on"
    assert all(found.unaware[cell] < found.ceiling[cell] for cell in found.unaware)
    (with_pipeline, of), (without, of_without) = found.slow_network
    assert with_pipeline / of > 0.95 > 0.2 > without / of_without


@pytest.mark.parametrize(
    ("nodes", "gather", "slow"),
    [(8, "55.4", True), (8, "175", False), (32, "13", True), (32, "74", False), (2, "160", True),
     (2, "220", False), (8, "", True), (1, "264", True)],
)  # fmt: skip
def test_the_network_is_told_by_what_a_host_adds_to_a_gather(nodes: int, gather: str, slow: bool) -> None:
    found = nanotron.of_row({"nodes": nodes, "gather_gbps": gather, "job": ""})
    assert (found.spread_host_s > 0) == slow and found.message_s == 0


@pytest.mark.parametrize(("job", "before"), [(14023848, True), (14097145, False), ("", False)])
def test_the_version_is_told_by_the_job(job: int | str, before: bool) -> None:
    found = nanotron.of_row({"nodes": 8, "gather_gbps": "55", "job": job})
    assert (found.message_s > 0) == before and found.name != NANOTRON.name


@pytest.mark.parametrize(("pipeline", "messages"), [(1, 0.0), (2, 2 * 8.5), (4, 4 * 9.5)])
def test_a_slow_message_is_waited_for_by_each_micro_batch_and_while_the_pipeline_fills(
    pipeline: int, messages: float
) -> None:
    setup = Setup(MODEL, Parallel("zero1", 4, 4, pipeline=pipeline), Recipe(2048, 2, 8))
    found, slow = (step_time(setup, CLUSTER, replace(NANOTRON, message_s=each)).total for each in (0.0, 0.25))
    assert slow - found == pytest.approx(0.25 * messages)


def test_a_slow_network_costs_layers_with_tensor_parallelism_on_several_hosts() -> None:
    slow = replace(NANOTRON, name="slow", spread_host_s=0.05)
    for tensor, data, longer in ((1, 32, False), (4, 2, False), (4, 8, True)):
        setup = Setup(MODEL, Parallel("zero1", data, data, tensor), Recipe(2048, 2, 4))
        found, slower = (step_time(setup, CLUSTER, manner).total for manner in (NANOTRON, slow))
        assert (slower > found) == longer
