"""The end of a step on a time axis, for a picture: the last micro-batch, its messages and the optimizer.

With a pipeline it is a whole step with few micro-batches, stage by stage, forward and backward in turn.
Lengths are those of step_time; work of one kind within a micro-batch is drawn in one piece. If parameters are
gathered once per step, beside the forward that follows, that forward is drawn too.
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

_MOST_PIECES = 40  # drawn one by one
_MOST_STAGES = 16


@dataclass(frozen=True)
class Span:
    """A bar."""

    lane: str
    name: str
    start_s: float
    stop_s: float


def spans(setup: Setup, cluster: Cluster) -> list[Span]:
    """All bars of the drawing."""
    stage = stage_time(setup, cluster, IMECE)
    if setup.parallel.pipeline > 1:
        return list(_pipeline(setup, stage))
    return list(_last_micro_batch(setup, cluster, stage))


def what_is_drawn(setup: Setup) -> str:
    """The drawing's title."""
    recipe, stages = setup.recipe, setup.parallel.pipeline
    if stages > 1:
        shown = min(recipe.accumulation, 2 * stages)
        of = "" if shown == recipe.accumulation else f", {shown} of its {recipe.accumulation} micro-batches"
        return f"A step of the chosen way{of}, s"
    if recipe.accumulation == 1:
        return "A step of the chosen way, s"
    last = f"The last of {recipe.accumulation} micro-batches of the chosen way"
    if _gathers_once(setup):
        return f"{last}, the end of its step and the next forward, s"
    return f"{last}, and the end of its step, s"


def _last_micro_batch(setup: Setup, cluster: Cluster, stage: StageTime) -> Iterator[Span]:
    found = synchronise(setup, cluster, IMECE, stage)
    gathers, gradients = _busy(setup, found)
    exposed = found.parameters / _gathered_times(setup)
    pieces = max(1, min(_MOST_PIECES, stage.layers))
    after = _gathers_once(setup) and setup.recipe.accumulation > 1
    now = 0.0
    if exposed and not after:
        yield Span("computing", "exposed: parameters", 0.0, exposed)
        now = exposed
    begin = now
    for name, long in (
        ("forward", stage.forward),
        ("sums within layers", stage.tensor / 2),
        ("exposed: context", stage.context / 2),
        ("recomputation", stage.recompute),
        ("backward", stage.backward),
        ("exposed: context", stage.context / 2),
        ("sums within layers", stage.tensor / 2),
        ("waits for the CPU", stage.waiting),
    ):
        if long > 0:
            yield Span("computing", name, now, now + long)
            now += long
    if not after:
        beside = stage.forward if _gathers_once(setup) else now - begin
        yield from _gathers(begin, beside, gathers, pieces)
    backward = stage.backward + stage.recompute
    if gradients > 0:
        ready = [now - backward + backward * (piece + 1) / pieces for piece in range(pieces)]
        drawn = list(_pieces("sums gradients", ready, gradients / pieces, lane="messages of gradients"))
        yield from drawn
        if drawn[-1].stop_s > now:
            yield Span("computing", "exposed: gradients", now, drawn[-1].stop_s)
            now = drawn[-1].stop_s
    stepped = now + optimizer_s(setup, cluster, IMECE)
    yield Span("computing", "optimizer", now, stepped)
    if after:
        begin = stepped + exposed
        if exposed:
            yield Span("computing", "exposed: parameters", stepped, begin)
        yield Span("computing", "next forward", begin, begin + stage.forward)
        yield from _gathers(begin, stage.forward, gathers, pieces, stepped)


def _gathers(begin: float, beside: float, long: float, pieces: int, earliest: float = 0.0) -> Iterator[Span]:
    """Gathers of parameters that are used one after the other in `beside` seconds from `begin` on. Each is
    requested one share before its use, and none before `earliest`."""
    if long > 0:
        asked = [max(earliest, begin + beside * (piece - 1) / pieces) for piece in range(pieces)]
        yield from _pieces("gathers parameters", asked, long / pieces)


def _gathers_once(setup: Setup) -> bool:
    """Whether each rank gathers all parameters once per step, before the forward that follows the update."""
    divides = DIVIDED[setup.parallel.strategy]
    return divides.optimizer and not divides.parameters


def _gathered_times(setup: Setup) -> int:
    """Micro-batches of a step in which parameters are gathered: all of them, or one."""
    return setup.recipe.accumulation if DIVIDED[setup.parallel.strategy].parameters else 1


def _busy(setup: Setup, found: Synchronisation) -> tuple[float, float]:
    """Seconds of the network for one micro-batch: (gathering parameters, summing gradients).

    The step's seconds are divided by bytes: one gather and one sum of everything move equally many.
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
    """One forward and one backward in turn, on every stage (only the first sixteen, if there are more).

    Several chunks per stage run as in Megatron-LM: in rounds of as many micro-batches as there are stages,
    which pass through the first chunk of all stages, then through the second.
    """
    stages, chunks = setup.parallel.pipeline, setup.parallel.interleave
    batches = min(setup.recipe.accumulation, 2 * stages)
    forward = (stage.forward + (stage.tensor + stage.sends) / 2) / chunks
    backward = stage.total / chunks - forward
    done: dict[_Piece, float] = {}
    free = [0.0] * stages
    orders = [_order(at, stages, chunks, batches) for at in range(stages)]
    place = [0] * stages
    while any(place[at] < len(orders[at]) for at in range(stages)):
        for at in range(stages):
            while place[at] < len(orders[at]):
                piece = orders[at][place[at]]
                before = _waits_for(piece, stages * chunks)
                if before is not None and before not in done:
                    break
                start = max(free[at], done[before] if before is not None else 0.0)
                stop = start + (forward if piece[0] == "forward" else backward)
                done[piece] = free[at] = stop
                place[at] += 1
                if at < _MOST_STAGES:
                    yield Span(f"stage {at + 1}", piece[0], start, stop)


_Piece = tuple[str, int, int]  # ("forward", part, micro-batch): chunk c on stage s is part c x stages + s


def _order(at: int, stages: int, chunks: int, batches: int) -> list[_Piece]:
    """The order of a stage's work: forwards until the first backward can come, then in turn, then the
    rest."""

    def all_of(name: str) -> list[_Piece]:
        rounds = (range(first, min(first + stages, batches)) for first in range(0, batches, stages))
        turns = range(chunks) if name == "forward" else range(chunks - 1, -1, -1)
        return [(name, turn * stages + at, batch) for round_ in rounds for turn in turns for batch in round_]

    forwards, backwards = all_of("forward"), all_of("backward")
    after = stages - at - 1
    ahead = min(after if chunks == 1 else 2 * after + (chunks - 1) * stages, len(forwards))
    in_turn = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(piece for pair in in_turn for piece in pair),
        *backwards[len(forwards) - ahead :],
    ]


def _waits_for(piece: _Piece, parts: int) -> _Piece | None:
    name, part, batch = piece
    if name == "forward":
        return ("forward", part - 1, batch) if part else None
    return ("backward", part + 1, batch) if part < parts - 1 else ("forward", part, batch)
