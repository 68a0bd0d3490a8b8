"""Scaling curves: what grows along, where they end, and that the table agrees with the points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imece.plan.answer.scale import (
    MOST_GPUS,
    Point,
    curve,
    draw_scale,
    efficiency,
    hosts_to_try,
    scale_json,
    scale_lines,
    slower,
)
from imece.plan.answer.search import search, settled
from imece.plan.answer.words import gb, seconds, title
from tests.plan.asked import LLAMA_70B, ask


def test_it_goes_up_to_16_x_8_x_200() -> None:
    asked = ask(hosts=16, batch=1024, tensor=16, pipeline=8)
    hosts = hosts_to_try(asked)
    assert hosts[0] == 16 and hosts[-1] * 8 == MOST_GPUS == 16 * 8 * 200
    assert hosts == sorted(set(hosts))
    assert hosts_to_try(ask(gpus=7, hosts=3), 50) == [3, 6]


def test_the_largest_is_the_16_x_8_x_200_that_was_asked_for() -> None:
    asked = ask(hosts=3200, batch=200 * 64, tensor=8, pipeline=16, strategy="zero1", recompute="full")
    (point,) = curve(asked, "strong")
    assert point.gpus == 25_600 and point.candidate is not None
    parallel = point.candidate.setup.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.data) == (8, 16, 200)


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_curves(kind: str, tmp_path: Path) -> None:
    asked = ask(batch=256, tensor=1, pipeline=1)
    points = list(curve(asked, kind, 256))  # type: ignore[arg-type]
    assert [point.gpus for point in points] == [8, 16, 32, 64, 128, 256]
    expected = [256 * (1 if kind == "strong" else times) for times in (1, 2, 4, 8, 16, 32)]
    assert [point.question.global_batch for point in points] == expected
    assert all(
        each.candidate and each.candidate.setup.global_batch == b
        for each, b in zip(points, expected, strict=True)
    )
    left = [efficiency(point, points[0]) for point in points]
    assert left[0] == 1.0 and all(0 < each <= 1.02 for each in left)
    lines = list(scale_lines(points, 200))
    assert len(lines) == 1 + len(points)
    for point, line in zip(points, lines[1:], strict=True):
        assert line.split()[:3] == [
            f"{point.gpus:,}",
            f"{point.question.global_batch:,}",
            f"{point.tokens_per_s:,.0f}",
        ]
    narrow = list(scale_lines(points, 80))
    assert all(len(line) <= 80 for line in narrow) and len(narrow) > len(lines)
    assert " ".join(" ".join(narrow).split()) == " ".join(" ".join(lines).split())
    content = scale_json(points, kind)  # type: ignore[arg-type]
    assert [each["gpus"] for each in content["points"]] == [8, 16, 32, 64, 128, 256]
    if kind == "strong":
        assert left[-1] < left[1], "with less to do on each, some of the speed must go"
        draw_scale(points, "strong", tmp_path / "new" / "scale.png")
        assert (tmp_path / "new" / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("batch", "of_the_batch"),
    [
        (64, "64 sequences are too few for 100 groups of 2 GPUs, as with 128 GPUs"),
        (
            256,
            "256 sequences cannot be dealt to 200 groups of 1 GPU, as with 128 GPUs: with 200 it would be ",
        ),
    ],
)
def test_more_gpus_that_are_slower_are_told_with_the_reason(batch: int, of_the_batch: str) -> None:
    asked = ask(gpu="H100", hosts=25, batch=batch, tensor=1, context=1)
    points = [
        *curve(ask(gpu="H100", hosts=16, batch=batch, tensor=1, context=1), "strong", 128),
        *curve(asked, "strong", 200),
    ]
    assert [point.gpus for point in points] == [128, 200]
    (said,) = slower(points)
    assert scale_json(points, "strong")["notes"] == [said]
    before, now = (point.candidate for point in points)
    assert before is not None and now is not None and now.time is not None
    if batch > 200:
        even = settled(search(replace(asked, global_batch=200))).winner
        assert even is not None and even.time is not None and even.time.tokens_per_s > points[0].tokens_per_s
        of_the_batch += f"{even.time.tokens_per_s:,.0f} tokens/s"
    assert said == (
        f"200 GPUs are slower than 128: a step takes {seconds(now.seconds)} instead of "
        f"{seconds(before.seconds)}, {seconds(now.time.bubble)} a step in which stages wait for the pipeline "
        f"to fill and empty ({now.setup.recipe.accumulation} micro-batches over 25 stages); {of_the_batch}"
    )
    assert list(slower(points[:1])) == []


def test_messages_are_the_reason_where_the_batch_can_be_dealt_as_before() -> None:
    """A slow network: the batch is a multiple of all numbers of GPUs."""
    found = ask(batch=256, hosts=2, tensor=1, pipeline=1, strategy="zero1")
    slow = replace(found.cluster, between=replace(found.cluster.between, bandwidth=1e8))
    first = Point(one := ask(batch=256, tensor=1, pipeline=1), settled(search(one)).winner)
    points = [first, *curve(replace(found, cluster=slow), "strong", 16)]
    assert [point.gpus for point in points] == [8, 16]
    (said,) = slower(points)
    assert said.endswith(" exposed in gathering parameters over 2 hosts, 0.10 GB/s a GPU"), said


def test_a_batch_that_cannot_be_shared_is_a_line_of_its_own() -> None:
    points = list(curve(ask(batch=8, tensor=1, pipeline=1, context=1), "strong", 32))
    assert [point.candidate is None for point in points] == [False, True, True]
    said = "--global-batch 8 cannot be divided by 32 ranks; the nearest are 32 and 64"
    assert list(scale_lines(points, 110))[-1] == f"     32         8  {said}"
    assert [each["why_none"] for each in scale_json(points, "strong")["points"]][::2] == [None, said]
    assert efficiency(points[-1], points[0]) == 0.0


def test_what_does_not_fit_is_told_by_how_much() -> None:
    (point,) = curve(ask(LLAMA_70B, batch=8), "strong", 8)
    assert point.candidate is None and point.least is not None
    (_, line) = scale_lines([point], 200)
    needs, room = gb(point.least.needed), gb(point.question.room_bytes)
    assert line == f"      8         8  nothing fits: {title(point.least.setup)} needs {needs} of {room} GB"
