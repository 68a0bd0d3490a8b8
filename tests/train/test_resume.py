"""A run that was ended at any instant and resumed equals an undisturbed one, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from imece.checkpoint import files as checkpoint_files
from imece.checkpoint.load import all_steps
from imece.membership.recovery import Recovery
from imece.membership.roster import Roster
from imece.train.step import Step
from tests.membership.deaths import dropping
from tests.train.command import Train, in_fork, train
from tests.train.compare import assert_same_run, exact, files, last, records, summary
from tests.train.small import options

STEPS = 30
EVERY = ["--checkpoint.every=3", "--validate.every=10", "--ranks=2"]


def words(folder: Path, run: str, *more: str) -> list[str]:
    return options(folder, run, f"--steps={STEPS}", *EVERY, *more)


def line_count(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def reached(run: Path, lines: int) -> Callable[[], bool]:
    return lambda: line_count(run) >= lines


def saving_slowly() -> None:
    """A checkpoint is half written for long enough to be seen."""
    put = checkpoint_files.put_in_place

    def slow(partial: Path, final: Path) -> None:
        time.sleep(0.05)
        put(partial, final)

    mock.patch.object(checkpoint_files, "put_in_place", slow).start()


def kills(folder: str, instants: list[str], seed: int, forked: bool, more: list[str]) -> dict[str, int]:
    """One run undisturbed; another one killed at each of the instants, and then left alone. What was seen."""
    path, draw = Path(folder), random.Random(seed)
    run = path / "killed"

    def command(name: str) -> Train:
        said = words(path, name, *more)
        return Train(said, path, forked=True, fault=saving_slowly) if forked else Train(said, path)

    begin = time.monotonic()
    with command("whole") as running:
        assert running.wait().status == 0, running.err()
    whole_s = time.monotonic() - begin
    seen = {"killed": 0, "before a step": 0, "midway in a save": 0}
    for instant in instants:
        done = line_count(run)
        with command("killed") as running:
            if instant == "start":
                time.sleep(draw.uniform(0.0, 0.5 * whole_s))  # most of that is gone before the first step
            elif instant == "step":
                running.wait_until(reached(run, min(done + draw.randrange(1, 6), STEPS - 1)))
                time.sleep(draw.uniform(0.0, 0.01))
            else:
                running.wait_until(lambda: any((run / "checkpoints").glob("*.partial")))
            if not running.running():
                break  # it was quicker: nothing is left to kill
            running.kill()
            assert running.wait().status == -signal.SIGKILL
        seen["killed"] += 1
        seen["before a step"] += line_count(run) == 0
        seen["midway in a save"] += any((run / "checkpoints").glob("*.partial"))
        # What is there is whole at any time: a person may look, and sample from it.
        for record in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if line_count(run) else []:
            json.loads(record)
    with command("killed") as running:
        assert running.wait().status == 0, running.err()
    assert "warning" not in running.out() + running.err(), "no checkpoint may be damaged by a kill"
    assert_same_run(run, path / "whole")
    assert len(records(run)) == STEPS and not list(run.glob("**/*.partial"))
    return seen


def test_killed_at_random_instants(tmp_path: Path) -> None:
    instants = ["start", "step", "save", "step", "save", "start"]
    seen = in_fork(kills, str(tmp_path), instants, random.randrange(10**6), True, [])
    print(seen)
    assert seen["killed"] >= 4 and seen["midway in a save"] >= 1, seen


@pytest.mark.slow
def test_compiled_and_killed(tmp_path: Path) -> None:
    seen = kills(str(tmp_path), ["step", "save"], random.randrange(10**6), False, ["--compute.compile"])
    assert seen["killed"] == 2, seen


@pytest.mark.slow
def test_real_processes_killed_at_random_instants(tmp_path: Path) -> None:
    instants = ["start", "start", "step", "save"] * 3
    seen = kills(str(tmp_path), instants, random.randrange(10**6), False, ["--compute.dtype=auto"])
    print(seen)
    # On a busy machine some come when the run has ended already.
    assert seen["killed"] >= len(instants) // 2, seen
    assert seen["before a step"] >= 1 and seen["midway in a save"] >= 1, seen


def killed_writing(name: str) -> None:
    """Whoever writes the file of that name is killed with all of it written, and none of it in place."""
    replace = os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    mock.patch.object(os, "replace", killed).start()


def writes(folder: str) -> None:
    """Killed in the writing of one of a run's files after the other, and gone on with each time."""
    path = Path(folder)
    said = options(path, "run", "--ranks=1", "--steps=2")
    run = path / "run"
    for name in ("config.toml", "tokenizer.json", "plan.json", "00000.json", "summary.json"):
        killed = train(said, path, fault=functools.partial(killed_writing, name))
        assert killed.status in (-signal.SIGKILL, 128 + signal.SIGKILL), (name, killed)
        assert list(run.glob(f"**/{name}.*.partial")), name
    assert train(said, path).status == 0
    assert len(records(run)) == 2 and not list(run.glob("**/*.partial"))


