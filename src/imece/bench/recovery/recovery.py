"""`imece bench recovery`: kills ranks of a real training at random instants, and compares with torchrun.

Its parts:

    kills    each strategy, undisturbed and under `imece drill`
    cost     what readiness for failures adds to a step
    torch    torchrun and torch's DistributedDataParallel with a checkpoint every few steps, one rank killed
    start    time from the command to the first finished step, imece launch beside torchrun
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from imece.bench.recovery.rank import SEQUENCES, SHAPE, Task
from imece.bench.recovery.record import Kills, Plan, Results
from imece.bench.recovery.runs import (
    GIVEN_UP_S,
    TorchKill,
    copied_package,
    cost,
    drill,
    kill_under_torchrun,
    start,
    train,
)
from imece.bench.recovery.targets import COST_STRATEGIES
from imece.listing import many

TORCHRUN = {"as it is": {}, "without a shared store": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Description -> environment variables."""
_MARGIN = 1.5
_START_RANKS = 2
_START_ROUNDS = 3


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes."""
    results = Results(plan)
    with (
        tempfile.TemporaryDirectory(prefix="imece-bench-recovery-") as name,
        copied_package(Path(name, "package")),
    ):
        for part, measure in (
            ("kills", _kills), ("cost", _cost), ("torchrun", _torchrun), ("start", _start)
        ):  # fmt: skip
            if part in plan.parts:
                measure(results, Path(name), say)
    return results


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two models' parameters, over the norm of the second's."""
    if one.keys() != other.keys():
        raise ValueError("two models with other parameters cannot be compared")
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    whole = sum(float(value.double().square().sum()) for value in other.values())
    return math.sqrt(apart / whole)


def goodput(step_s: float, figures: dict[str, Any]) -> float | None:
    """The rate under kills, over the undisturbed run's, or over that before the first kill if it was higher.

    A machine with other work is not equally fast twice; taking the higher rate avoids flattering the result.
    """
    hit, calm = figures["hit_steps_per_s"], figures["calm_steps_per_s"]
    return None if hit is None else hit / max(1 / step_s, calm or 0.0)


def _kills(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    plan = results.plan
    say(
        f"\na GPT of 1.8M parameters, bytes of the standard library, {SEQUENCES} sequences x {SHAPE.length} "
        f"a step, SGD with momentum, fp32, {plan.ranks} ranks, 1 thread a rank;\n"
        f"SIGKILL to a random rank about every {plan.every_s:g} s; recovery: from the signal to the last "
        f"survivor's next finished step;\nparameters apart: after {plan.steps} steps, from those of the "
        f"undisturbed run\n"
        f"  {'':<11}{'ms/step':>9}{'steps':>7}{'survived':>11}{'median s':>10}{'worst s':>9}"
        f"{'again':>7}{'goodput':>9}{'apart':>9}"
    )
    for strategy in plan.strategies:
        calm, hit = folder / f"{strategy}-calm", folder / f"{strategy}-hit"
        for each in (calm, hit):
            each.mkdir()
        task = Task(str(calm), strategy, plan.steps, plan.steps, pause_s=plan.pause_s)
        undisturbed = train(task, plan.ranks)
        step_s = undisturbed.seconds / (plan.steps - 1)
        # Nobody knows how many steps the kills take, so the run ends some time after the last one.
        after = math.ceil(_MARGIN * plan.every_s / step_s)
        task = Task(
            str(hit), strategy, sys.maxsize - 1, plan.steps, pause_s=plan.pause_s,
            members=plan.ranks + plan.kills, after=after,
        )  # fmt: skip
        trained, figures = drill(task, plan.ranks, plan.kills, plan.every_s, plan.seed)
        found = Kills(strategy, step_s, figures, goodput(step_s, figures), None, plan.steps)
        if trained is not None:
            found.difference = difference(trained.parameters, undisturbed.parameters)
        results.kills[strategy] = found
        say(kills_line(found))


def kills_line(found: Kills) -> str:
    """One line of the table."""
    figures = found.drill

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    survived = f"{figures['survived']} of {len(figures['faults'])}"
    return (
        f"  {found.strategy:<11}{found.step_s * 1e3:>9.0f}{found.steps:>7}{survived:>11}"
        f"{shown(figures['median_s'], '.2f'):>10}{shown(figures['worst_s'], '.2f'):>9}{figures['again']:>7}"
        f"{shown(found.goodput, '.0%'):>9}{shown(found.difference, '.1e'):>9}"
        f"  ({many(found.kills_compared, 'kill')} before)"
    )


def _cost(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    plan = results.plan
    say(
        f"\nwhat being ready adds to a step when nothing fails, AdamW, medians of {plan.cost_rounds} "
        f"alternating rounds of {plan.cost_steps} steps"
    )
    for strategy in COST_STRATEGIES:
        if strategy not in plan.strategies:
            continue
        into = folder / f"{strategy}-cost"
        into.mkdir()
        task = Task(str(into), strategy, plan.cost_steps, 0, rounds=plan.cost_rounds)
        found = results.cost[strategy] = cost(task, plan.ranks)
        plain, ready = (statistics.median(found[name]) * 1e3 for name in ("plain_s", "resilient_s"))
        say(
            f"  {strategy:<11}{plain:>9.1f} ms/step in a plain loop,{ready:>8.1f} in imece.steps:"
            f"{found['cost']:>+8.2%}"
        )


def _torchrun(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    plan = results.plan
    rng = random.Random(plan.seed)
    say(
        f"\ntorchrun --max-restarts 3, DistributedDataParallel on Gloo, a checkpoint every "
        f"{plan.checkpoint_every} steps, SIGKILL of a random rank"
    )
    for words, environ in TORCHRUN.items():
        found = results.torchrun[words] = []
        for number in range(plan.torchrun_runs):
            into = folder / f"torchrun-{len(results.torchrun)}-{number}"
            into.mkdir()
            found.append(kill_under_torchrun(plan.ranks, plan.checkpoint_every, into, rng, environ))
        say(f"  {words:<24}{torchrun_text(found)}")


def torchrun_text(found: list[TorchKill]) -> str:
    """Several runs in a line."""
    came_back = [kill.recovery_s for kill in found if kill.recovery_s is not None]
    again = [kill.again for kill in found if kill.again is not None]
    text = f"came back in {len(came_back)} of {len(found)} runs"
    if not came_back:
        return f"{text} (given up after {GIVEN_UP_S:.0f} s)"
    return (
        f"{text}, after {min(came_back):.1f} to {max(came_back):.1f} s, "
        f"{min(again)} to {max(again)} steps made again"
    )


def _start(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    seconds: dict[str, list[float]] = {"imece launch": [], "torchrun": []}
    for number in range(_START_ROUNDS):
        for name in [*seconds][:: 1 if number % 2 == 0 else -1]:
            into = folder / f"start-{name}-{number}"
            into.mkdir()
            seconds[name].append(start(name == "imece launch", _START_RANKS, into))
    results.start = seconds
    texts = [f"{name} {statistics.median(each):.1f} s" for name, each in seconds.items()]
    say(
        f"\nfrom the command to the first finished step of {_START_RANKS} ranks, the same script of torch's, "
        f"medians of {_START_ROUNDS} alternating rounds\n  {', '.join(texts)}"
    )
