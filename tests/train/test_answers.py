"""Training on records: answers alone are learned, on any ranks as by one process on the whole batch."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from imece.cli.main import main
from imece.data.batches import IGNORE, Batches
from imece.data.tokenizer import load_tokenizer
from imece.data.tokens import open_tokens
from imece.train.model.beginning import new_model
from imece.train.model.origin import shape_of, trained_model
from imece.train.model.precision import choose_precision
from imece.train.run.folder import RunFolder
from tests.train.command import in_fork, train
from tests.train.compare import records
from tests.train.model.test_origin import write_model
from tests.train.small import options

SEQ = 32
NEAR = 1e-5  # fp32, summed in another order
TEMPLATE = (
    "{% for message in messages %}{{ '<unk>' + message.role + ' ' + message.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<unk>assistant ' }}{% endif %}"
)


def write_records(path: Path, count: int = 60) -> Path:
    """Prompts and answers of many lengths: some sequences have many learned tokens, others few."""
    draw = random.Random(3)
    lines = []
    for number in range(count):
        answer = "yes" * draw.choice((1, 1, 1, 6))
        lines.append(json.dumps({"prompt": f"{number} {'?' * draw.randint(0, 9)}", "completion": answer}))
    path.write_text("\n".join(lines) + "\n")
    return path


def words(folder: Path, run: str, *more: str) -> list[str]:
    text = folder / "answers.jsonl"
    if not text.exists():
        write_records(text)
    return options(
        folder, run, f"--data={text}", "--data.format=answers", f"--model.max-seq={SEQ}",
        "--optimizer.kind=adamw", "--optimizer.schedule=constant", "--optimizer.warmup=0",
        "--model.layers=2", "--model.kv-heads=2", "--validate.every=2", *more,
    )  # fmt: skip


def whole_loss(run: Path) -> float:
    """Of the first step, by one process and torch's own function: the mean over all answers, of which the
    model reads each record alone."""
    config, cpu = RunFolder(run).config(), torch.device("cpu")
    model = new_model(config, shape_of(config, 257), cpu, choose_precision("fp32", cpu))
    batches = Batches(open_tokens(run / "tokens").train, SEQ, config.batch.sequences, config.seed)
    part, nats, learned = batches.part, 0.0, 0
    assert part.learned is not None
    for name in batches.names(0):
        tokens = torch.from_numpy(part.document(name).astype(np.int64))
        counts = torch.from_numpy(part.learned[part.offsets[name] : part.offsets[name + 1]].copy())
        targets = torch.where(counts, tokens, IGNORE)[1:]
        nats += float(F.cross_entropy(model(tokens[None, :-1])[0], targets, reduction="sum").detach())
        learned += int((targets != IGNORE).sum())
    assert learned == batches.learned(0)
    return nats / learned


def curve(run: Path) -> list[float]:
    figures = ("loss", "grad_norm", "val_loss")
    return [record[name] for record in records(run) for name in figures if name in record]


def runs(name: str) -> float:
    folder, crosses = Path(name), "--data.separate=False"
    for run, more in (
        ("alone", ["--ranks=1", "--batch.micro=3", "--steps=4"]),
        ("halves", ["--ranks=1", "--batch.micro=3", "--steps=2"]),
        ("halves", ["--ranks=1", "--batch.micro=3", "--steps=4"]),
        ("three", ["--ranks=3", "--batch.micro=4", "--steps=2"]),
        ("crossing", ["--ranks=1", crosses, "--batch.micro=3", "--steps=2"]),
        ("context", ["--ranks=2", crosses, "--mesh.context=2", "--batch.micro=1", "--steps=2"]),
        ("pipeline", ["--ranks=2", "--mesh.pipeline=2", "--batch.micro=3", "--steps=2"]),
    ):
        outcome = train(words(folder, run, *more), folder)
        assert outcome.status == 0, (run, outcome)
    return whole_loss(folder / "alone")


def test_any_ranks_train_like_one_process(tmp_path: Path) -> None:
    """Ranks have other numbers of learned tokens; with context and micro-batches of one sequence some have
    none. What is gone on with has the same bits."""
    whole = in_fork(runs, str(tmp_path))
    alone = curve(tmp_path / "alone")
    assert abs(alone[0] / whole - 1) < NEAR / 10
    assert curve(tmp_path / "halves") == alone
    crossing = curve(tmp_path / "crossing")
    assert abs(crossing[0] / whole - 1) > NEAR
    for run, one in (("three", alone), ("context", crossing), ("pipeline", alone)):
        found = np.array(curve(tmp_path / run))
        apart = np.abs(found / one[: len(found)] - 1).max()
        assert apart < 5 * NEAR, (run, apart)


def test_held_out_records_that_do_not_fit_are_found_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"prompt": "x" * 99, "completion": "y"}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    asked = words(tmp_path, "run", f"--data.validation={tmp_path / 'long.jsonl'}")
    assert main(["train", *(word for word in asked if "held-out" not in word)]) == 2
    said = capsys.readouterr().err
    assert "none of 1 records of the validation part fits" in said and "--model.max-seq 101" in said
    assert not (tmp_path / "run").exists()


def talk(number: int) -> dict[str, Any]:
    said = {"role": "user", "content": f"say {number % 7}"}
    return {"messages": [said, {"role": "assistant", "content": f"village {number % 7}"}]}


def learn_chats(name: str) -> list[Any]:
    folder = Path(name)
    words = [
        f"--from={folder / 'source'}", f"--data={folder / 'chats.jsonl'}", "--data.format=chat",
        f"--run={folder / 'run'}", "--model.max-seq=32", "--batch.sequences=8", "--compute.dtype=fp32",
        "--ranks=2", "--steps=3", "--data.held-out=0.1",
    ]  # fmt: skip
    outcome = train(words, folder)
    return [outcome.status, outcome.out, outcome.err]


def test_a_run_that_learns_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder's template to answers: `imece sample` asks by it, and `imece export` carries it along."""
    write_model(tmp_path / "source")
    (tmp_path / "source/chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(talk(number)) + "\n" for number in range(60)))
    status, out, err = in_fork(learn_chats, str(tmp_path))
    assert status == 0, err
    assert " of answers (" in out and "<unk>user say " in out
    run = str(tmp_path / "run")
    assert main(["sample", run, "--prompt", "say 3", "--tokens", "2", "--temperature", "0"]) == 0
    asked = capsys.readouterr().out
    assert asked.startswith("say 3\n")
    model, _ = trained_model(RunFolder(tmp_path / "run"), "best")
    tokenizer = load_tokenizer(tmp_path / "source")
    ((ids, _),) = tokenizer.encode_with_spans(["<unk>user say 3</s>\n<unk>assistant "], special=True)
    likeliest = int(model(torch.tensor([ids.tolist()]))[0, -1, : tokenizer.vocab_size].argmax())
    assert asked.removeprefix("say 3\n").startswith(tokenizer.decode([likeliest]).rstrip("\ufffd"))
    assert main(["sample", run]) == 2
    assert "say it with --prompt, or take --raw" in capsys.readouterr().err
    assert main(["sample", run, "--raw", "--prompt", "say 3", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("say 3")
    assert main(["eval", run, "--data", str(tmp_path / "chats.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["documents"] == 60 and found["bytes"] == 60 * len("village 1")
    out = str(tmp_path / "out")
    assert main(["export", run, out]) == 0
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    # Whoever loads it stops where an answer ends, even if the model it began with stopped elsewhere.
    shutil.copytree(run, tmp_path / "other")
    (tmp_path / "other/from/chat_template.jinja").write_text(TEMPLATE.replace("</s>", "<unk>"))
    (tmp_path / "other/from/generation_config.json").write_text('{"eos_token_id": 7}')
    assert main(["export", str(tmp_path / "other"), str(tmp_path / "others")]) == 0
    for name, stops in (("config.json", [2, 7, 0]), ("generation_config.json", [7, 0, 2])):
        assert json.loads((tmp_path / "others" / name).read_text())["eos_token_id"] == stops
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [2, 7]
    capsys.readouterr()
    assert main(["sample", out, "--prompt", "say 3", "--tokens", "2", "--temperature", "0"]) == 0
    again = capsys.readouterr()
    assert again.out == asked and "--raw: the prompt is the beginning of a text" in again.err
    assert main(["sample", out]) == 2
    assert "say it with --prompt, or take --raw" in capsys.readouterr().err
    chats = ["--data", str(tmp_path / "chats.jsonl")]
    assert main(["eval", out, *chats, "--data.format", "chat", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["tokens"], read["model"]) == (found["tokens"], pytest.approx(found["model"], rel=0.02))
    assert main(["eval", out, *chats]) == 2
    assert "its fields are 'messages': take --data.format chat" in capsys.readouterr().err


def test_records_longer_than_a_sequence_are_said_to_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    data = ["--data", str(write_records(tmp_path / "answers.jsonl")), "--data.format=answers", "--json"]
    documents = []
    for length, said in (
        (
            ["--model.max-seq=20"],
            " of 60 records are left out, with more than 21 tokens: --model.max-seq 25 takes all",
        ),
        ([], ""),
    ):
        assert main(["eval", str(tmp_path / "model"), *data, *length]) == 0
        out, err = capsys.readouterr()
        assert said in err and bool(said) == bool(err)
        documents.append(json.loads(out)["tokens"])
    assert documents[0] < documents[1]
