"""`imece eval`: compared with a loss computed document by document; and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from imece.cli.evaluate import measures
from imece.cli.main import main
from imece.data.baselines import baselines
from imece.data.prepare import TextSource, prepare
from imece.data.tokens import open_tokens
from imece.train.model.origin import trained_model
from imece.train.model.precision import choose_precision
from imece.train.run.folder import RunFolder
from tests.cli.refused import refused


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["eval", *argv, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def loss_of(run: Path, tokens: list[int], which: str = "best") -> float:
    """Nats a token, in windows of the context."""
    model, _ = trained_model(RunFolder(run), "best" if which == "best" else "last")
    nats, before = 0.0, 256
    for first in range(0, len(tokens), 64):
        targets = tokens[first : first + 64]
        logits = model(torch.tensor([[before, *targets[:-1]]]))[0]
        nats += float(F.cross_entropy(logits, torch.tensor(targets), reduction="sum").detach())
        before = targets[-1]
    return nats / len(tokens)


def test_its_own_held_out_part(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = open_tokens(trained_run / "tokens")
    held_out = tokens.validation
    assert 0 < held_out.documents < 40
    for which, step in (("best", 1), ("last", 2)):
        content = found(capsys, str(trained_run), "--which", which)
        nats = content["model"]["nats_per_token"]
        assert nats == pytest.approx(loss_of(trained_run, held_out.tokens.tolist(), which), rel=1e-5)
        assert content["model"]["perplexity"] == pytest.approx(math.exp(nats))
        bits = nats * len(held_out.tokens) / math.log(2) / held_out.text_bytes
        assert content["model"]["bits_per_byte"] == pytest.approx(bits)
        assert content["step"] == step
        counts = (held_out.documents, held_out.text_bytes, len(held_out.tokens))
        assert (content["documents"], content["bytes"], content["tokens"]) == counts
        expected = baselines(tokens.train, held_out, 257)
        assert {name: each["nats_per_token"] for name, each in content["baselines"].items()} == expected
    assert main(["eval", str(trained_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 1, fp32, on held out" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == ["model", "bigram", "unigram", "uniform"]
    assert f"{loss_of(trained_run, held_out.tokens.tolist()):.3f}" in lines[3]


def test_baselines_of_a_part_of_the_tokens_say_so(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(capsys, str(trained_run))["baselines_counted_in"] == ""
    monkeypatch.setattr("imece.cli.evaluate.counted_in", lambda *_: "101 of 3,000 million train tokens")
    assert main(["eval", str(trained_run)]) == 0
    table = capsys.readouterr().out
    assert table.endswith("\n\nwithout a model: counted in 101 of 3,000 million train tokens\n")


def test_other_text(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("köy " * 50, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    before = sorted(os.listdir(trained_run))
    content = found(capsys, str(trained_run), "--data", str(tmp_path / "a.txt"))
    text = list(("köy " * 50).encode())
    assert content["model"]["nats_per_token"] == pytest.approx(loss_of(trained_run, [*text, 256]), rel=1e-5)
    assert (content["documents"], content["bytes"], content["tokens"]) == (1, 250, 251)
    own = open_tokens(trained_run / "tokens")
    assert content["baselines"]["uniform"]["nats_per_token"] == pytest.approx(math.log(own.vocab_size))
    content = found(capsys, str(trained_run), "--data", str(tmp_path / "b.jsonl"), "--data.field", "body")
    assert (content["documents"], content["tokens"]) == (2, 8)
    read = ["--data", str(tmp_path / "b.jsonl"), "--data.field", "body", "--data.separate"]
    alone = sum(loss_of(trained_run, [*text.encode(), 256]) for text in ("one", "two")) / 2
    for separate, expected in (("True", alone), ("False", content["model"]["nats_per_token"])):
        content = found(capsys, str(trained_run), *read, separate)
        assert content["model"]["nats_per_token"] == pytest.approx(expected, rel=1e-6)
    assert alone != pytest.approx(expected, rel=1e-5)
    (tmp_path / "c.jsonl").write_text("".join(f'{{"prompt": "{n}", "completion": "vii"}}\n' for n in (1, 5)))
    read = ["--data", str(tmp_path / "c.jsonl"), "--data.format", "answers"]
    losses = [
        found(capsys, str(trained_run), *read, *more)["model"]["nats_per_token"]
        for more in ([], ["--data.separate", "True"], ["--data.separate", "False"])
    ]
    assert losses[0] == losses[1] != losses[2], "records are separate, if nothing else is said"
    assert sorted(os.listdir(trained_run)) == before


def test_a_model_in_hugging_faces_format(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("köy " * 50, encoding="utf-8")
    folder, data = str(tmp_path / "hf"), ["--data", str(tmp_path / "a.txt")]
    assert main(["export", str(trained_run), folder]) == 0
    capsys.readouterr()
    content = found(capsys, folder, *data)
    text = list(("köy " * 50).encode())
    rel = 1e-5 if content["precision"] == "fp32" else 0.02
    expected = pytest.approx(loss_of(trained_run, [*text, 256]), rel=rel)
    assert content["model"]["nats_per_token"] == expected
    assert (content["step"], content["baselines"]) == (None, {})
    assert main(["eval", folder, *data]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{folder}, {content['precision']}, on {tmp_path / 'a.txt'}: 1 doc") and err == ""
    said = refused(capsys, "eval", folder)
    assert said == f"imece: {folder} is no run, which would have text of its own: name text with --data\n"


def test_a_terminal_shows_how_much_is_read(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["eval", str(trained_run)]) == 0
    table = capsys.readouterr()
    assert table.err == ""
    monkeypatch.setattr("imece.cli.evaluate.Console", partial(Console, force_terminal=True))
    assert main(["eval", str(trained_run)]) == 0
    shown = capsys.readouterr()
    tokens = len(open_tokens(trained_run / "tokens").validation.tokens)
    assert shown.out == table.out and f"reading {tokens} tokens" in shown.err and "100%" in shown.err


def test_files_that_are_not_text(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"\0\0")
    (tmp_path / "run").mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (tmp_path / "run" / name).touch()
    assert main(["eval", str(trained_run), "--data", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    left_out = "imece: 1 run folder left out\nimece: 1 of 2 files are not text and were left out\n"
    assert err == left_out
    assert "1 document, 4 bytes, 5 tokens" in out


def test_without_the_runs_own_tokens(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    shutil.rmtree(run / "tokens")
    (tmp_path / "a.txt").write_text("text")
    assert "no finished token files" in refused(capsys, "eval", str(run))
    assert main(["eval", str(run), "--data", str(tmp_path / "a.txt"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "no baselines" in err and err.count("\n") == 1
    assert json.loads(out)["baselines"] == {}


def test_tokens_that_have_changed_on_the_disk(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    file = run / "tokens" / "validation.bin"
    content = bytearray(file.read_bytes())
    content[1] ^= 0xFF  # of a token that no model knows
    file.write_bytes(content)
    assert f"{file}: damaged, its checksum is another: imece train makes it again" in refused(
        capsys, "eval", str(run)
    )


def test_the_tokens_of_another_run(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs share --data.folder, with the same tokenizer, and the other one was there last."""
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    (tmp_path / "a.txt").write_text("".join(f"another text {number}\n" for number in range(100)))
    prepare(TextSource((str(tmp_path / "a.txt"),)), run / "tokenizer.json", run / "tokens")
    why = (
        f"{run}/tokens: not of the text that step 1 was trained on: imece train makes them again if that is "
        "still there, --data names other text"
    )
    assert refused(capsys, "eval", str(run)) == f"imece: {why}\n"
    assert main(["eval", str(run), "--data", str(tmp_path / "a.txt"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"imece: no baselines, for the run's own tokens cannot be used ({why})\n"
    assert json.loads(out)["baselines"] == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "/nowhere.txt"], "/nowhere.txt: no such file"),
        (["--data", "--json"], "--data is empty: give it a name, or leave it out"),
        (["--data"], "--data is empty: give it a name, or leave it out"),
        (["--data", __file__, "--data.field", ""], "--data.field is ''"),
        (["--data.format", "chat"], "say how --data is read: name text with --data"),
        (["--model.max-seq", "0"], "--model.max-seq 0: at least 1"),
        (["--model.max-seq", "65"], "has 64 positions: at most 64"),
        (["--wich", "best"], "did you mean --which?"),
    ],
)
def test_what_it_refuses(
    trained_run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refused(capsys, "eval", str(trained_run), *argv)


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is neither a run, it has no config.toml, nor a model in" in refused(capsys, "eval", str(tmp_path))


def test_a_run_in_fp16_without_a_gpu(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imece.cli.evaluate.best_device", lambda: torch.device("cpu"))
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('dtype = "fp32"', 'dtype = "fp16"'))
    assert main(["eval", str(run)]) == 0
    out, err = capsys.readouterr()
    name = choose_precision("auto", torch.device("cpu")).name
    assert f"step 1, {name}, on held out" in out
    assert err == f"imece: the run's fp16 needs a GPU: evaluated in {name}\n"


def test_where_nothing_can_be_written(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    message = refused(capsys, "eval", str(trained_run), "--data", str(tmp_path / "a.txt"))
    assert "no folder for the tokens of --data can be made (No such file or directory): set TMPDIR" in message


def test_in_a_folder_that_is_gone(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = refused(capsys, "eval", str(trained_run), "--data", "a.txt")
    assert message == "imece: the current folder has been removed: go to one that is there\n"


@pytest.mark.parametrize("nats", [math.nan, math.inf, 1e4])
def test_what_json_has_no_number_for(nats: float) -> None:
    values = measures(nats, 10, 20)
    assert values["perplexity"] is None
    json.dumps(values, allow_nan=False)
