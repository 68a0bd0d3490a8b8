"""A run that ends as its validation loss does not fall any more: where, with which checkpoint, how it
goes on."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from imece.collectives import ops
from imece.errors import PeerLostError
from imece.train import loop as loops
from imece.train.loop import Loop
from imece.train.run.folder import RunFolder
from imece.train.session import Session
from tests.data.helpers import part_of
from tests.ranks import run_ranks
from tests.train.command import in_fork, train
from tests.train.compare import assert_same_run, records, summary
from tests.train.small import options
from tests.train.test_faults import POISON, poison

LOSSES = {4: 3.0, 8: 2.5, 12: 2.75, 16: 2.625, 20: 2.5625, 24: 2.75, 28: 2.25}  # by steps
WHY = "the validation loss has not fallen below 2.500 in 2 validations"
USUAL = ["--steps=40", "--validate.every=4", "--checkpoint.every=13", "--checkpoint.keep=1"]


def words(folder: Path, run: str, *more: str) -> list[str]:
    return options(folder, run, *USUAL, "--validate.patience=2", *more)


def scripted(
    folder: str = "", dies_at: int = 0, all_die: bool = False, losses: Mapping[int, float] = LOSSES
) -> None:
    """Validations yield `losses`. At one of them all are killed once they know of it; or rank 2 is, and of
    the others only rank 1 knows."""
    validate, validated, flag = Loop.validate, Session.validated, Path(folder, "died")

    def of_step(self: Loop, most_tokens: int) -> tuple[float, dict[str, float]]:
        validate(self, most_tokens)
        return losses[self._session.done], {}

    def known(self: Session, loss: float) -> None:
        now = self.done == dies_at
        if now and not all_die and self.mesh.rank == 2:
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if now and not all_die and self.mesh.rank == 0:
            while not flag.exists():
                time.sleep(0.001)
            raise PeerLostError("rank 2 is gone")
        validated(self, loss)
        if now and all_die:
            os.kill(os.getppid(), signal.SIGKILL)  # the launcher: its ranks die with it
            signal.pause()

    mock.patch.object(Loop, "validate", of_step).start()
    mock.patch.object(Session, "validated", known).start()


def steps_kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


def stops(folder: str) -> None:
    path = Path(folder)
    whole = path / "whole"
    outcome = train(words(path, "whole", "--ranks=2"), path, fault=scripted)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert len(records(whole)) == 16 and summary(whole)["ended"] == WHY
    # Step 8 is not due to be saved, nor is 16.
    assert steps_kept(whole) == ["step-00000008", "step-00000016"]
    assert RunFolder(whole).saved("best").step == 8
    shown = " ".join(outcome.out.split())
    assert f"ended before step 40: {WHY}" in shown
    assert "best checkpoints/step-00000008, validation 2.500: imece sample, eval and export take it" in shown
    assert "--validate.patience 4" in shown

    again = train(["--run", whole, "--ranks=2"], path, fault=scripted)
    assert again.status == 0 and again.out.splitlines()[-1] == (
        f"{whole} ended after step 16, as {WHY}: a larger --validate.patience goes on"
    )

    # Killed as it knows that it is over, of which no checkpoint tells: that of step 13 has the validation
    # before.
    killed = train(
        words(path, "killed", "--ranks=2"), path, fault=partial(scripted, folder, 16, all_die=True)
    )
    assert killed.status == -signal.SIGKILL and "step-00000013" in steps_kept(path / "killed"), killed
    assert train(["--run", path / "killed", "--ranks=2"], path, fault=scripted).status == 0
    assert_same_run(path / "killed", whole)

    more = train(["--run", whole, "--ranks=2", "--validate.patience=4"], path, fault=scripted)
    assert more.status == 0 and len(records(whole)) == 24, more
    assert summary(whole)["ended"] == WHY.replace("2 validations", "4 validations")
    assert RunFolder(whole).saved("best").step == 8


def test_a_run_ends_when_the_loss_does_not_fall(tmp_path: Path) -> None:
    in_fork(stops, str(tmp_path))


def goes_on_elsewhere(folder: str) -> None:
    path = Path(folder)
    killed = train(words(path, "run", "--ranks=2"), path, fault=partial(scripted, folder, 16, all_die=True))
    assert killed.status == -signal.SIGKILL, killed
    for ranks in (3, 1):  # the second time it is over already
        more = train(["--run", path / "run", f"--ranks={ranks}"], path, fault=scripted)
        assert (more.status, more.err) == (0, ""), more
        assert len(records(path / "run")) == 16 and summary(path / "run")["ended"] == WHY
        assert steps_kept(path / "run") == ["step-00000008", "step-00000016"]
        assert RunFolder(path / "run").saved("best").step == 8


def test_a_run_that_goes_on_at_another_number_of_ranks_ends_at_the_same_step(tmp_path: Path) -> None:
    in_fork(goes_on_elsewhere, str(tmp_path))


NOT_FINITE: dict[str, tuple[dict[int, float], list[int], str]] = {  # losses, steps kept, why it ended
    "never": ({4: math.nan, 8: math.inf}, [8], "the validation loss has not been finite in 2 validations"),
    "after a finite one": ({4: 2.5, 8: math.nan, 12: 2.75}, [4, 12], WHY),
    "at first": ({4: math.nan, 8: 2.5, 12: math.nan, 16: 2.75}, [8, 16], WHY),
}


def diverges(folder: str, case: str) -> None:
    path, (losses, kept, why) = Path(folder), NOT_FINITE[case]
    outcome = train(words(path, "run", "--ranks=2"), path, fault=partial(scripted, losses=losses))
    assert (outcome.status, outcome.err) == (0, ""), outcome
    found = records(path / "run")
    assert len(found) == max(losses) and summary(path / "run")["ended"] == why
    told = [each["val_loss"] for each in found if "val_loss" in each]
    assert told == [loss if math.isfinite(loss) else None for loss in losses.values()]
    assert steps_kept(path / "run") == [f"step-{step:08d}" for step in kept]
    assert f"ended before step 40: {why}" in " ".join(outcome.out.split())


@pytest.mark.parametrize("case", NOT_FINITE)
def test_a_loss_that_is_not_finite_is_no_lower_one(tmp_path: Path, case: str) -> None:
    in_fork(diverges, str(tmp_path), case)


def skips(folder: str) -> None:
    """Steps 8 and 12 are skipped: the losses there count for nothing, low or high."""
    path = Path(folder)
    POISON["steps"] = [7, 11]

    def fault() -> None:
        scripted(losses={4: 2.5, 8: 1.0, 12: 9.0, 16: 2.75, 20: 2.625})
        poison()

    outcome = train(words(path, "run", "--ranks=2", "--batch.micro=2"), path, fault=fault)
    assert outcome.status == 0 and outcome.out.count("skipped on all ranks") == 2, outcome
    assert len(records(path / "run")) == 20 and summary(path / "run")["ended"] == WHY
    assert steps_kept(path / "run") == ["step-00000004", "step-00000020"]


def test_validations_after_a_skipped_step_do_not_count(tmp_path: Path) -> None:
    in_fork(skips, str(tmp_path))


def dies(folder: str) -> None:
    path = Path(folder)
    outcome = train(words(path, "run", "--ranks=3"), path, fault=partial(scripted, folder, 16))
    assert (path / "died").exists() and outcome.status == 0, outcome
    assert "generation 1:" in outcome.out and WHY in " ".join(outcome.out.split())
    assert len(records(path / "run")) == 16 and summary(path / "run")["ended"] == WHY
    assert steps_kept(path / "run") == ["step-00000008", "step-00000016"]


def test_a_rank_that_dies_before_it_knows(tmp_path: Path) -> None:
    """Of the others one knows that this was the last step, and it is not the first rank."""
    in_fork(dies, str(tmp_path))


def test_all_ranks_judge_by_the_same_loss() -> None:
    assert run_ranks(judged, 2, backend="gloo") == [3.0, 3.0]


def judged() -> float:
    """The loss of a rank that computed another one than rank 0."""
    rank = dist.get_rank()
    mesh = mock.Mock(device="cpu", world_group=dist.group.WORLD, rank=rank)
    loop = Loop.__new__(Loop)
    loop._session = mock.Mock(mesh=mesh, recovery=None)
    loop._session.prepared.tokens.validation = part_of([[1]])
    with (
        mock.patch.object(loops, "evaluate", lambda *_, **__: (3.0 + rank, 1)),
        mock.patch.object(ops, "all_reduce", lambda *_, **__: None),
    ):
        return loop.validate(0)[0]
