"""Failures while ranks run: users' mistakes are reported in one line, and nothing is lost."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from imece.checkpoint.load import Saved, all_steps, first_whole
from imece.checkpoint.save import Checkpoints
from imece.data.batches import Batches
from imece.data.bpe import train_bpe
from imece.data.corpus import Source
from imece.data.tokenizer import load_tokenizer
from imece.data.tokens import open_tokens
from imece.observe.metrics import read_metrics
from imece.plan.check import read_plan
from imece.train.evaluate import mean_nats
from imece.train.model.origin import trained_model
from imece.train.run.folder import RunFolder
from imece.train.step import Step
from tests.train.command import Train, in_fork, train
from tests.train.compare import assert_same_run, exact, files, last, records, summary
from tests.train.small import options

PARTS = ("data_s", "forward_s", "backward_s", "exposed_s", "optimizer_s", "copy_s", "other_s")


def cut(file: Path) -> None:
    """Damage it: its last byte goes."""
    os.truncate(file, file.stat().st_size - 1)


def damage(folder: str) -> None:
    """Checkpoints of steps 4, 8 and 12; the newest is damaged, then all."""
    path = Path(folder)
    usual = ["--ranks=2", "--steps=12", "--checkpoint.every=4", "--checkpoint.keep=3"]
    for name in ("whole", "run"):
        assert train(options(path, name, *usual), path).status == 0
    run = path / "run"
    step_12 = run / "checkpoints" / "step-00000012"
    cut(step_12 / "rank-00001.safetensors")
    outcome = train(["--run", run], path)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    (warning,) = [line for line in outcome.out.splitlines() if "warning: damaged" in line]
    assert warning.startswith(f"warning: damaged, so an older checkpoint is used: {step_12}/rank-00001")
    assert "going on after step 8" in outcome.out
    assert "the run had come to step 12: 4 steps are lost\n" in outcome.out
    assert_same_run(run, path / "whole")

    for step in run.glob("checkpoints/step-*"):
        cut(step / "manifest.json")
    before = files(run)
    said = train(["--run", run, "--ranks=2"], path).mistake()
    assert said.startswith(
        f"{run / 'checkpoints'}: none of 3 checkpoints can be read ({step_12}/manifest.json: "
    )
    assert said.endswith("to begin anew, name another folder with --run") and "older checkpoint" not in said
    assert files(run) == before


def test_damaged_checkpoints(tmp_path: Path) -> None:
    in_fork(damage, str(tmp_path))


def rank_1_reads_less() -> None:
    """It finds the newest checkpoint damaged, as one whose disk fails would."""

    def older(paths: Callable[[], list[Path]], damaged: Callable[[str], None], **how: bool) -> Saved | None:
        return first_whole(paths if os.environ["RANK"] == "0" else lambda: paths()[1:], damaged, **how)

    mock.patch("imece.checkpoint.reading.first_whole", older).start()


def strangers(folder: str) -> None:
    """What belongs to another run, or is seen by some ranks only."""
    path = Path(folder)
    run = path / "run"
    usual = ["--ranks=2", "--steps=4", "--checkpoint.every=2"]
    assert train(options(path, "run", *usual), path).status == 0
    tokenizer = (run / "tokenizer.json").read_bytes()
    saved = files(run / "checkpoints")

    said = train(["--run", run, "--steps=8"], path, fault=rank_1_reads_less).mistake()
    assert said == (
        f"{run / 'checkpoints'}: rank 1 can read step 2 at most, others step 4: "
        "check that all hosts see the same disk"
    )
    train_bpe([Source([path / "text.jsonl"])], vocab_size=270).save(run / "tokenizer.json")
    said = train(["--run", run, "--steps=8"], path).mistake()
    assert said == (
        f"{run}/checkpoints/step-00000004 was trained with another tokenizer (257 entries) than "
        f"{run}/tokenizer.json (270): put the old one back"
    )
    (run / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in train(["--run", run, "--steps=8"], path).mistake()
    assert files(run / "checkpoints") == saved
    (run / "tokenizer.json").write_bytes(tokenizer)
    assert train(["--run", run, "--steps=8"], path).status == 0
    assert len(records(run)) == 8


def test_what_belongs_to_another_run(tmp_path: Path) -> None:
    in_fork(strangers, str(tmp_path))


def no_file_beyond(limit_bytes: int) -> None:
    """As on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


