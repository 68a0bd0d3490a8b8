"""`imece bench tensor`: every way trains one model; divided logits need less than whole ones."""

from __future__ import annotations

import pytest
import torch

from imece.bench.tensor import tensor
from imece.bench.tensor.rank import most_bytes
from imece.bench.tensor.ways import WAYS


@pytest.mark.slow
def test_all_ways_train_the_same_and_divided_logits_take_less() -> None:
    said: list[str] = []
    results = tensor.run(tensor.Plan(2, (256,), (16384,), rounds=1, steps=1), said.append)
    found = {row.way: row for row in results.rows}
    assert list(found) == list(WAYS) and not results.wrong
    assert all(row.step_s > 0 for row in results.rows)
    logits = 256 * 16384 * 4  # bytes
    whole, divided = (found[way].memory_bytes for way in ("imece, whole logits", "imece"))
    assert whole - divided > 0.9 * logits  # half of them, and half of their gradient
    assert divided < 0.7 * found["one rank"].memory_bytes
    assert "2 ranks, 256 tokens a step, a vocabulary of 16,384" in said[0]
    assert [line.split("  ")[1] for line in said[2 : 2 + len(WAYS)]] == list(WAYS)
    assert results.as_json()["rows"][0]["way"] == "one rank"


def test_memory_is_what_is_there_at_once() -> None:
    def run() -> None:
        first = torch.ones(1000)
        second = first + first
        del first
        torch.ones(500).add_(second[:500])

    assert 8000 <= most_bytes(run) < 8500


def test_a_loss_that_is_not_that_of_one_rank_is_told() -> None:
    rows = [tensor.Row(way, 512, 128, [1.0], loss, 1) for way, loss in (("one rank", 6.0), ("torch", 6.1))]
    assert tensor.Results(tensor.Plan(), rows).wrong == ["torch: a loss of 6.1, and 6 on one rank"]
    rows[1] = tensor.Row("torch", 512, 128, [1.0], float("nan"), 1)
    assert tensor.Results(tensor.Plan(), rows).wrong
    rows[1] = tensor.Row("torch", 512, 128, [1.0], 6.0001, 1)
    assert not tensor.Results(tensor.Plan(), rows).wrong
