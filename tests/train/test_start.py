"""What a rank does before it has anything to train."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.errors import UserError
from imece.train import start
from imece.train.config import TrainConfig
from imece.train.run.lock import HELD, RunLock
from imece.train.session import Session
from imece.train.watch.stopping import Stop
from tests.meshes import FakeMesh

AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
Rank = Callable[..., None]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rank:
    """Runs one, without the others, until it opens its session."""

    def run(number: int, *, joining: bool = False) -> None:
        mesh = FakeMesh({"replicate": 2}, rank=number, joining=joining)
        monkeypatch.setattr("imece.opening.init", lambda axes, ranks: mesh)
        start.run_rank(TrainConfig(run=str(tmp_path / "run")), Stop())

    monkeypatch.setattr(start, "check_same_start", lambda config, mesh: None)
    monkeypatch.setattr(start, "together", lambda mesh, call: call())
    return run


def is_free(folder: Path) -> bool:
    """Whether another command could begin in it."""
    try:
        with RunLock(folder) as lock:
            lock.begin()
    except UserError:
        return False
    return True


def test_every_rank_holds_the_run(rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of any other launcher is refused; of its own ranks all keep others away, whichever die."""
    seen: list[bool] = []

    def opening(*_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.delenv(HELD, raising=False)
            for name in AGAIN:
                patch.delenv(name, raising=False)
            seen.append(is_free(tmp_path / "run"))
        raise ZeroDivisionError

    monkeypatch.setattr(start, "open_session", opening)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch()
    for number, joining in ((1, False), (0, True), (0, False)):
        with pytest.raises(ZeroDivisionError):
            rank(number, joining=joining)
    assert seen == [False, False, False]
    # One that the launcher of this very run has started, and one of a job that starts again, are not refused.
    for name in ("", HELD, *AGAIN):
        with RunLock(tmp_path / "run") as other, monkeypatch.context() as patch:
            other.begin()
            if name:
                patch.setenv(name, "1")
            with pytest.raises(ZeroDivisionError if name else UserError) as ending:
                rank(0)
        if not name:
            assert re.match(
                r"a run is under way in .*/run \(begun by process \d+ on \S+\): ", str(ending.value)
            )
    assert len(seen) == 6


def test_the_run_is_under_way_as_long_as_a_rank_lives(tmp_path: Path) -> None:
    with RunLock(tmp_path) as second:
        with RunLock(tmp_path) as first:
            first.begin()
            second.join()
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    assert (tmp_path / ".lock").read_bytes() == b"", "nobody is at it, so it names nobody"


def test_what_ends_a_rank_that_joins_is_told(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(session: Session) -> None:
        assert not hasattr(session, "checkpoints"), "it has them once it is where the others are"
        raise RuntimeError("the others have gone")

    monkeypatch.setattr(start, "open_session", lambda *_: Session.__new__(Session))
    monkeypatch.setattr(Session, "begin", begin)
    with pytest.raises(RuntimeError, match=r"^the others have gone$"):
        rank(0, joining=True)


def test_a_cache_of_torch_that_cannot_be_made(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def unwritable(name: str, package: str | None = None) -> object:
        if name == "torch._dynamo":
            raise PermissionError(13, "Permission denied", "/cache")
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", unwritable)
    with pytest.raises(UserError, match=r"'/cache'\): set TMPDIR or TORCHINDUCTOR_CACHE_DIR to a "):
        rank(0)


def test_gpus_that_torch_cannot_use_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts them, and may be too old for torch."""
    monkeypatch.setattr(start, "usable_cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    for available, ranks in ((False, 2), (True, 5)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert start.default_ranks() == ranks
