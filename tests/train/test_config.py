"""The config: one thing in three forms, and which options of a run may change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.cli.options import parse
from imece.errors import UserError
from imece.footprint import StrategyName
from imece.models.presets import PRESETS
from imece.train.config import (
    BatchSection,
    CheckpointSection,
    ComputeSection,
    DataSection,
    LoraSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PipelineSchedule,
    TrainConfig,
    ValidateSection,
    WatchSection,
    flat,
)
from imece.train.config_file import read_toml, to_toml
from imece.train.run.folder import RunFolder
from imece.train.run.same import MAY_CHANGE, check_same_run

_CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")  # control characters too
WORDS = st.text(_CHARACTERS, max_size=12)
NAMES = st.text(_CHARACTERS, min_size=1, max_size=12)
COUNTS = st.integers(1, 2**40)
COUNTS_OR_0 = st.integers(0, 2**40)
SHARES = st.floats(0, 1, exclude_max=True)
RATES = st.floats(0, 1e30)


def some(section: type[Any], /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Instances of a dataclass, all fields of which are drawn."""
    assert set(fields) == {each.name for each in dataclasses.fields(section)}, section.__name__
    return st.builds(section, **fields)


@st.composite
def models(draw: st.DrawFn) -> ModelSection:
    """Shapes that can be, some values left to the preset."""
    kv_heads, group, half = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    heads = kv_heads * group
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "width": heads * half * 2}
    others: dict[str, st.SearchStrategy[Any]] = {
        "layers": st.integers(1, 9),
        "mlp_width": COUNTS,
        "max_seq": st.integers(2, 2**40),
        "tied_head": st.booleans(),
    }
    chosen = shape if draw(st.booleans()) else {}
    chosen = chosen | {name: draw(st.none() | values) for name, values in others.items()}
    if draw(st.integers(0, 9)) == 0:
        return ModelSection(preset="", weights=draw(NAMES), max_seq=chosen.get("max_seq"))
    return ModelSection(preset=draw(st.sampled_from(sorted(PRESETS))), **chosen)


