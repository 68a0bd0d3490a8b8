"""Each loser has its figure, each gain is true when it is tried, and nothing fits is said with what would."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from imece.plan.answer.explain import eight_bit, gains, others, parts, why_not
from imece.plan.answer.search import Answer, judge, search
from imece.plan.answer.shortfall import least, state_arithmetic, ways
from imece.plan.answer.space import Question
from imece.plan.answer.words import NAMES, gb, meanings, seconds, share, strategy_name, title
from imece.plan.hardware import find_gpu, gpu_names
from tests.plan.asked import LLAMA_70B, ask


@pytest.fixture(scope="module")
def answer() -> Answer:
    return search(ask(gpu="A100-40", batch=128))


@pytest.fixture(scope="module")
def too_large() -> Question:
    return ask(LLAMA_70B, "H100", batch=128)


def test_each_strategy_has_a_line_with_its_figure(answer: Answer) -> None:
    assert answer.winner is not None
    found = others(answer)
    plain = [strategy_name(each.candidate.setup.parallel) for each in found]
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"} <= {*plain, strategy_name(answer.winner.setup.parallel)}
    assert len(set(plain)) == len(plain)
    for each in found:
        assert re.search(r"\d", each.sentence) and "\n" not in each.sentence
        assert gb(each.candidate.needed) in each.sentence
        if each.candidate.time is None:
            assert each.sentence.startswith("does not fit: needs ")
        elif each.candidate.seconds > 1.02 * answer.winner.seconds:
            slower = re.search(r"(\d+) % slower: ", each.sentence)
            assert slower, each.sentence
            assert int(slower[1]) == round(100 * (each.candidate.seconds / answer.winner.seconds - 1))


def test_ddp_does_not_fit_because_of_its_state(answer: Answer) -> None:
    ddp = next(each for each in others(answer) if each.name == "DDP")
    state = 16 * answer.question.model.parameters
    assert ddp.sentence.endswith(f"whole on each GPU take {gb(state)}")


def test_gains_are_true(answer: Answer) -> None:
    """What is said of a larger micro-batch, computed once more here."""
    winner = answer.winner
    assert winner is not None
    said = gains(answer)
    missing = [re.search(r"micro-batch (\d+) would be .* needs ([\d.]+) GB more", each) for each in said]
    found = [each for each in missing if each]
    assert found, said
    micro, short = int(found[0][1]), float(found[0][2])
    recipe = winner.setup.recipe
    times = micro // recipe.micro_batch
    larger = replace(recipe, micro_batch=micro, accumulation=recipe.accumulation // times)
    needed = judge(replace(winner.setup, recipe=larger), answer.question.cluster).needed
    assert (needed - answer.question.room_bytes) / 1e9 == pytest.approx(short, rel=0.05)


def test_a_slow_network_is_named_with_its_rate() -> None:
    asked = ask(hosts=4, batch=256, tensor=1, pipeline=1, micro_batch=1, recompute="none")
    slow = replace(asked.cluster, between=replace(asked.cluster.between, bandwidth=1.25e9))
    found = search(replace(asked, cluster=slow))
    said = gains(found)
    assert any("links of 2.5 instead of 1.2 GB/s between hosts" in each for each in said), said
    lost = [each.sentence for each in others(found)]
    assert any("exposed in" in each and "over 4 hosts, 1.2 GB/s a GPU" in each for each in lost), lost


def test_parts_add_up_to_the_step(answer: Answer) -> None:
    for each in answer.ranked[::40]:
        assert each.time is not None
        assert sum(parts(each.time).values()) == pytest.approx(each.seconds)


def test_every_word_of_the_title_is_explained(answer: Answer) -> None:
    cluster = answer.question.cluster
    for each in answer.ranked[::20]:
        words = [word for word, _ in meanings(each.setup, cluster)]
        for word in title(each.setup).split(", "):
            known = any(word.startswith(known) or known in word for known in words)
            assert known or word.endswith(" accumulated") or "chunks" in word or word == "one GPU", (
                word,
                words,
            )


def test_every_strategy_has_a_name() -> None:
    assert len(set(NAMES.values())) == 6


def test_nothing_fits_says_by_how_much_and_what_would(too_large: Question) -> None:
    answer = search(too_large)
    assert answer.winner is None
    smallest = least(answer)
    assert smallest.needed == min(each.needed for each in answer.missed)
    found = ways(too_large, [find_gpu(name) for name in gpu_names()])
    assert any(way.fits for way in found)
    for way in found:
        assert (way.least.needed <= way.question.room_bytes) == way.fits
        assert ("fits in" in way.sentence) == way.fits
    names = [way.name for way in found]
    assert "--adapters qlora" in names and "--optimizer adamw-8bit" in names
    assert names[-1] == "--gpus 8xH100 --hosts 2"


def test_the_state_is_sixteen_bytes_a_parameter(too_large: Question) -> None:
    said = state_arithmetic(too_large)
    assert said.startswith("2 + 2 + 4 + 4 + 4 = 16 bytes a parameter x 70.6B = 1,129 GB; 8 GPUs have 684 GB")
    assert state_arithmetic(eight_bit(too_large)).startswith("2 + 2 + 4 + 1 + 1 = 10 bytes")


def test_why_not_of_what_only_activations_burst() -> None:
    asked = ask(gpu="A100-40", strategy="zero3", tensor=1, pipeline=1, micro_batch=8, recompute="none")
    found = search(asked)
    assert found.winner is None
    assert "the largest are activations" in why_not(found.missed[0], asked)


def test_figures_in_words() -> None:
    assert [gb(number) for number in (31.2e9, 1.129e12, 0.22e9, 2e9)] == ["31.2", "1,129", "0.22", "2.0"]
    assert [seconds(n) for n in (23.94, 1.234, 0.2144, 0.00333, 119.4)] == [
        "23.9 s", "1.23 s", "214 ms", "3.33 ms", "119 s",
    ]  # fmt: skip
    assert [share(part, 8) for part in (1, 0.01, 8)] == ["12 %", "under 1 %", "100 %"]
