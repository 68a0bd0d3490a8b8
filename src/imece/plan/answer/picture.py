"""Draws a plan: memory and step of the best candidates, the winner's step in time, and all candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from imece.observe.pictures import save
from imece.plan.answer.explain import parts
from imece.plan.answer.search import Answer, Candidate, pareto
from imece.plan.answer.spans import spans, what_is_drawn
from imece.plan.answer.text import Explained, memory_parts, subject
from imece.plan.answer.words import device, gb, seconds, strategy_name, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that also differ in lightness.
_MEMORY = {
    "parameters": "#1f4e8c", "gradients": "#6fa8dc", "optimizer": "#b45f06", "masters": "#f0b46c",
    "gathered": "#38761d", "communication": "#93c47d", "activations": "#741b47", "logits": "#d5a6bd",
    "overhead": "#9a9a9a",
}  # fmt: skip
_STEP = {
    "compute": "#1f4e8c", "recomputation": "#6fa8dc", "waiting": "#777777", "exposed: gradients": "#cc4125",
    "exposed: parameters": "#e69138", "exposed: tensor": "#f1c232", "exposed: context": "#a64d79",
    "exposed: pipeline": "#d5a6bd", "bubble": "#d9d9d9", "optimizer": "#38761d", "data": "#93c47d",
}  # fmt: skip
_SPANS = {
    "forward": "#6fa8dc", "recomputation": "#b4d0ec", "backward": "#1f4e8c", "optimizer": "#38761d",
    "sums within layers": "#f1c232", "waits for the CPU": "#d9d9d9", "gathers parameters": "#e69138",
    "sums gradients": "#cc4125", "exposed: parameters": "#f6c992", "exposed: gradients": "#e8a093",
    "exposed: context": "#a64d79", "next forward": "#cfe2f3",
}  # fmt: skip
_KINDS = (  # of candidates, for the picture of all of them
    ("pipeline", "#741b47", "with a pipeline"),
    ("tensor", "#e69138", "tensor parallel"),
    ("context", "#38761d", "context parallel"),
    ("data", "#1f4e8c", "data parallel only"),
)
_OTHER = "#777777"
_SHOWN = 1.35  # of the available memory: longer bars end there and say how long they are
_MOST_POINTS = 4000
_ABOVE = 1.06  # of the fastest way's rate


def draw(explained: Explained, path: Path) -> None:
    """Write a PNG with four panels."""
    save(whole(explained), path)


def whole(explained: Explained) -> Figure:
    """The four panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 9.5), layout="constrained")
    grid = figure.subplots(2, 2)
    draw_memory(grid[0][0], explained)
    draw_steps(grid[0][1], explained)
    draw_timeline(grid[1][0], explained)
    draw_all(grid[1][1], explained.answer)
    figure.suptitle(
        f"{subject(explained.question)}\n{title(explained.winner.setup)}", fontsize=11, parse_math=False
    )
    return figure


def draw_memory(axes: Axes, explained: Explained) -> None:
    """A bar for the winner and for each other candidate, and the available memory."""
    cluster = explained.question.cluster
    room = cluster.gpu.memory_bytes / 1e9
    rows = [explained.winner, *(each.candidate for each in explained.others)]
    _stacked(axes, rows, lambda each: memory_parts(each, cluster), _MEMORY, 1e9, _SHOWN * room)
    for place, each in enumerate(rows):
        if each.needed / 1e9 > _SHOWN * room:
            axes.text(
                _SHOWN * room,
                place,
                f"{gb(each.needed)} GB",
                ha="right",
                va="center",
                color="white",
                fontsize=8,
                bbox={"facecolor": "black", "linewidth": 0, "pad": 1.5},  # bars end in any colour
            )
    axes.axvline(room, color="black", linewidth=1.4)
    axes.set_xlim(0, _SHOWN * room)
    axes.set_title(
        f"Memory of a {device(cluster)}, GB; the line is all it has: {room:.1f}",
        fontsize=10,
        parse_math=False,
    )


