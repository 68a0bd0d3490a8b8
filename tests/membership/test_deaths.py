"""`imece train` goes on when ranks die anywhere in a step, and learns what it would have learned."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from unittest import mock

import pytest

from imece.train.step import Step
from tests.membership.deaths import PLACES, death, difference, dropping, slower
from tests.train.command import Train, in_fork, train
from tests.train.compare import records, summary
from tests.train.small import options

STEPS, AT = 12, 5
STEP, AFTER = f"of step {AT + 1}", f"after step {AT + 1}"
PHASES = {
    "backward": f"in backward {STEP}",
    "border": f"between steps, {AFTER}",
    "saving": f"saving, {AFTER}",
}
ADAMW = ["--optimizer.kind=adamw", "--optimizer.lr=1e-3"]
ROUNDING = 1e-5  # relative: other ranks sum the same samples in another order
OF_MUON = 2e-3  # it makes more of a rounding in single elements, where a gradient has next to nothing


def dies(folder: str, strategy: str, places: list[str], members: list[int], dead: int) -> list[str]:
    """Of three ranks, some die. What is wrong, in words."""
    path = Path(folder)
    words = [
        "--ranks=3",
        f"--steps={STEPS}",
        f"--strategy={strategy}",
        f"--checkpoint.every={AT + 1}",
        f"--validate.every={AT + 1}",
    ]
    assert train(options(path, "whole", *words), path).status == 0
    wrong = []
    for place in places:
        run, last_step = path / place, STEPS - 1 if place == "finish" else -1 if place == "start" else AT
        with Train(
            options(path, place, *words), path, forked=True, fault=death(place, members, last_step)
        ) as running:
            outcome = running.wait()
        if outcome.status:
            wrong.append(f"{place}: status {outcome.status}\n{outcome.out}\n{outcome.err}")
            continue
        fired = len(re.findall(r"rank \d \(pid \d+\) was killed by signal 9", outcome.err))
        told = records(run)  # each step once
        recovered = [record for record in told if "generation" in record]
        again = sum(record["lost_steps"] for record in recovered)
        off = difference(run, path / "whole")
        if fired < (1 if place == "start" else dead):  # there all start again, and one cause is told
            wrong.append(f"{place}: {fired} ranks died\n{outcome.err}")
        if place in PHASES and f"(SIGKILL) {PHASES[place]}" not in outcome.err:
            wrong.append(f"{place}: the launcher named no such phase\n{outcome.err}")
        if not off < OF_MUON or summary(run)["steps"] != STEPS:
            wrong.append(f"{place}: parameters differ by {off}")
        # That of the step in which they died may be of the ranks that were left.
        kept = [each["step"] - 1 for each in told if "generation" not in each]
        one, two = ([each["loss"] for each in records(each)] for each in (run, path / "whole"))
        one, two = ([each[at] for at in kept] for each in (one, two))
        if one != pytest.approx(two, rel=ROUNDING):
            wrong.append(f"{place}: losses differ: {one}, {two}")
        if again > (strategy != "replicate"):
            wrong.append(f"{place}: {again} steps were made again")
        if place not in ("start", "finish") and not recovered:
            wrong.append(f"{place}: nobody recovered\n{outcome.out}\n{outcome.err}")
    return wrong


@pytest.mark.parametrize(
    ("strategy", "places", "members"),
    [
        ("replicate", ["backward", "border"], [1]),
        pytest.param("zero1", ["update", "saving"], [0], marks=pytest.mark.slow),
        pytest.param("zero3", ["backward"], [0, 2], marks=pytest.mark.slow),  # two of three together
    ],
)
def test_a_death(tmp_path: Path, strategy: str, places: list[str], members: list[int]) -> None:
    assert in_fork(dies, str(tmp_path), strategy, places, members, len(members)) == []


@pytest.mark.faults
@pytest.mark.parametrize("members", [[0], [2], [0, 1]])
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3"])
def test_a_death_anywhere(tmp_path: Path, strategy: str, members: list[int]) -> None:
    wrong = in_fork(dies, str(tmp_path), strategy, list(PLACES), members, len(members), timeout_s=600)
    print(
        f"\n{strategy}: members {members} killed in {', '.join(PLACES)}: {len(PLACES) - len(wrong)} survived"
    )
    assert wrong == []


def drops(folder: str, strategy: str) -> None:
    """A model with dropout, in micro-batches of one sequence: as many ranks as there are draw the same."""
    path = Path(folder)
    words = ["--ranks=3", f"--steps={STEPS}", f"--strategy={strategy}", "--batch.micro=1", *ADAMW]
    dies = death("update", [1], AT)

    def both() -> None:
        dropping()
        dies()

    for name, fault in (("whole", dropping), ("nothing dropped", lambda: None), ("run", both)):
        outcome = train(options(path, name, *words), path, fault=fault)
        assert outcome.status == 0, outcome.err
    assert "rank 1" in outcome.err and any("generation" in each for each in records(path / "run"))
    assert difference(path / "run", path / "whole") < ROUNDING
    assert difference(path / "nothing dropped", path / "whole") > 100 * ROUNDING


@pytest.mark.faults
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_what_is_dropped_after_a_death(tmp_path: Path, strategy: str) -> None:
    in_fork(drops, str(tmp_path), strategy)


def joins(folder: str, number: int) -> None:
    """A rank is killed or stopped, and another takes its place long before the end."""
    path, steps = Path(folder), 40
    # AdamW: over so many steps Muon makes of a rounding a difference, also without any death.
    words = ["--ranks=3", f"--steps={steps}", "--strategy=zero1", *ADAMW]
    assert train(options(path, "whole", *words), path).status == 0
    kill, wait = death("backward", [1], AT, number), slower(0.3, 3)

    def fault() -> None:
        kill()
        wait()

    with Train(options(path, "run", *words), path, forked=True, fault=fault) as running:
        outcome = running.wait()
    assert outcome.status == 0, outcome
    first, second, *more = [record for record in records(path / "run") if "generation" in record]
    assert not more and (first["ranks"], second["ranks"]) == (2, 3)
    assert first["lost_steps"] <= 1 and second["lost_steps"] == 0
    assert "rank 1 (pid" in outcome.err and "joined; 3 ranks go on" in outcome.err
    assert difference(path / "run", path / "whole") < ROUNDING
    print(f"\nsignal {number}: 2 ranks after {first['recovery_s']:.2f} s, 3 after step {second['step'] - 1}")


def test_a_replacement_joins(tmp_path: Path) -> None:
    in_fork(joins, str(tmp_path), int(signal.SIGKILL))


@pytest.mark.faults
def test_a_stopped_rank_is_evicted_and_replaced(tmp_path: Path) -> None:
    in_fork(joins, str(tmp_path), int(signal.SIGSTOP))


def raises(folder: str) -> str:
    """One rank's own mistake ends all of them: nobody is replaced."""
    path = Path(folder)
    with Train(options(path, "run", "--ranks=3", "--steps=12"), path, forked=True, fault=mistake) as running:
        outcome = running.wait()
    assert outcome.status == 1, outcome
    return outcome.err


def mistake() -> None:
    """Of member 1, in its fourth update."""
    update, calls = Step._update, []

    def wrong(self: Step, length: float) -> str:
        calls.append(1)
        if os.environ["IMECE_MEMBER"] == "1" and len(calls) == 4:
            raise RuntimeError("by mistake")
        return update(self, length)

    mock.patch.object(Step, "_update", wrong).start()


def test_an_exception_ends_all(tmp_path: Path) -> None:
    began = time.monotonic()
    said = in_fork(raises, str(tmp_path))
    assert "failed with RuntimeError: by mistake" in said.splitlines()[-1]
    assert "ranks go on" not in said and "joined;" not in said
    assert time.monotonic() - began < 60
