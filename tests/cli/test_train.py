"""`imece train` until it would start ranks: options, files, and mistakes in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imece.cli import train
from imece.cli.main import main
from imece.cli.options import options_of
from imece.data.batches import Batches
from imece.data.prepare import prepare
from imece.data.tokens import open_tokens
from imece.errors import UserError
from imece.launch.generations import Limits
from imece.train import header, start
from imece.train.config import TrainConfig
from imece.train.config_file import read_toml, to_toml
from imece.train.run.folder import RunFolder
from imece.train.run.lock import HELD
from tests.cli.refused import refused
from tests.train.compare import files
from tests.train.small import options, write_text

Launch = tuple[list[str], int]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """(command, ranks) of each launch; nothing is started."""
    launches: list[Launch] = []

    def launch(
        command: list[str], limits: Limits, *, grace_s: float, environ: dict[str, str], direct: bool
    ) -> int:
        assert environ == os.environ | {HELD: "1"}, "the launcher holds the lock for its ranks"
        assert grace_s >= 60 and direct, "a step and a save need time, and mistakes are to be said once"
        assert limits.restart, "it can go on from its checkpoint"
        launches.append((command, limits.ranks))
        return 0

    monkeypatch.setattr(train, "launch", launch)
    return launches


@pytest.fixture
def mistake(launched: list[Launch], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `imece train ...`, which must be refused: the one line that it says."""

    def run(*words: str | Path) -> str:
        said = refused(capsys, "train", *map(str, words))
        assert not launched
        return said.removeprefix("imece: ").rstrip("\n")

    return run


