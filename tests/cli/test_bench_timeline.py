"""The timeline of a step: arithmetic, the file for Perfetto, the table and the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from imece.bench.step import timeline
from imece.data_parallel.reducing.trace import BucketTrace, StepTrace

# Backward from 1.0 to 3.0 s; bucket 2 leaves before bucket 1 is over, bucket 3 after the last gradient.
STEP = StepTrace(
    forward_start_s=0.5, backward_start_s=1.0, backward_end_s=3.0, end_s=4.5,
    buckets=[
        BucketTrace(0, 1024, 1.2, 1.3, 1.5),
        BucketTrace(1, 2048, 2.0, 2.0, 3.2),
        BucketTrace(2, 4096, 2.5, 2.6, 3.6),
        BucketTrace(3, 8192, 3.0, 3.7, 4.2),
    ],
)  # fmt: skip


def test_communication_is_hidden_until_the_last_gradient_and_exposed_after_it() -> None:
    hidden = [timeline.hidden_s(bucket, STEP) for bucket in STEP.buckets]
    exposed = [timeline.exposed_s(bucket, STEP) for bucket in STEP.buckets]
    assert hidden == pytest.approx([0.2, 1.0, 0.4, 0.0])
    assert exposed == pytest.approx([0.0, 0.2, 0.6, 0.5])


def test_collectives_under_way_together_have_different_rows() -> None:
    assert timeline.rows(STEP.buckets) == [0, 0, 1, 0]
    assert timeline.rows(STEP.buckets[::-1]) == [0, 1, 0, 0]
    back_to_back = [BucketTrace(at, 1, at, float(at), at + 1.0) for at in range(5)]
    assert timeline.rows(back_to_back) == [0] * 5
    together = [replace(bucket, done_s=9.0) for bucket in back_to_back]
    assert timeline.rows(together) == [0, 1, 2, 3, 4]
    spans = ((0.0, 2.0), (1.0, 10.0), (3.0, 9.0), (4.0, 5.0))
    mixed = [BucketTrace(at, 1, begin, begin, end) for at, (begin, end) in enumerate(spans)]
    assert timeline.rows(mixed) == [0, 1, 0, 2]
    assert timeline.rows([]) == []


def test_the_table_tells_compute_and_each_bucket() -> None:
    head, communication, columns, *buckets = timeline.table(STEP)
    assert "step 4000.0 ms: compute 2500.0 (forward 500.0, backward 2000.0), then exposed 1500.00" in head
    # Buckets 1 and 2 overlap: 0.2 + 1.6 + 0.5 s under way, of which 0.2 + 1.0 before the last gradient.
    assert "communication 2300.00 ms in 4 buckets, 1200.00 of it hidden" in communication
    assert " ".join(columns.split()) == "bucket bytes ready launched done took ms hidden exposed"
    assert " ".join(buckets[1].split()) == "1 2,048 1500.00 1500.00 2700.00 1200.00 1000.00 200.00"
    assert len(buckets) == 4
    assert len(timeline.table(replace(STEP, buckets=[]))) == 2


def test_perfetto_gets_every_span_of_every_rank() -> None:
    second = replace(
        STEP, forward_start_s=4.6, backward_start_s=5.0, backward_end_s=6.0, end_s=6.0, buckets=[]
    )
    trace: dict[str, Any] = json.loads(json.dumps(timeline.chrome_trace({0: [STEP, second], 3: [STEP]})))
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ranks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert ranks == {1: "rank 0", 4: "rank 3"}  # pid 0 is the idle task to Perfetto
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == (3 + 4) + 3 + (3 + 4)
    assert {(e["pid"], e["tid"]) for e in spans} == set(names)
    [bucket] = [e for e in spans if e["pid"] == 1 and e["name"] == "bucket 2"]
    assert names[1, bucket["tid"]] == "communication 2"
    assert (bucket["ts"], bucket["dur"]) == pytest.approx((2.1e6, 1.0e6))
    assert bucket["args"]["bytes"] == 4096 and bucket["args"]["exposed_us"] == pytest.approx(0.6e6)
    exposed = [e for e in spans if e["name"] == "exposed" and e["pid"] == 1]
    assert [e["dur"] for e in exposed] == pytest.approx([1.5e6, 0.0])
    for place in names:  # a viewer nests spans of a row, so they must follow one another
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == place)
        assert row[0][0] >= 0
        assert all(before[1] <= after[0] + 1e-3 for before, after in zip(row, row[1:], strict=False))


def test_no_step_is_an_empty_trace_and_no_picture(tmp_path: Path) -> None:
    assert timeline.chrome_trace({})["traceEvents"] == []
    with pytest.raises(ValueError, match="no step to draw"):
        timeline.draw({0: []}, tmp_path / "none.png")


def test_the_picture_shows_how_much_is_exposed(tmp_path: Path) -> None:
    quiet = replace(STEP, end_s=3.0, buckets=[replace(STEP.buckets[0], done_s=1.6)])
    red: dict[str, int] = {}
    for name, step in (("loud", STEP), ("quiet", quiet)):
        file = tmp_path / "new" / f"{name}.png"
        timeline.draw({0: [quiet, step], 1: [quiet, step]}, file, "a title")
        pixels = matplotlib.image.imread(file)[..., :3]
        assert pixels.shape[0] > 800 and pixels.shape[1] > 1500
        red[name] = int(((pixels - (0xCC / 255, 0x41 / 255, 0x25 / 255)) ** 2).sum(-1).__lt__(0.001).sum())
    assert red["quiet"] < 2_000  # the legend and the words
    assert red["loud"] > red["quiet"] + 20_000
