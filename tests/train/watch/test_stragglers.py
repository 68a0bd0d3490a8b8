"""The right rank and phase are named, once, and noise names nobody."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from imece.train.evaluate import mean_nats
from imece.train.watch.stragglers import PHASES, Slow, Stragglers
from tests.train.command import in_fork, train
from tests.train.compare import records
from tests.train.small import options

USUAL = {"data": 0.002, "forward": 0.05, "backward": 0.1, "optimizer": 0.02, "copy": 0.0, "other": 0.004}


class Ranks:
    """Made-up times of so many ranks, each step with some noise."""

    def __init__(self, ranks: int, noise: float = 0.1, seed: int = 0) -> None:
        self._usual = np.tile([USUAL[phase] for phase in PHASES], (ranks, 1))
        self._noise, self._draw = noise, np.random.default_rng(seed)

    def step(self, **late: tuple[int, float]) -> list[list[float]]:
        """late: of a phase the rank and by how many seconds."""
        times = self._usual * np.exp(self._noise * self._draw.standard_normal(self._usual.shape))
        for phase, (rank, seconds) in late.items():
            times[rank, PHASES.index(phase)] += seconds
        found: list[list[float]] = times.tolist()
        return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
@pytest.mark.parametrize("phase", PHASES)
def test_who_is_late(ranks: int, phase: str) -> None:
    made, seen = Ranks(ranks), Stragglers(1.3)
    changes = [step for step in range(40) if seen.add(made.step(**{phase: (ranks - 1, 0.2)}))]
    assert len(changes) == 1 and changes[0] < 20, "said once, within 20 steps"
    assert seen.slow is not None and (seen.slow.rank, seen.slow.phase) == (ranks - 1, phase)
    assert seen.slow.seconds == pytest.approx(USUAL[phase] + 0.2, rel=0.2)
    assert seen.slow.others == pytest.approx(USUAL[phase], rel=0.2)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_noise_is_nobodys_fault(ranks: int) -> None:
    for seed in range(10):
        made, seen = Ranks(ranks, noise=0.25, seed=seed), Stragglers(1.3)
        assert not any(seen.add(made.step()) for _ in range(100)), seen.slow


def test_what_is_no_straggler() -> None:
    made, now_and_then, little, cheap = Ranks(4), Stragglers(1.3), Stragglers(1.3), Stragglers(3.0)
    for step in range(60):
        assert not now_and_then.add(made.step(backward=(1, 0.3 if step % 2 else 0.0)))
        assert not little.add(made.step(other=(1, 0.008))), "three times as long, but what does it matter"
        assert not cheap.add(made.step(backward=(1, 0.1))), "below the ratio that was asked for"
    alone = Stragglers(1.3)
    assert not any(alone.add(Ranks(1).step()) for _ in range(30))
    long = Stragglers(1.3)  # 30 ms are nothing in steps of 3 s
    assert not any(long.add((np.array(made.step()) * [1, 20, 20, 1, 1, 1]).tolist()) for _ in range(20))
    assert not any(long.add(made_long(made, 0.030)) for _ in range(20))
    assert any(long.add(made_long(made, 0.300)) for _ in range(20))
    short = Stragglers(1.3)  # 8 ms double steps of 9 ms, and nobody minds
    times = [np.array(made.step()) / 20 + 0.008 * np.eye(4, 6) for _ in range(20)]
    assert not any(short.add(each.tolist()) for each in times)


def made_long(made: Ranks, late_s: float) -> list[list[float]]:
    times = np.array(made.step()) * [1, 20, 20, 1, 1, 1]
    times[2, PHASES.index("data")] += late_s
    found: list[list[float]] = times.tolist()
    return found


def test_it_ends_and_begins_again_elsewhere() -> None:
    made, seen = Ranks(4), Stragglers(1.3)
    said = []
    late: list[dict[str, tuple[int, float]]] = [{"backward": (2, 0.1)}, {}, {"data": (0, 0.1)}]
    for each in (*late, {"data": (0, 0.1), "backward": (1, 0.4)}):
        for _ in range(30):
            if seen.add(made.step(**each)):
                said.append((seen.slow.rank, seen.slow.phase) if seen.slow else None)
    assert said == [(2, "backward"), None, (0, "data"), (1, "backward")]
    seen.clear()
    assert seen.slow is None and not any(seen.add(Ranks(2).step()) for _ in range(30)), "fewer ranks now"


def test_two_that_are_equally_late_are_not_named_by_turns() -> None:
    made, seen = Ranks(5), Stragglers(1.3)
    times = [made.step(backward=(1, 0.2), forward=(3, 0.2)) for _ in range(200)]
    assert sum(seen.add(each) for each in times) == 1


def test_stages_have_different_work() -> None:
    """Ranks 0 to 2 have one stage, 3 to 5 another, of which backward takes twice as long."""
    for late, named in ((0.0, None), (0.2, 1)):
        made, seen, mixed = Ranks(6), Stragglers(1.3, stages=2), Stragglers(1.3)
        for _ in range(20):
            times = np.array(made.step(backward=(1, late)))
            times[3:, PHASES.index("backward")] += 0.1
            seen.add(times.tolist())
            mixed.add(times.tolist())
        assert (seen.slow.rank if seen.slow is not None else None) == named
        assert late or mixed.slow is not None, "compared with another stage"


def test_in_words() -> None:
    slow = Slow(2, "backward", 0.3102, 0.1049)
    assert slow.describe() == "rank 2 is slow in backward: 310 ms a step, the others 105 ms; all wait for it"
    assert Slow(0, "other", 1.0, 0.0).describe().startswith("rank 0 is slow outside of all phases: 1000 ms")


LATE_S, LATE_RANK, FROM = 0.2, 2, 3


def late_in_backward() -> None:
    """From step FROM on one rank needs 200 ms more, in the middle of its backward."""
    seen = {"losses": 0}

    def delayed(*args: Any) -> torch.Tensor:
        loss = mean_nats(*args)
        if loss.requires_grad and os.environ["RANK"] == str(LATE_RANK):
            seen["losses"] += 1
            if seen["losses"] > FROM:
                loss.register_hook(lambda _: time.sleep(LATE_S))
        return loss

    mock.patch("imece.train.passes.mean_nats", delayed).start()


def real(folder: str, strategy: str) -> None:
    path = Path(folder)
    words = ["--ranks=4", "--steps=20", f"--strategy={strategy}", "--validate.every=0"]
    outcome = train(options(path, strategy, *words), path, fault=late_in_backward)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    found = records(path / strategy)
    assert sum(record["step_s"] > LATE_S for record in found) >= 20 - FROM, "nobody was late"
    named = [record for record in found if "slowest_rank" in record]
    assert {(each["slowest_rank"], each["slowest_phase"]) for each in named} == {(LATE_RANK, "backward")}
    assert named[0]["step"] <= FROM + 16
    assert named[-1]["slowest_s"] > LATE_S > 2 * named[-1]["others_s"]
    assert outcome.out.count(f"rank {LATE_RANK} is slow in backward: ") == 1
    assert outcome.out.count(" is slow ") == 1


@pytest.mark.parametrize("strategy", ["replicate", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_rank_that_is_late_in_backward(tmp_path: Path, strategy: str) -> None:
    """Its backward has 200 ms more; the others have them in theirs too, but for what they wait."""
    in_fork(real, str(tmp_path), strategy)
