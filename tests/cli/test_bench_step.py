"""`imece bench step`: its arithmetic, its verdicts, and one quick run of everything."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from imece.bench.collectives import collectives
from imece.bench.reference_model import REFERENCE, batch, new_decoder
from imece.bench.step import parameter_cost, step, targets
from imece.bench.step.rank import Rank
from imece.bench.step.step import Memory, Plan, Results
from imece.bench.step.ways import ALONE, ONE_PROCESS, OURS, STRATEGY_WAYS, WAITING, WAYS, missing
from imece.cli.main import main
from imece.data_parallel.reducing.trace import BucketTrace, StepTrace

GLOO, SHM, VIEW = "torch-gloo", "torch-shm", "torch-gloo-view"


def measured(**seconds: list[float]) -> Results:
    """128 tokens; ways with _ for -."""
    ways = {name.replace("_", "-"): rounds for name, rounds in seconds.items()}
    return Results(Plan(ways=tuple(ways)), 1000, seconds={128: ways})


def test_what_is_added_is_taken_round_by_round() -> None:
    # A machine that gets slower, and one round disturbed: medians of the columns would say 1.0, not 0.1.
    results = measured(
        no_sync=[1.0, 2.0, 3.0], imece=[1.1, 3.0, 3.1], torch_gloo=[1.5, 2.5, 2.9], torch_shm=[0.9, 1.9, 2.9]
    )
    assert results.added_s(128, OURS) == pytest.approx(0.1)
    assert results.share(128, OURS, GLOO) == pytest.approx(0.2)
    assert results.speed(128, OURS, ALONE) == pytest.approx(1.0 / 1.1)
    assert results.share(128, OURS, SHM) == math.inf  # the other added nothing
    assert results.share(128, SHM, SHM) == 0.0


def test_targets_are_judged_by_what_was_measured() -> None:
    results = measured(no_sync=[1.0], imece=[1.02], torch_gloo=[1.25], torch_shm=[1.02])
    results.memory[128] = {OURS: Memory(0, 0, 300), VIEW: Memory(0, 0, 200)}
    shown = targets.judged(results)
    found = {each.text: each.met for each in shown}
    at = "128 tokens a rank: "
    assert found[f"{at}adds at most 20% of what {GLOO} adds"] is True
    assert found[f"{at}at least 0.97 x the tokens/s of {ALONE}"] is True
    assert found[f"{at}at least 1.2 x the tokens/s of {GLOO}"] is True
    assert found[f"{at}at least 1.2 x the tokens/s of fabric"] is None
    assert found[f"512 tokens a rank: adds at most 20% of what {GLOO} adds"] is None
    assert found[f"{at}resident memory at most 1 x that of {VIEW}"] is False
    assert shown[0].line == f"  met     {at}adds at most 20% of what torch-gloo adds: 8%"
    slow = measured(no_sync=[1.0], imece=[1.1], torch_gloo=[1.25])
    assert [each.met for each in targets.judged(slow)][:5:2] == [False, None, False]


def test_a_way_that_trains_another_model_is_told() -> None:
    alone = {ALONE: 9.0, WAITING: 8.0}
    results = Results(Plan(ways=WAYS), losses=alone | {OURS: 5.0, SHM: 5.001, GLOO: 5.02, VIEW: math.nan})
    told = "did not train the same model as the others: a loss of"
    assert results.wrong == [f"{GLOO} {told} 5.02, theirs is 5.001", f"{VIEW} {told} nan, theirs is 5.001"]
    del results.losses[GLOO], results.losses[VIEW]
    assert results.wrong == []


def test_one_process_has_a_thread_for_each_rank_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    used: list[int] = []

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        used.append(torch.get_num_threads())
        return torch.tensor(float(len(inputs)))  # the batches of both ranks

    rank = Rank.__new__(Rank)
    rank._ways = {ONE_PROCESS: SimpleNamespace(model=loss)}  # type: ignore[dict-item]
    rank._steps = {ONE_PROCESS: 0}
    monkeypatch.setattr(rank, "_finish", lambda *_: None)
    torch.set_num_threads(1)
    for number, losses in ((0, 2.0), (1, None)):
        monkeypatch.setattr(dist, "get_rank", lambda number=number: number)
        assert rank.measure(ONE_PROCESS, 8, 1).get("loss") == losses
    assert used == [2] and torch.get_num_threads() == 1, "what is traced next has one"


def test_the_reference_model_has_the_size_that_is_quoted() -> None:
    parameters = sum(parameter.numel() for parameter in new_decoder(REFERENCE).parameters())
    assert f"{parameters / 1e6:.1f}" == "10.9"
    assert batch(REFERENCE, 128, 0).shape == (1, 129)
    assert batch(REFERENCE, 512, 0).shape == (2, 257)
    for tokens in (0, 300):
        with pytest.raises(ValueError, match="whole sequences"):
            batch(REFERENCE, tokens, 0)


def test_the_step_that_is_shown_is_the_median_one() -> None:
    def lasting(*lengths: float) -> list[StepTrace]:
        return [StepTrace(1.0, 1.0, 1.0, 1.0 + length, [BucketTrace(0, 8, 1.0, 1.0)]) for length in lengths]

    traces = {0: lasting(1, 5, 2), 1: lasting(9, 1, 4)}  # the slowest rank: 9, 5, 4
    chosen = step.typical(traces)
    assert chosen == {0: [traces[0][1]], 1: [traces[1][1]]}
    assert step.step_trace(json.loads(json.dumps(asdict(traces[0][0])))) == traces[0][0]


def test_a_way_that_cannot_be_built_is_left_out_with_its_error() -> None:
    class Refusing:
        def build(self, way: str) -> Any:
            raise RuntimeError(f"no {way}\nhere")

    rank = Rank.__new__(Rank)
    rank._builder, rank._ways, rank._steps = Refusing(), {}, {}  # type: ignore[assignment]
    answer = rank.build(OURS)
    assert answer == {"refused": "RuntimeError: no imece here"}

    class OneRank:
        def ask(self, do: str, way: str, timeout_s: float) -> list[dict[str, Any]]:
            return [{"parameters": 7}, answer] if way == OURS else [{"parameters": 7}] * 2

    results = Results(Plan(ways=(ALONE, OURS, GLOO)))
    step._build(OneRank(), results)  # type: ignore[arg-type]
    assert results.left_out == {OURS: "RuntimeError: no imece here"}
    assert list(results.losses) == [ALONE, GLOO] and results.parameters == 7


def test_what_is_not_installed_is_left_out_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "deepspeed-zero3" in STRATEGY_WAYS
    assert missing("deepspeed-zero3") == "deepspeed is not installed (pip install deepspeed)"
    assert missing("zero3") is None


def test_torchs_data_parallel_is_left_out_where_it_would_compute_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert missing(ONE_PROCESS) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert missing(ONE_PROCESS) == "torch's DataParallel would take the GPUs" and missing(OURS) is None


def test_deepspeed_is_left_out_where_it_would_wait_for_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert missing("deepspeed-zero3") is None and collectives.missing("deepspeed") is None
    lock = tmp_path / "deepspeed_shm_comm/lock"
    lock.parent.mkdir()
    lock.touch()
    for why in (missing("deepspeed-zero3"), collectives.missing("deepspeed")):
        assert why is not None and why.endswith(f"left its lock: rm {lock}")


def test_parameters_are_counted_where_they_have_elements() -> None:
    class Emptied:
        def ask(self, do: str, way: str, timeout_s: float) -> list[dict[str, Any]]:
            return [{"parameters": 0 if way == "deepspeed-zero3" else 7}] * 2

    results = Results(Plan(ways=(ALONE, "deepspeed-zero3")))
    step._build(Emptied(), results)  # type: ignore[arg-type]
    assert results.parameters == 7


@pytest.mark.slow
def test_a_quick_run_measures_traces_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, trace, plot = (tmp_path / name for name in ("step.json", "trace.json", "step.png"))
    argv = ["--quick", "--tokens", "8", "--ways", f"{GLOO},{OURS},{ONE_PROCESS}"]
    files = ["--json", str(figures), "--trace", str(trace), "--plot", str(plot)]
    assert main(["bench", "step", *argv, *files]) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text and "left out" not in text
    assert "a GPT of 10.9M parameters, 8 tokens a rank" in text and "one step of imece with 8 tokens" in text
    content = json.loads(figures.read_text())
    assert list(content["seconds"]["8"]) == [ALONE, GLOO, OURS, ONE_PROCESS]
    assert all(len(seconds) == 2 and min(seconds) > 1e-4 for seconds in content["seconds"]["8"].values())
    for way in (OURS, ONE_PROCESS):
        assert content["losses"][way] == pytest.approx(content["losses"][GLOO], rel=1e-3)
    assert content["losses"][ALONE] != pytest.approx(content["losses"][GLOO], rel=1e-6)
    assert set(content["traces"]["8"]) == {"0", "1"}
    for facts in (facts for steps in content["traces"]["8"].values() for facts in steps):
        found = step.step_trace(facts)
        assert found.forward_start_s < found.backward_start_s < found.backward_end_s <= found.end_s
        assert sum(bucket.nbytes for bucket in found.buckets) >= 4 * content["parameters"]
        for bucket in found.buckets:
            assert found.backward_start_s <= bucket.ready_s <= bucket.launched_s <= bucket.done_s
            assert bucket.done_s <= found.end_s
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {1, 2}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_several_numbers_of_tokens_have_files_of_their_own(tmp_path: Path) -> None:
    results = Results(
        Plan(ways=(ALONE,)), traces={n: {0: [StepTrace(0.0, 1.0, 2.0, 3.0)]} for n in ("128", "128-overlap")}
    )
    said: list[str] = []
    step.write_timelines(results, tmp_path / "new" / "trace.json", None, said.append)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "trace-128-overlap.json",
        "trace-128.json",
    ]
    del results.traces["128-overlap"]
    step.write_timelines(results, tmp_path / "trace.json", None, said.append)
    assert (tmp_path / "trace.json").exists()
    results.traces.clear()
    step.write_timelines(results, tmp_path / "none.json", None, said.append)
    assert said[-1] == "no timeline: imece was not measured"


def test_the_cost_of_a_parameter_is_the_difference_of_backwards() -> None:
    results = parameter_cost.Results(Plan(parameters=(10_000, 1_000), rounds=3))
    for parameters, each in ((1_000, 7e-6), (10_000, 9e-6)):
        bare = [0.01, 0.02, 0.03]
        results.processor_s[parameters] = {
            ALONE: bare, OURS: [s + parameters * each for s in bare], SHM: bare,
        }  # fmt: skip
        results.seconds[parameters] = results.processor_s[parameters]
    assert results.cost_us(1_000, OURS) == pytest.approx(7.0)
    assert results.growth == pytest.approx(9 / 7)
    assert [each.met for each in parameter_cost.judged(results)] == [True, False, False]
    assert [line.split()[-1] for line in parameter_cost.lines(results) if f" {OURS} " in line] == [
        "7.00",
        "9.00",
    ]


@pytest.mark.slow
def test_a_quick_run_of_parameters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "cost.json"
    assert main(["bench", "step", "--quick", "--parameters", "200,50", "--json", str(figures)]) == 0
    text = capsys.readouterr().out
    assert "50 parameters: at most 8 us" in text and "linear: a parameter of 200" in text
    content = json.loads(figures.read_text())
    assert list(content["seconds"]) == ["50", "200"]
    for ways in content["processor_s"].values():
        assert list(ways) == [ALONE, OURS, SHM]
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in ways.values())


@pytest.mark.slow
def test_memory_is_measured_for_each_way_in_ranks_of_its_own() -> None:
    said: list[str] = []
    ways = (ALONE, OURS, VIEW, ONE_PROCESS)
    results = step.run(Plan((8, 4), ways, rounds=1, steps=1, memory=True), said.append)
    assert list(results.memory) == [4, 8]
    for found in results.memory.values():
        assert list(found) == [ALONE, OURS, VIEW]
        assert all(memory.peak_bytes > memory.parts_bytes > 100e6 for memory in found.values())
        assert found[ALONE].shared_bytes < 10e6 < found[OURS].shared_bytes
    assert any("peak   shared  divided" in line for line in said)