def no_room_for_tokens() -> None:
    no_file_beyond(3000)


def no_room_for_checkpoints() -> None:
    """Nor for metrics; shared memory, files too, comes before."""

    def checkpoints(*args: Any, **options: Any) -> Checkpoints:
        no_file_beyond(4000)
        return Checkpoints(*args, **options)

    mock.patch("imece.train.session.Checkpoints", checkpoints).start()
    full = OSError(errno.ENOSPC, "No space left on device")
    mock.patch("imece.observe.run_files.write_whole", side_effect=full).start()  # of small files


def full_disk(folder: str) -> list[str]:
    path = Path(folder)
    run = path / "run"
    words = options(path, "run", "--ranks=2", "--checkpoint.every=2")
    said = train([*words, "--steps=4"], path, fault=no_room_for_tokens).mistake()
    assert said.startswith(
        f"{run}/tokens: cannot write the token files (File too large): raise the limit of a file's size"
    )
    assert not run.exists()
    assert train([*words, "--steps=4"], path).status == 0
    saved = files(run / "checkpoints" / "step-00000004")
    environment = (run / "environment.json").read_bytes()

    outcome = train([*words, "--steps=8"], path, fault=no_room_for_checkpoints)
    assert outcome.status == 1, outcome
    assert "the last checkpoint is not on the disk: see the warning above" in outcome.out
    assert (
        "\nkept    the checkpoint of step 4: once the disk takes files again, the command below goes on"
        in outcome.out
    )
    assert "imece sample" not in outcome.out
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    for step in (6, 8):
        (line,) = [line for line in warnings if f"the checkpoint of step {step} was not saved" in line]
        assert "File too large: raise the limit of a file's size (ulimit -f)" in line
    assert [line for line in warnings if "metrics.jsonl: cannot be written (File too large)" in line]
    assert files(run / "checkpoints" / "step-00000004") == saved and last(run).step == 4
    assert (run / "environment.json").read_bytes() == environment
    assert not list(run.glob("**/*.partial"))

    assert train([*words, "--steps=8"], path).status == 0  # there is room again
    assert train(options(path, "whole", "--ranks=2", "--steps=8"), path).status == 0
    assert len(records(run)) == 8 and summary(run)["steps"] == 8
    return [line for line in outcome.err.splitlines() if "Traceback" in line]


def test_no_space_on_disk(tmp_path: Path) -> None:
    assert in_fork(full_disk, str(tmp_path)) == []


def remove_run(run: str) -> None:
    """By somebody else, in step 2: before the first save, which might be under way later."""
    original = Step.run

    def removing(self: Step, index: int, *args: Any) -> Any:
        if index == 1 and os.environ["RANK"] == "0":
            shutil.rmtree(run)
        return original(self, index, *args)

    Step.run = removing  # type: ignore[assignment, method-assign]


def removed(folder: str) -> None:
    path = Path(folder)
    run = path / "run"
    words = options(path, "run", "--ranks=2", "--checkpoint.every=3")
    outcome = train([*words, "--steps=7"], path, fault=partial(remove_run, str(run)))
    assert outcome.status == 0, outcome
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert f"{run} was moved or removed in the middle of the run" in line
    assert [record["step"] for record in read_metrics(run)] == [2, 3, 4, 5, 6, 7]
    _, saved = trained_model(RunFolder(run))
    own = load_tokenizer(RunFolder(run).tokenizer_file)
    assert saved.step == 7 and saved.state["tokenizer_hash"] == own.hash
    assert train(["--run", str(run), "--steps=8"], path).status == 0
    assert [record["step"] for record in read_metrics(run)] == [2, 3, 4, 5, 6, 7, 8]


