"""`imece bench train`: its arithmetic, its verdicts, and one quick run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.bench import resident
from imece.bench.train import train
from imece.bench.train.contenders import (
    ALONE,
    ONE_RANK,
    OURS,
    PLAIN,
    QUICK,
    SAME_LOSS,
    WAYS,
    Plan,
    batch_of,
)
from imece.bench.train.targets import judged
from imece.bench.train.train import Results, Save
from imece.cli.main import main
from imece.train.config import TrainConfig


class InBf16(Plan):
    @property
    def config(self) -> TrainConfig:
        return replace(QUICK, compute=replace(QUICK.compute, dtype="bf16"))


class InFp32(Plan):
    @property
    def config(self) -> TrainConfig:
        return replace(QUICK, compute=replace(QUICK.compute, dtype="fp32"))


def measured(**seconds: list[float]) -> Results:
    """Ways with _ for -, where imece trains in bf16 by default; 1000 tokens a step."""
    ways = {name.replace("_", "-"): rounds for name, rounds in seconds.items()}
    return Results(InBf16(tuple(ways)), tokens=1000, seconds=ways)


def test_ratios_are_taken_round_by_round() -> None:
    # A machine that gets slower: the medians of the columns would say 1.0, and 4.0 the other way round.
    results = measured(imece_bf16=[1.0, 2.0, 8.0], plain_bf16=[1.3, 2.6, 2.0], no_sync=[0.9, 1.9, 8.0])
    assert results.speed(OURS["bf16"], PLAIN["bf16"]) == pytest.approx(1.3)
    assert results.speed(OURS["bf16"], ALONE) == pytest.approx(0.95)
    assert results.tokens_per_s(OURS["bf16"]) == pytest.approx(500.0)


def test_the_default_is_first_and_depends_on_the_precision() -> None:
    assert InBf16((ALONE, *PLAIN.values())).every == (OURS["bf16"], ALONE, *PLAIN.values())
    assert InFp32(WAYS).every[:2] == (OURS["fp32"], OURS["bf16"])
    assert len(InFp32(WAYS).every) == len(WAYS)


def test_targets_are_judged_by_what_was_measured() -> None:
    results = measured(
        imece_bf16=[1.0], imece_fp32=[1.6], imece_compiled_fp32=[1.5], plain_bf16=[1.2], plain_fp32=[1.9],
        no_sync=[0.96],
    )  # fmt: skip
    step = {"step_s": 1.0, "data_s": 0.004, "other_s": 0.01, "forward_s": 0.986}
    results.phases = [step, step | {"other_s": 0.5}, step]
    results.save = Save([0.2, 3.0, 0.9], 0, grown_bytes=101, written_bytes=100)
    found = judged(results)
    assert [each.met for each in found] == [False, *[True] * 7]
    shown = [each.line for each in found]
    assert "MISSED  imece-fp32: at least 1.2 x the tokens/s of plain-fp32: 1.19 x" in shown[0]
    assert "met     imece-compiled-fp32: at least 1.2 x the tokens/s of plain-fp32: 1.27 x" in shown[1]
    assert "met     default: at least 1.6 x the tokens/s of plain-fp32: 1.9 x" in shown[3]
    assert "96.0%" in shown[4] and "1.40%" in shown[5] and "0.90" in shown[6] and "1.01" in shown[7]


def test_targets_that_are_missed() -> None:
    results = measured(imece_bf16=[1.0], plain_bf16=[1.19], plain_fp32=[1.59], no_sync=[0.94])
    results.phases = [{"step_s": 1.0, "data_s": 0.01, "other_s": 0.011}]
    results.save = Save([1.1], 1, grown_bytes=150, written_bytes=100)
    assert [each.met for each in judged(results)] == [None, None, *[False] * 6]


def test_what_was_not_measured_is_neither() -> None:
    assert {each.met for each in judged(measured(imece_bf16=[1.0]))} == {None}


def test_a_way_that_trains_another_model_is_told() -> None:
    losses = {OURS["bf16"]: 5.0, OURS["fp32"]: 5.01, PLAIN["fp32"]: 5.05, ONE_RANK: math.nan, ALONE: 9.0}
    results = Results(InBf16(WAYS), losses=losses)
    assert [line.split()[0] for line in results.wrong] == [PLAIN["fp32"], ONE_RANK]
    del losses[PLAIN["fp32"]], losses[ONE_RANK]
    assert results.wrong == []


def test_a_save_is_judged_by_the_rank_that_suffers_most() -> None:
    class TwoRanks:
        way = OURS["bf16"]

        def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
            answers: dict[str, list[dict[str, Any]]] = {
                "save": [{"grown_bytes": grown, "written_bytes": 100} for grown in (90, 130)],
                "measure": [{"phases": [{"step_s": s} for s in (1.0, 2.0, 9.0)]}] * 2,
                "measure_save": [
                    {"steps_s": [3.0, 2.0, 2.0], "whole": True},
                    {"steps_s": [4.0, 2.0, 2.0], "whole": False},
                ],
            }
            return answers[do]

    results = Results(InBf16((), rounds=2, steps=3))
    train._measure_saves(TwoRanks(), results)  # type: ignore[arg-type]
    assert results.save == Save([1.0, 1.0], outlasted=2, grown_bytes=130, written_bytes=100)
    results.phases = [{"step_s": 2.0, "other_s": 0.1}]
    assert "2 saves held it up by +1.00 to +1.00 steps, of which 2 went on" in train.lines(results)[-1]


def test_the_peak_of_memory_counts_from_when_it_is_asked() -> None:
    nbytes = 100 * 2**20
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)  # before, so it does not count
    before = resident.peak_from_now_on()
    if before is None:
        pytest.skip("this kernel does not tell the peak of resident memory")
    assert resident.peak_bytes() - before < nbytes / 2
    torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    assert resident.peak_bytes() - before > 0.9 * nbytes


def run_quick(tmp_path: Path, ways: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The figures of a run that must have gone well."""
    figures = tmp_path / "train.json"
    argv = ["bench", "train", "--quick", "--ways", ",".join(ways), "--json", str(figures)]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text and "tiny, 0.1M parameters, 4 sequences x 64" in text
    content: dict[str, Any] = json.loads(figures.read_text())
    assert set(content["seconds"]) == {content["default"], *ways}
    assert all(len(rounds) == 2 and min(rounds) > 1e-4 for rounds in content["seconds"].values())
    return content


