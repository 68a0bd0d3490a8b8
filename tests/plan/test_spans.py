"""The picture's time axis: nothing overlaps in a lane, and lengths are those of step_time."""

from __future__ import annotations

from collections import defaultdict

import pytest

from imece.plan.answer.search import search
from imece.plan.answer.spans import spans, what_is_drawn
from imece.plan.speed.manner import IMECE
from imece.plan.speed.stage import stage_time
from imece.plan.speed.synchronise import synchronise
from tests.plan.asked import ask


def test_what_is_gathered_once_a_step_is_drawn_whole() -> None:
    """ZeRO-2 sums gradients in every micro-batch, and gathers parameters once, like ZeRO-1."""
    asked = ask(strategy="zero2", tensor=1, pipeline=1, micro_batch=1)
    setup = next(each.setup for each in search(asked).ranked if each.setup.recipe.accumulation > 1)
    found = synchronise(setup, asked.cluster, IMECE, stage_time(setup, asked.cluster, IMECE))
    bars = spans(setup, asked.cluster)
    names = [bar.name for bar in bars]
    optimizer, exposed, following = (
        bars[names.index(name)] for name in ("optimizer", "exposed: parameters", "next forward")
    )
    assert optimizer.stop_s == exposed.start_s and exposed.stop_s == following.start_s
    assert exposed.stop_s - exposed.start_s == pytest.approx(found.parameters)
    assert names.index("gathers parameters") > names.index("next forward")
    assert min(bar.start_s for bar in bars if bar.name == "gathers parameters") >= optimizer.stop_s
    assert what_is_drawn(setup).endswith("the end of its step and the next forward, s")
    gathers, sums = (
        sum(bar.stop_s - bar.start_s for bar in bars if bar.name == name)
        for name in ("gathers parameters", "sums gradients")
    )
    whole = found.parameters + found.gradients + found.hidden
    assert gathers + setup.recipe.accumulation * sums == pytest.approx(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "replicate", "gpu": "H200"},
        {"strategy": "zero1"},
        {"strategy": "zero2", "micro_batch": 8},
        {"strategy": "zero3", "recompute": "full"},
        {"pipeline": 4, "interleave": 1, "micro_batch": 1},
        {"pipeline": 4, "interleave": 4, "micro_batch": 1},
        {"pipeline": 4, "interleave": 2, "micro_batch": 2, "batch": 16},
        {"tensor": 2},
        {"context": 8, "gpu": "H200", "gpus": 1, "hosts": 8},
    ],
)
def test_lanes(changes: dict[str, object]) -> None:
    asked = ask(**{"tensor": 1, "pipeline": 1} | changes)  # type: ignore[arg-type]
    winner = search(asked).winner
    assert winner is not None and winner.time is not None
    found = spans(winner.setup, asked.cluster)
    lanes = defaultdict(list)
    for span in found:
        assert 0 <= span.start_s <= span.stop_s
        lanes[span.lane].append(span)
    for lane in lanes.values():
        for one, other in zip(lane, lane[1:], strict=False):
            assert other.start_s >= one.stop_s - 1e-9, (one, other)
    stage = stage_time(winner.setup, asked.cluster, IMECE)
    if asked.pipeline == 1:
        assert (stage.context > 0) == (asked.context == 8)
        drawn = (
            ("forward", stage.forward),
            ("backward", stage.backward),
            ("exposed: context", stage.context),
        )
        for name, long in drawn:
            assert sum(s.stop_s - s.start_s for s in found if s.name == name) == pytest.approx(long)
        if winner.setup.recipe.accumulation == 1 and asked.strategy == "zero2":  # gathered beside its forward
            (forward,) = (span for span in found if span.name == "forward")
            assert all(s.start_s < forward.stop_s for s in found if s.name == "gathers parameters")
    else:
        batches = min(winner.setup.recipe.accumulation, 8)
        assert list(lanes) == ["stage 1", "stage 2", "stage 3", "stage 4"]
        chunks = winner.setup.parallel.interleave
        assert chunks == asked.interleave
        assert all(len(lane) == 2 * batches * chunks for lane in lanes.values())
        whole = max(span.stop_s for span in found)
        assert whole == pytest.approx((batches + 3 / chunks) * stage.total, rel=1e-6)  # the classic bubble
        assert "A step of the chosen way" in what_is_drawn(winner.setup)
