"""Draws the pictures of docs/ddp.md into docs/images: python docs/figures/ddp_figures.py

Buckets come from imece.layout, the ring from imece.collectives.schedules, and the timeline from one real step
of two ranks on this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import imece
from imece import layout
from imece.bench.reference_model import REFERENCE, batch, new_decoder
from imece.collectives import schedules

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IMAGES = Path(__file__).parents[1] / "images"
CAP_MB = 8
MIB = 2**20
INK, FAINT = "#222222", "#8a8a8a"
BLOCKS = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c")
OTHERS = "#d9d9d9"  # embeddings and the last norm
FORWARD, BACKWARD, HIDDEN, EXPOSED = "#9fc5e8", "#3d78b4", "#57a99a", "#cc4125"


def new_figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# --- buckets


def draw_buckets(path: Path) -> None:
    """The reference model's parameters, where layout.build puts their gradients, and bucket 0 from within."""
    items = [
        layout.Item(name, tuple(each.shape), "float32", 4)
        for name, each in new_decoder(REFERENCE).named_parameters()
    ]
    buckets = layout.build(items, cap_bytes=[MIB, CAP_MB * MIB]).buckets
    total = sum(item.nbytes for item in items)
    gap = 0.018 * total
    starts = [float(sum(item.nbytes for item in items[:index])) for index in range(len(items) + 1)]
    figure = new_figure(11, 5.4)
    axes = figure.subplots()
    top, middle, low, half = 4.1, 2.75, 1.15, 0.25
    for item, start in zip(items, starts, strict=False):
        box(axes, start, top, item.nbytes, half, color_of(item.name))
    for title, start, width in groups(items, starts):
        axes.text(start + width / 2, top + half + 0.07, title, ha="center", fontsize=9, color=INK)
    right: float = total + gap * (len(buckets) - 1) / 2
    first = (right - buckets[0].nbytes, right)
    for bucket in buckets:  # from the right to the left, as backward goes
        for place in bucket.places:
            begin, end = right - place.stop * 4, right - place.start * 4
            color = color_of(items[place.item].name)
            band(
                axes,
                (starts[place.item], starts[place.item + 1], top - half),
                (begin, end, middle + half),
                color,
            )
            box(axes, begin, middle, end - begin, half, color)
        left = right - bucket.nbytes
        axes.add_patch(outline(left, middle - half, bucket.nbytes, 2 * half))
        label = f"bucket {bucket.index}\n{bucket.nbytes / MIB:.1f} MiB"
        axes.text(
            (left + right) / 2, middle - half - 0.07, label, ha="center", va="top", fontsize=9, color=INK
        )
        right = left - gap
    draw_inside(axes, buckets[0], items, (0.1 * total, 0.9 * total), low, half, first, middle - half)
    arrow(axes, (0, 4.85), (0.2 * total, 4.85), "forward", FAINT)
    arrow(axes, (total, 4.85), (0.72 * total, 4.85), "backward: gradients come, buckets leave", EXPOSED)
    for height, text in ((top, "parameters"), (middle, "gradients"), (low, "in memory")):
        axes.text(-0.07 * total, height, text, ha="right", va="center", fontsize=10, color=INK)
    finish(axes, (-0.17 * total, 1.06 * total), (0.4, 5.1))
    save(figure, path)


def draw_inside(
    axes: Axes,
    bucket: layout.Bucket,
    items: Sequence[layout.Item],
    across: tuple[float, float],
    middle: float,
    half: float,
    source: tuple[float, float],
    source_low: float,
) -> None:
    """A bucket's flat memory, not to scale, below the bucket itself at `source`."""
    left, right = across
    shares = [1.0 + 0.35 * (items[place.item].numel > 10_000) for place in bucket.places]
    unit = (right - left) / sum(shares)
    band(axes, (*source, source_low - 0.42), (left, right, middle + half), FAINT)
    at = left
    for share, place in zip(shares, bucket.places, strict=True):
        item = items[place.item]
        box(axes, at, middle, share * unit, half, color_of(item.name))
        ink = ink_on(color_of(item.name))
        axes.text(
            at + share * unit / 2, middle, f"{item.name}.grad\n{list(item.shape)}", ha="center", va="center",
            fontsize=8.5, color=ink,
        )  # fmt: skip
        at += share * unit
    axes.add_patch(outline(left, middle - half, right - left, 2 * half))
    note = (
        "one flat tensor, reduced as one message; each .grad is a view into it, so nothing is copied out "
        "(widths not to scale)"
    )
    axes.text((left + right) / 2, middle - half - 0.08, note, ha="center", va="top", fontsize=9, color=INK)


