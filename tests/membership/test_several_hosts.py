"""Ranks of several hosts go on: state spread over hosts comes from copies on all of them."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.membership.agents import STEPS, Agents, difference, learn, learn_dying_again, learnt_alone
from tests.membership.deaths import death
from tests.membership.deaths import difference as difference_of_runs
from tests.train.command import in_fork, train
from tests.train.compare import summary
from tests.train.small import options

ROUNDING = 1e-5  # relative: other ranks sum the same samples in another order


def survive(strategy: str, deaths: dict[int, tuple[int, str]], ranks: int = 4, per_host: int = 2) -> Any:
    """What the survivors have seen, which is the same on all, and have learnt what there was to learn."""
    said = {str(member): list(death) for member, death in deaths.items()}
    with Agents(learn, ranks, ranks_per_host=per_host, args=[strategy, said]) as agents:
        results = agents.watch()
    assert sorted(agents.dead) == sorted(deaths)
    assert all(results[member].returncode == -signal.SIGKILL for member in deaths)
    others = [results[member] for member in results if member not in deaths]
    assert others and all(result.ok for result in others), "\n".join(each.report() for each in others)
    expected = learnt_alone()
    for result in others:
        assert difference(result.value["parameters"], expected) < ROUNDING
        assert result.value["told"] == others[0].value["told"] != []
    return others[0].value["told"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2"])
@pytest.mark.parametrize("place", ["backward", "step"])
def test_a_rank_whose_host_has_another(strategy: str, place: str) -> None:
    ((_, step, lost, hosts),) = survive(strategy, {2: (5, place)})
    assert step >= 5 and lost <= 1 and hosts == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_while_parameters_come(strategy: str) -> None:
    """The others have left the step, whose values they will never have from it, and run the next forward."""
    ((_, step, lost, hosts),) = survive(strategy, {2: (5, "gather")})
    assert step >= 5 and lost <= 1 and hosts == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "hybrid", "hybrid_zero2"])
def test_a_whole_host(strategy: str) -> None:
    told = survive(strategy, {0: (5, "backward"), 1: (5, "backward")})
    assert sum(lost for _, _, lost, _ in told) <= 1 and told[-1][3] == [2]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hybrid"])
def test_one_rank_of_each_host_one_after_the_other(strategy: str) -> None:
    told = survive(strategy, {0: (4, "backward"), 3: (8, "step")})
    assert all(lost <= 1 for _, _, lost, _ in told) and told[-1][3] == [1, 1]


@pytest.mark.slow
def test_a_part_that_is_gone_with_its_host() -> None:
    with Agents(learn, 4, ranks_per_host=2, args=["zero3", {"2": [5, "step"], "3": [5, "step"]}]) as agents:
        results = agents.watch()
    for member in (0, 1):
        assert results[member].returncode == 1
        assert "LostStateError" in results[member].error_text
        assert re.search(r"until step [56] is lost", results[member].error_text)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3", "hybrid"])
@pytest.mark.parametrize("leaving", [[2, 3], [1]])
def test_members_leave_in_order(strategy: str, leaving: list[int]) -> None:
    with Agents(learn, 4, ranks_per_host=2, args=[strategy, {}], pause=3) as agents:
        agents.watch(until=lambda: agents.steps() >= 3)
        agents.publish(range(4), leaving)
        agents.go_on()
        results = agents.watch()
    assert agents.dead == [] and [each.returncode for each in results.values()] == [0] * 4
    assert all(results[member].value == {"left": 0} for member in leaving)
    expected, stayed = learnt_alone(), [results[member] for member in results if member not in leaving]
    for result in stayed:
        assert difference(result.value["parameters"], expected) < ROUNDING
        (number, step, lost, hosts), *more = result.value["told"]
        assert lost == 0 and 3 <= step < STEPS and sum(hosts) == 4 - len(leaving)
        assert number >= 2 and all(told[2] == 0 for told in more)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero3", "hybrid"])
def test_a_member_joins(strategy: str) -> None:
    with Agents(learn, 4, ranks_per_host=2, args=[strategy, {"3": [2, "backward"]}], pause=4) as agents:
        agents.watch(until=lambda: agents.dead == [3] and agents.steps() >= 4)
        joins = agents.join(host=1)
        agents.watch(until=lambda: agents.is_ready(joins))
        agents.publish([*agents.generation.members, joins])
        agents.go_on()
        results = agents.watch()
    expected = learnt_alone()
    assert [member for member, each in results.items() if not each.ok] == [3]
    for member in (0, 1, 2, joins):
        assert difference(results[member].value["parameters"], expected) < ROUNDING
        assert results[member].value["told"][-1][2:] == [0, [2, 2]]


@pytest.mark.parametrize(
    ("strategy", "per_host", "gather"),
    [
        ("zero3", 3, True),
        pytest.param("zero3", 3, False, marks=pytest.mark.slow),
        pytest.param("zero3", 2, False, marks=pytest.mark.slow),
        pytest.param("hybrid", 2, True, marks=pytest.mark.slow),
        pytest.param("hybrid", 2, False, marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_come_back(strategy: str, per_host: int, gather: bool) -> None:
    """Rank 0 dies, and a member joins that has other values."""
    ranks, args = 3 if per_host == 3 else 4, [strategy, {"0": [2, "step"]}, gather, True]
    with Agents(learn, ranks, ranks_per_host=per_host, args=args, pause=4) as agents:
        agents.watch(until=lambda: agents.dead == [0] and agents.steps() >= 4)
        joins = agents.join(host=0)
        agents.watch(until=lambda: agents.is_ready(joins))
        agents.publish([joins, *agents.generation.members])
        agents.go_on()
        results = agents.watch()
    expected = learnt_alone(frozen=True)
    for member in (*range(1, ranks), joins):
        assert results[member].ok, results[member].report()
        assert difference(results[member].value["parameters"], expected) < ROUNDING
        assert results[member].value["told"][-1][2] == 0


def test_frozen_parameters_that_are_on_their_way() -> None:
    """A second rank dies while it gives the others of its host what it has in memory common with them."""
    args = [0, "moving", "zero3", {"2": [2, "backward"]}, False, True]
    with Agents(learn_dying_again, 3, ranks_per_host=3, args=args) as agents:
        results = agents.watch()
    assert sorted(agents.dead) == [0, 2]
    assert results[1].ok, results[1].report()
    assert difference(results[1].value["parameters"], learnt_alone(frozen=True)) < ROUNDING


def test_frozen_parameters_that_are_lost() -> None:
    """What a host had in common is in parts when another one joins, and that dies before there are copies."""
    args = [4, "moved", "zero3", {}, False, True]
    with Agents(learn_dying_again, 4, ranks_per_host=2, args=args, pause=2) as agents:
        agents.watch(until=lambda: agents.steps() >= 2)
        agents.publish(range(4), leaving=[2, 3])
        agents.go_on(pause=4)
        agents.watch(until=lambda: agents.generation.members == (0, 1) and agents.steps() >= 4)
        joins = agents.join(host=1)
        agents.watch(until=lambda: agents.is_ready(joins))
        agents.publish([0, 1, joins])
        agents.go_on()
        results = agents.watch()
    assert results[joins].returncode == -signal.SIGKILL
    for member in (0, 1):
        assert "LostStateError" in results[member].error_text, results[member].report()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["store", "generation"])
def test_the_store_to_meet_in_moves(first: str) -> None:
    """For two seconds nobody serves it: before a new generation is named, or after it."""
    with Agents(learn, 4, ranks_per_host=2, args=["zero1", {}], pause=3) as agents:
        agents.watch(until=lambda: agents.steps() >= 3)
        agents.tunnel.lead_to(None)
        port = agents.serve_elsewhere()
        agents.signal(3, signal.SIGKILL)
        agents.go_on()
        if first == "generation":
            agents.watch(until=lambda: agents.dead == [3])
        time.sleep(2)
        agents.tunnel.lead_to(port)
        results = agents.watch()
    assert agents.dead == [3]
    for member in range(3):
        assert results[member].ok, results[member].report()
        assert difference(results[member].value["parameters"], learnt_alone()) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "hybrid"])
def test_a_host_falls_silent(strategy: str) -> None:
    """Its connections stay as they are, and nothing comes over them any more."""
    with Agents(learn, 4, ranks_per_host=2, args=[strategy, {}], pause=3) as agents:
        agents.watch(until=lambda: agents.steps() >= 3)
        for member in (2, 3):
            agents.signal(member, signal.SIGSTOP)
        agents.go_on()
        time.sleep(0.5)  # the others wait for them now
        agents.publish([0, 1])
        began = time.monotonic()
        agents.watch(until=lambda: agents.result(0).finished and agents.result(1).finished)
        print(f"\nwent on to the end {time.monotonic() - began:.1f} s after the others were given up")
    for member in (0, 1):
        value = agents.result(member).value
        assert difference(value["parameters"], learnt_alone()) < ROUNDING
        assert value["told"][-1][2:] == [0, [2]]


def two_hosts() -> None:
    """For a forked launcher: ranks 0 and 1 are on another host than 2 and 3."""
    for place in ("imece.launchers.host_id", "imece.meeting.host_id"):
        mock.patch(place, lambda *_: f"host {int(os.environ.get('LOCAL_RANK', 0)) // 2}").start()


def loses_a_host(folder: str) -> list[str]:
    """`imece train` on two hosts, of which one is gone after a checkpoint. What it has said."""
    path, words = Path(folder), ["--ranks=4", "--steps=12", "--strategy=zero1", "--checkpoint.every=4"]
    assert train(options(path, "whole", *words), path).status == 0
    kill = death("backward", [2, 3], 6)

    def fault() -> None:
        two_hosts()
        kill()

    outcome = train(options(path, "run", *words), path, fault=fault)
    assert outcome.status == 0, outcome
    assert difference_of_runs(path / "run", path / "whole") < ROUNDING
    assert summary(path / "run")["steps"] == 12
    return outcome.out.splitlines()


@pytest.mark.slow
def test_back_to_the_checkpoint(tmp_path: Path) -> None:
    said = in_fork(loses_a_host, str(tmp_path))
    assert any("back to the checkpoint of step 4: 2 steps are lost" in line for line in said), said
