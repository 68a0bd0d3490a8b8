"""`imece bench pipeline`: ranks idle as the schedule says, and 1F1B keeps less."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from imece.bench.pipeline import pipeline
from imece.bench.pipeline.rank import Kept
from imece.model_parallel.schedules import ideal_bubble


def test_what_a_schedule_leaves_idle() -> None:
    assert ideal_bubble(1, 1, 2) == 0.5
    assert ideal_bubble(8, 1, 4) == pytest.approx(3 / 11)  # (p - 1) / (m + p - 1)
    assert ideal_bubble(8, 2, 4) == pytest.approx((3 / 16) / (1 + 3 / 16))
    assert ideal_bubble(5, 1, 1) == 0.0


@pytest.mark.slow
def test_ranks_idle_as_the_schedule_says() -> None:
    said: list[str] = []
    plan = pipeline.Plan((2,), (1, 4), ("gpipe", "1f1b"), steps=3, wait=True)
    results = pipeline.run(plan, said.append)
    found = {(row.schedule, row.micro_batches): row for row in results.rows}
    assert list(found) == [("gpipe", 1), ("gpipe", 4), ("1f1b", 4)]  # 1f1b needs one for each stage
    for row in results.rows:
        assert row.emulated and row.ideal - 0.02 < row.bubble < row.ideal + 0.25, row
    assert found["gpipe", 4].bubble < found["gpipe", 1].bubble
    assert found["1f1b", 4].kept_bytes < 0.8 * found["gpipe", 4].kept_bytes
    assert "8 blocks that only wait" in said[0]
    assert said[2].split()[:2] == ["gpipe", "1"] and "50.0%" in said[2]
    assert results.as_json()["rows"][0]["ideal"] == 0.5


def test_what_backward_needs_is_counted_once_and_no_parameters() -> None:
    layer = nn.Linear(10, 10)
    kept = Kept({layer.weight.untyped_storage().data_ptr()})
    x = torch.randn(5, 10, requires_grad=True)
    with kept.hooks():
        y = torch.sigmoid(layer(x))  # x of the one, what comes out of the other
        z = y * y  # the same once more
    assert kept.now == kept.most == 2 * 5 * 10 * 4
    z.sum().backward()
    del y, z
    gc.collect()
    assert kept.now == 0 and kept.most == 400
