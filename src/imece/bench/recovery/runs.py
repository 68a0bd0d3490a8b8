"""Starts, hits and awaits the programs of `imece bench recovery`, and ends all that they started."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

import imece
from imece.bench.recovery import rank, torch_rank
from imece.bench.recovery.rank import BEGAN, COST, ENDED, PARAMETERS, Task
from imece.bench.recovery.torch_rank import PROGRESS, TorchTask
from imece.launch.processes import die_with_parent

Argv = Sequence[str]

GIVEN_UP_S = 45.0
_START_S = 120.0
_POLL_S = 0.01
_RANK, _TORCH = rank.__name__, torch_rank.__name__
_IMECE = (sys.executable, "-m", "imece")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class RunError(RuntimeError):
    """A program ended in an unexpected way."""


@dataclass(frozen=True)
class Trained:
    """What a run of the ranks left behind."""

    seconds: float
    """From the second to the last step."""
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class TorchKill:
    """A rank under torchrun was killed."""

    recovery_s: float | None
    """Until the next finished step; None if there was none within GIVEN_UP_S."""
    again: int | None
    """Finished steps that had to be made again."""


@contextlib.contextmanager
def copied_package(folder: Path) -> Iterator[None]:
    """Inside, all programs import a copy of the package in `folder`.

    A replacement imports what is on the disk at that moment: if somebody edits the package during a run, it
    would have other code than the survivors.
    """
    package = folder / "imece"
    shutil.copytree(Path(imece.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(package, quiet=2)  # now, so that it is not timed
    theirs = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder), theirs] if theirs else [str(folder)])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # the latter: `python -m` looks here first
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _argument(task: Task | TorchTask) -> str:
    """The task as an argument of the module that reads it."""
    return json.dumps(asdict(task))


def train(task: Task, ranks: int) -> Trained:
    """A run without faults."""
    _run((*_IMECE, "launch", "--ranks", str(ranks), "-m", _RANK, _argument(task)))
    return _trained(task)


def drill(
    task: Task, ranks: int, kills: int, every_s: float, seed: int
) -> tuple[Trained | None, dict[str, Any]]:
    """The same under `imece drill`, with its figures; None if the run did not end."""
    figures = Path(task.folder) / "drill.json"
    options = ("--ranks", str(ranks), "--kills", str(kills), "--every-s", str(every_s), "--seed", str(seed))
    argv = (*_IMECE, "drill", *options, "--json", str(figures), "-m", _RANK)
    said = _run((*argv, _argument(task)), statuses=None)
    if not figures.exists():
        raise RunError(said)
    found: dict[str, Any] = json.loads(figures.read_text())
    whole = all((Path(task.folder) / name).exists() for name in (BEGAN, ENDED, PARAMETERS))
    return (_trained(task) if whole and found["status"] == 0 else None), found


def cost(task: Task, ranks: int) -> dict[str, Any]:
    """What readiness for failures adds to a step."""
    _run((*_IMECE, "launch", "--ranks", str(ranks), "-m", _RANK, _argument(task)))
    found: dict[str, Any] = json.loads((Path(task.folder) / COST).read_text())
    return found


def start(ours: bool, ranks: int, folder: Path) -> float:
    """Seconds from the command to the first finished step of torch's own training."""
    task = TorchTask(str(folder), steps=1)
    launcher = (*_IMECE, "launch", "--ranks") if ours else (*_TORCHRUN, "--nproc-per-node")
    began = time.monotonic()
    _run((*launcher, str(ranks), "-m", _TORCH, _argument(task)))
    return _progress(folder)[0][0] - began


def kill_under_torchrun(
    ranks: int, checkpoint_every: int, folder: Path, rng: random.Random, environ: Mapping[str, str]
) -> TorchKill:
    """Send SIGKILL to a random rank, at a random instant after the first checkpoint."""
    task = TorchTask(str(folder), steps=10**6, checkpoint_every=checkpoint_every)
    argv = (*_TORCHRUN, "--max-restarts", "3", "--nproc-per-node", str(ranks), "-m", _TORCH)
    with _running((*argv, _argument(task)), environ) as (child, log):
        wanted = checkpoint_every + rng.randint(1, 2 * checkpoint_every)
        if not _wait(lambda: len(_progress(folder)) >= wanted, child, _START_S):
            raise RunError(f"torchrun made no {wanted} steps\n{_tail(log)}")
        time.sleep(rng.uniform(0.0, 0.2))
        workers = [each for each in psutil.Process(child.pid).children() if _is_worker(each)]
        if len(workers) != ranks:
            raise RunError(f"torchrun has {len(workers)} ranks, not {ranks}\n{_tail(log)}")
        old_pid = _progress(folder)[-1][2]
        killed = time.monotonic()
        rng.choice(workers).kill()
        # Survivors may finish the step for which the dead rank had done its part: that is no recovery.
        if not _wait(lambda: _progress(folder)[-1][2] != old_pid, child, GIVEN_UP_S):
            return TorchKill(None, None)
        lines = _progress(folder)
        most = max(step for _, step, pid in lines if pid == old_pid)
        time_s, first = next((at, step) for at, step, pid in lines if pid != old_pid)
        return TorchKill(time_s - killed, most - (first - 1))


def _is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return _TORCH in process.cmdline()
    return False


def _progress(folder: Path) -> list[tuple[float, int, int]]:
    """(time, finished steps, rank 0's process) for each line."""
    try:
        lines = (folder / PROGRESS).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(at), int(step), int(pid)) for at, step, pid in words]


def _wait(until: Callable[[], bool], child: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait until it is true; False if the program ends before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not until():
        if time.monotonic() > deadline or child.poll() is not None:
            return until()
        time.sleep(_POLL_S)
    return True


def _run(argv: Argv, statuses: tuple[int, ...] | None = (0,)) -> str:
    """Run to the end; returns the output. RunError for another status than these; None: any."""
    with _running(argv, {}) as (child, log):
        child.wait()
        if statuses is not None and child.returncode not in statuses:
            raise RunError(f"{' '.join(argv[2:5])} ... ended with status {child.returncode}\n{_tail(log)}")
        return _tail(log)


@contextlib.contextmanager
def _running(argv: Argv, environ: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A program and the file with its output; on leaving it is ended, with everything that it started."""
    with tempfile.TemporaryDirectory(prefix="imece-bench-") as folder:
        log = Path(folder) / "log"
        parent = os.getpid()
        with log.open("wb") as file:
            child = subprocess.Popen(
                argv, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, preexec_fn=lambda: die_with_parent(parent),
            )  # fmt: skip
        try:
            yield child, log
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the program first, because it would start others. torchrun's ranks have sessions of their own and
    may outlive it."""
    if child.poll() is not None:
        return
    below = psutil.Process(child.pid).children(recursive=True)
    child.kill()
    child.wait()
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _trained(task: Task) -> Trained:
    folder = Path(task.folder)
    began, ended = (json.loads((folder / name).read_text())["time_s"] for name in (BEGAN, ENDED))
    return Trained(ended - began, load_file(folder / PARAMETERS))