def test_more_ranks_than_may_have_files_open(
    mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("imece.system.open_files.allow_open_files", lambda: 30)
    said = mistake(*options(tmp_path, "run", "--ranks=9"))
    assert said.startswith("9 ranks need ") and ", and 30 are allowed (ulimit -Hn): raise that limit" in said
    assert not (tmp_path / "run").exists()


def test_help_explains_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # boxes one below the other
    with pytest.raises(SystemExit) as leaving:
        main(["train", "--help"])
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "--print-config" in out and "imece train [config.toml] [options]" in " ".join(out.split())
    lines = "\n".join(line.strip("│ ") for line in out.splitlines())
    described: dict[str, str] = {}
    for entry in re.split(r"\n(?=--)", lines):
        text = re.sub(r"--\S+|\{\S+\}|[A-Z]{3,}|\(default.*", "", entry, flags=re.DOTALL)
        described |= dict.fromkeys(re.findall(r"(?:^|, )(--[a-z0-9.-]+)", entry.splitlines()[0]), text)
    names = options_of(TrainConfig)
    assert len(names) >= 40
    for name in names:
        assert len(re.findall(r"[a-z]{2,}", described[name])) >= 3, f"{name} is not explained"
    for name in ("--model", "--data", "--ranks", "--steps", "--run", "--strategy"):
        assert name in names


@pytest.mark.parametrize(
    "command, words, last",
    [
        ("train", "What each rank holds", "(default: "),
        ("train", "On GPUs: what lies in the host's memory", "(default: "),
        ("train", "A rank is called slow", "(default: "),
        ("launch", "How often in all a dead rank", "all ranks are never started again."),
        ("plan", "Number format.", "fp32 on CPUs."),
    ],
)
def test_a_wide_screen_has_each_option_on_a_line(
    command: str,
    words: str,
    last: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However the source breaks its lines."""
    monkeypatch.setenv("COLUMNS", "2000")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    (line,) = (each for each in capsys.readouterr().out.splitlines() if words in each)
    assert last in line


def test_the_printed_config_is_a_whole_one(
    tmp_path: Path, launched: list[Launch], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--steps=7", "--print-config", "--model=tiny", "--data", "a", "b"]) == 0
    out = capsys.readouterr().out
    (tmp_path / "printed.toml").write_text(out)
    config = read_toml(tmp_path / "printed.toml")
    assert (config.steps, config.model.preset, config.data.paths) == (7, "tiny", ("a", "b"))
    assert main(["train", str(tmp_path / "printed.toml"), "--print-config"]) == 0
    assert capsys.readouterr().out == out
    assert not launched and not (tmp_path / "runs").exists()


def test_options_count_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("steps = 5\nseed = 6\n[optimizer]\nlr = 0.5\nwarmup = 3\n")
    config = train.read_config([str(file), "--steps", "8", "--optimizer.lr=0.25", "--checkpoint.keep", "9"])
    assert (config.steps, config.seed) == (8, 6)
    assert (config.optimizer.lr, config.optimizer.warmup, config.checkpoint.keep) == (0.25, 3, 9)
    assert config.validate == TrainConfig().validate


def test_a_run_folders_values_are_what_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = train.read_config(options(tmp_path, "run", "--steps=5", "--checkpoint.every=3"))
    begun = dataclasses.replace(begun, data=begun.data.absolute())  # which names the usual field
    RunFolder(tmp_path / "run").begin(begun)
    again = train.read_config([f"--run={tmp_path / 'run'}", "--steps", "9"])
    assert again == dataclasses.replace(begun, steps=9)
    # A run that was moved is where it is now, whatever its file says.
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = str(tmp_path / "moved")
    assert train.read_config(["--run", moved]) == dataclasses.replace(begun, run=moved)
    # Without --run it is that of the model; and a file says all that is wanted, so the folder adds nothing.
    monkeypatch.chdir(tmp_path)
    small = dataclasses.replace(begun, run="")
    RunFolder(Path("runs/tiny")).begin(small)
    assert train.read_config(["--model=tiny"]) == small
    assert train.read_config([]) == TrainConfig()
    Path("b.toml").write_text("[model]\npreset = 'tiny'\n")
    assert train.read_config(["b.toml"]).steps == TrainConfig().steps


def test_a_run_s_own_file_means_that_run(
    tmp_path: Path, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it has been moved to; but a file that only lies somewhere means what it says."""
    monkeypatch.chdir(tmp_path)
    own = "runs/own/config.toml"
    RunFolder(Path("runs/own")).begin(TrainConfig(run="runs/own"))
    Path("runs/own/checkpoints").mkdir()
    assert train.read_config([own]).run == "runs/own", "as it was, for all ranks alike"
    Path("runs/own").rename("runs/moved")
    moved = "runs/moved/config.toml"
    assert train.read_config([moved]).run == "runs/moved"
    assert train.read_config([moved, "--run=other"]).run == "other"
    monkeypatch.chdir("runs/moved")
    assert train.read_config(["config.toml"]).run == "."
    os.rename("config.toml", "mine.toml")
    assert train.read_config(["mine.toml"]).run == "runs/own"
    os.rename("mine.toml", "config.toml")
    os.rmdir("checkpoints")
    assert train.read_config(["config.toml"]).run == "runs/own", "nothing has begun beside it"


def test_what_is_launched(tmp_path: Path, launched: list[Launch], capsys: pytest.CaptureFixture[str]) -> None:
    words = options(tmp_path, "run", "--ranks=3", "--steps=5")
    assert main(["train", *words]) == 0
    assert capsys.readouterr() == ("starting 3 ranks\n", ""), "so little text becomes tokens at once"
    config_file = tmp_path / "run" / "config.toml"
    command = [sys.executable, "-m", "imece", "train", str(config_file)]
    assert launched == [(command, 3)]
    assert read_toml(config_file) == train.read_config(words)
    assert {"tokenizer.json", "tokens"} < {path.name for path in (tmp_path / "run").iterdir()}
    launched.clear()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    before = files(tmp_path / "run")
    assert main(["train", "--run", str(tmp_path / "run")]) == 0
    after = files(tmp_path / "run")
    assert launched == [(command, 3)] and after.items() >= before.items()
    assert after.keys() - before.keys() == {"loss.png", "report.html"}, "the ranks made none"


@pytest.mark.parametrize("columns", ["30", "40", "80"])
def test_the_bar_is_one_line(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COLUMNS", columns), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    with train._progress() as report:
        report("making tokens of 40 files", 542_600, 542_600)
    drawn = capsys.readouterr().err
    assert "making tokens" in drawn and "\x1b[2A" not in drawn and drawn.count("\n") <= 2, repr(drawn)


def test_the_run_lies_in_its_own_text(
    tmp_path: Path, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = options(tmp_path, "runs/own", "--data", ".")
    assert main(["train", *words]) == 0
    before = files(tmp_path / "runs")
    (tmp_path / "runs/own/metrics.jsonl").touch()
    config = train.read_config(words)
    run = RunFolder(config.folder)
    prepared = prepare(config.data, run.tokenizer_file, run.tokens(config))
    said = header.describe_data(prepared, config)
    assert said.endswith("(14.4 % of them held out), 1 run folder left out") and ": 1 file, " in said
    assert main(["train", *words]) == 0 and len(launched) == 2
    (tmp_path / "runs/own/metrics.jsonl").unlink()
    assert files(tmp_path / "runs") == before


def test_texts_are_found_from_any_folder(
    tmp_path: Path, launched: list[Launch], mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a run whose file has the names as they were given; but other text of the same name is none."""
    home, other, run = tmp_path / "[home]", tmp_path / "other", RunFolder(tmp_path / "run")
    for folder in (home, other):
        folder.mkdir()
        write_text(folder / "a.jsonl", seed=len(folder.name))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    names, more = ("a.jsonl", "*.jsonl", "~/a.jsonl", "."), "--data.folder=shared"
    assert main(["train", *options(tmp_path, "run", "--data", *names, more)]) == 0
    given, kept, tokens = train.read_config(["--data", *names, more]).data, run.config().data, files(home)
    a = str(home / "a.jsonl")
    assert kept.paths == (a, f"{tmp_path}/[[]home]/*.jsonl", a, str(home))
    assert (kept.tokenizer, kept.folder) == ("bytes", str(home / "shared"))
    monkeypatch.chdir(other)
    for words in ((), ("--data", "../[home]/a.jsonl", "../[[]home]/*.jsonl", "~/a.jsonl", "../[home]")):
        assert main(["train", "--run=../run", *words]) == 0
        assert run.config().data == kept and files(home) == tokens
    run.checkpoints.mkdir()
    launched.clear()
    assert "holds a run with data.paths = " in mistake("--run=../run", "--data", *names)
    monkeypatch.chdir(home)
    as_given = dataclasses.replace(kept, paths=given.paths, folder=given.folder)
    run.config_file.write_text(to_toml(dataclasses.replace(run.config(), data=as_given)))
    assert run.config().data == as_given != kept
    assert main(["train", "--run=../run"]) == 0
    assert run.config().data == kept and files(home) == tokens


def test_ranks_by_default(tmp_path: Path, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imece.train.start.usable_gpus", lambda: 0)
    for cores, ranks in ((1, 1), (2, 2), (64, 2)):
        monkeypatch.setattr("imece.train.start.usable_cores", lambda cores=cores: cores)
        assert main(["train", *options(tmp_path, f"run{cores}")]) == 0
        assert launched.pop()[1] == ranks
    monkeypatch.setattr("imece.train.start.usable_gpus", lambda: 4)
    assert main(["train", *options(tmp_path, "run-gpus")]) == 0
    assert launched.pop()[1] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stepz=5"], "there is no option --stepz; did you mean --steps?"),
        (["--print-confg"], r"there is no option --print-confg; did you mean --print-config\?"),
        (["--optimizer.lrr", "1"], "there is no option --optimizer.lrr; did you mean --optimizer.lr?"),
        (["--lr", "1"], r"--lr; did you mean --optimizer\.lr\?"),
        (["--model.warmup=1"], r"--model\.warmup; did you mean --optimizer\.warmup\?"),
        (["--config", "a.toml"], r"--config; did you mean imece train FILE\.toml\?"),
        (["--save_steps", "9"], r"--save_steps; did you mean --checkpoint\.every\?"),
        (["--num_train_epochs", "3"], r"--num_train_epochs; did you mean --epochs\?"),
        (["--every=1"], r"--every; did you mean --validate\.every or --checkpoint\.every\?"),
        (["--steps=many"], r"'many'.*--steps|--steps.*'many'"),
        (["--strategy=zero9"], r"^--strategy 'zero9': one of auto, replicate, zero1.*did you mean zero"),
        (["--print-config", "--data.weights", "3", "1"], "weights names 2 weights for 1 name behind --data"),
        (["--nproc", "4"], r"^there is no option --nproc \(see"),
        (["--strategy=hybrid"], "--strategy hybrid: it shards inside hosts.*use zero3"),
        (["--offload=optimizer"], "--offload optimizer moves .* and there is no GPU here: leave it out"),
        (["--offload=disk"], r"'disk': one of none, optimizer, parameters"),
        (["--model=smal"], r"there is no preset 'smal': did you mean 'small'\?"),
        (["--model.heads=3"], r"width is 16, which cannot be divided among heads = 3"),
        (["--optimizer.lr=nan"], r"^optimizer\.lr is nan: at least 0$"),
        (["--seed=-1"], r"seed is -1: from 0 to 9223372036854775807"),
        (["--seed=99999999999999999999"], r"seed is 99999999999999999999: from 0 to"),
        (["--epochs=nan"], r"^epochs is nan: at least 0$"),
        (["--epochs=1e9"], r"^epochs is 1000000000\.0: at least 0, at most 1000000$"),
        (
            ["--steps=9", "--epochs=2"],
            "^--steps 9 has no effect beside epochs = 2: give one of them, or --epochs 0$",
        ),
        (
            ["--data.held-out=0.1", "--data.validation=a"],
            "--data.held-out 0.1 has no effect beside data.valid",
        ),
        (
            ["--data.held-out=0", "--validate.patience=3"],
            "--validate.patience 3 has no effect beside data.held_out = 0, with which nothing is validated",
        ),
        (["--data.held-out=1"], r"held_out is 1\.0: at least 0 and less than 1"),
        (["--ranks=5"], r"--batch\.sequences 12 cannot be divided by 5 ranks; the nearest are 10 and 15"),
        (["--model.max-seq=1"], r"model\.max_seq is 1: at least 2, for a token"),
        (["--batch.micro=7", "--ranks=2"], r"--batch\.micro 7 is more than the 6 .*: at most 6$"),
        (["--batch.micro=5", "--ranks=2"], r"cannot be divided by 2 ranks x micro-batch 5; .* 10 and 20"),
        (
            ["--batch.tokens=192"],
            r"--batch\.sequences 12 has no effect beside batch\.tokens = 192: give one of them, or",
        ),
        (["--ranks=13"], r"--ranks 13 are more than the 12 sequences of a step: at most 12 ranks, or"),
        (
            ["--batch.sequences=2000"],
            r"the train part holds [\d,]+ tokens, but a step reads 2,000 sequences x 16 ",
        ),
        (["--data={tmp}/none.txt"], r"none\.txt: no such file or folder: check the path"),
        (["--data=s3://bucket/a"], r"s3://bucket/a: text is not downloaded: save it as a file and name that"),
        (["--data={tmp}/*.none"], r"\*\.none: no file matches this pattern"),
        (["--data={tmp}/empty.txt"], r"empty\.txt: the file is empty: name one that holds text"),
        (["--data={tmp}/binary.txt"], r"binary\.txt: a NUL at byte 3, so not text"),
        (["--data={tmp}/latin.txt"], r"latin\.txt: not UTF-8 at byte 1: convert it with iconv"),
        (["--data.field=body"], r"text\.jsonl:1: no field 'body'; its fields are 'text'"),
        (["--data.tokenizer={tmp}/none.json"], r"no tokenizer '.*none\.json': name bpe, bytes or the path"),
        (["--data.tokenizer={tmp}/empty.txt"], r"empty\.txt: not a tokenizer\.json"),
        (
            ["--data.folder={tmp}/empty.txt/x"],
            r"empty\.txt/x: cannot write the token files \(Not a directory\)",
        ),
        (["--run="], "^--run is empty: give it a name, or leave it out$"),
        (["--run", ""], "^--run is empty: give it a name, or leave it out$"),
        (["--from", "", "--steps=5"], "^--from is empty: give it a name, or leave it out$"),
        (["--model.weights="], r"^--model\.weights is empty: give it a name, or leave it out$"),
        (["--data", "a", "--data=b"], "^--data is given twice: give all names behind one of them$"),
        (["--data"], "^--data is empty: give it a name, or leave it out$"),
        (["--data.paths", "--steps=5"], r"^--data\.paths is empty: give it a name, or leave it out$"),
        (["--run={tmp}/empty.txt"], r"empty\.txt is a file: name a folder with --run"),
        (["--run={tmp}/empty.txt/x"], r"the run folder cannot be written \(Not a directory\): name another$"),
        (["--run={tmp}/dangling"], r"dangling is a link that leads to nothing: name a folder with --run"),
        (["--run={tmp}/foreign"], r"foreign holds other files, but no run: name another folder with --run"),
        (["--run=/proc/run"], r"/proc/run: the run folder cannot be written \(No such file"),
        (["--run={tmp}/" + "x" * 300], r"the run folder cannot be written \(File name too long\)"),
        (["--run={tmp}/\udcff"], r'run = ".*\\udcff": a name that is not UTF-8'),
        (
            ["stray.toml"],
            r"^stray\.toml: a config file stands before the options: imece train stray\.toml \.\.\.$",
        ),
    ],
)
def test_mistakes_leave_nothing(
    words: list[str], said: str, tmp_path: Path, mistake: Callable[..., str]
) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes").write_text("not ours")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "binary.txt").write_bytes(b"abc\0")
    (tmp_path / "latin.txt").write_bytes(b"f\xfcr")
    given = options(tmp_path, "runs/run", *(word.format(tmp=tmp_path) for word in words))
    before = files(tmp_path)
    assert re.search(said, mistake(*given))
    assert files(tmp_path) == before and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps = 5\n[optimiser]\nlr = 1\n", "a.toml: there is no optimiser; did you mean optimizer?"),
        (b"steps = [\n", "a.toml: not TOML (Invalid value (at end of document)); imece train --print-config"),
        (b"run = '\xff'\n", "a.toml: not TOML ('utf-8' codec can't decode byte 0xff"),
        (b"strategy = 'zero9'\n", "a.toml: strategy is 'zero9': one of auto, replicate, zero1, zero2"),
        (
            b"ranks = 3\n[batch]\nsequences = 4",
            "--batch.sequences 4 cannot be divided by 3 ranks; the nearest",
        ),
    ],
)
def test_mistakes_in_a_file(
    content: bytes, said: str, tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_bytes(content)
    assert mistake("a.toml").startswith(said)
    assert files(tmp_path) == {"a.toml": content}


def test_files_that_are_none(
    tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mistake(tmp_path / "none.toml").endswith(
        "cannot be read (No such file or directory): name a TOML file, or none"
    )
    Path("notes").mkdir()
    Path("a b").mkdir()
    Path("a b/config.toml").touch()
    for name in ("notes", "Book.TXT"):
        assert mistake(name) == f"{name} is no config file: to train on it say imece train --data {name}"
    assert mistake("a b") == "a b is no config file: to go on with this run say imece train --run 'a b'"
    os.mkfifo("pipe")
    for name in ("pipe", "/dev/zero"):
        assert mistake(name).startswith(f"{name}: neither a file nor a folder")
    assert mistake("x" * 300).endswith("cannot be read (File name too long): name a TOML file, or none")


def test_the_next_command_may_mend_any_option(
    tmp_path: Path, mistake: Callable[..., str], launched: list[Launch]
) -> None:
    """What a refused command has begun is taken back, so the folder is not that of its mistake."""
    assert "no such file" in mistake(*options(tmp_path, "run", f"--data={tmp_path / 'none'}"))
    assert "the train part holds" in mistake(*options(tmp_path, "run", "--batch.sequences=2000"))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert "no tokenizer" in mistake(*options(tmp_path, "run", "--data.tokenizer=none.json"))
    assert (tmp_path / "run").is_dir() and not files(tmp_path / "run")
    assert main(["train", *options(tmp_path, "run")]) == 0
    assert main(["train", *options(tmp_path, "run", "--model.layers=3")]) == 0, "no rank has begun yet"
    assert RunFolder(tmp_path / "run").config().model.layers == 3
    assert len(launched) == 2


def test_a_mistake_that_only_ranks_see_is_taken_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when there is no room in /dev/shm. Not what ranks have begun, nor what ended otherwise."""
    run = tmp_path / "run"

    def launch(status: int, *opened: str) -> None:
        def end(*_: Any, **__: Any) -> int:
            for name in opened:
                (run / name).mkdir()
            return status

        monkeypatch.setattr(train, "launch", end)
        assert main(["train", *options(tmp_path, "run")]) == status

    launch(2)
    assert not run.exists()
    run.mkdir()
    launch(2)
    assert run.is_dir() and not files(run)
    launch(1)
    before = files(run)
    assert "config.toml" in before
    launch(2)
    assert files(run) == before, "it was there"
    shutil.rmtree(run)
    launch(2, "checkpoints")
    assert (run / "config.toml").exists()


def test_a_run_whose_checkpoints_are_gone(
    tmp_path: Path, mistake: Callable[..., str], launched: list[Launch]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(tmp_path, "run")]) == 0
    launched.clear()
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 12}\n')
    before = files(run)
    assert mistake("--run", run) == (
        f"{run} has figures of 12 steps, but checkpoints/ is gone: put it back; to begin anew, name another "
        "folder with --run or remove this one"
    )
    assert files(run) == before
    (run / "checkpoints").mkdir()  # it was killed before its first save
    assert main(["train", "--run", str(run)]) == 0 and len(launched) == 1


def test_a_run_is_as_it_was_after_a_mistake(
    tmp_path: Path, mistake: Callable[..., str], launched: list[Launch]
) -> None:
    assert main(["train", *options(tmp_path, "run", "--ranks=2")]) == 0
    (tmp_path / "run/checkpoints").mkdir()
    launched.clear()
    before = files(tmp_path / "run")
    for words, said in (
        (["--optimizer.lr=0.5"], f"{tmp_path / 'run'} holds a run with optimizer.lr = 0.004, this command"),
        (
            ["--seed=5", "--model.width=32"],
            f"{tmp_path / 'run'} holds a run with seed = 1, this command says 5 (model.width differs too)",
        ),
        (["--ranks=7"], "--batch.sequences 12 cannot be divided by 7 ranks"),
        (
            [f"--data.folder={tmp_path / 'text.jsonl'}"],
            f"{tmp_path / 'text.jsonl'}: cannot write the token files",
        ),
    ):
        assert mistake("--run", tmp_path / "run", *words).startswith(said)
        assert files(tmp_path / "run") == before


def test_fewer_steps_than_are_done(
    tmp_path: Path, mistake: Callable[..., str], launched: list[Launch]
) -> None:
    assert main(["train", *options(tmp_path, "run", "--steps=50")]) == 0
    launched.clear()
    (tmp_path / "run" / "checkpoints" / "step-00000040").mkdir(parents=True)  # damaged, but it may be mended
    before = files(tmp_path / "run")
    run = tmp_path / "run"
    said = mistake("--run", run, "--steps=39")
    assert said == f"{run} has 40 steps already, more than --steps 39: at least 40"
    assert files(run) == before
    epochs = Batches(open_tokens(run / "tokens").train, 16, 12, 1).epoch(39)
    said = mistake("--run", run, f"--epochs={epochs}")
    assert said == f"{run} has 40 steps already, more than the 39 of --epochs {epochs:g}: at least 40"
    assert files(run) == before
    assert main(["train", "--run", str(run), "--steps=40"]) == 0 and len(launched) == 1


def test_a_damaged_config_in_the_run_folder(tmp_path: Path, mistake: Callable[..., str]) -> None:
    RunFolder(tmp_path / "run").begin(TrainConfig())
    (tmp_path / "run" / "config.toml").write_text(to_toml(TrainConfig())[:-8])
    assert "config.toml: not TOML" in mistake("--run", tmp_path / "run")


def test_a_run_that_is_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second command is refused from the first one's first change until its last rank has ended."""
    run, refused = tmp_path / "run", list[str]()

    def second(*words: str) -> None:
        before = files(run)
        capsys.readouterr()
        assert main(["train", f"--run={run}", *words]) == 2
        refused.append(capsys.readouterr().err)
        assert files(run) == before

    def preparing(*arguments: Any) -> Any:
        second()
        return prepare(*arguments)

    def launch(*arguments: Any, **how: Any) -> int:
        second("--steps=7", "--checkpoint.keep=9")
        return 130

    monkeypatch.setattr(start, "prepare", preparing)
    monkeypatch.setattr(train, "launch", launch)
    for _ in range(2):
        assert main(["train", *options(tmp_path, "run")]) == 130, "the next one may go on at once"
    assert refused == 4 * [
        f"imece: a run is under way in {run} (begun by process {os.getpid()} on {socket.gethostname()}): "
        "wait for its end or stop it, or name another folder with --run\n"
    ]


def test_a_file_system_without_locks(
    tmp_path: Path, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.ENOLCK, errno.EOPNOTSUPP):

        def flock(file: int, kind: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        without = SimpleNamespace(**vars(fcntl) | {"flock": flock})
        monkeypatch.setattr("imece.train.run.lock.fcntl", without)
        assert main(["train", *options(tmp_path, f"run{number}")]) == 0
    assert len(launched) == 2


def test_ended_while_it_prepares(
    tmp_path: Path,
    launched: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By Ctrl-C or a mistake of ours: nothing is left, and other options may be tried."""
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("folder")
    for error in (KeyboardInterrupt, ZeroDivisionError):

        def ended(source: Any, file: Path, folder: Path, report: Any, error: Any = error) -> None:
            folder.mkdir()
            (folder / "train.bin").touch()
            if folder.parent.name == "link":
                report("learning the tokenizer", 1_000_000, 1_000_000)
                report("making tokens of 40 files", 500_000, 1_000_000)
            raise error

        for name, lines, doing in (
            ("run", "", "reading the text"),
            ("link", "learning the tokenizer\nmaking tokens of 40 files\n", "making tokens of 40 files"),
        ):
            with monkeypatch.context() as patch, contextlib.suppress(ZeroDivisionError):
                patch.setattr(start, "prepare", ended)
                assert main(["train", *options(tmp_path, name)]) == 130
                said = f"imece: interrupted while {doing}; nothing was saved\n"
                assert capsys.readouterr() == (lines, said)
            capsys.readouterr()
    assert not (tmp_path / "run").exists() and (tmp_path / "link").is_symlink()
    assert not files(tmp_path / "folder") and (tmp_path / "folder").stat().st_mode & 0o777 == 0o700
    for name in ("run", "link"):
        assert main(["train", *options(tmp_path, name, "--seed=5")]) == 0
    assert len(launched) == 2


def test_ended_before_a_step_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    said = f"imece: no step was saved; go on with: imece train --run '{run}'\n"
    for saves, status, err in ((0, 130, said), (5, 143, ""), (5, 143, said), (0, 137, ""), (9, 130, "")):

        def launch(*_: Any, step: int = saves, status: int = status, **__: Any) -> int:
            if step:
                (run / f"checkpoints/step-{step:08}").mkdir(parents=True, exist_ok=True)
            return status

        monkeypatch.setattr(train, "launch", launch)
        assert main(["train", *options(tmp_path, run.name)]) == status
        assert capsys.readouterr().err == err


def test_what_others_put_into_the_folder_meanwhile_stays(
    tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(*arguments: Any) -> None:
        prepare(*arguments)
        for name in ("notes.txt", "tokens/notes.txt", "a/b"):
            (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "run" / name).write_text("not ours")
        raise UserError("no")

    monkeypatch.setattr(start, "prepare", prepared)
    assert mistake(*options(tmp_path, "run")) == "no"
    assert set(files(tmp_path / "run")) == {"notes.txt", "tokens", "tokens/notes.txt", "a", "a/b"}
    shutil.rmtree(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "prepare", lambda *arguments: prepare(*arguments) and 1 / 0)
    (tmp_path / "there").mkdir()
    for run, tokens in (("run", "run/mine"), ("run", "run"), ("there", "there")):
        with pytest.raises(ZeroDivisionError):
            main(["train", *options(tmp_path, run, f"--data.folder={tokens}")])
    assert not (tmp_path / "run").exists() and not files(tmp_path / "there")


def test_a_run_folder_that_looks_like_an_option(
    tmp_path: Path, launched: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options(tmp_path, "run", "--run=-x")]) == 0
    ((command, _),) = launched
    assert command[4:] == [f"{tmp_path}/-x/config.toml"]
    assert RunFolder(train.read_config(command[4:]).folder).path == Path("-x")


def test_killed_while_it_began(tmp_path: Path, launched: list[Launch]) -> None:
    """A folder that holds only what a process left that never came to an end is as good as empty."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml.4711.partial").write_text("steps = 5\nse")
    assert main(["train", *options(tmp_path, "run")]) == 0
    assert len(launched) == 1
    assert not list((tmp_path / "run").glob("*.partial"))


def test_the_disk_is_full(
    tmp_path: Path, mistake: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the writes, one after the other, that come before the ranks."""
    words = options(tmp_path, "run")
    before = files(tmp_path)
    places = []
    for number in range(20):
        writes = 0

        def sync(file: object, number: int = number) -> None:
            nonlocal writes
            writes += 1
            if writes > number:
                raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("imece.writing.sync", sync)
            patch.setattr("imece.data.build.sync", sync)
            try:
                said = mistake(*words)
            except AssertionError:
                assert writes == number, "all has been written, so it may begin"
                break
            assert "(No space left on device): make room or name another" in said
            places.append(said.split(":")[0].removeprefix(str(tmp_path)))
            assert files(tmp_path) == before and not (tmp_path / "run").exists()
    assert {"/run", "/run/tokenizer.json", "/run/tokens"} == set(places)
