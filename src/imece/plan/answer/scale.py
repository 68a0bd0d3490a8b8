"""Answers the same question for ever more hosts: the time of a step, and how much of the ideal speed is left.

Weak scaling: the batch grows with the GPUs, so each GPU has as much to do as before. Strong scaling: the
batch stays, so each GPU has less to do and communication weighs more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from imece.listing import many
from imece.observe.pictures import save
from imece.plan.answer.explain import grown
from imece.plan.answer.search import Candidate, search, settled
from imece.plan.answer.space import Question, why_none
from imece.plan.answer.text import as_json, wrapped
from imece.plan.answer.words import gb, seconds, strategy_name, title

Kind = Literal["weak", "strong"]
MOST_GPUS = 25_600  # 16 x 8 x 200


@dataclass(frozen=True)
class Point:
    """The best plan for this many GPUs."""

    question: Question
    candidate: Candidate | None  # None if nothing fits, or the batch cannot be divided
    least: Candidate | None = None  # the smallest of those that do not fit

    @property
    def gpus(self) -> int:
        return self.question.cluster.gpus

    @property
    def tokens_per_s(self) -> float:
        """0 if there is no plan."""
        return self.candidate.timed.tokens_per_s if self.candidate is not None else 0.0

    @property
    def exposed(self) -> float:
        """The part of a step in which GPUs wait for communication or the pipeline."""
        if self.candidate is None:
            return 0.0
        time = self.candidate.timed
        return (sum(time.exposed.values()) + time.bubble) / time.total


def hosts_to_try(question: Question, most_gpus: int = MOST_GPUS) -> list[int]:
    """Doubled from the asked number on, up to exactly `most_gpus` if that is a multiple."""
    first, inside = question.cluster.hosts, question.cluster.gpus_per_host
    found = []
    hosts = first
    while hosts * inside <= most_gpus:
        found.append(hosts)
        hosts *= 2
    if most_gpus % (first * inside) == 0 and found and found[-1] * inside != most_gpus:
        found.append(most_gpus // inside)
    return found or [first]


def curve(question: Question, kind: Kind, most_gpus: int = MOST_GPUS) -> Iterator[Point]:
    """A point for each number of hosts, from its own search."""
    for hosts in hosts_to_try(question, most_gpus):
        times = hosts // question.cluster.hosts
        batch = question.global_batch * (times if kind == "weak" else 1)
        asked = replace(question, cluster=replace(question.cluster, hosts=hosts), global_batch=batch)
        answer = settled(search(asked))
        yield Point(asked, answer.winner, answer.missed[0] if answer.missed else None)


def efficiency(point: Point, first: Point) -> float:
    """Tokens per second and GPU, relative to the first point; 0 if there is no plan."""
    if not first.tokens_per_s:
        return 0.0
    return point.tokens_per_s / point.gpus / (first.tokens_per_s / first.gpus)


def scale_lines(points: Sequence[Point], width: int) -> Iterator[str]:
    """A table with a line per point; a plan that is too wide comes below its figures."""
    first = next((point for point in points if point.candidate is not None), points[0])
    yield (
        f"{'GPUs':>7} {'sequences':>9} {'tokens/s':>13} {'step':>8} {'MFU':>5} {'left':>6} {'waits':>6} "
        f"{'GB':>6}  plan"
    )
    for point in points:
        head = f"{point.gpus:>7,} {point.question.global_batch:>9,}"
        if point.candidate is None:
            yield from _row(head, _why_none(point), width)
            continue
        time, recipe = point.candidate.timed, point.candidate.setup.recipe
        again = f", {recipe.recompute} recomputation" if recipe.recompute != "none" else ""
        figures = (
            f"{head} {time.tokens_per_s:>13,.0f} {seconds(time.total):>8} {100 * time.mfu:>3.0f} % "
            f"{100 * efficiency(point, first):>4.0f} % {100 * point.exposed:>4.0f} % "
            f"{gb(point.candidate.needed):>6}"
        )
        plan = (
            f"{strategy_name(point.candidate.setup.parallel)}, {recipe.micro_batch} x "
            f"{recipe.accumulation}{again}"
        )
        yield from _row(figures, plan, width)


def _row(figures: str, text: str, width: int) -> list[str]:
    if len(figures) + 2 + len(text) <= width:
        return [f"{figures}  {text}"]
    return [figures, *wrapped("", text, width, hang=2)]


def _why_none(point: Point) -> str:
    if point.least is None:
        return why_none(point.question)
    room, needs = gb(point.question.room_bytes), gb(point.least.needed)
    return f"nothing fits: {title(point.least.setup)} needs {needs} of {room} GB"


def slower(points: Sequence[Point]) -> Iterator[str]:
    """For each number of GPUs that is slower than a smaller one, why."""
    best: Point | None = None
    for point in points:
        if point.candidate is None:
            continue
        if best is None or best.candidate is None or point.tokens_per_s >= best.tokens_per_s:
            best = point
            continue
        now, before = point.candidate, best.candidate
        yield (
            f"{point.gpus:,} GPUs are slower than {best.gpus:,}: a step takes {seconds(now.seconds)} instead "
            f"of {seconds(before.seconds)}, {grown(now, before, point.question.cluster)}"
            f"{_uneven(point, best)}"
        )


def _uneven(point: Point, best: Point) -> str:
    """How this number of GPUs divides the batch unevenly, if they cannot be grouped like those of the
    best."""
    assert best.candidate is not None
    batch, group = point.question.global_batch, best.gpus // best.candidate.setup.parallel.data
    groups = point.gpus // group
    if point.gpus % group or batch % groups == 0:
        return ""
    divided = f"{many(groups, 'group')} of {many(group, 'GPU')}, as with {many(best.gpus, 'GPU')}"
    if batch < groups:
        return f"; {many(batch, 'sequence')} are too few for {divided}"
    even = batch // groups * groups
    found = settled(search(replace(point.question, global_batch=even))).winner
    if found is None or found.timed.tokens_per_s <= best.tokens_per_s:
        return ""
    rate = f"{found.timed.tokens_per_s:,.0f} tokens/s"
    return f"; {many(batch, 'sequence')} cannot be dealt to {divided}: with {even:,} it would be {rate}"


def scale_json(points: Sequence[Point], kind: Kind) -> dict[str, Any]:
    """The points for a program."""
    first = next((point for point in points if point.candidate is not None), points[0])
    return {
        "scaling": kind,
        "model": points[0].question.model.name,
        "notes": list(slower(points)),
        "points": [
            {
                "gpus": point.gpus,
                "hosts": point.question.cluster.hosts,
                "global_batch": point.question.global_batch,
                "efficiency": efficiency(point, first),
                "waits": point.exposed,
                "plan": as_json(point.candidate, point.question) if point.candidate else None,
                "why_none": None if point.candidate else _why_none(point),
            }
            for point in points
        ],
    }


def draw_scale(points: Sequence[Point], kind: Kind, path: Path) -> None:
    """Draw a PNG: tokens/s beside the ideal, and what is left of a GPU's speed."""
    from matplotlib.figure import Figure

    shown = [point for point in points if point.candidate is not None]
    first = shown[0]
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    gpus = [point.gpus for point in shown]
    ideal = first.tokens_per_s / first.gpus
    left.plot(gpus, [ideal * number for number in gpus], color="#999999", linestyle="--", label="ideal")
    left.plot(gpus, [point.tokens_per_s for point in shown], color="#1f4e8c", marker="o", label="predicted")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_ylabel("tokens/s")
    left.legend(frameon=False)
    right.plot(gpus, [100 * efficiency(point, first) for point in shown], color="#1f4e8c", marker="o",
               label=f"speed of a GPU, beside that on {first.gpus:,}")  # fmt: skip
    right.plot(gpus, [100 * point.exposed for point in shown], color="#cc4125", marker="s",
               label="part of a step in which GPUs wait")  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_ylim(0, 112)
    right.set_ylabel("%")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_xticks(gpus, [f"{number:,}" for number in gpus], rotation=45, fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    batch = f"{first.question.global_batch:,} sequences" + (" at first" if kind == "weak" else "")
    figure.suptitle(
        f"{kind} scaling of {first.question.model.name} on {first.question.cluster.gpu.name}, {batch} x "
        f"{first.question.seq:,}", fontsize=11, parse_math=False,
    )  # fmt: skip
    save(figure, path)