def test_a_run_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    in_fork(removed, str(tmp_path))


POISON = {"steps": [2], "rank": 1}


def poison() -> None:
    """The loss of POISON["rank"] is NaN in the second micro-batch of POISON["steps"]."""
    run, blame = Step.run, Step.blame
    now = {"step": -1, "number": 0}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Step, index: int, *args: Any) -> Any:
            now.update(step=index, number=0)
            return original(self, index, *args)

        return call

    def spoilt(*args: Any) -> torch.Tensor:
        now["number"] += 1
        bad = now["step"] in POISON["steps"] and now["number"] == 2  # type: ignore[operator]
        return mean_nats(*args) * (math.nan if bad and os.environ["RANK"] == str(POISON["rank"]) else 1.0)

    Step.run, Step.blame = noting(run), noting(blame)  # type: ignore[method-assign]
    mock.patch("imece.train.passes.mean_nats", spoilt).start()


def not_finite(folder: str) -> None:
    """Steps that all skip; so many that the run ends; then it goes on, and its last step is skipped."""
    path = Path(folder)
    run, whole = path / "run", path / "whole"
    usual = ["--ranks=2", "--batch.micro=2", "--steps=15", "--checkpoint.every=2", "--compute.bad-steps=2"]
    POISON["steps"] = [2, 9, 11, 12, 13, 14]
    outcome = train(options(path, "run", *usual), path, fault=poison)
    assert outcome.status == 1, outcome
    why = (
        "2 steps in a row had no finite gradient, the last one was step 13: the run ends; the usual cure is "
        "a new run with a lower --optimizer.lr"
    )
    assert outcome.err == f"imece: {why}\n", "once, and not by each rank"
    assert outcome.out.endswith("\nthe newest checkpoint is of step 11\n"), outcome.out
    early = summary(run)
    assert (early["steps"], early["ended"], "sample" in early) == (13, why, False)
    assert (run / "report.html").exists() and read_plan(run)["measured"]["rank_bytes"]
    batches = Batches(_train_part(run), 16, 12, seed=1)
    documents = ", ".join(map(str, batches.names(2, 8, 10)))  # rank 1 has rows 6 to 11
    where = f"rank 1: loss nan, gradient of embed.weight and 10 more; documents {documents}"
    skipped = f"step 3 skipped on all ranks: the gradient is not finite\n  brought by {where}\n"
    assert skipped in outcome.out and outcome.out.count("skipped on all ranks") == 4
    found = records(run)
    assert found[2]["skipped"] == f"the gradient is not finite; {where}" and len(found) == 13
    for name, value in (("skipped", "the grad"), ("loss", "None"), ("grad_norm", "None")):
        steps = [record["step"] for record in found if str(record.get(name, "")).startswith(value)]
        assert steps == [3, 10, 12, 13], name
    assert all_steps(run / "checkpoints") == [8, 11], "10 and 12 were due, and skipped"

    POISON["steps"] = [2, 9, 14]  # what was wrong with the others is mended
    for name in ("run", "whole"):
        outcome = train(options(path, name, *usual), path, fault=poison)
        assert (outcome.status, outcome.err) == (0, ""), outcome
        assert all_steps(path / name / "checkpoints") == [12, 14, 15], "none goes for that of the last step"
    assert_same_run(run, whole)
    assert math.isfinite(summary(run)["val_loss"]) and "ended" not in summary(run)


def _train_part(run: Path) -> Any:
    return open_tokens(run / "tokens").train


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    in_fork(not_finite, str(tmp_path))