@pytest.mark.slow
def test_a_quick_run_measures_training_and_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = run_quick(tmp_path, (OURS["fp32"], PLAIN["fp32"]), capsys)
    losses, default = content["losses"], content["default"]
    assert losses[OURS["fp32"]] == pytest.approx(losses[PLAIN["fp32"]], rel=1e-4)
    assert content["tokens_per_s"][default] == pytest.approx(256 / (sum(content["seconds"][default]) / 2))
    assert len(content["phases"]) == 2
    for step in content["phases"]:
        assert step["step_s"] == pytest.approx(sum(step.values()) - step["step_s"])
        assert min(step[f"{name}_s"] for name in ("data", "forward", "backward", "optimizer")) > 0
    save = content["save"]
    assert len(save["delays"]) == 2
    # This rank's half of the weights and of at least one number of the optimizer for each of them.
    assert save["written_bytes"] > 4 * content["parameters"]
    assert save["grown_bytes"] is None or save["grown_bytes"] >= 0.9 * save["written_bytes"]
    measured = [each["measured"] is not None for each in content["targets"]]
    assert not measured[4] and measured[5] and measured[6], "not the limit, but the loop and the saves"


@pytest.mark.slow
def test_all_ways_train_the_same_model_but_those_that_never_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run_quick(tmp_path, WAYS, capsys)
    losses = content["losses"]
    together = losses.pop(content["default"])
    assert losses.pop(ALONE) != pytest.approx(together, rel=2e-3)
    assert set(losses.values()) and all(loss == pytest.approx(together, rel=2e-3) for loss in losses.values())
    assert losses[SAME_LOSS["fp32"]] == pytest.approx(losses[PLAIN["fp32"]], rel=1e-4)
    assert all(each["measured"] is not None for each in content["targets"][2:5]), "speeds, and the limit"
    assert batch_of(QUICK, 2).tokens == content["tokens"]
