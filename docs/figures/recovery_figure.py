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
    """Both losses over each other, and below them how many ranks made each step of the second run."""
    figure, (axis, below) = plt.subplots(
        2, 1, figsize=(8, 4), sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    undisturbed, records = read_metrics(alone), read_metrics(killed)
    axis.plot([r["step"] for r in undisturbed], [r["loss"] for r in undisturbed], lw=4, color="#c9d6e8",
              label="left alone")  # fmt: skip
    axis.plot([r["step"] for r in records], [r["loss"] for r in records], lw=1, color="#1f4e8c",
              label="ranks killed and replaced")  # fmt: skip
    axis.set_ylabel("loss, nats a token")
    axis.legend(frameon=False, loc="upper right")
    most = max((r["ranks"] for r in records if "ranks" in r), default=0)
    ranks = [most]
    for record in records:
        ranks.append(record.get("ranks", ranks[-1]))
    below.step([r["step"] for r in records], ranks[1:], where="post", color="#b3261e", lw=1.2)
    below.set_yticks(range(most + 1))
    below.set_ylabel("ranks")
    below.set_xlabel("step")
    for each in (axis, below):
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    runs, picture = [Path(word) for word in sys.argv[1:3]], Path(sys.argv[3])
    draw(runs[0], runs[1], picture)
    print(f"largest difference {largest_difference(*runs):.1e}")
