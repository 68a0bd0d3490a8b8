"""A run folder is all that a later command needs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint.save import Checkpoints
from imece.checkpoint.state.weights import load_weights
from imece.data.sources import sources
from imece.data.tokenizer import ByteTokenizer, load_tokenizer
from imece.errors import UserError
from imece.models.presets import PRESETS
from imece.models.shape import RopeScaling, TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TrainConfig
from imece.train.model.origin import trained_model
from imece.train.run.folder import RunFolder, Which, read_shape, shape_as_json
from imece.train.run.lock import RunLock

SHAPE = dataclasses.replace(PRESETS["tiny"], vocab_size=257, width=16, mlp_width=24)


def model(seed: int, **changes: Any) -> Transformer:
    return Transformer(dataclasses.replace(SHAPE, **changes), generator=torch.Generator().manual_seed(seed))


def save(folder: RunFolder, metrics: dict[int, float | None]) -> None:
    """Models of so many steps, each with its metric; that of step n has the seed n."""
    alarms: list[str] = []
    checkpoints = Checkpoints(
        folder.checkpoints, rank=0, world_size=1, keep=len(metrics), alarm=alarms.append
    )
    for step, metric in metrics.items():
        tensors = {f"model/{name}": each.detach() for name, each in model(step).named_parameters()}
        checkpoints.save(step, tensors, {"model": shape_as_json(SHAPE)}, {}, metric=metric)
        assert checkpoints.finish(), alarms
    checkpoints.close()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.begin(TrainConfig(run=str(made.path)))
    return made


def test_its_files_are_no_text_once_it_has_begun(tmp_path: Path) -> None:
    text, run = tmp_path / "a.txt", RunFolder(tmp_path / "run")
    text.write_text("x")
    with RunLock(run.path) as lock, run.begun(TrainConfig(run=str(run.path)), lock):
        run.origin.mkdir()
        (run.origin / "merges.txt").write_text("x")
        assert sources([tmp_path]) == [text]


def test_shapes_as_json() -> None:
    for shape in PRESETS.values():
        assert read_shape(shape_as_json(shape)) == shape
    read = read_shape(shape_as_json(PRESETS["llama-8b"]))
    assert isinstance(read, TransformerConfig) and isinstance(read.rope_scaling, RopeScaling)


def test_best_and_last(folder: RunFolder) -> None:
    save(folder, {1: 3.0, 2: 2.5, 3: 4.0})
    steps: dict[Which, int] = {"last": 3, "best": 2, "1": 1}
    for which, step in steps.items():
        found, saved = trained_model(folder, which)
        assert saved.step == step and not found.training
        for name, parameter in model(step).named_parameters():
            assert torch.equal(found.get_parameter(name), parameter), name


def test_a_step_that_has_no_checkpoint(folder: RunFolder) -> None:
    save(folder, {1: 3.0, 3: 4.0})
    with pytest.raises(UserError, match=r"run has no checkpoint of step 2: those of 1, 3 are there$"):
        folder.saved("2")


def test_a_run_that_never_validated_has_no_best(folder: RunFolder) -> None:
    save(folder, {1: None, 2: None})
    assert folder.saved("best").step == folder.saved("last").step == 2


def test_nothing_to_read(folder: RunFolder, tmp_path: Path) -> None:
    for which in ("best", "last", "1"):
        with pytest.raises(UserError, match="run has no checkpoint that can be read yet: train first"):
            folder.saved(which)
    save(folder, {1: 3.0})
    (folder.checkpoints / "step-00000001" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"no checkpoint that can be read: .*manifest\.json: damaged"):
        folder.saved("last")
    with pytest.raises(UserError, match=r"other is no run folder, it has no config\.toml: check the path"):
        RunFolder(tmp_path / "other").config()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is no run folder, it has no config\.toml: check the path"):
        RunFolder(tmp_path / "file").config()
    with pytest.raises(UserError, match=r"xx: cannot be read \(File name too long\): check the path and its"):
        RunFolder(tmp_path / ("x" * 300)).config()


def test_a_damaged_best_is_passed_over_by_name(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder, {1: 3.0, 2: 2.5, 3: 4.0})
    paths = {step: folder.checkpoints / f"step-{step:08d}" / "manifest.json" for step in (1, 2, 3)}
    damaged: list[str] = []
    for step, expected in ((2, 1), (1, 3)):
        paths[step].write_text("{}")
        damaged.append(f"imece: damaged, so another checkpoint is used: {paths[step]}: damaged ")
        assert folder.saved("best").step == expected
        lines = sorted(capsys.readouterr().err.splitlines(), reverse=True)
        assert [line[: len(damaged[0])] for line in lines] == damaged
    paths[3].write_text("{}")
    with pytest.raises(UserError, match=r"run has no checkpoint that can be read: .*manifest\.json: damaged"):
        folder.saved("best")
    save(folder, {1: None, 2: 2.0})
    paths[2].write_text("{}")
    assert folder.saved("best").step == 1
    assert capsys.readouterr().err.count("imece: ") == 2, "each once, by two looks"


def test_a_checkpoint_of_another_model(folder: RunFolder) -> None:
    save(folder, {1: None})
    saved = folder.saved()
    load_weights(model(0), saved)
    with pytest.raises(
        UserError, match=r"001 is of another model: blocks\.0\.mlp\.gate\.weight should be \[32, 16\], the "
    ):
        load_weights(model(0, mlp_width=32), saved)
    with pytest.raises(UserError, match=r"blocks\.2\.attention\.norm\.weight should be \[16\], .* none; "):
        load_weights(model(0, layers=3), saved)


def test_what_was_only_prepared_for_other_options_is_discarded(tmp_path: Path) -> None:
    """As after SIGTERM: nothing has begun, and the tokenizer would be taken as it is."""
    run = RunFolder(tmp_path / "run")
    config = TrainConfig(run=str(run.path))
    run.begin(config)
    for name in ("tokenizer.json", "tokenizer_config.json", "from/config.json", "from/merges.txt"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    run.begin(dataclasses.replace(config, steps=3))
    assert run.tokenizer_file.exists(), "of use still"
    other = dataclasses.replace(config, seed=3)
    run.begin(other)
    assert [path.name for path in run.path.iterdir()] == ["config.toml"]
    assert run.config().seed == 3
    both = dataclasses.replace(other, model=dataclasses.replace(other.model, weights="a"))
    with pytest.raises(UserError, match="a model is new or that of a folder: leave one of them out"):
        run.begin(both)
    run.checkpoints.mkdir()
    with pytest.raises(UserError, match="holds a run with seed = 3, this command says 1"):
        run.begin(config)


def test_what_is_put_back_has_what_stands_beside_the_tokenizer(folder: RunFolder, tmp_path: Path) -> None:
    given = json.loads(ByteTokenizer().to_json())
    given["added_tokens"].append({**given["added_tokens"][0], "id": 257, "content": "<s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
    shutil.rmtree(folder.path)
    assert folder.put_back(TrainConfig(), load_tokenizer(tmp_path))
    assert load_tokenizer(folder.tokenizer_file).begin == 257


def test_where_tokens_are(folder: RunFolder) -> None:
    assert folder.tokens(TrainConfig()) == folder.path / "tokens"
    shared = dataclasses.replace(TrainConfig().data, folder="shared")
    assert folder.tokens(dataclasses.replace(TrainConfig(), data=shared)) == Path("shared")


def test_a_run_of_another_version_is_called_so(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config_file.write_text("speed = 3\n")
    for written, also in (("{}", False), ("[]", False), ("{", False), ('{"imece": "99.0"}', True)):
        (tmp_path / "environment.json").write_text(written)
        with pytest.raises(UserError, match="there is no speed") as raised:
            run.config()
        assert ("imece 99.0 has written this run" in str(raised.value)) == also


@pytest.mark.parametrize(
    "name", ["config.toml", ".lock", "metrics.jsonl", "tokens/0.bin", "checkpoints/.ranks/0"]
)
def test_a_pipe_in_a_files_place_is_named_before_anybody_waits_for_it(folder: RunFolder, name: str) -> None:
    pipe = folder.path / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    (folder.path / "link.txt").symlink_to("nowhere")
    config = TrainConfig(run=str(folder.path))
    for opens in (folder.config, lambda: folder.begin(config, RunLock(folder.path))):
        with pytest.raises(UserError, match=f"{pipe}: no plain file, but a pipe"):
            opens()


def test_an_empty_config_is_no_run_with_the_defaults(folder: RunFolder) -> None:
    folder.config_file.write_bytes(b"")
    with pytest.raises(UserError, match=r"config\.toml: damaged \(it is empty\): put it back"):
        folder.config()
