"""`imece export --to hf`: a folder that transformers loads, complete or absent."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from imece.checkpoint.load import Saved
from imece.cli.export import export
from imece.cli.main import main
from imece.data.tokenizer import load_tokenizer
from imece.data.tokens import open_tokens
from imece.models.hugging_face import from_hugging_face
from imece.models.hugging_face_files import write_weights
from imece.models.transformer import Transformer
from imece.train.config import DataSection, defaults
from imece.train.model.origin import keep, trained_model
from imece.train.run.folder import RunFolder
from tests.cli.conftest import TEXT, make_run
from tests.cli.refused import refused
from tests.ranks import start_ranks

FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
SENTENCE = "The çığ of 🏔 fell, \n\t<|end|> said."


@pytest.mark.parametrize(("which", "dtype"), [("best", "fp32"), ("last", "bf16")])
def test_the_folder_holds_the_model(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str, dtype: str
) -> None:
    target = tmp_path / "new" / "model"
    argv = ["export", str(trained_run), "--to", "hf", str(target), "--which", which, "--dtype", dtype]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert f"from_pretrained('{target}')" in said and re.search(r"parameters, \w+, [\d.]+ [kM]B\n", said)
    assert sorted(os.listdir(target)) == FILES
    assert os.listdir(target.parent) == ["model"]
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
    expected, _ = trained_model(RunFolder(trained_run), "best" if which == "best" else "last")
    config, tensors = from_hugging_face(target)
    assert config == expected.config
    for name, parameter in expected.named_parameters():
        wanted = parameter.detach().to(torch.float32 if dtype == "fp32" else torch.bfloat16)
        assert tensors[name].dtype == wanted.dtype and torch.equal(tensors[name], wanted), name
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    end = {"bos_token_id": 256, "eos_token_id": 256}
    for name in ("config.json", "generation_config.json"):
        content = json.loads((target / name).read_text())
        assert {key: content[key] for key in end} == end
    tokenizer = json.loads((target / "tokenizer_config.json").read_text())
    assert (tokenizer["eos_token"], tokenizer["model_max_length"]) == ("<|end|>", 64)
    assert load_tokenizer(target).encode(SENTENCE) == list(SENTENCE.encode())


def test_several_files(trained_run: Path, tmp_path: Path) -> None:
    """What is in one file otherwise, in the order of the model, and none larger than asked for."""
    one, several = tmp_path / "one", tmp_path / "several"
    assert main(["export", str(trained_run), str(one)]) == 0
    assert main(["export", str(trained_run), str(several), "--max-shard", "20 kB"]) == 0
    index = json.loads((several / "model.safetensors.index.json").read_text())
    expected = load_file(one / "model.safetensors")
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in expected.values())}
    names = sorted(path.name for path in several.glob("*.safetensors"))
    assert len(names) > 2 and sorted(set(index["weight_map"].values())) == names
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    found: dict[str, torch.Tensor] = {}
    for name in names:
        inside = load_file(several / name)
        assert sum(each.nbytes for each in inside.values()) <= 20_000 or len(inside) == 1
        assert {index["weight_map"][key] for key in inside} == {name}
        found |= inside
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert from_hugging_face(several)[1].keys() == from_hugging_face(one)[1].keys()


def test_one_tensor_is_in_memory_at_a_time(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    most = 0
    read = Saved.slice

    def counted(saved: Saved, name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal most
        found = read(saved, name, start, stop)
        alive.add(found.untyped_storage())
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(Saved, "slice", counted)
    assert main(["export", str(trained_run), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert 1 <= most <= 2  # the one before is let go of when the next one is there


@pytest.mark.parametrize("size", ["", "5", "GB", "0MB", "-1GB", "5GBs", "1e9B", "0.4B"])
def test_no_size(size: str, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "export", str(trained_run), str(tmp_path / "out"), f"--max-shard={size}")
    assert f"--max-shard {size!r} is not a size like 5GB or 500MB" in said
    assert os.listdir(tmp_path) == []


def test_sizes() -> None:
    sizes = {"50GB": 50 * 10**9, "2GiB": 2**31, "1.5 kb": 1500, "7B": 7, "3TB": 3 * 10**12, " 1MiB": 2**20}
    assert {text: export.read_bytes(text) for text in sizes} == sizes


def stopped_midway(run: str, out: str, go_on: str | None) -> int:
    """An export that is killed when the weights are there; or waits then, until a file is."""

    def stops(*args: Any, **options: Any) -> None:
        write_weights(*args, **options)
        if go_on is None:
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{go_on}.half").touch()
        while go_on is not None and not Path(go_on).exists():
            time.sleep(0.01)

    with mock.patch("imece.cli.export.export.write_weights", stops):
        return main(["export", run, out])


def test_what_a_killed_one_left_goes_away_with_the_next(trained_run: Path, tmp_path: Path) -> None:
    """But not what another one is writing just now; that one then finds the folder taken."""
    folder, go_on = tmp_path / "folder", tmp_path / "go on"
    words = [str(trained_run), str(folder / "out")]
    with start_ranks(stopped_midway, 1, args=[*words, None]) as killed:
        assert killed.wait()[0].returncode == -signal.SIGKILL
    (left,) = os.listdir(folder)
    assert left.endswith(".partial") and os.listdir(folder / left) == ["model.safetensors"]
    with start_ranks(stopped_midway, 1, args=[*words, str(go_on)]) as waiting:
        while not Path(f"{go_on}.half").exists():
            assert waiting.alive() == [0]
            time.sleep(0.01)
        (own,) = os.listdir(folder)
        assert own != left
        (folder / ".out.00000007.partial").mkdir()
        (folder / ".outer.00000007.partial").mkdir()
        assert main(["export", *words]) == 0
        assert sorted(os.listdir(folder)) == sorted([own, ".outer.00000007.partial", "out"])
        assert sorted(os.listdir(folder / "out")) == FILES
        go_on.touch()
        (result,) = waiting.wait()
    assert result.value == 2 and "Directory not empty" in result.output
    assert sorted(os.listdir(folder)) == [".outer.00000007.partial", "out"]


def test_tokens_that_others_would_add_are_left_out(trained_run: Path, tmp_path: Path) -> None:
    given = tmp_path / "tokenizer.json"
    content = json.loads((trained_run / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}},
    }
    given.write_text(json.dumps(content))
    data = DataSection(paths=(str(trained_run.parent / "texts"),), tokenizer=str(given), held_out=0.2)
    run = make_run(tmp_path / "run", data)
    assert open_tokens(run / "tokens").vocab_size == 257
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["post_processor"] is None


def test_the_token_that_began_each_document_is_put_before_a_text(trained_run: Path, tmp_path: Path) -> None:
    given = tmp_path / "tokenizer.json"
    content = json.loads((trained_run / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 257, "content": "<s>"})
    given.write_text(json.dumps(content))
    given.with_name("tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    data = DataSection(paths=(str(trained_run.parent / "texts"),), tokenizer=str(given), held_out=0.2)
    run, out = make_run(tmp_path / "run", data), tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert load_tokenizer(out).begin == load_tokenizer(run).begin == 257
    assert tokenizers.Tokenizer.from_file(str(out / "tokenizer.json")).encode("a").ids == [257, 97]
    for name in ("config.json", "generation_config.json"):
        found = json.loads((out / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"]) == (257, 256)
    assert json.loads((out / "tokenizer_config.json").read_text())["bos_token"] == "<s>"
    # A run that begins with this one says the same where it has learned to stop.
    keep(dataclasses.replace(defaults(str(run), 0), run=str(tmp_path / "second")))
    found = json.loads((tmp_path / "second/from/config.json").read_text())
    assert (found["bos_token_id"], found["eos_token_id"]) == (257, 256)


def test_a_chat_template_beside_a_tokenizer_of_ours_is_carried_along(
    trained_run: Path, tmp_path: Path
) -> None:
    """Put there to learn chats: a run that another one begins from has no tokenizer_config.json."""
    run = shutil.copytree(trained_run, tmp_path / "run")
    (run / "from").mkdir()
    shutil.copy(run / "tokenizer.json", run / "from")
    (run / "from/chat_template.jinja").write_text("{{ messages }}")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


def test_an_empty_folder_and_a_link_are_taken(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert main(["export", str(trained_run), str(tmp_path / "link")]) == 0
    assert sorted(os.listdir(tmp_path / "empty")) == FILES
    assert sorted(os.listdir(tmp_path)) == ["empty", "link"]


def test_where_it_does_not_write(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "file"
    file.parent.mkdir()
    file.write_text("precious")
    assert "is not empty" in refused(capsys, "export", str(trained_run), str(file.parent))
    assert "is a file" in refused(capsys, "export", str(trained_run), str(file))
    assert "cannot be written (Not a directory)" in refused(
        capsys, "export", str(trained_run), str(file / "below")
    )
    assert "DIR is empty: name a folder" in refused(capsys, "export", str(trained_run), "")
    assert "RUN is empty: name a run folder" in refused(capsys, "export", "", "out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in refused(capsys, "export", str(trained_run), ".")
    assert "is no run folder" in refused(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "config.json").write_text("{}")
    said = refused(capsys, "export", str(tmp_path), str(tmp_path / "out"))
    assert said.endswith("is no run, but a model in Hugging Face's format already: nothing to export\n")
    (tmp_path / "config.json").unlink()
    assert file.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["folder", "here"]


def test_another_format(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gguf" in refused(capsys, "export", str(trained_run), "--to", "gguf", str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(
    trained_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
) -> None:
    written = []

    def fails(folder: Path, *_: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        written.append(folder)
        raise error

    monkeypatch.setattr(export, "write_hugging_face", fails)
    status = main(["export", str(trained_run), str(tmp_path / "new" / "folders" / "out")])
    err = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert (status, err) == (130, "imece: interrupted\n")
    else:
        assert status == 2 and "space" in err
    assert len(written) == 1 and os.listdir(tmp_path) == []


def test_a_folder_that_is_filled_meanwhile_is_not_replaced(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_process(*_: object) -> int:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("precious")
        return 0

    monkeypatch.setattr(export, "write_hugging_face", other_process)
    assert "cannot be written (Directory not empty)" in refused(
        capsys, "export", str(trained_run), str(tmp_path / "out")
    )
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["file"]


def test_transformers_reads_it(trained_run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run, out = tmp_path / "run", tmp_path / "out"
    texts = tmp_path / "texts"
    shutil.copytree(trained_run.parent / "texts", texts)
    make_run(run, DataSection(paths=(str(texts),), vocab_size=300, held_out=0.2))
    assert main(["export", str(run), str(out), "--max-shard=40kB"]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ours, _ = trained_model(RunFolder(run), "best")
    assert isinstance(ours, Transformer)
    own = load_tokenizer(RunFolder(run).tokenizer_file)
    text = TEXT.format(number=7) + "  naïve\t日本"
    ids = tokenizer(text)["input_ids"]
    assert ids == own.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == own.end == theirs.generation_config.eos_token_id
    tokens = torch.tensor([[own.end, *ids[:60]]])
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)


def test_a_run_without_adapters_has_none_to_export(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained_run), str(tmp_path / "out"), "--to=adapter"]) == 2
    assert "has trained all of the model, and no adapters: take --to hf" in capsys.readouterr().err
