"""Draws docs/recovery.md's picture from two run folders: python recovery_figure.py ALONE KILLED OUT.png"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from imece.checkpoint.load import newest
from imece.observe.metrics import read_metrics


def largest_difference(alone: Path, killed: Path) -> float:
    """Between the last parameters, as a share of each one's largest element."""
    one, two = (newest(run / "checkpoints", print) for run in (alone, killed))
    assert one is not None and two is not None and one.step == two.step, "two whole runs of as many steps"
    names = [name for name in one.names() if name.startswith("model/")]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(one.tensor(name), two.tensor(name)) for name in names]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def draw(alone: Path, killed: Path, out: Path) -> None:
    """Both losses over each other; a line at each step after which the ranks changed."""
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    undisturbed, records = read_metrics(alone), read_metrics(killed)
    axis.plot([r["step"] for r in undisturbed], [r["loss"] for r in undisturbed], lw=4, color="#c9d6e8",
              label="left alone")  # fmt: skip
    axis.plot([r["step"] for r in records], [r["loss"] for r in records], lw=1, color="#1f4e8c",
              label="ranks killed and replaced")  # fmt: skip
    ranks = max((r["ranks"] for r in records if "ranks" in r), default=0)
    for record in records:
        if "generation" in record:
            fewer = record["ranks"] < ranks
            axis.axvline(record["step"], color="#b3261e" if fewer else "#2e7d32", lw=0.8, ls=":")
            at = record["step"], 0.97
            axis.annotate(f" {record['ranks']} ranks", at, xycoords=("data", "axes fraction"), va="top",
                          fontsize=8)  # fmt: skip
    axis.set_xlabel("step (dotted: the ranks changed)")
    axis.set_ylabel("loss, nats a token")
    axis.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    runs, picture = [Path(word) for word in sys.argv[1:3]], Path(sys.argv[3])
    draw(runs[0], runs[1], picture)
    print(f"largest difference {largest_difference(*runs):.1e}")
