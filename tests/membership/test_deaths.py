"""`imece train` goes on when ranks die, wherever in a step that is, and learns what it would have learned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.membership.deaths import PLACES, death, difference
from tests.train.command import Train, in_fork, train
from tests.train.compare import records, summary
from tests.train.small import options

STEPS, AT = 12, 5
ROUNDING = 1e-5  # relative: other ranks sum the same samples in another order


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
        if fired < dead:
            wrong.append(f"{place}: {fired} ranks died\n{outcome.err}")
        if not off < ROUNDING or summary(run)["steps"] != STEPS:
            wrong.append(f"{place}: parameters differ by {off}")
        if again > (strategy != "replicate"):
            wrong.append(f"{place}: {again} steps were made again")
        if place not in ("start", "finish") and not recovered:
            wrong.append(f"{place}: nobody recovered\n{outcome.out}\n{outcome.err}")
    return wrong


@pytest.mark.parametrize(
    ("strategy", "places", "members"),
    [
        ("replicate", list(PLACES), [1]),
        ("zero1", ["backward", "update", "border", "writing"], [0]),
        ("zero3", ["backward", "update"], [2]),
        ("zero1", ["border"], [0, 2]),  # two of three together
    ],
)
def test_a_death(tmp_path: Path, strategy: str, places: list[str], members: list[int]) -> None:
    assert in_fork(dies, str(tmp_path), strategy, places, members, len(members)) == []
