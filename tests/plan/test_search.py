"""The search compared with an enumeration without shortcuts, and the laws of a ranking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imece.buckets import default_cap_bytes
from imece.plan.answer.search import (
    BUCKETS,
    SAME,
    complexity,
    hours_for,
    judge,
    pareto,
    search,
    settled,
    with_best_bucket,
    with_usual_buckets,
)
from imece.plan.answer.space import Question, setups
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import find_model
from imece.plan.speed.step_time import step_time
from tests.plan.asked import LLAMA_70B, ask


@pytest.mark.parametrize("asked", [ask(), ask(gpu="A100-40", gpus=4, batch=8)])
def test_the_search_leaves_out_nothing_that_fits(asked: Question) -> None:
    answer = search(asked)
    everything = [with_usual_buckets(setup, asked.cluster) for line in setups(asked) for setup in line]
    assert answer.considered == len(everything) > 100
    gpu = asked.cluster.gpu
    fitting = {each for each in everything if memory(each).total + gpu.overhead_bytes <= asked.room_bytes}
    assert {each.setup for each in answer.ranked} == fitting
    assert 0 < len(fitting) < len(everything)


def test_the_ranking_is_by_time_but_for_a_simpler_winner() -> None:
    answer = search(ask())
    winner, *rest = answer.ranked
    assert [each.seconds for each in rest] == sorted(each.seconds for each in rest)
    fastest = min(each.seconds for each in answer.ranked)
    near = [each for each in answer.ranked if each.seconds <= (1 + SAME) * fastest]
    assert winner in near
    assert complexity(winner.setup) == min(complexity(each.setup) for each in near)
    assert winner.time == step_time(winner.setup, answer.question.cluster)


def test_of_equally_fast_micro_batches_the_one_that_needs_least_memory_is_taken() -> None:
    answer = settled(search(ask(find_model("100M"), "RTX-4090", gpus=1, batch=256, seq=1024)))
    winner = answer.winner
    assert winner is not None
    alike = [
        each
        for each in answer.ranked
        if each.setup.parallel == winner.setup.parallel
        and each.setup.recipe.recompute == winner.setup.recipe.recompute
        and each.seconds <= (1 + SAME) * min(each.seconds for each in answer.ranked)
    ]
    assert len({each.setup.recipe.micro_batch for each in alike}) > 1, (
        "only one is fast: the test shows nothing"
    )
    assert winner.needed == min(each.needed for each in alike) < max(each.needed for each in alike)


def test_what_misses_says_the_least_it_would_need() -> None:
    asked = ask(LLAMA_70B, "H100", tensor=1, pipeline=1)
    answer = search(asked)
    assert answer.winner is None and answer.ranked == ()
    assert {each.setup.parallel.strategy for each in answer.missed} == {
        "replicate",
        "zero1",
        "zero2",
        "zero3",
    }
    for each in answer.missed:
        alike = [s for line in setups(asked) for s in line if s.parallel == each.setup.parallel]
        assert each.needed == min(judge(setup, asked.cluster).needed for setup in alike) > asked.room_bytes
    assert [each.needed for each in answer.missed] == sorted(each.needed for each in answer.missed)


def test_more_memory_finds_what_less_found_and_is_never_slower() -> None:
    small, large = search(ask(gpu="A100-40")), search(ask(gpu="A100-80"))
    assert small.winner is not None and large.winner is not None
    assert {each.setup for each in small.ranked} < {each.setup for each in large.ranked}
    none_free = search(ask(gpu="A100-40", reserve=0.0))
    assert {each.setup for each in small.ranked} < {each.setup for each in none_free.ranked}


def test_pareto_has_those_that_nothing_beats() -> None:
    answer = search(ask())
    front = pareto(answer.ranked)
    assert len(front) > 2
    for each in front:
        assert not any(o.needed <= each.needed and o.seconds < each.seconds for o in answer.ranked)
    assert {front[0].needed, front[-1].seconds} == {
        min(each.needed for each in answer.ranked),
        min(each.seconds for each in answer.ranked),
    }


def test_a_bucket_is_recommended_that_none_beats() -> None:
    asked = ask(hosts=8, batch=512, strategy="zero1", tensor=1, pipeline=1, context=1)
    answer = search(asked)
    assert answer.winner is not None
    setup = answer.winner.setup
    ways = [replace(setup, recipe=replace(setup.recipe, bucket_bytes=size)) for size in BUCKETS]
    times = [step_time(way, asked.cluster).total for way in ways]
    assert len(set(times)) > 1, "no bucket matters here: the test shows nothing"
    best = settled(answer).winner
    assert best is not None and best == judge(
        ways[BUCKETS.index(best.setup.recipe.bucket_bytes)], asked.cluster
    )
    assert best.seconds <= 1.001 * min(times)


def test_a_bucket_is_recommended_with_which_it_fits() -> None:
    """With ZeRO-2 two buckets are in memory at a time."""
    asked = ask(hosts=8, batch=512, strategy="zero2", tensor=1, pipeline=1, micro_batch=1, recompute="none")
    found = settled(search(asked)).winner
    assert found is not None and found.setup.recipe.bucket_bytes > default_cap_bytes()
    tight = replace(asked, reserve=1 - (found.needed - 1) / asked.cluster.gpu.memory_bytes)
    smaller = settled(search(tight)).winner
    assert smaller is not None and smaller.needed <= tight.room_bytes
    assert default_cap_bytes() <= smaller.setup.recipe.bucket_bytes < found.setup.recipe.bucket_bytes


def test_the_winner_is_the_fastest_when_each_way_has_its_best_buckets() -> None:
    asked = ask(gpu="H100", hosts=8, tensor=1, pipeline=1, batch=256, seq=1024)
    answer = search(asked)
    assert answer.winner is not None
    found = settled(answer).ranked
    fastest = min(with_best_bucket(each, asked).seconds for each in answer.ranked)
    assert found[0].seconds == fastest < 0.99 * with_best_bucket(answer.winner, asked).seconds
    assert found[0].setup.parallel != answer.winner.setup.parallel
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert len(found) == len(answer.ranked)


def test_hours() -> None:
    winner = search(ask()).winner
    assert winner is not None and winner.time is not None
    assert hours_for(3600 * winner.time.tokens_per_s, winner) == pytest.approx(1.0)


def test_more_than_ten_thousand_ways_are_considered() -> None:
    asked = ask(LLAMA_70B, "H100", hosts=128, batch=4096, seq=8192)
    assert search(asked).considered > 10_000