def test_killed_while_it_writes_a_file(tmp_path: Path) -> None:
    in_fork(writes, str(tmp_path))


def one_killed(folder: str) -> None:
    """Rank 1 is killed in the last save: the other one saves alone what both had begun to."""
    path = Path(folder)
    said = options(path, "run", "--ranks=2", "--steps=4")
    outcome = train(said, path, fault=functools.partial(killed_writing, "00001.json"))
    assert outcome.status == 0, outcome
    told = "\nwarning: the checkpoint of step 4 was not saved: the ranks changed before it was complete\n"
    assert told in outcome.out and "\nnext    imece sample" in outcome.out, outcome.out
    assert last(path / "run").step == 4


def test_one_rank_is_killed_while_all_save(tmp_path: Path) -> None:
    in_fork(one_killed, str(tmp_path))


def signalled(folder: str) -> None:
    """The same run, ended by SIGINT, gone on with, ended by SIGTERM, gone on with, and ended by a scheduler
    that signals one of the ranks."""
    path = Path(folder)
    run = path / "signalled run"
    assert train(words(path, "whole"), path).status == 0
    for number, status, after in ((signal.SIGINT, 130, 4), (signal.SIGTERM, 143, 12), (None, 143, 20)):
        with Train(words(path, run.name), path, forked=True) as running:
            assert running.wait_until(reached(run, after))
            if number:
                running.kill(number)
            else:
                psutil.Process(running.pid).children()[1].send_signal(signal.SIGTERM)
            outcome = running.wait()
        assert outcome.status == status, outcome
        done = len(records(run))
        assert after <= done < STEPS
        assert last(run).step == done, "the last step that was made is saved"
        assert f"saved after step {done}; go on with: imece train --run '{run}'" in outcome.out
        if number:
            assert outcome.err == f"imece: ended by {number.name}, passed on to 2 ranks\n"
        name = (number or signal.SIGTERM).name
        assert (summary(run)["steps"], summary(run)["ended"]) == (done, f"stopped by {name}")
    rest = train(["--run", run], path)
    assert rest.status == 0 and rest.out.count("\nvalidating on all held-out text\n") == 1, rest
    assert_same_run(run, path / "whole")


def test_signals(tmp_path: Path) -> None:
    in_fork(signalled, str(tmp_path))


def drops(folder: str) -> None:
    """A model with dropout, killed, and gone on with."""
    path = Path(folder)
    assert train(words(path, "whole"), path, fault=dropping).status == 0
    with Train(words(path, "run"), path, forked=True, fault=dropping) as running:
        assert running.wait_until(lambda: all_steps(path / "run/checkpoints"))
        running.kill()
        running.wait()
    assert 3 <= last(path / "run").step < STEPS
    assert train(words(path, "run"), path, fault=dropping).status == 0
    assert_same_run(path / "run", path / "whole")
    assert train(words(path, "nothing dropped"), path).status == 0
    assert exact(path / "nothing dropped")[-1] != exact(path / "whole")[-1]


@pytest.mark.slow
def test_what_is_dropped_after_a_kill(tmp_path: Path) -> None:
    in_fork(drops, str(tmp_path))


def stuck_in_step_5() -> None:
    """Rank 1 needs for ever for that step, as with a disk that does not answer."""
    run = Step.run

    def slow(self: Step, index: int, lr: float) -> Any:
        if index == 5 and os.environ["RANK"] == "1":
            end = time.monotonic() + 1000
            while time.monotonic() < end:
                time.sleep(1)
        return run(self, index, lr)

    Step.run = slow  # type: ignore[method-assign]


def impatient(folder: str) -> None:
    path = Path(folder)
    run = path / "run"
    with Train(words(path, "run"), path, forked=True, fault=stuck_in_step_5) as running:
        assert running.wait_until(reached(run, 5))
        ranks = psutil.Process().children(recursive=True)
        assert len(ranks) == 3
        running.kill(signal.SIGINT)
        time.sleep(1.3)  # the first one is noted, and waits for the step's end; two within a second are one
        assert running.running()
        running.kill(signal.SIGINT)
        outcome = running.wait(20)
    assert outcome.status == 130
    assert not any(rank.is_running() for rank in ranks), "nobody is left behind"
    assert len(records(run)) == 5 and last(run).step == 3


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    in_fork(impatient, str(tmp_path))


