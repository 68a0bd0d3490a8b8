"""`imece bench gpu`: figures, targets, and a whole run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from imece.bench.gpu.gpu import Plan, Results, lines
from imece.bench.gpu.targets import judged
from imece.bench.gpu.ways import (
    BARE,
    COMPILED,
    FLAT,
    FOREACH,
    FULLY_SHARD,
    FUSED,
    OURS,
    STRATEGIES,
    TORCH,
    ZERO3,
    Timed,
    syncs_of,
)
from imece.cli.main import main


def results(ours_s: float, *, peak: int = 50, syncs: float = 0.0, loss: float = 7.0) -> Results:
    """A run of which only imece's figures vary."""
    ways = {
        BARE: [Timed(1.0, 7.0, 40), Timed(2.0, 7.0, 40)],
        OURS: [Timed(ours_s, loss, peak, syncs), Timed(2 * ours_s, loss, peak, syncs)],
        TORCH: [Timed(1.02, 7.0, 50), Timed(2.04, 7.0, 50)],
        COMPILED: [Timed(0.5, 7.01, 30), Timed(0.7, 7.01, 30)],
        ZERO3: [Timed(0.9, 7.0, 55), Timed(1.9, 7.0, 45)],
        FULLY_SHARD: [Timed(1.0, 7.0, 50), Timed(2.0, 7.0, 50)],
    }
    optimizers = {FLAT: [0.1, 0.3], FUSED: [0.1, 0.2], FOREACH: [0.2, 0.6]}
    return Results(Plan(rounds=2), "a GPU", 10**9, 8192, 6e12, 2e13, ways, optimizers, 0.004)


def test_ratios_are_of_rounds_and_shares_of_the_matrix_rate() -> None:
    found = [each.measured for each in judged(results(1.005))]
    assert found == pytest.approx([1.005, 1.005 / 1.02, 1.0, 0.0, 0.5, 0.004, 0.925, 0.9, 1.25, 0.5])


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (results(1.005), 1),  # the optimizer, beside the fused one
        (results(1.03), 3),
        (results(1.005, peak=51), 2),
        (results(1.005, syncs=1.0), 2),
    ],
)
def test_what_is_worse_than_promised_is_missed(run: Results, missed: int) -> None:
    assert sum(each.met is False for each in judged(run)) == missed


def test_what_was_not_measured_is_said_so() -> None:
    nothing = Results(Plan(parts=()))
    assert all("not measured" in each.line for each in judged(nothing))
    assert lines(nothing)


def test_a_way_that_trains_something_else_is_noticed() -> None:
    assert results(1.0).wrong == []
    for loss in (7.2, float("nan")):
        (line,) = results(1.0, loss=loss).wrong
        assert line.startswith(f"{OURS} did not train")


def profiled(*named: tuple[str, float, float]) -> list[Any]:
    """Events of a profile: name, begin and end."""
    return [
        SimpleNamespace(
            name=name, time_range=SimpleNamespace(start=start, end=end), device_type=DeviceType.CPU
        )
        for name, start, end in named
    ]


def test_waits_are_those_inside_steps() -> None:
    events = profiled(
        ("step", 0, 10), ("cudaLaunchKernel", 1, 2), ("cudaStreamSynchronize", 3, 4), ("cudaMemcpy", 5, 6),
        ("cudaMemcpyAsync", 6, 7), ("cudaStreamWaitEvent", 7, 8), ("step", 10, 20),
        ("cudaDeviceSynchronize", 21, 22),
    )  # fmt: skip
    assert syncs_of(events) == 1.0


def test_a_profile_that_saw_nothing_of_the_gpu_says_nothing_of_waits() -> None:
    assert syncs_of(profiled(("step", 0, 10))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--device", "cpu", "--model", "tiny", "--sequences", "1", "--rounds", "1", "--steps", "1"],
        pytest.param(["--model", "small", "--rounds", "1", "--steps", "2"], marks=pytest.mark.gpu),
    ],
)
def test_all_parts_run(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", *words, "--json", str(tmp_path / "gpu.json")]) == 0
    out = capfd.readouterr().out
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert set(content["ways"]) == {BARE, OURS, TORCH, COMPILED, *STRATEGIES}
    assert set(content["optimizers"]) == {FLAT, FUSED, FOREACH}
    on_cpu = "cpu" in words
    unmeasured = [at for at, each in enumerate(content["targets"]) if each["measured"] is None]
    assert unmeasured == ([2, 3, 7] if on_cpu else []), "a CPU counts no peaks and no waits"
    judged_lines = sum(line.strip().startswith(("met", "MISSED")) for line in out.splitlines())
    assert judged_lines == (0 if on_cpu else len(content["targets"]))
    assert ("none is judged, for --device cpu is not to quote" in out) == on_cpu