CONFIGS = some(
    TrainConfig,
    run=WORDS,
    ranks=COUNTS_OR_0,
    steps=COUNTS,
    epochs=st.floats(0, 1_000_000),
    strategy=st.sampled_from(get_args(StrategyName)),
    seed=st.integers(0, 2**63 - 1),
    model=models(),
    data=some(
        DataSection,
        paths=st.lists(NAMES, max_size=3).map(tuple),
        weights=st.lists(st.floats(0.1, 99).map(lambda weight: round(weight, 1)), max_size=3).map(tuple),
        format=st.just("text"),
        field=st.none() | NAMES,
        tokenizer=NAMES,
        vocab_size=st.integers(257, 2**20),
        held_out=SHARES,
        validation=st.lists(NAMES, max_size=3).map(tuple),
        separate=st.none() | st.booleans(),
        folder=WORDS,
    ),
    batch=some(BatchSection, sequences=COUNTS, tokens=COUNTS_OR_0, micro=COUNTS_OR_0),
    optimizer=some(
        OptimizerSection,
        kind=st.sampled_from(["muon", "adamw"]),
        lr=RATES,
        schedule=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
        warmup=COUNTS_OR_0,
        min_lr=st.floats(0, 1),
        weight_decay=RATES,
        beta1=SHARES,
        beta2=SHARES,
        eps=st.floats(1e-37, 1e30),
        clip=RATES,
    ),
    lora=some(
        LoraSection,
        rank=COUNTS_OR_0,
        alpha=st.none() | COUNTS,
        dropout=SHARES,
        targets=st.lists(WORDS, unique=True).map(tuple),
        quantize=st.sampled_from(["none", "nf4"]),
    ),
    mesh=some(
        MeshSection,
        context=COUNTS,
        tensor=COUNTS,
        sequence=st.booleans(),
        pipeline=COUNTS,
        schedule=st.sampled_from(get_args(PipelineSchedule)),
    ),
    compute=some(
        ComputeSection,
        dtype=st.sampled_from(["auto", "bf16", "fp32", "fp16"]),
        compile=st.booleans(),
        recompute=st.booleans(),
        offload=st.sampled_from(["none", "optimizer", "parameters"]),
        wire=st.sampled_from(["none", "bf16", "int8"]),
        accumulate=st.sampled_from(["auto", "whole", "sharded"]),
        bad_steps=COUNTS,
    ),
    validate=some(ValidateSection, every=COUNTS, tokens=COUNTS_OR_0, patience=COUNTS_OR_0)
    | some(ValidateSection, every=st.just(0), tokens=COUNTS_OR_0, patience=st.just(0)),
    checkpoint=some(CheckpointSection, every=COUNTS_OR_0, minutes=RATES, keep=COUNTS),
    watch=some(WatchSection, drift_every=st.integers(0, 100_000), slow_ratio=st.floats(1, 10)),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "config.toml"


@given(config=CONFIGS)
def test_toml_and_back(config: TrainConfig, file: Path) -> None:
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_toml(file) == config
    assert [type(value) for value in flat(read_toml(file)).values()] == [
        type(value) for value in flat(config).values()
    ]


@pytest.mark.parametrize(
    "name", ["\x7f", "\x01\x1f", "\"'\\", "\n\r\t\b\f", "ü\u2028\ufeff\U0001f600", "[a]\n#b = 1"]
)
def test_names_that_need_care(name: str, file: Path) -> None:
    config = TrainConfig(run=name, data=DataSection(paths=(name, name), tokenizer=name))
    file.write_text(to_toml(config), encoding="utf-8")
    assert read_toml(file) == config


def test_toml_names_every_value(file: Path) -> None:
    """A file that is printed to be changed must show all there is, but for what the preset says."""
    content = to_toml(TrainConfig())
    for name in flat(TrainConfig()):
        key = name.rpartition(".")[2]
        assert (f"\n{key} = " in f"\n{content}") == (flat(TrainConfig())[name] is not None), name


def test_what_a_file_leaves_out_is_as_ever(file: Path) -> None:
    file.write_text("")
    assert read_toml(file) == TrainConfig()
    file.write_text('steps = 5\n[optimizer]\nlr = 1\n[data]\npaths = "a.txt"\n[model]\nlayers = 3\n')
    changed = dataclasses.replace(
        TrainConfig(steps=5),
        optimizer=OptimizerSection(lr=1.0),
        data=DataSection(paths=("a.txt",)),
        model=ModelSection(layers=3),
    )
    assert read_toml(file) == changed
    assert type(read_toml(file).optimizer.lr) is float


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("setps = 5", "there is no setps; did you mean steps?"),
        ("[nope]\na = 1", "there is no nope; there are run, "),
        ("[optimizer]\ngamma = 1", "there is no optimizer.gamma; there are "),
        ("[checkpoint]\nevry = 1", "there is no checkpoint.evry; did you mean checkpoint.every?"),
        ("[optimiser]\nlr = 1", "there is no optimiser; did you mean optimizer?"),
        ("lr = 1", "there is no lr; did you mean optimizer.lr?"),
        ("[optimizer]\nlearning_rate = 1", "there is no optimizer.learning_rate; did you mean optimizer.lr?"),
        ("output_dir = 'a'", "there is no output_dir; did you mean run?"),
        ("[model]\nsteps = 1", "there is no model.steps; did you mean steps?"),
        ("every = 1", "there is no every; did you mean validate.every or checkpoint.every?"),
        ('run = "a\\u0000b"', "run is 'a\\x00b': take the NUL out"),
        ('[data]\npaths = ["a", "\\u0000"]', "data.paths is '\\x00': take the NUL out"),
        ("model = 'tiny'", "model is a section, [model], not a value"),
        ("[steps]\nx = 1", "steps is {'x': 1}: a whole number"),
        ("steps = 1.5", "steps is 1.5: a whole number"),
        ("steps = true", "steps is True: a whole number"),
        ("steps = '5'", "steps is '5': a whole number"),
        ("steps = 0", "steps is 0: at least 1"),
        ("seed = -1", "seed is -1: from 0 to 9223372036854775807"),
        ("run = 5", "run is 5: a string"),
        ("strategy = 'zero9'", "strategy is 'zero9': one of auto, replicate, zero1, zero2"),
        ("strategy = ['ddp']", "strategy is ['ddp']: one of auto, replicate, zero1, zero2"),
        ("[compute]\ncompile = 1", "compute.compile is 1: true or false"),
        ("[optimizer]\nlr = true", "optimizer.lr is True: a number"),
        ("[optimizer]\nlr = nan", "optimizer.lr is nan: at least 0"),
        ("[optimizer]\nlr = inf", "optimizer.lr is inf: at least 0"),
        ("[optimizer]\nlr = 1979-05-27", "optimizer.lr is datetime.date(1979, 5, 27): a number"),
        ("[optimizer]\neps = 0", "optimizer.eps is 0.0: at least 1e-37"),
        ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1 is 1.0: at least 0 and less than 1"),
        ("[optimizer]\nmin_lr = 1.5", "optimizer.min_lr is 1.5: a share of lr, so at most 1"),
        ("[validate]\nevery = 0\npatience = 3", "validate.patience is 3, and validate.every 0, with which"),
        ("[data]\npaths = [1]", "data.paths is [1]: a list of strings"),
        ("[data]\nheld_out = 1.0", "data.held_out is 1.0: at least 0 and less than 1"),
        ("[model]\npreset = 'smal'", "there is no preset 'smal': did you mean 'small'?"),
        ("[model]\nlayers = 0", "model.layers is 0: at least 1"),
        (
            "[model]\nmax_seq = 1",
            "model.max_seq is 1: at least 2, for a token is learned from those before it",
        ),
        ("[model]\nlayers = 9223372036854775808", "model.layers is 9223372036854775808: at least 1, at most"),
        ("[model]\nheads = 3", "width is 256, which cannot be divided among heads = 3"),
        ("steps = ", "not TOML (Invalid value (at end of document)); imece train --print-config shows"),
        ("steps = 1\nsteps = 2", "not TOML (Cannot overwrite a value"),
        ("[watch]\ndrift_every = 100001", "watch.drift_every is 100001 steps: at least 0 steps, at most 1"),
        ("[data]\nvocab_size = 1048577", "data.vocab_size is 1048577: at most 1048576, for all take memory"),
        (
            "ranks = 9223372036854775808",
            "ranks is 9223372036854775808: at least 0, at most 9223372036854775807",
        ),
        ("seed = 9223372036854775808", "seed is 9223372036854775808: from 0 to 9223372036854775807"),
        pytest.param(f"[batch]\ntokens = {10**310}", "batch.tokens is 1000", id="310 digits"),
        pytest.param(f"[optimizer]\nlr = {10**310}", "optimizer.lr is 1000", id="310 digits of a rate"),
        pytest.param(f"steps = {'9' * 5000}", "not TOML (Exceeds the limit (4300 digits)", id="5000 digits"),
        pytest.param(f"x = {'[' * 10_000}", "not TOML (maximum recursion depth", id="deep"),
    ],
)
def test_mistakes_in_a_file(content: str, said: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(UserError) as mistake:
        read_toml(file)
    assert str(mistake.value).startswith(f"{file}: {said}")


def test_a_file_may_begin_with_a_byte_order_mark(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert read_toml(file).steps == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"run = '\xfc'\n")
    with pytest.raises(UserError, match=r"latin\.toml: not TOML \('utf-8' codec"):
        read_toml(tmp_path / "latin.toml")


# A value for each field that is none of TrainConfig()'s.
OTHER: dict[str, Any] = {
    "run": "x", "ranks": 3, "steps": 9, "epochs": 0.5, "strategy": "ddp", "seed": 2, "model.preset": "tiny",
    "model.weights": "x",
    "model.layers": 1, "model.width": 64, "model.heads": 4, "model.kv_heads": 2, "model.mlp_width": 8,
    "model.max_seq": 9, "model.tied_head": False, "data.paths": ("a",),
    "data.format": "answers", "data.field": "body,reply",
    "data.tokenizer": "bytes", "data.vocab_size": 300, "data.held_out": 0.5, "data.validation": ("v",),
    "data.weights": (2.0,), "data.separate": True,
    "data.folder": "x",
    "batch.sequences": 8, "batch.tokens": 512, "batch.micro": 2, "optimizer.kind": "adamw",
    "optimizer.lr": 1.0,
    "optimizer.schedule": "wsd", "optimizer.warmup": 1, "optimizer.min_lr": 0.5,
    "optimizer.weight_decay": 0.5, "optimizer.beta1": 0.5, "optimizer.beta2": 0.5, "optimizer.eps": 1e-6,
    "optimizer.clip": 2.0, "lora.rank": 1, "lora.alpha": 1, "lora.dropout": 0.5, "lora.targets": ("q",),
    "lora.quantize": "nf4", "mesh.context": 2, "mesh.tensor": 2, "mesh.sequence": True,
    "mesh.pipeline": 2, "mesh.schedule": "gpipe",
    "compute.dtype": "fp32", "compute.compile": True, "compute.recompute": True,
    "compute.offload": "optimizer", "compute.wire": "int8", "compute.accumulate": "whole",
    "compute.bad_steps": 1,
    "validate.every": 1, "validate.tokens": 1, "validate.patience": 1,
    "checkpoint.every": 1, "checkpoint.minutes": 0.5,
    "checkpoint.keep": 1, "watch.drift_every": 1, "watch.slow_ratio": 2.0,
}  # fmt: skip


def changed(name: str) -> TrainConfig:
    """TrainConfig() with another value there."""
    section, _, key = name.rpartition(".")
    if not section:
        return dataclasses.replace(TrainConfig(), **{key: OTHER[name]})
    part = dataclasses.replace(getattr(TrainConfig(), section), **{key: OTHER[name]})
    return dataclasses.replace(TrainConfig(), **{section: part})


def test_every_value_has_another_here() -> None:
    assert OTHER.keys() == flat(TrainConfig()).keys()


def test_the_list_of_what_may_change() -> None:
    """Written out once more: whoever makes it longer has to say here that the run stays the same."""
    expected = {
        "run", "ranks", "steps", "epochs", "data.folder",
        "strategy", "mesh.context", "mesh.tensor", "mesh.sequence", "mesh.pipeline", "mesh.schedule",
        "batch.micro", "compute.compile", "compute.recompute", "compute.offload", "compute.wire",
        "compute.accumulate", "compute.bad_steps", "validate.every", "validate.tokens", "validate.patience",
        "checkpoint.every", "checkpoint.minutes", "checkpoint.keep",
        "watch.drift_every", "watch.slow_ratio",
    }  # fmt: skip
    assert expected == MAY_CHANGE and expected < OTHER.keys()


@pytest.mark.parametrize("name", sorted(OTHER))
def test_what_may_change(name: str) -> None:
    config = changed(name)
    assert [key for key, value in flat(config).items() if value != flat(TrainConfig())[key]] == [name]
    check_same_run(TrainConfig(), TrainConfig())
    if name in MAY_CHANGE:
        check_same_run(TrainConfig(), config)
        check_same_run(config, TrainConfig())
        return
    with pytest.raises(UserError, match=f"holds a run with {name} = .*, this command says .*--run"):
        check_same_run(TrainConfig(), config)
    with pytest.raises(UserError, match=f"holds a run with {name} = "):
        check_same_run(config, TrainConfig())


def test_several_values_that_may_not_change() -> None:
    now = dataclasses.replace(changed("optimizer.lr"), seed=7, run="runs/x")
    many = dataclasses.replace(now, data=DataSection(("a",), field="b", tokenizer="c", vocab_size=5000))
    some = "optimizer.lr differs"
    for config, others in ((now, some), (many, "data.paths, data.field, data.tokenizer and 2 more differ")):
        with pytest.raises(UserError) as mistake:
            check_same_run(TrainConfig(), config)
        assert str(mistake.value) == (
            f"runs/x holds a run with seed = 1, this command says 7 ({others} too): "
            "name another folder with --run, or leave those options out"
        )


def test_a_run_on_the_default_text_is_called_so() -> None:
    now = dataclasses.replace(TrainConfig(), data=DataSection(("/a",)))
    with pytest.raises(UserError) as mistake:
        check_same_run(TrainConfig(), now)
    assert (
        "holds a run with data.paths = [] (no --data: Python's standard library), this command says "
        '["/a"]: name another folder'
    ) in str(mistake.value)


def test_what_is_none_is_named_as_an_option_takes_it() -> None:
    with pytest.raises(
        UserError, match=r"holds a run with model\.layers = None, this command says 3"
    ) as mistake:
        check_same_run(TrainConfig(), parse(TrainConfig, ["--model.layers=3"], "imece train", ""))
    said = str(mistake.value).partition(" = ")[2].partition(",")[0]
    assert parse(TrainConfig, [f"--model.layers={said}"], "imece train", "") == TrainConfig()


def test_a_number_of_steps_that_nothing_can_count() -> None:
    with pytest.raises(UserError, match=r"^steps is 10{17}\.\.\.0{19}: at least 1, at most 92\d*7$"):
        parse(TrainConfig, ["--steps", str(10**310)], "imece train", "")


def test_a_folder_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As data.paths and data.tokenizer: no shell reads a TOML file."""
    monkeypatch.setenv("HOME", "/home/me")
    config = TrainConfig(run="~/r", data=DataSection(folder="~/t"))
    assert config.folder == Path("/home/me/r")
    assert RunFolder(config.folder).tokens(config) == Path("/home/me/t")


def test_the_run_folder() -> None:
    assert TrainConfig().folder == Path("runs/small")
    assert changed("model.preset").folder == Path("runs/tiny")
    assert TrainConfig(run="here").folder == Path("here")
