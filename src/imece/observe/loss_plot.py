"""loss.png: the loss curves of a run, as one picture for a README or a message."""

from __future__ import annotations

from pathlib import Path

from imece.observe.curves import curve, frame, smoothed, thinned
from imece.observe.pictures import save
from imece.observe.run_files import RunFiles

_RAW, _MAIN, _VAL, _LEVEL, _SOFT = "#a9cbe8", "#1f6fb2", "#c2570c", "#8a93a3", "#5d6675"
_INCHES, _DPI = (12, 7), 100  # 1200 x 700 pixels


def write_loss_plot(run: Path) -> None:
    """Write loss.png into the run folder `run`; nothing if no step has a loss.

    OSError if that fails; an earlier loss.png is then still there.
    """
    files = RunFiles.read(run)
    raw, validation = curve(files.records, "loss"), curve(files.records, "val_loss")
    if not len(raw):
        return
    from matplotlib.figure import Figure  # this import takes a second, which only drawing should pay
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    for name, value in files.baselines.items():
        axes.axhline(value, color=_LEVEL, linewidth=1.4, linestyle=(0, (5, 4)))
        axes.annotate(
            f"{name} {value:.2f}", (1, value), (-6, 5), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", color=_SOFT, fontsize=13,
        )  # fmt: skip
    drawn, smooth, dots = thinned(raw), thinned(smoothed(raw)), thinned(validation)
    marker = "o" if len(raw) == 1 else None  # a line through one point would show nothing
    axes.plot(drawn.steps, drawn.values, color=_RAW, linewidth=0.9, label="training, each step")
    axes.plot(
        smooth.steps, smooth.values, color=_MAIN, linewidth=2.6, marker=marker, label="training, smoothed"
    )
    if len(dots):
        axes.plot(dots.steps, dots.values, "o-", color=_VAL, linewidth=1.4, markersize=7, label="validation")
    axes.set_ylim(*frame([raw, validation], [*files.baselines.values()]))
    axes.set_xlim(0, max(files.steps_done, 1) * 1.01)
    axes.grid(True, alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=13)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("step", fontsize=14)
    axes.set_ylabel("loss, nats a token", fontsize=14)
    axes.legend(fontsize=13, frameon=False, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.08))
    title = files.name if files.val_loss is None else f"{files.name}: validation loss {files.val_loss:.3f}"
    figure.suptitle(title, fontsize=17, x=0.02, ha="left", parse_math=False)
    save(figure, run / "loss.png", dpi=_DPI)
