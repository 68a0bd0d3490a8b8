"""`imece sample`: what it prints, in whole characters only, and what it refuses."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from imece.cli import sample
from imece.cli.main import main
from imece.cli.sample import Text
from imece.data.bpe import train_bpe
from imece.data.corpus import Source
from imece.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer
from imece.models.generate import LogitsError, generate
from imece.models.transformer import Transformer
from imece.train.model.origin import model_of, trained_model
from imece.train.run.folder import RunFolder
from tests.cli.refused import refused

SENTENCE = "çığ 🏔️ a�b 日本語 naïve"


def written(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """stdout and stderr of `imece sample ARGV`, which must succeed."""
    assert main(["sample", *argv]) == 0
    out, err = capsys.readouterr()
    return out, err


def greedy(run: Path, which: str, prompt: str, new: int) -> str:
    model, _ = trained_model(RunFolder(run), "best" if which == "best" else "last")
    tokenizer = load_tokenizer(RunFolder(run).tokenizer_file)
    ids = [tokenizer.end, *tokenizer.encode(prompt)]
    return tokenizer.decode(list(generate(model, ids, new, temperature=0)))


# ---------------------------------------------------------------- the command


def test_it_writes_the_prompt_and_what_the_model_adds(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(trained_run), "--prompt", "köy ", "--tokens", "30", "--temperature", "0", "--no-stop"]
    best, last = (greedy(trained_run, which, "köy ", 30) for which in ("best", "last"))
    assert best != last
    out, err = written(capsys, *argv)
    assert out == f"köy {best}\n"
    assert err.startswith("imece: step 1: 30 tokens, ") and "tokens/s" in err
    out, err = written(capsys, *argv, "--which", "last")
    assert out == f"köy {last}\n"
    assert err.startswith("imece: step 2: 30 tokens, ")


def test_a_model_in_hugging_faces_format(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(trained_run), str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    argv = [str(tmp_path / "hf"), "--prompt", "köy ", "--tokens", "30", "--temperature", "0", "--no-stop"]
    out, err = written(capsys, *argv)
    assert out == f"köy {greedy(trained_run, 'best', 'köy ', 30)}\n" and err.startswith("imece: 30 tokens, ")
    said = refused(capsys, "sample", *argv, "--which", "last")
    assert said.endswith(f"last: {tmp_path / 'hf'} is no run, and has no checkpoints: leave --which out\n")
    monkeypatch.setattr(Text, "pieces", mock.Mock(side_effect=LogitsError))
    assert main(["sample", str(tmp_path / "hf")]) == 2
    assert "/hf: what its model computes is not finite: get the folder again" in capsys.readouterr().err


def test_the_folder_of_a_checkpoint(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(trained_run / "checkpoints" / "step-00000002")
    last = greedy(trained_run, "last", "köy ", 5)
    argv = ["--prompt", "köy ", "--tokens", "5", "--temperature", "0", "--no-stop"]
    out, err = written(capsys, folder, *argv)
    assert out == f"köy {last}\n" and err.startswith("imece: step 2: ")
    said = refused(capsys, "sample", folder, "--which", "1")
    assert said == f"imece: --which 1: {folder} is the checkpoint of step 2: leave --which out\n"
    said = refused(capsys, "sample", folder.replace("-00000002", "-00000007"))
    assert said == f"imece: {trained_run} has no checkpoint of step 7: those of 1, 2 are there\n"


def test_the_seed_it_tells_writes_the_same_again(
    trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = written(capsys, str(trained_run), "--tokens", "40")
    seed = err.split("--seed ")[1].split()[0]
    assert written(capsys, str(trained_run), "--tokens", "40", "--seed", seed)[0] == out
    assert written(capsys, str(trained_run), "--tokens", "40", "--seed", "1")[0] != out
    assert written(capsys, str(trained_run), "--tokens", "40", "--seed", seed, "--top-k", "1")[0] != out


def test_the_prompt_from_standard_input(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [str(trained_run), "--tokens", "5", "--temperature", "0"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("köy\n".encode())))
    assert written(capsys, *argv, "--prompt", "-")[0] == written(capsys, *argv, "--prompt", "köy\n")[0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"k\xf6y")))
    assert "standard input: not UTF-8 at byte 1" in refused(capsys, "sample", *argv, "--prompt", "-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed: give the text with --prompt" in refused(
        capsys, "sample", *argv, "--prompt", "-"
    )


def test_beyond_the_context(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(trained_run), "--tokens", "100", "--temperature", "0", "--no-stop"]
    prompt = "".join(map(chr, range(33, 127))) + "abcdef"  # 100 tokens, the context is 64
    out, err = written(capsys, *argv, "--prompt", prompt)
    assert "the prompt has 101 tokens, the model's context 64: it reads the last 64" in err
    assert "100 tokens" in err
    model, _ = trained_model(RunFolder(trained_run), "best")
    expected = generate(model, list(prompt.encode())[-64:], 100, temperature=0)
    expected_text = ByteTokenizer().decode(list(expected))
    assert len(set(expected_text)) > 5
    assert out == prompt + expected_text + "\n"


def test_the_end_of_a_document_ends(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def few(*_: object, stop: object, **__: object) -> Iterator[int]:
        seen.append(stop)
        return iter(b"ab")

    monkeypatch.setattr(sample, "generate", few)
    assert written(capsys, str(trained_run))[0] == "ab\n"
    written(capsys, str(trained_run), "--no-stop")
    assert seen == [{256}, ()]
    monkeypatch.setattr(sample, "generate", lambda *_, **__: iter(()))
    assert "0 tokens, the document ended at once" in written(capsys, str(trained_run))[1]


def test_weights_that_are_not_finite(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any) -> Transformer:
        model = model_of(*args)
        assert isinstance(model, Transformer)
        with torch.no_grad():
            model.embed.weight.fill_(torch.nan)
        return model

    monkeypatch.setattr(sample, "model_of", spoilt)
    for which, step, cure in (
        ("best", 1, "the usual cure is a new run with a lower --optimizer.lr"),
        ("last", 2, "--which best takes step 1"),
    ):
        folder = f"{trained_run}/checkpoints/step-0000000{step}"
        for temperature in ("0", "0.6"):
            argv = [str(trained_run), "--prompt", "köy", "--which", which, "--temperature", temperature]
            assert main(["sample", *argv]) == 2
            out, err = capsys.readouterr()
            assert out == "köy\n"
            assert err == (
                f"imece: {folder}: what its model computes is not finite, so its training went wrong before: "
                f"{cure}\n"
            )


def test_a_terminal_obeys_nothing_that_a_model_writes(
    trained_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "generate", lambda *_, **__: iter(b"a\x1b[31m\n"))
    assert written(capsys, str(trained_run))[0] == "a\x1b[31m\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert written(capsys, str(trained_run))[0] == "a\\x1b[31m\n\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "--tokens 0: at least 1"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--top-k", "0"], "--top-k 0"),
        (["--top-p", "0"], "--top-p 0.0"),
        (["--top-p", "1.5"], "--top-p 1.5"),
        (["--seed", "-1"], "--seed -1"),
        (["--which", "first"], "--which 'first': best, last, or the number of a step"),
        (["--promt", "x"], "did you mean --prompt?"),
        (["--prompt", "\udcff"], "half a surrogate pair"),
    ],
)
def test_what_it_refuses(
    trained_run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refused(capsys, "sample", str(trained_run), *argv)


def test_runs_it_refuses(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # as of others' folders; nothing is closed to root
        assert f"{trained_run}: cannot be read: check its permissions" in refused(
            capsys, "sample", str(trained_run)
        )
    assert "is neither a run, it has no config.toml, nor a model in" in refused(
        capsys, "sample", str(tmp_path)
    )
    assert "no such folder: name a run, or a folder with config.json" in refused(
        capsys, "sample", str(tmp_path / "x")
    )
    (tmp_path / "x").touch()
    assert "x: a file, not a folder: name a run, or a folder with" in refused(
        capsys, "sample", str(tmp_path / "x")
    )
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    (run / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(capsys, "sample", str(run))
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint" in refused(capsys, "sample", str(run))


def test_a_tokenizer_of_another_run(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    (tmp_path / "text.txt").write_text("some other text, some other tokens")
    train_bpe([Source([tmp_path / "text.txt"])], vocab_size=257).save(run / "tokenizer.json")
    assert "not the tokenizer that step 1 was trained with" in refused(capsys, "sample", str(run))


# ---------------------------------------------------------------- whole characters


def bpe(tmp_path: Path) -> Tokenizer:
    file = tmp_path / "text.txt"
    file.write_text(SENTENCE * 3, encoding="utf-8")
    return train_bpe([Source([file])], vocab_size=270, share=0.0)


def byte_fallback(_: Path) -> Tokenizer:
    """As Llama 2's: each byte of an unfinished run is an unknown character, and a first space is dropped."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "<eos>": 258}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return JsonTokenizer(tokenizer, 258)


