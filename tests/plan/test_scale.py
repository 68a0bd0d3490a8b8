"""Scaling curves: what grows along, where they end, and that the table says what the points are."""

from __future__ import annotations

from pathlib import Path

import pytest

from imece.plan.answer.scale import (
    MOST_GPUS,
    curve,
    draw_scale,
    efficiency,
    hosts_to_try,
    scale_json,
    scale_lines,
    slower,
)
from tests.plan.asked import ask


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


def test_more_gpus_that_are_slower_are_told_with_the_reason() -> None:
    points = list(curve(ask(gpu="H100", hosts=5, tensor=1), "strong", 200))
    points = [*curve(ask(gpu="H100", hosts=16, tensor=1), "strong", 128), *points[-1:]]
    assert [point.gpus for point in points] == [128, 200]
    said = (
        "200 GPUs are slower than 128: 64 sequences can be dealt to 8 groups of 25 GPUs at most, each with a "
        "model of its own; 128 GPUs may be groups of 2"
    )
    assert list(slower(points)) == scale_json(points, "strong")["notes"] == [said]
    assert list(slower(points[:1])) == []


def test_a_batch_that_cannot_be_shared_is_a_line_of_its_own() -> None:
    points = list(curve(ask(batch=8, tensor=1, pipeline=1), "strong", 32))
    assert [point.candidate is None for point in points] == [False, True, True]
    assert "cannot be divided" in list(scale_lines(points, 110))[-1]
    assert efficiency(points[-1], points[0]) == 0.0
