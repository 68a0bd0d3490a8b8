"""The end of a step on a time axis, for a picture: the last micro-batch, its messages and the optimizer.

With a pipeline it is a whole step with few micro-batches, stage by stage, forward and backward in turn.
Lengths are those of step_time; work of one kind within a micro-batch is drawn in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from imece.footprint import DIVIDED
from imece.plan.hardware import Cluster
from imece.plan.setup import Setup
from imece.plan.speed.manner import IMECE
from imece.plan.speed.stage import StageTime, stage_time
from imece.plan.speed.synchronise import Synchronisation, optimizer_s, reductions, synchronise
from imece.plan.speed.timeline import ends

_MOST_PIECES = 40  # that are drawn one by one
_MOST_STAGES = 16


@dataclass(frozen=True)
class Span:
    """A bar."""

    lane: str
    name: str
    start_s: float
    stop_s: float


def spans(setup: Setup, cluster: Cluster) -> list[Span]:
    """What to draw."""
    stage = stage_time(setup, cluster, IMECE)
    if setup.parallel.pipeline > 1:
        return list(_pipeline(setup, stage))
    return list(_last_micro_batch(setup, cluster, stage))


def what_is_drawn(setup: Setup) -> str:
    """A title."""
    recipe, stages = setup.recipe, setup.parallel.pipeline
    if stages > 1:
        shown = min(recipe.accumulation, 2 * stages)
        of = "" if shown == recipe.accumulation else f", {shown} of its {recipe.accumulation} micro-batches"
        return f"A step of the chosen way{of}, s"
    if recipe.accumulation == 1:
        return "A step of the chosen way, s"
    return f"The last of {recipe.accumulation} micro-batches of the chosen way, and the end of its step, s"


def _last_micro_batch(setup: Setup, cluster: Cluster, stage: StageTime) -> Iterator[Span]:
    found = synchronise(setup, cluster, IMECE, stage)
    gathers, gradients = _busy(setup, found)
    now = found.parameters / _gathered_times(setup)
    if now:
        yield Span("computing", "exposed: parameters", 0.0, now)
    begin = now
    for name, long in (
        ("forward", stage.forward),
        ("sums within layers", stage.tensor / 2),
        ("recomputation", stage.recompute),
        ("backward", stage.backward),
        ("sums within layers", stage.tensor / 2),
        ("waits for the CPU", stage.waiting),
    ):
        if long > 0:
            yield Span("computing", name, now, now + long)
            now += long
    backward = stage.backward + stage.recompute
    pieces = max(1, min(_MOST_PIECES, stage.layers))
    if gathers > 0:  # each asked for one share ahead of its use
        whole = now - begin
        asked = [begin + whole * (piece - 1) / pieces for piece in range(pieces)]
        yield from _pieces("gathers parameters", [max(0.0, time) for time in asked], gathers / pieces)
    if gradients > 0:
        ready = [now - backward + backward * (piece + 1) / pieces for piece in range(pieces)]
        drawn = list(_pieces("sums gradients", ready, gradients / pieces, lane="messages of gradients"))
        yield from drawn
        if drawn[-1].stop_s > now:
            yield Span("computing", "exposed: gradients", now, drawn[-1].stop_s)
            now = drawn[-1].stop_s
    yield Span("computing", "optimizer", now, now + optimizer_s(setup, cluster, IMECE, stage))


def _gathered_times(setup: Setup) -> int:
    """Micro-batches of a step in which parameters are gathered: all of them, or one."""
    return setup.recipe.accumulation if DIVIDED[setup.parallel.strategy].parameters else 1


def _busy(setup: Setup, found: Synchronisation) -> tuple[float, float]:
    """Seconds of the network for one micro-batch: gathering parameters, summing gradients.

    The step's are dealt by the bytes that move: gathering them once, and summing them once, are as many.
    """
    whole = found.gradients + found.parameters + found.hidden
    divides = DIVIDED[setup.parallel.strategy]
    if not divides.optimizer:
        return 0.0, whole
    gathers = 2 if divides.parameters else 1  # in forward and in backward, or once after a step
    one = whole / (gathers * _gathered_times(setup) + reductions(setup))
    return gathers * one, one


def _pieces(
    name: str, ready: list[float], long: float, lane: str = "messages of parameters"
) -> Iterator[Span]:
    for stop in ends(ready, [long] * len(ready)):
        yield Span(lane, name, stop - long, stop)


def _pipeline(setup: Setup, stage: StageTime) -> Iterator[Span]:
    """One forward and one backward in turn, on every stage (on the first sixteen, if there are more)."""
    stages = setup.parallel.pipeline
    batches = min(setup.recipe.accumulation, 2 * stages)
    forward = stage.forward + (stage.tensor + stage.sends) / 2
    backward = stage.total - forward
    done: dict[tuple[str, int, int], float] = {}  # ("forward", stage, micro-batch) -> when
    free = [0.0] * stages
    orders = [_order(at, stages, batches) for at in range(stages)]
    place = [0] * stages
    while any(place[at] < len(orders[at]) for at in range(stages)):
        for at in range(stages):
            while place[at] < len(orders[at]):
                name, batch = orders[at][place[at]]
                before = _waits_for(name, at, batch, stages)
                if before is not None and before not in done:
                    break
                start = max(free[at], done[before] if before is not None else 0.0)
                stop = start + (forward if name == "forward" else backward)
                done[name, at, batch] = free[at] = stop
                place[at] += 1
                if at < _MOST_STAGES:
                    yield Span(f"stage {at + 1}", name, start, stop)


def _order(at: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """What a stage does: as many forwards as there are stages after it, then in turn, then what is left."""
    ahead = min(stages - at - 1, batches)
    order = [("forward", batch) for batch in range(ahead)]
    for batch in range(batches - ahead):
        order += [("forward", ahead + batch), ("backward", batch)]
    return order + [("backward", batch) for batch in range(batches - ahead, batches)]


def _waits_for(name: str, at: int, batch: int, stages: int) -> tuple[str, int, int] | None:
    if name == "forward":
        return ("forward", at - 1, batch) if at else None
    return ("backward", at + 1, batch) if at < stages - 1 else ("forward", at, batch)
