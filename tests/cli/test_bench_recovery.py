"""`imece bench recovery`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import imece
from imece.bench.recovery import recovery
from imece.bench.recovery import targets as recovery_targets
from imece.bench.recovery.rank import SEQUENCES, SHAPE, Text
from imece.bench.recovery.record import Kills, Plan, Results
from imece.bench.recovery.runs import TorchKill, kill_under_torchrun
from imece.cli.main import main


def kills(**more: Any) -> Kills:
    """A strategy that went well, but for what is given."""
    faults = [{"step": 50, "again": more.get("again", 0), "recovery_s": seconds} for seconds in (0.5, 0.9)]
    figures = {
        "faults": faults, "survived": 2, "passed": True, "again": 2 * more.get("again", 0), "median_s": 0.7,
        "worst_s": 0.9, "seen": [(0.0, 0), (40.0, 300)],
    }  # fmt: skip
    found = Kills("zero1", 0.1, figures | more.get("drill", {}), 0.9, 1e-7, 200)
    for name in ("goodput", "difference", "compared"):
        setattr(found, name, more.get(name, getattr(found, name)))
    return found


def test_what_went_wrong_is_told() -> None:
    bad = {"passed": False, "survived": 1, "plan": {"kills": 3}, "status": 1, "left": ["process 7 (python)"]}
    assert Results(Plan(), {"zero1": kills(), "zero3": kills(drill=bad)}).wrong == [
        "zero3: 1 of 3 kills came and were survived, and the run ended with status 1; left behind: process 7 "
        "(python)"
    ]


def words(results: Results) -> list[str]:
    return [each.line.split()[0] for each in recovery_targets.judged(results)]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (kills(), ["met"] * 5),
        (kills(drill={"passed": False, "survived": 1}), ["MISSED", *["met"] * 4]),
        (kills(drill={"median_s": 1.1, "worst_s": 1.2}), ["met", "MISSED", "met", "met", "met"]),
        (kills(drill={"worst_s": 2.1}), ["met", "MISSED", "met", "met", "met"]),
        (kills(drill={"median_s": None}), ["met", "MISSED", "met", "met", "met"]),
        (kills(again=1), ["met"] * 5),
        (kills(again=2), ["met", "met", "MISSED", "met", "met"]),
        (kills(difference=2e-5), ["met", "met", "met", "MISSED", "met"]),
        (kills(difference=None), ["met", "met", "met", "--", "met"]),
        (kills(compared=40), ["met", "met", "met", "--", "met"]),  # before any kill
        (kills(goodput=0.79), ["met", "met", "met", "met", "MISSED"]),
        (kills(goodput=None), ["met"] * 4),
    ],
)
def test_the_targets_of_a_strategy(measured: Kills, expected: list[str]) -> None:
    results = Results(Plan(every_s=15.0), {"zero1": measured})
    assert words(results) == [*expected, "--", "--", "--", "--", "--"]


def test_what_was_measured_is_shown_though_nothing_was_promised() -> None:
    few = kills(compared=60)  # both kills were before
    line = recovery_targets.judged(Results(Plan(every_s=15.0), {"zero1": few}))[3].line
    assert line.split()[0] == "--" and line.endswith(f": {few.difference:.1e}")


def test_the_other_targets() -> None:
    results = Results(Plan(every_s=8.0), {"zero1": kills(goodput=0.5)})
    results.cost = {"replicate": {"cost": 0.01}, "zero1": {"cost": 0.051}}
    results.torchrun = {"as it is": [TorchKill(None, None)], "other": [TorchKill(5.6, 4)]}
    results.start = {"imece launch": [3.0, 2.0, 9.0], "torchrun": [2.0, 2.0, 10.0]}
    assert words(results) == ["met", "met", "met", "met", "--", "met", "MISSED", "--", "met", "met"]
    assert recovery_targets.judged(results)[-2].figure == "8 x"
    assert results.slower_start == 1.0


def test_what_is_said_of_torchrun() -> None:
    found = [TorchKill(None, None), TorchKill(4.25, 3), TorchKill(6.0, 9)]
    text = "came back in 2 of 3 runs, after 4.2 to 6.0 s, 3 to 9 steps made again"
    assert recovery.torchrun_text(found) == text
    assert recovery.torchrun_text(found[:1]) == "came back in 0 of 1 runs (given up after 45 s)"


@pytest.mark.parametrize(("step_s", "calm"), [(0.1, 8.0), (0.125, 10.0), (0.1, None)])
def test_goodput_is_of_the_fastest_undisturbed_run(step_s: float, calm: float | None) -> None:
    figures = {"hit_steps_per_s": 9.0, "calm_steps_per_s": calm}
    assert recovery.goodput(step_s, figures) == pytest.approx(0.9)
    assert recovery.goodput(step_s, figures | {"hit_steps_per_s": None}) is None


def test_how_far_apart_parameters_are() -> None:
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    assert recovery.difference(one, one) == 0.0
    other = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 0.5])}
    assert recovery.difference(other, one) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="other parameters"):
        recovery.difference({"a": one["a"]}, one)


def test_a_global_batch_is_the_same_for_any_world() -> None:
    text = Text()
    whole = text.batch(5, 0, 1)
    assert whole.shape == (SEQUENCES, SHAPE.length + 1) and len(whole.unique()) > 20
    for ranks in (2, 3, 5):
        assert torch.equal(torch.cat([text.batch(5, rank, ranks) for rank in range(ranks)]), whole)
    assert not torch.equal(text.batch(6, 0, 1), whole)


def test_what_is_measured_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for whoever is where the package lies, and has a path of their own."""
    package, found = Path(imece.__file__).parent, []
    (tmp_path / "theirs.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(package.parent)

    def asks(results: Results, folder: Path, say: Callable[[str], None]) -> None:
        text = "import imece.bench.recovery.targets as asked, theirs; print(asked.__file__)"
        said = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout
        found.append(Path(said.strip()))
        assert found[0].is_file()

    monkeypatch.setattr(recovery, "_kills", asks)
    before = dict(os.environ)
    recovery.run(Plan(parts=("kills",)), print)
    (copy,) = found
    assert copy.parts[-4:] == ("imece", "bench", "recovery", "targets.py") and package not in copy.parents
    assert not copy.exists() and dict(os.environ) == before, "nothing of it is left"


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "recovery.json"
    assert main(["bench", "recovery", "--quick", "--strategies", "zero1", "--json", str(figures)]) == 0
    shown = capsys.readouterr().out
    assert "zero1: every kill survived, nothing left behind: 1 of 1" in shown
    found = json.loads(figures.read_text())
    row = found["kills"]["zero1"]
    assert row["drill"]["passed"] and 0 < row["goodput"] < 1.5 and row["difference"] < 1e-5
    assert len(found["cost"]["zero1"]["plain_s"]) == 2


@pytest.mark.slow
def test_a_kill_under_torchrun(tmp_path: Path) -> None:
    environ = recovery.TORCHRUN["without a shared store"]
    found = kill_under_torchrun(2, 3, tmp_path, random.Random(0), environ)
    assert found.recovery_s is not None and found.again is not None
    assert 0.5 < found.recovery_s < 45 and 0 <= found.again <= 4