def groups(items: Sequence[layout.Item], starts: Sequence[float]) -> list[tuple[str, float, float]]:
    """(title, start, width in bytes) of the embeddings and of each block."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(title_of(item.name), []).append(index)
    return [
        (title, starts[members[0]], sum(items[member].nbytes for member in members))
        for title, members in found.items()
    ]


def title_of(name: str) -> str:
    if name.startswith("blocks."):
        return f"block {name.split('.')[1]}"
    return "" if name.startswith("norm") else "embeddings"


def ink_on(color: str) -> str:
    return "white" if color in BLOCKS[3:] else INK


def color_of(name: str) -> str:
    return BLOCKS[int(name.split(".")[1])] if name.startswith("blocks.") else OTHERS


def box(axes: Axes, start: float, middle: float, width: float, half: float, color: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle((start, middle - half), width, 2 * half, facecolor=color, edgecolor="white", linewidth=0.6)
    )


def outline(start: float, low: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((start, low), width, height, facecolor="none", edgecolor=INK, linewidth=1.2)


def band(
    axes: Axes, above: tuple[float, float, float], below: tuple[float, float, float], color: str
) -> None:
    """A pale connection; each end is (left, right, height)."""
    (left, right, high), (start, stop, low) = above, below
    axes.fill([left, right, stop, start], [high, high, low, low], color=color, alpha=0.3, linewidth=0)


def arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float], text: str, color: str) -> None:
    axes.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.6})
    axes.text((tail[0] + head[0]) / 2, tail[1] + 0.07, text, ha="center", fontsize=9, color=color)


def finish(axes: Axes, across: tuple[float, float], upward: tuple[float, float]) -> None:
    axes.set_xlim(*across)
    axes.set_ylim(*upward)
    axes.set_axis_off()


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    print(path)


# --- ring


def draw_ring(path: Path, ranks: int = 4) -> None:
    """Who holds the sum of whom after each step of the ring, as the schedule itself says."""
    plans = [schedules.build("all_reduce", "ring", rank, ranks, ranks) for rank in range(ranks)]
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]  # [rank][slice]: whose numbers are in it
    figure = new_figure(11.5, 6.0)
    grid = figure.subplots(2, ranks)
    panel(grid[0][0], held, set(), "before")
    for step in range(2 * (ranks - 1)):
        old = [[set(each) for each in row] for row in held]
        moved = set()
        for rank, plan in enumerate(plans):
            for incoming in plan[step].receives:
                piece, source = incoming.start, old[incoming.peer][incoming.start]
                held[rank][piece] = source | old[rank][piece] if incoming.how == "sum" else source
                moved.add((rank, piece))
        summing = step < ranks - 1
        titles = {ranks - 2: "reduce-scatter is done", 2 * ranks - 3: "all-gather is done"}
        what = titles.get(step, "sum what comes" if summing else "copy what comes")
        axes = grid[0][step + 1] if summing else grid[1][step + 2 - ranks]
        panel(axes, held, moved, f"step {step + 1}: {what}")
    assert all(len(piece) == ranks for row in held for piece in row)
    lines = (
        "Each cell: a quarter of the bucket,", f"M / {ranks} bytes, and the ranks",
        "whose numbers are in its sum.", "", "Each rank sends 2(N - 1) cells:",
        "2(N - 1) / N x M bytes, less than",
        "2M however many ranks there are.", "", "But 2(N - 1) messages follow",
        "one another: latency grows with N,", "and one dead rank stops all.",
    )  # fmt: skip
    axes = grid[1][0]
    axes.set_axis_off()
    axes.text(
        0.0,
        0.97,
        "\n".join(lines),
        transform=axes.transAxes,
        va="top",
        fontsize=10,
        color=INK,
        linespacing=1.25,
    )
    save(figure, path)


def panel(axes: Axes, held: Sequence[Sequence[set[int]]], moved: set[tuple[int, int]], title: str) -> None:
    """One table of ranks x slices; an arrow into each cell that has just come from the rank above."""
    from matplotlib.patches import Rectangle

    ranks = len(held)
    for rank, row in enumerate(held):
        axes.text(-0.12, -rank, f"rank {rank}", ha="right", va="center", fontsize=8.5, color=INK)
        for piece, owners in enumerate(row):
            whole = len(owners) == ranks
            new = (rank, piece) in moved
            color = "#2f7d6b" if whole else ("#eef3f8", "#cfe0ef", "#9fc3e0")[len(owners) - 1]
            edge = {"edgecolor": EXPOSED, "linewidth": 2.2, "zorder": 3} if new else {"edgecolor": "white"}
            axes.add_patch(Rectangle((piece + 0.04, -rank - 0.31), 0.92, 0.62, facecolor=color, **edge))
            label = "all" if whole else "+".join(map(str, sorted(owners)))
            axes.text(
                piece + 0.5, -rank, label, ha="center", va="center", fontsize=9 - (len(label) > 3),
                color="white" if whole else INK, zorder=4,
            )  # fmt: skip
            if new:
                style = {"arrowstyle": "-|>", "color": EXPOSED, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
                head, tail = (piece + 0.5, -rank + 0.31), (piece + 0.5, -rank + 0.69)
                axes.annotate("", head, tail, zorder=5, arrowprops=style)
    for rank, piece in moved:
        if rank == 0:  # the ring closes
            axes.text(
                piece + 0.58, 0.62, f"from {ranks - 1}", ha="left", va="center", fontsize=8, color=EXPOSED
            )
    axes.set_title(title, fontsize=10, color=INK)
    finish(axes, (-0.9, ranks + 0.05), (-ranks + 0.45, 0.75))


# --- overlap


def traced_step(tokens: int, cap_mb: int) -> dict[str, Any]:
    """On each rank: the StepTrace of the shortest of 20 steps."""
    torch.set_num_threads(1)
    rank = imece.init(backend="gloo").rank
    model = imece.DistributedDataParallel(new_decoder(REFERENCE), bucket_cap_mb=[1, cap_mb])
    model.record_trace()
    traces = []
    for step in range(23):
        model(batch(REFERENCE, tokens, seed=2 * step + rank)).backward()
        model.zero_grad()
        assert model.last_trace is not None
        traces.append(model.last_trace)
    return asdict(min(traces[3:], key=lambda trace: trace.end_s - trace.forward_start_s))


def draw_overlap(path: Path, tokens: int = 64) -> None:
    """One real step of two ranks on Gloo, as rank 0 saw it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    trace = imece.spawn(traced_step, ranks=2, args=(tokens, CAP_MB))[0]
    zero = trace["forward_start_s"]

    def ms(name: str, of: dict[str, Any] = trace) -> float:
        return float(of[name] - zero) * 1e3

    begin, last, end = ms("backward_start_s"), ms("backward_end_s"), ms("end_s")
    buckets = trace["buckets"]
    figure = new_figure(11, 1.6 + 0.42 * len(buckets))
    axes = figure.subplots()
    axes.barh(0, begin, 0.7, color=FORWARD)
    axes.barh(0, last - begin, 0.7, left=begin, color=BACKWARD)
    axes.barh(
        0, end - last, 0.7, left=last, facecolor="#f4cccc", edgecolor=EXPOSED, hatch="///", linewidth=0.8
    )
    axes.text(begin / 2, 0, "forward", ha="center", va="center", fontsize=10)
    axes.text((begin + last) / 2, 0, "backward", ha="center", va="center", fontsize=10, color="white")
    for row, bucket in enumerate(buckets, 1):
        ready, left, done = (ms(name, bucket) for name in ("ready_s", "launched_s", "done_s"))
        split = min(max(last, left), done)
        axes.plot([ready, ready], [0.35, row], color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
        axes.barh(row, split - left, 0.62, left=left, color=HIDDEN)
        axes.barh(row, done - split, 0.62, left=split, color=EXPOSED)
    axes.axvline(last, color=INK, linewidth=0.9, linestyle="--")
    handles = [
        Line2D([], [], color=FAINT, linestyle=":", label="its last gradient is there"),
        Patch(color=HIDDEN, label="on its way, hidden behind backward"),
        Patch(color=EXPOSED, label="on its way, exposed"),
        Patch(facecolor="#f4cccc", edgecolor=EXPOSED, hatch="///", label="the step waits"),
    ]
    axes.legend(handles=handles, loc="lower left", fontsize=9, frameon=False)
    names = [f"bucket {each['index']}, {each['nbytes'] / MIB:.1f} MiB" for each in buckets]
    axes.set_yticks(range(len(buckets) + 1), ["compute", *names], fontsize=9)
    axes.set_ylim(len(buckets) + 0.6, -0.6)
    axes.set_xlim(0, end * 1.01)
    axes.set_xlabel("ms since the start of forward", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save(figure, path)


def main() -> None:
    draw_buckets(IMAGES / "ddp_buckets.png")
    draw_ring(IMAGES / "ddp_ring.png")
    if "--no-step" not in sys.argv:
        draw_overlap(IMAGES / "ddp_overlap.png")


if __name__ == "__main__":
    main()