def killed_in_the_report(said: str) -> None:
    """said: a file for the steps that a member says it has finished. Copies take long, as large ones do."""
    say, begin = Roster.say_alive, Recovery.begin

    def slow(self: Recovery, step: int) -> None:
        time.sleep(0.5)
        begin(self, step)

    def noted(self: Roster, member: int, beats: int, steps: int) -> None:
        if member == 0:
            with open(said, "a") as file:
                file.write(f"{steps}\n")
        say(self, member, beats, steps)

    mock.patch.object(Roster, "say_alive", noted).start()
    mock.patch.object(Recovery, "begin", slow).start()
    mock.patch("imece.train.finish.write_report", lambda run: os.kill(os.getpid(), signal.SIGKILL)).start()


def ends(folder: str) -> None:
    """Longer, shorter, finished, and killed after the last step."""
    path = Path(folder)
    usual = options(path, "run", "--ranks=2", "--optimizer.schedule=constant")
    run = path / "run"
    assert (
        train(
            [*options(path, "whole", "--ranks=2", "--optimizer.schedule=constant"), "--steps=14"], path
        ).status
        == 0
    )
    assert train([*usual, "--steps=8"], path).status == 0
    first = exact(run)
    assert len(first) == 8 and summary(run)["steps"] == 8

    before = files(run)
    again = train(["--run", run], path)
    assert (again.status, again.err) == (0, "")
    assert again.out == f"starting 2 ranks\n{run} has its 8 steps: a larger --steps goes on\n"
    assert files(run) == before, "a finished run is left as it is"
    fewer = train(["--run", run, "--steps=7"], path)
    assert fewer.mistake() == f"{run} has 8 steps already, more than --steps 7: at least 8"
    assert files(run) == before

    said = path / "said"
    dying = functools.partial(killed_in_the_report, str(said))
    killed = train(["--run", run, "--steps=14"], path, fault=dying)
    assert killed.status == 137, killed
    assert min(map(int, said.read_text().split())) == 8, "steps of the checkpoint would look like new ones"
    assert "going on after step 8" in killed.out and last(run).step == 14
    finished = train(["--run", run], path)
    assert finished.status == 0 and "validation" in finished.out, "what was missing is made"
    assert exact(run)[:7] == first[:7]
    whole = exact(path / "whole")
    whole[7]["val_loss"] = first[7]["val_loss"]  # there the run had ended, so it was validated
    assert exact(run) == whole
    for name in last(run).names():
        assert last(run).tensor(name).equal(last(path / "whole").tensor(name)), name
    assert summary(run)["val_loss"] == summary(path / "whole")["val_loss"]
    assert "has its 14 steps" in train(["--run", run], path).out


def in_epochs(folder: str) -> None:
    """A run that counts in epochs, and is made longer."""
    path = Path(folder)
    first = train(options(path, "run", "--ranks=1", "--epochs=0.5"), path)
    run, half = path / "run", last(path / "run").step
    assert f"steps   {half}, " in first.out and first.status == 0
    assert "epochs = 0.5\n" in (run / "config.toml").read_text()
    assert f" --run {run} --epochs 1\n" in first.out
    assert f"{run} has its {half} steps: a larger --epochs goes on" in train(["--run", run], path).out
    assert train(["--run", run, "--epochs=1.5"], path).status == 0
    before, reached = (record["epoch"] for record in records(run)[-2:])
    assert len(records(run)) == last(run).step > half and before < 1.5 <= reached


def test_epochs(tmp_path: Path) -> None:
    in_fork(in_epochs, str(tmp_path))


@pytest.mark.slow
def test_longer_shorter_and_finished(tmp_path: Path) -> None:
    in_fork(ends, str(tmp_path))


def other_worlds(folder: str) -> None:
    """The same run gone on with by other numbers of ranks."""
    path = Path(folder)
    usual = ["--optimizer.schedule=constant", "--optimizer.kind=adamw"]
    assert train(options(path, "whole", *usual, "--ranks=1", "--steps=16"), path).status == 0
    for ranks, steps in ((2, 4), (3, 8), (1, 12), (4, 16)):
        run = options(path, "run", *usual, f"--ranks={ranks}", f"--steps={steps}")
        assert train(run, path).status == 0
        assert last(path / "run").state["world_size"] == ranks
    curves = [[record["loss"] for record in records(path / run)] for run in ("run", "whole")]
    assert curves[0] == pytest.approx(curves[1], rel=0, abs=1e-5)
    assert curves[0][0] - curves[0][-1] > 0.1


def test_by_another_number_of_ranks(tmp_path: Path) -> None:
    in_fork(other_worlds, str(tmp_path))
