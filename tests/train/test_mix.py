"""A run on several sources with weights: killed, on other ranks, divided among ranks, on records, wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from imece.cli.evaluate import run as evaluate
from imece.cli.sample import run as sample
from imece.cli.train import read_config
from imece.data.batches import IGNORE
from imece.data.prepare import prepare
from imece.train import header
from imece.train.batch import BatchPlan, batches_of
from imece.train.evaluate import of_all, windows_read
from imece.train.run.folder import RunFolder
from tests.data.helpers import part_of, part_of_sources
from tests.train.command import in_fork, train
from tests.train.compare import records, summary
from tests.train.small import options, write_text
from tests.train.test_resume import kills

NEAR = 1e-5


def mixed(folder: Path) -> list[str]:
    """Three sources, the last one so small that a run reads it often."""
    paths = []
    for seed, documents in enumerate((60, 30, 12)):
        paths.append(write_text(folder / f"s{seed}.jsonl", documents, seed))
    return ["--data", *map(str, paths), "--data.weights", "3", "1.5", "1.5"]


def curve(run: Path) -> list[float]:
    """Losses, and at even steps those of the validations, which a run also makes at its end."""
    validations = ("val_loss", *(f"val_loss/s{number}.jsonl" for number in range(3)))
    found = []
    for record in records(run):
        names = ("loss", "grad_norm", *(validations if record["step"] % 2 == 0 else ()))
        found += [record[name] for name in names]
    return found


def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    """To the same bits, in the middle of passes of all sources."""
    said = mixed(tmp_path)
    seen = in_fork(kills, str(tmp_path), ["step", "save", "step"], random.randrange(10**6), True, said)
    assert seen["killed"] >= 2, seen
    run = tmp_path / "whole"
    read = [record["tokens"] for record in records(run)]
    assert sum(read) == 30 * 12 * 16
    config = RunFolder(run).config()
    assert config.data.weights == (3.0, 1.5, 1.5)
    shown = summary(run)
    of_each = shown["val_loss_by_source"]
    assert list(of_each) == ["s0.jsonl", "s1.jsonl", "s2.jsonl"]
    assert min(of_each.values()) < shown["val_loss"] < max(of_each.values())


def runs(name: str) -> dict[str, str]:
    folder, out = Path(name), {}
    for run, more in (
        ("alone", ["--ranks=1", "--steps=8"]),
        ("changing", ["--ranks=2", "--steps=3"]),
        ("changing", ["--ranks=3", "--steps=5"]),
        ("changing", ["--ranks=1", "--steps=8"]),
        ("pipeline", ["--ranks=2", "--mesh.pipeline=2", "--batch.micro=3", "--steps=3"]),
        ("context", ["--ranks=2", "--mesh.context=2", "--steps=3"]),
    ):
        said = options(
            folder, run, *mixed(folder), *more, "--model.layers=2", "--model.kv-heads=2",
            "--validate.every=2", "--validate.tokens=96",
            "--optimizer.kind=adamw", "--optimizer.schedule=constant", "--optimizer.warmup=0",
        )  # fmt: skip
        outcome = train(said, folder)
        assert outcome.status == 0, (run, outcome)
        out[run] = outcome.out
    return out


def test_any_ranks_read_the_same_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = in_fork(runs, str(tmp_path))
    alone = curve(tmp_path / "alone")
    assert len(alone) == 8 * 2 + 4 * 4
    for run in ("changing", "pipeline", "context"):
        found = np.array(curve(tmp_path / run))
        assert len(found) == (len(alone) if run == "changing" else 3 * 2 + 4)
        assert np.abs(found / alone[: len(found)] - 1).max() < 10 * NEAR, run
    # The header, a warning, and the losses of each at the end.
    (mix,) = [line for line in out["alone"].splitlines() if line.startswith("mix ")]
    config = RunFolder(tmp_path / "alone").config()
    prepared = prepare(config.data, tmp_path / "alone/tokenizer.json", tmp_path / "alone/tokens")
    each = batches_of(config, prepared, BatchPlan(16, 12, 1, 4, 3)).epochs(8)
    assert mix.split("mix")[1].strip() == "; ".join(
        f"s{number}.jsonl {share}, read {times:.2g} times"
        for number, (share, times) in enumerate(zip(("50 %", "25 %", "25 %"), each, strict=True))
    )
    losses = summary(tmp_path / "alone")["val_loss_by_source"]
    assert f"of {', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())}\n" in out["alone"]
    # What is held out of each source, evaluated: the same numbers, and it still samples.
    assert evaluate([str(tmp_path / "alone"), "--which=last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["nats_per_token"] == pytest.approx(
        summary(tmp_path / "alone")["val_loss"], rel=NEAR
    )
    measured = {name: values["nats_per_token"] for name, values in found["sources"].items()}
    assert measured == pytest.approx(losses, rel=NEAR)
    assert evaluate([str(tmp_path / "alone"), "--which=last"]) == 0
    assert "\nmodel  " in (table := capsys.readouterr().out) and "\n  s1.jsonl  " in table
    assert sample([str(tmp_path / "alone"), "--prompt=one", "--tokens=3"]) == 0


def test_records_of_several_sources(tmp_path: Path) -> None:
    """Only answers are targets, and each sequence has those of one source; what does not fit is told of
    each."""
    paths = []
    for answer in ("yes", "no"):
        lines = [{"prompt": f"{number}?", "completion": answer} for number in range(40)]
        lines.append({"prompt": "?" * 99, "completion": answer})  # fits nowhere
        paths.append(str(tmp_path / f"{answer}.jsonl"))
        Path(paths[-1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = ["--data", *paths, "--data.weights", "2", "1", "--data.format=answers", "--data.held-out=0"]
    config = read_config(options(tmp_path, "run", *said))
    prepared = prepare(config.data, tmp_path / "tokenizer.json", tmp_path / "tokens")
    batches = batches_of(config, prepared, BatchPlan(16, 3, 1, 3, 1))
    for step in range(30):
        targets = np.concatenate([batches.for_rank(step, rank, 2)[1] for rank in range(2)])
        letters = [set(bytes(row[(row >= 0) & (row < 256)].tolist()).decode()) for row in targets]
        assert sorted("".join(sorted(each)) for each in letters) == ["esy", "esy", "no"]
        assert batches.learned(step) == (targets != IGNORE).sum()
    lines_told = [line.split(" are left out")[0] for line in header.notes_on_data(prepared, config, batches)]
    assert lines_told[:2] == [f"warning: 1 of 41 records of {name}.jsonl" for name in ("yes", "no")]


def refusals(name: str) -> list[str]:
    folder, found = Path(name), []
    for more in (["--steps=1"], ["--steps=2", "--data.weights", "1", "1", "1"]):
        outcome = train(
            options(folder, "run", *mixed(folder)[:4], "--data.weights", "3", "1", "1", *more), folder
        )
        found.append(outcome.mistake() if outcome.status else "")
    config = folder / "run/config.toml"
    config.write_text(config.read_text().replace("weights = [3.0, 1.0, 1.0]", "weights = [3.0, 1.0, 2.0]"))
    found.append(train(["--run", folder / "run", "--steps=2"], folder).mistake())
    found.append(
        train(
            [
                "--data",
                folder / "s0.jsonl",
                folder / "s1.jsonl",
                "--data.weights",
                "1",
                "--run",
                folder / "other",
            ],
            folder,
        ).mistake()
    )
    assert not (folder / "other").exists()
    return found


def test_what_is_refused(tmp_path: Path) -> None:
    fine, other, edited, few = in_fork(refusals, str(tmp_path))
    assert fine == ""
    assert "data.weights = [3.0, 1.0, 1.0], this command says [1.0, 1.0, 1.0]: name another folder" in other
    assert (
        "was made with data.weights = [3.0, 1.0, 1.0], the run's config.toml says [3.0, 1.0, 2.0]" in edited
    )
    assert few.startswith("--data.weights names 1 weight for 2 names")


def test_shares_and_times_that_are_small_are_told(tmp_path: Path) -> None:
    folders = [write_text(tmp_path / f"{name}.jsonl", 40) for name in ("one", "other")]
    said = ["--data", *map(str, folders), "--data.weights", "1", "9999"]
    config = read_config(options(tmp_path, "run", *said))
    prepared = prepare(config.data, tmp_path / "tokenizer.json", tmp_path / "tokens")
    mix = header._mix(batches_of(config, prepared, BatchPlan(16, 12, 1, 12, 1)), 5)
    assert mix == "one.jsonl 0.01 %, read less than 0.001 times; other.jsonl 99.99 %, read 0.43 times"


def test_the_loss_of_all_weighs_sources_by_their_tokens() -> None:
    part = part_of_sources([part_of([range(1, 30)] * 3), part_of([[1] * 9])])
    assert [each.targets for each in part.sources] == [90, 10]
    assert of_all(part, [2.0, 4.0]) == pytest.approx(2.2)
    assert of_all(part.sources[0], [1 / 3]) == 1 / 3, "of one source the very bits"
    # Of 12 windows in all, and of 8 tokens at most, 4 of each source.
    assert windows_read(part, 9, 0) == 12 and windows_read(part, 2, 8) == 4
    assert windows_read(part, 2, 40) == 10 + 5, "of one that is too short the rest is not read of others"


def test_many_reads_of_a_source_are_told(tmp_path: Path) -> None:
    config = read_config(options(tmp_path, "run", *mixed(tmp_path), "--steps=200"))
    prepared = prepare(config.data, tmp_path / "tokenizer.json", tmp_path / "tokens")
    batches = batches_of(config, prepared, BatchPlan(16, 12, 1, 4, 3))
    often = [times > 4 for times in batches.epochs(200)]
    lines = [line for line in header.notes_on_data(prepared, config, batches) if " is read " in line]
    assert len(lines) == sum(often) > 0
    assert (
        lines[-1].startswith("warning: s2.jsonl is read ")
        and "times: more than 4 teach little new" in lines[-1]
    )
    assert not [line for line in header.notes_on_data(prepared, config) if " is read " in line]