@pytest.mark.parametrize("make", [lambda _: ByteTokenizer(), bpe, byte_fallback])
def test_each_character_comes_whole_and_at_once(make: object, tmp_path: Path) -> None:
    assert callable(make)
    tokenizer: Tokenizer = make(tmp_path)
    ids = tokenizer.encode(SENTENCE)
    assert len(ids) > len(SENTENCE) / 2
    pieces: list[str] = []

    def feed() -> Iterator[int]:
        for index, token in enumerate(ids):
            yield token
            due = tokenizer.decode([*tokenizer.encode("a"), *ids[: index + 1]])[1:]
            if not due.endswith("�"):
                assert "".join(pieces) == due  # nothing that is certain is held back

    for piece in Text(tokenizer, tokenizer.encode("a")).pieces(feed()):
        pieces.append(piece)
    assert "".join(pieces) == SENTENCE
    assert len(pieces) > 10


@pytest.mark.parametrize("make", [lambda _: ByteTokenizer(), byte_fallback])
def test_bytes_that_are_no_text(make: object, tmp_path: Path) -> None:
    assert callable(make)
    tokenizer: Tokenizer = make(tmp_path)
    junk = [0x80] * 9 + [0x61, 0xC3, 0xF0, 0x9F, 0x8F]
    pieces = list(Text(tokenizer, []).pieces(iter(junk)))
    assert "".join(pieces) == tokenizer.decode(junk)
    assert len(pieces) > 4 and "a" not in pieces[0]  # it does not wait for ever


def test_the_space_of_a_first_word_is_kept(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)
    assert tokenizer.decode([256, 257]) == "a"
    assert "".join(Text(tokenizer, [257]).pieces(iter([256, 257]))) == " a"
