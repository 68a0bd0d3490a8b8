"""The plot of `imece bench collectives`: bus bandwidth against size, both on logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imece.bench.collectives.collectives import Result
from imece.listing import size_text
from imece.observe.pictures import legend_below, panels, save

# imece's lines are thick, the others thinner; colours also differ in lightness.
_STYLES: dict[str, dict[str, Any]] = {
    "shm": {"color": "#0b5394", "linewidth": 2.4, "marker": "o", "label": "imece shm, shared tensors"},
    "shm ordinary": {
        "color": "#6fa8dc",
        "linewidth": 2.0,
        "marker": "s",
        "label": "imece shm, ordinary tensors",
    },
    "gloo": {"color": "#b45f06", "linewidth": 1.4, "marker": "^", "label": "Gloo"},
    "mpich": {"color": "#38761d", "linewidth": 1.4, "marker": "v", "label": "MPICH"},
    "deepspeed": {"color": "#741b47", "linewidth": 1.4, "marker": "D", "label": "DeepSpeed shared memory"},
    "limit": {
        "color": "#777777",
        "linewidth": 1.2,
        "linestyle": "--",
        "label": "limit: plain copies and sums",
    },
}


def draw(results: Sequence[Result], path: Path, subtitle: str) -> None:
    """Write a PNG with one panel for each operation and number of ranks."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    calls = list(dict.fromkeys((result.ranks, result.op) for result in results))
    figure, grid = panels(len(calls), 2, 5.6, 3.3, 1.7, 7.5, sharex=True, sharey=True)
    for axes, (ranks, op) in zip(grid, calls, strict=True):
        shown = [result for result in results if (result.ranks, result.op) == (ranks, op)]
        for library, style in _STYLES.items():
            line = sorted((r.size_bytes, r.bus_gbps) for r in shown if r.library == library)
            if line:
                axes.plot(*zip(*line, strict=True), markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(True, which="major", alpha=0.35)
        axes.set_title(f"{op}, {ranks} ranks", fontsize=11)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("message size (larger of input and output)", fontsize=9)
        axes.set_ylabel("bus bandwidth, GB/s", fontsize=9)
        axes.label_outer()
    legend_below(figure, grid, 3)
    lines = subtitle.replace("; load", "\nload")  # a single line would be wider than one panel
    figure.suptitle(f"Collectives on one host, one thread a rank\n{lines}", fontsize=11)
    save(figure, path, dpi=130)
