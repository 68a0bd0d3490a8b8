"""The examples under every launcher, and what docs/ddp.md shows of them. Both scripts share one start."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from imece import mesh
from tests.launch.launcher import Launcher, torchrun
from tests.train.command import in_fork, launched

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = ROOT / "examples/minimal/before.py", ROOT / "examples/minimal/after.py"
TRAIN_TEXT = ROOT / "examples/train_text.py"
RESILIENT = ROOT / "examples/resilient"
MODEL_PARALLEL = ROOT / "examples/model_parallel.py"
DOCS = ROOT / "docs/ddp.md"

BOTH = f"""
import runpy, sys
runpy.run_path({str(AFTER)!r}, run_name="__main__")
sys.argv[0] = "train_text.py"
runpy.run_path({str(TRAIN_TEXT)!r}, run_name="__main__")
"""
STEPS = ["--steps", "10", "--heads", "1", "--layers", "1", "--accumulate", "2", "--text", argparse.__file__]
TWO_RANKS = [*STEPS, "--batch", "4", "--out"]
ONE_RANK = [*STEPS, "--batch", "8", "--out"]


def run(commands: Sequence[Sequence[str | Path]], environs: Sequence[Mapping[str, str]] = ({},)) -> str:
    """The output of processes that run at the same time; AssertionError unless all end well."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    processes = [
        subprocess.Popen(
            [str(word) for word in command],
            env={**own, "OMP_NUM_THREADS": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, environ in zip(commands, environs, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return "\n".join(outputs)


def by_torchrun(script: Path, out: Path) -> str:
    outcome = torchrun("--standalone", "--nproc-per-node", "2", script, *TWO_RANKS, out)
    assert outcome.status == 0, outcome.err
    return outcome.out + outcome.err


def imece_launch(script: Path, out: Path) -> str:
    status, said, err = in_fork(
        launched, str(script.parent), "--ranks", "2", *map(str, (script, *TWO_RANKS, out))
    )
    assert status == 0, err
    return str(said)


def slurm(script: Path, out: Path) -> str:
    """What srun -n 2 would start, with the variables that it sets."""
    environs = [
        {
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node7", "SLURM_JOB_NODELIST": "node7",
            "SLURM_PROCID": rank, "SLURM_LOCALID": rank,
        }
        for rank in ("0", "1")
    ]  # fmt: skip
    return run([[sys.executable, script, *TWO_RANKS, out]] * 2, environs)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What both scripts print without a launcher, and the folder where the decoder is saved."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "both.py").write_text(BOTH)
    return run([[sys.executable, folder / "both.py", *ONE_RANK, folder / "out" / "model"]]), folder / "out"


def test_one_process(one_process: tuple[str, Path]) -> None:
    output, folder = one_process
    check_output(output, 1)
    assert [file.name for file in folder.iterdir()] == ["model"]


SLOW = [pytest.param(start, marks=pytest.mark.slow) for start in (by_torchrun, slurm)]


@pytest.mark.parametrize("start", [imece_launch, *SLOW])
def test_two_ranks(start: Callable[[Path, Path], str], tmp_path: Path, one_process: tuple[str, Path]) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    check_output(start(tmp_path / "both.py", tmp_path / "model"), 2)
    parameters, expected = load_file(tmp_path / "model"), load_file(one_process[1] / "model")
    assert parameters.keys() == expected.keys()
    for key in expected:
        if not key.endswith("in_proj_bias"):  # the keys' bias has no gradient but noise, which Adam enlarges
            torch.testing.assert_close(parameters[key], expected[key], rtol=0, atol=2e-5, msg=key)


def check_output(output: str, ranks: int) -> None:
    """Of both scripts: losses fall, and each rank of the first one printed the same."""
    epochs = [re.findall(rf"epoch {epoch}: loss (\d\.\d{{6}})", output) for epoch in range(5)]
    assert [len(losses) for losses in epochs] == [ranks] * 5, output
    assert all(len(set(losses)) == 1 for losses in epochs), f"the ranks' models differ\n{output}"
    assert float(epochs[-1][0]) < float(epochs[0][0])
    assert f"takes 16 = {ranks} ranks x {8 // ranks} x 2 micro-batches" in output
    held_out = [float(loss) for loss in re.findall(r"step .* held out (\S+) nats", output)]
    assert len(held_out) == 5
    assert held_out == sorted(held_out, reverse=True)
    assert held_out[-1] < held_out[0] - 0.2


def test_three_lines_differ() -> None:
    """And the import, and the docstring."""
    before, after = (path.read_text().split('"""\n', 1)[1].splitlines() for path in (BEFORE, AFTER))
    changed = 0
    for kind, start, stop, new_start, new_stop in difflib.SequenceMatcher(
        None,
        [line for line in before if line],
        [line for line in after if line and "import imece" not in line],
    ).get_opcodes():
        if kind != "equal":
            changed += max(stop - start, new_stop - new_start)
    assert changed == 3
    assert len(after) - len([line for line in after if "import imece" not in line]) == 1


@pytest.mark.faults
def test_the_resilient_loop_under_a_kill() -> None:
    """Two of three ranks go on, and learn what one process learns; a third one comes."""
    alone = run([[sys.executable, RESILIENT / "before.py"]])
    with Launcher("--ranks", "3", RESILIENT / "after.py") as launcher:
        launcher.wait_for("step 200: 3 ranks", 120)
        victim = next(
            each for each in psutil.Process(launcher.pid).children() if each.environ()["IMECE_MEMBER"] == "1"
        )
        victim.kill()
        outcome = launcher.wait(120)
    assert outcome.status == 0, outcome.err
    assert f"rank 1 (pid {victim.pid}) was killed by signal 9" in outcome.err
    assert "2 ranks go on, a replacement is starting" in outcome.err
    assert ": 2 ranks, loss" in outcome.out, outcome.out
    last = "step 1800: "
    (expected,) = re.findall(rf"{last}1 ranks, loss (\S+)", alone)
    losses = [float(loss) for loss in re.findall(rf"{last}\d ranks, loss (\S+)", outcome.out)]
    assert losses and abs(sum(losses) / len(losses) - float(expected)) < 2e-3, (losses, expected)


def test_two_lines_make_a_loop_resilient() -> None:
    before, after = (
        [
            line.strip()
            for line in (RESILIENT / name).read_text().split('"""\n', 1)[1].splitlines()
            if line.strip()
        ]
        for name in ("before.py", "after.py")
    )
    assert [line for line in after if line not in before] == [
        "for step in imece.steps(2_000, model, optimizer):", "with step as number:",
    ]  # fmt: skip
    assert len(after) == len(before) + 1


def test_docs_show_the_example() -> None:
    text, code = DOCS.read_text(), [line.strip() for line in AFTER.read_text().splitlines()]
    shown = [line.split("  #")[0].strip() for line in text[text.index("    import imece") :].splitlines()[:6]]
    assert [line for line in shown if line] == [line for line in code if "imece" in line and '"' not in line]
    images = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(images) == 3
    for image in images:
        assert (DOCS.parent / image).is_file(), image


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [("4", "pipeline=2,tensor=2"), pytest.param("2", "context=2", marks=pytest.mark.slow)],
)
def test_whatever_divides_the_model_the_losses_are_those_of_one_rank(
    ranks: str, axes: str, tmp_path: Path
) -> None:
    alone = losses(run([[sys.executable, MODEL_PARALLEL, "--steps", "3"]]))
    assert len(alone) == 1 and alone[0] < math.log(256)
    words = ["--ranks", ranks, str(MODEL_PARALLEL), "--steps", "3", "--mesh", axes]
    status, out, err = in_fork(launched, str(tmp_path), *words)
    assert status == 0, err
    assert losses(out) == pytest.approx(alone, abs=2e-4), axes


def test_a_mesh_that_no_model_can_use_is_refused(tmp_path: Path) -> None:
    words = ["--ranks", "4", str(MODEL_PARALLEL), "--steps", "1", "--mesh", "pipeline=2,context=2"]
    status, out, err = in_fork(launched, str(tmp_path), *words)
    assert status == 2 and "stages take no positions" in out + err


def losses(output: str) -> list[float]:
    """Of the one rank that prints some."""
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mesh", "tensor"], "--mesh tensor: name axes and their sizes, as pipeline=2,tensor=2"),
        (["--mesh", "row=2"], "'row' is no axis of ranks"),
        (["--mesh", "tensor=2"], "tensor 2 = 2 ranks, but the world has 1"),
        (["--text", "/dev/null"], "--text /dev/null has 0 bytes: at least 256"),
        (["--strategy", "zero9"], "unknown strategy 'zero9'"),
        (["--batch", "0"], "--batch 0: a multiple of 1, the ranks that read their own"),
    ],
)
def test_a_mistake_in_a_mesh_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["model_parallel.py", *words])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(MODEL_PARALLEL), run_name="__main__")
    if dist.is_initialized():
        mesh.current().close()
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("model_parallel.py: ") and said in line


def test_figures_are_drawn(tmp_path: Path) -> None:
    """Those that need no ranks; the ring asserts that its last step leaves all sums everywhere."""
    figures = runpy.run_path(str(ROOT / "docs/figures/ddp_figures.py"))
    for name in ("draw_buckets", "draw_ring"):
        figures[name](tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps: '0' is not a whole number"),
        (["--batch", "many"], "--batch: 'many'"),
        (["--stepz", "3"], "--stepz"),
        (["--text", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--text", "/dev/null"], "a step takes 16 pieces, and besides the 256 held out there are 0"),
        (["--out", "/dev/null/model"], "/dev/null"),
        (["--out", "/"], "--out / is a folder"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where the script makes its folder runs/
    monkeypatch.setattr(sys, "argv", ["train_text.py", *words])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(TRAIN_TEXT), run_name="__main__")
    if dist.is_initialized():
        mesh.current().close()
    assert leaving.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_text: ")
    assert said in line