def draw_steps(axes: Axes, explained: Explained) -> None:
    """A bar for each candidate that fits."""
    rows = [
        explained.winner,
        *(each.candidate for each in explained.others if each.candidate.time is not None),
    ]

    longest = _SHOWN * 2 * explained.winner.seconds
    _stacked(axes, rows, lambda each: parts(each.timed), _STEP, 1.0, longest)
    axes.set_xlim(0, 1.1 * min(longest, max(each.seconds for each in rows)))
    for place, each in enumerate(rows):
        axes.text(min(each.seconds, longest), place, f" {seconds(each.seconds)}", va="center", fontsize=8)
    axes.set_title("A step, s, of the ways that fit", fontsize=10)


def draw_timeline(axes: Axes, explained: Explained) -> None:
    """The winner's step: what is computed, and what is on the network meanwhile."""
    setup = explained.winner.setup
    drawn = spans(setup, explained.question.cluster)
    lanes = list(dict.fromkeys(span.lane for span in drawn))
    names = list(dict.fromkeys(span.name for span in drawn))
    colour = {name: _SPANS.get(name, _OTHER) for name in names}
    for name in names:
        for lane in lanes:
            there = [
                (each.start_s, each.stop_s - each.start_s)
                for each in drawn
                if (each.lane, each.name) == (lane, name)
            ]
            if there:
                place = lanes.index(lane) - 0.35, 0.7
                edge = colour[name] if lane.startswith("messages") else "white"
                axes.broken_barh(there, place, facecolor=colour[name], edgecolor=edge, linewidth=0.5)
        axes.plot([], [], color=colour[name], linewidth=6, label=name)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    axes.set_title(what_is_drawn(setup), fontsize=10)


def draw_all(axes: Axes, answer: Answer) -> None:
    """Every candidate that fits: tokens/s against memory, with the best of each size joined by a line."""
    winner = answer.best
    shown = answer.ranked[:: max(1, len(answer.ranked) // _MOST_POINTS)]
    for axis, colour, label in _KINDS:
        points = [each for each in shown if _kind(each) == axis]
        if points:
            axes.scatter(
                [each.needed / 1e9 for each in points], [_rate(each) for each in points],
                s=9, color=colour, alpha=0.55, label=label, linewidths=0,
            )  # fmt: skip
    front = pareto(answer.ranked)
    axes.step([each.needed / 1e9 for each in front], [_rate(each) for each in front], where="post",
              color="black", linewidth=1.1, label="none is both faster and smaller")  # fmt: skip
    name = strategy_name(winner.setup.parallel)
    axes.plot([winner.needed / 1e9], [_rate(winner)], marker="*", markersize=15, color="#cc4125",
              linestyle="none", markeredgecolor="white", label=name)  # fmt: skip
    axes.axvline(answer.question.cluster.gpu.memory_bytes / 1e9, color="black", linewidth=1.4)
    axes.set_xlabel(f"memory of a {device(answer.question.cluster)}, GB")
    axes.set_ylabel("tokens/s")
    axes.set_xlim(left=0)
    axes.set_ylim(0, _ABOVE * max(_rate(each) for each in shown))  # room for the star
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    axes.set_title(f"All {len(answer.ranked):,} ways that fit, of {answer.considered:,}", fontsize=10)


def _stacked(
    axes: Axes,
    rows: Sequence[Candidate],
    amounts: Callable[[Candidate], Mapping[str, float]],
    colours: Mapping[str, str],
    unit: float,
    most: float,
) -> None:
    """Horizontal bars, the first on top; bars are cut off at `most` units."""
    found = [amounts(each) for each in rows]
    names = sorted({name for each in found for name in each}, key=[*colours].index)
    done = [0.0] * len(rows)
    for name in names:
        widths = [
            max(0.0, min(each.get(name, 0.0) / unit, most - at)) for each, at in zip(found, done, strict=True)
        ]
        axes.barh(range(len(rows)), widths, left=done, color=colours[name], label=name, height=0.7)
        done = [at + width for at, width in zip(done, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [strategy_name(each.setup.parallel) for each in rows], fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.06), frameon=False)


def _kind(candidate: Candidate) -> str:
    parallel = candidate.setup.parallel
    return next((axis for axis in ("pipeline", "tensor", "context") if getattr(parallel, axis) > 1), "data")


def _rate(candidate: Candidate) -> float:
    return candidate.timed.tokens_per_s