def whole_folder(folder: str) -> None:
    path = Path(folder)
    for ranks in (1, 2):
        run = path / f"run{ranks}"
        words = options(path, run.name, f"--ranks={ranks}", "--steps=9", "--validate.every=3")
        outcome = train([*words, "--checkpoint.every=4"], path)
        assert (outcome.status, outcome.err) == (0, ""), outcome
        check_records(run, ranks)
        names = {path.name for path in run.iterdir()}
        assert names >= {
            "config.toml", "tokenizer.json", "tokens", "metrics.jsonl", "tensorboard", "environment.json",
            "plan.json", "summary.json", "checkpoints",
        }  # fmt: skip
        assert sorted(path.name for path in (run / "checkpoints").glob("step*")) >= ["step-00000008"]
        state = last(run).state
        assert (state["world_size"], state["seed"], state["strategy"]) == (ranks, 1, "zero1")
        assert state["counters"]["tokens"] == 9 * 192 == summary(run)["tokens"]
        assert len(last(run).rank_states) == ranks and summary(run)["checkpoint"] == 9
        assert state["best_val_loss"] == min(r["val_loss"] for r in records(run) if "val_loss" in r)
        check_summary(run)


def check_records(run: Path, ranks: int) -> None:
    found = records(run)
    assert len(found) == 9
    for record in found:
        numbers = {
            "step", "loss", "tokens", "tokens_per_s", "lr", "grad_norm", "epoch", "time", "step_s",
            "memory_bytes", "mfu", *PARTS,
        }  # fmt: skip
        assert record.keys() - {"val_loss", "val_s", "save_s"} == numbers
        assert all(math.isfinite(value) for value in record.values())
        assert all(record[part] >= 0 for part in PARTS if part != "backward_s")
        assert sum(record[part] for part in PARTS) == pytest.approx(record["step_s"], rel=1e-9)
        assert record["other_s"] < record["step_s"]
        assert record["tokens"] == 192
        assert record["tokens_per_s"] == pytest.approx(192 / record["step_s"])
        assert record["memory_bytes"] > 10e6 and record["mfu"] > 0
        assert ("val_loss" in record) == ("val_s" in record) == (record["step"] in (3, 6, 9))
        assert ("save_s" in record) == (record["step"] in (5, 9)), "it held up the step after"
    assert [record["epoch"] for record in found] == pytest.approx(
        [step * found[0]["epoch"] for step in range(1, 10)]
    )
    assert sum(record["exposed_s"] for record in found) > 0 or ranks == 1
    times = [record["time"] for record in found]
    assert times == sorted(times)


def check_summary(run: Path) -> None:
    found = summary(run)
    assert found["steps"] == 9 and found["parameters"] > 1000
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["seconds"])
    uniform = math.log(257)
    assert found["baselines"]["uniform"] == pytest.approx(uniform)
    assert found["baselines"]["bigram"] < found["baselines"]["unigram"] < uniform
    assert 0 < found["val_loss"] < uniform + 1
    assert found["sample"]["text"].startswith(found["sample"]["prompt"])
    # All that is held out is 253 tokens or so: the last validation has read the same.
    assert found["val_loss"] == records(run)[-1]["val_loss"]
    json.loads((run / "environment.json").read_text())
    assert exact(run)[-1]["lr"] == pytest.approx(0.1 * max(each["lr"] for each in exact(run)))


def test_what_a_run_writes(tmp_path: Path) -> None:
    in_fork(whole_folder, str(tmp_path))


def test_a_run_of_real_processes(tmp_path: Path) -> None:
    """All that the forks of other tests leave out is there, and nothing else is different."""
    words = ["--ranks=2", "--steps=9", "--validate.every=3", "--checkpoint.every=4"]
    with Train(options(tmp_path, "run", *words), tmp_path) as running:
        outcome = running.wait()
    assert (outcome.status, outcome.err) == (0, "")
    run = tmp_path / "run"
    check_records(run, 2)
    check_summary(run)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (run / "report.html").read_text()
    assert in_fork(again_by_forks, str(tmp_path)) is None


def again_by_forks(folder: str) -> None:
    path = Path(folder)
    words = ["--ranks=2", "--steps=9", "--validate.every=3", "--checkpoint.every=4"]
    with mock.patch("imece.train.finish._SAMPLE_TOKENS", 160):  # other forks' samples are shorter
        assert train(options(path, "forked", *words), path).status == 0
    assert_same_run(path / "run", path / "forked")
