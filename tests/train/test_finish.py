"""What the end of a run prints, as far as that needs no run."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from imece.data.tokenizer import ByteTokenizer
from imece.data.tokens import Part
from imece.footprint import Footprint
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import MeshSection, TrainConfig
from imece.train.finish import _prompt, _rows, _sample, is_finished, next_commands
from imece.train.model.precision import Precision
from imece.train.run.folder import RunFolder
from tests.checkpoint.crew import crew, state_of
from tests.meshes import FakeMesh


@pytest.mark.parametrize(("run", "word"), [("runs/my run", "runs/my run"), ("-x", "./-x"), ("/a/b", "/a/b")])
def test_commands_can_be_copied(run: str, word: str) -> None:
    where = SimpleNamespace(path=Path(run))
    session: Any = SimpleNamespace(folder=where, config=TrainConfig(steps=3), why_early="")
    commands = dict(next_commands(session, True))
    assert shlex.split(commands["next"]) == ["imece", "sample", word, "--prompt", "class Queue("]
    assert shlex.split(commands["longer"]) == ["imece", "train", "--run", word, "--steps", "6"]
    session.config = TrainConfig(steps=7, epochs=1.5)
    assert dict(next_commands(session, True))["longer"].endswith(" --epochs 3")


def test_what_is_kept_when_the_last_checkpoint_is_not(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(folder=RunFolder(tmp_path / "my run"), config=TrainConfig(steps=60))
    again = ("next", f"imece train --run {shlex.quote(str(tmp_path / 'my run'))}")
    said = "no checkpoint: once the disk takes files again, the command below begins anew"
    assert next_commands(session, False) == [("kept", said), again]
    with crew(session.folder.checkpoints, 1) as ranks:
        assert ranks.save(5, state_of(5)) and ranks.save(10, state_of(10))
    (session.folder.checkpoints / "step-00000015").mkdir()
    said = "the checkpoint of step 10: once the disk takes files again, the command below goes on from there"
    assert next_commands(session, False) == [("kept", said), again]


def test_a_run_is_finished_once_all_its_files_are_of_these_steps(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(folder=RunFolder(tmp_path), done=3, why_early="", is_over=True)
    assert not is_finished(session)
    for content, finished in (
        ('{"steps": 3}', True), ('{"steps": 3, "ended": "early"}', False), ('{"steps": 2}', False),
        ("{}", False), ('{"steps"', False), ("[3]", False), ("3", False), ("", False),
    ):  # fmt: skip
        (tmp_path / "summary.json").write_text(content)
        (tmp_path / "report.html").write_text("")
        assert is_finished(session) == finished, content
    (tmp_path / "report.html").unlink()
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    assert not is_finished(session)


def test_where_nothing_is_held_out_the_sample_begins_as_the_text_does() -> None:
    tokens = [np.frombuffer(text, np.uint8) for text in (b"Dear diary, it rains.\n", b"Again.\n", b"")]
    parts = [
        Part("", each, np.array(at), 10, 0) for each, at in zip(tokens, ([0, 22], [0, 7], [0]), strict=True)
    ]
    train, held_out, nothing = parts
    tokenizer = SimpleNamespace(decode=lambda ids: bytes(ids).decode(), begin=None)

    def prompt(paths: tuple[str, ...], validation: Part) -> str:
        both = SimpleNamespace(train=train, validation=validation)
        config = SimpleNamespace(data=SimpleNamespace(paths=paths))
        session: Any = SimpleNamespace(
            config=config, prepared=SimpleNamespace(tokens=both, tokenizer=tokenizer)
        )
        found = _prompt(session)
        assert isinstance(found, str)
        return found

    assert prompt(("notes/",), nothing) == "Dear di"
    assert prompt(("notes/",), held_out) == "Again."
    assert prompt((), nothing).startswith("class Queue")


def test_a_model_whose_numbers_are_not_finite() -> None:
    """No sample, and nothing that would need one; the rest of the summary stands."""
    model = Transformer(TransformerConfig(257, 1, 16, 2, 1, 24, 16))
    session: Any = SimpleNamespace(
        prepared=SimpleNamespace(tokenizer=ByteTokenizer()),
        model=model,
        mesh=FakeMesh(),
        plan=SimpleNamespace(mesh=MeshSection()),
        precision=Precision("fp32", "cpu"),
        folder=SimpleNamespace(path=Path("runs/a")),
    )
    whole = _sample(session, "ab")
    assert whole is not None and whole["prompt"] == "ab" and whole["text"].startswith("ab")
    with torch.no_grad():
        model.embed.weight.fill_(torch.nan)
    assert _sample(session, "ab") is None
    summary = {"steps": 3, "seconds": 3.0, "tokens": 30, "tokens_per_s": 10.0, "sample": None}
    rows = _rows(summary | {"memory": asdict(Footprint(1, 1, 1, 1))}, True)
    assert rows[-1] == (
        "",
        "no sample: what the model computes is not finite any more, so its training went wrong; the usual "
        "cure is a new run with a lower --optimizer.lr",
    )
    assert next_commands(session, True, usable=False) == [("open", "runs/a/report.html")]


def test_baselines_of_a_part_of_the_tokens_say_so() -> None:
    summary: dict[str, Any] = {"steps": 40, "seconds": 3.0, "tokens": 40_960, "tokens_per_s": 13_653.0}
    summary |= {"memory": asdict(Footprint(1, 1, 1, 1)), "val_loss": 2.0, "val_bits_per_byte": 1.5}
    summary |= {"sample": {"prompt": "", "text": ""}}
    some = "101 of 3,000 million train tokens"
    for counted, also in (("", ""), (some, f" (counted in {some})")):
        found = {"baselines": {"uniform": 8.0, "bigram": 3.25}, "baselines_counted_in": counted}
        lines = [line for _, line in _rows(summary | found, True)]
        assert f"without a model it would be uniform 8.000, bigram 3.250{also}" in lines


def test_so_many_tokens_as_the_header_writes_them() -> None:
    summary = {"steps": 40, "seconds": 3.0, "tokens": 40_960, "tokens_per_s": 13_653.0, "sample": {}}
    memory = asdict(Footprint(1, 1, 1, 1))
    ((_, line), *_) = _rows(summary | {"memory": memory}, True)
    assert line == "40 steps in 0:03, 41.0k tokens, 13,653 tokens/s"
    ((_, line), *_) = _rows(summary | {"memory": memory, "seconds": 36_000.4}, True)
    assert line.startswith("40 steps in 10:00:00, ")
    ((_, line), *_) = _rows(summary | {"memory": memory, "steps": 1}, True)
    assert line.startswith("1 step in 0:03, ")
