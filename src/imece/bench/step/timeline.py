"""The timeline of a step: compute, each bucket's communication, and how much of it was exposed.

Communication is *hidden* while backward still computes, and *exposed* after the last gradient, when the step
can only wait. All times are `time.perf_counter()` seconds; on Linux all ranks of a host share that clock, so
their rows can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imece.data_parallel.reducing.trace import BucketTrace, StepTrace
from imece.listing import many
from imece.observe.pictures import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Traces = Mapping[int, Sequence[StepTrace]]
"""Rank -> its steps, in their order."""


def exposed_s(bucket: BucketTrace, trace: StepTrace) -> float:
    """Seconds of the bucket's collective that came after the last gradient."""
    return max(0.0, bucket.done_s - max(bucket.launched_s, trace.backward_end_s))


def hidden_s(bucket: BucketTrace, trace: StepTrace) -> float:
    """Seconds of the bucket's collective during which backward still computed."""
    return bucket.done_s - bucket.launched_s - exposed_s(bucket, trace)


def rows(buckets: Sequence[BucketTrace]) -> list[int]:
    """A row for each bucket, from 0: collectives that overlap in time have different rows."""
    ends: list[float] = []
    chosen = [0] * len(buckets)
    for at in sorted(range(len(buckets)), key=lambda at: buckets[at].launched_s):
        bucket = buckets[at]
        row = next((row for row, end in enumerate(ends) if end <= bucket.launched_s), len(ends))
        ends[row : row + 1] = [bucket.done_s]
        chosen[at] = row
    return chosen


def table(trace: StepTrace) -> list[str]:
    """The step in a few lines, one for each bucket; times in ms from the start of forward."""
    start, buckets = trace.forward_start_s, trace.buckets

    def ms(seconds: float) -> float:
        return seconds * 1e3

    lines = [
        f"step {ms(trace.end_s - start):.1f} ms: compute {ms(trace.compute_s):.1f} "
        f"(forward {ms(trace.backward_start_s - start):.1f}, "
        f"backward {ms(trace.backward_end_s - trace.backward_start_s):.1f}), "
        f"then exposed {ms(trace.exposed_s):.2f}",
        f"communication {ms(trace.communication_s):.2f} ms in {many(len(buckets), 'bucket')}, "
        f"{ms(trace.hidden_s):.2f} of it hidden behind backward",
    ]
    if buckets:
        lines.append(
            f"{'bucket':>6}{'bytes':>12}{'ready':>9}{'launched':>10}{'done':>9}{'took ms':>9}"
            f"{'hidden':>8}{'exposed':>9}"
        )
    for bucket in buckets:
        lines.append(
            f"{bucket.index:>6}{bucket.nbytes:>12,}{ms(bucket.ready_s - start):>9.2f}"
            f"{ms(bucket.launched_s - start):>10.2f}{ms(bucket.done_s - start):>9.2f}"
            f"{ms(bucket.done_s - bucket.launched_s):>9.2f}{ms(hidden_s(bucket, trace)):>8.2f}"
            f"{ms(exposed_s(bucket, trace)):>9.2f}"
        )
    return lines


def chrome_trace(traces: Traces) -> dict[str, Any]:
    """The steps in Chrome's trace event format, which ui.perfetto.dev opens: a process for each rank.

    Times are microseconds since the first forward of all ranks. A rank's pid is rank + 1, because Perfetto
    takes pid 0 for the kernel's idle task.
    """
    steps = [step for ranks_steps in traces.values() for step in ranks_steps]
    zero = min((step.forward_start_s for step in steps), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, ranks_steps in sorted(traces.items()):
        pid = rank + 1
        events.append(_name("process_name", pid, 0, f"rank {rank}"))
        most_rows = max((row + 1 for step in ranks_steps for row in rows(step.buckets)), default=1)
        exposed_tid = most_rows + 2  # below the rows of the buckets
        for tid, name in (
            (1, "compute"),
            *((2 + row, "communication" if row == 0 else f"communication {row + 1}")
              for row in range(most_rows)),
            (exposed_tid, "exposed"),
        ):  # fmt: skip
            events.append(_name("thread_name", pid, tid, name))
        for number, step in enumerate(ranks_steps):
            spans: list[tuple[int, str, float, float, dict[str, Any]]] = [
                (1, "forward", step.forward_start_s, step.backward_start_s, {}),
                (1, "backward", step.backward_start_s, step.backward_end_s, {}),
                (exposed_tid, "exposed", step.backward_end_s, step.end_s, {}),
            ]
            for bucket, row in zip(step.buckets, rows(step.buckets), strict=True):
                facts = {
                    "bytes": bucket.nbytes,
                    "ready_us": _us(bucket.ready_s - zero),
                    "hidden_us": _us(hidden_s(bucket, step)),
                    "exposed_us": _us(exposed_s(bucket, step)),
                }
                spans.append((2 + row, f"bucket {bucket.index}", bucket.launched_s, bucket.done_s, facts))
            for tid, name, begin, end, facts in spans:
                events.append({
                    "name": name, "cat": name.split()[0], "ph": "X", "pid": pid, "tid": tid,
                    "ts": _us(begin - zero), "dur": _us(end - begin), "args": {"step": number, **facts},
                })  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_FORWARD, _BACKWARD, _HIDDEN, _EXPOSED = "#9fc5e8", "#3d78b4", "#57a99a", "#cc4125"
_MOST_RANKS = 8  # ranks in one picture


def draw(traces: Traces, path: Path, title: str = "One training step") -> None:
    """Write a PNG of the last step of the first 8 ranks: the whole step, and below it the end of backward
    enlarged.

    ValueError if no rank has a step.
    """
    from matplotlib.figure import Figure  # this import takes a second, which only drawing should pay
    from matplotlib.patches import Patch

    last = {rank: steps[-1] for rank, steps in sorted(traces.items())[:_MOST_RANKS] if steps}
    if not last:
        raise ValueError("there is no step to draw")
    zero = min(step.forward_start_s for step in last.values())
    end = max(max([step.end_s, *(b.done_s for b in step.buckets)]) for step in last.values())
    figure = Figure(figsize=(12, 2.2 + 1.5 * 2 * len(last)), layout="constrained")
    whole, close = figure.subplots(2, 1)
    for axes in (whole, close):
        _draw_rows(axes, last, zero)
    whole.set_xlim(0, (end - zero) * 1e3 * 1.01)
    whole.set_title("the whole step", loc="left", fontsize=10)
    begin = _interesting_from(last, zero, end)
    close.set_xlim((begin - zero) * 1e3, (end - zero + 0.02 * (end - begin)) * 1e3)
    close.set_title("the end of backward, enlarged", loc="left", fontsize=10)
    close.set_xlabel("ms since the start of forward")
    whole.axvspan(*close.get_xlim(), color="#f3e6b3", alpha=0.55, zorder=0, linewidth=0)
    for axes in (whole, close):
        _label_bars(axes, last, zero)
    handles = [
        Patch(color=_FORWARD, label="forward"),
        Patch(color=_BACKWARD, label="backward"),
        Patch(color=_HIDDEN, label="communication, hidden"),
        Patch(color=_EXPOSED, label="communication, exposed"),
        Patch(facecolor="#f4cccc", edgecolor=_EXPOSED, hatch="///", label="exposed: the step waits"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    save(figure, path, dpi=130)


_ROWS = ("compute", "buckets", "exposed")
_HALF = 0.38  # half a bar's height, in rows


def _draw_rows(axes: Axes, last: Mapping[int, StepTrace], zero: float) -> None:
    """Three rows for each rank, from above; bars of overlapping collectives share the height of one row."""

    def bar(y: float, height: float, begin: float, end: float, **style: Any) -> None:
        axes.barh(y, (end - begin) * 1e3, height, left=(begin - zero) * 1e3, **style)

    names, places = [], []
    for at, (rank, step) in enumerate(last.items()):
        compute, buckets, exposed = (_y(at, row) for row in range(len(_ROWS)))
        bar(compute, 2 * _HALF, step.forward_start_s, step.backward_start_s, color=_FORWARD)
        bar(compute, 2 * _HALF, step.backward_start_s, step.backward_end_s, color=_BACKWARD)
        for bucket, y, height in _bucket_places(step, buckets):
            split = min(max(step.backward_end_s, bucket.launched_s), bucket.done_s)
            edge = {"edgecolor": "white", "linewidth": 0.4}
            bar(y, height, bucket.launched_s, split, color=_HIDDEN, **edge)
            bar(y, height, split, bucket.done_s, color=_EXPOSED, **edge)
        bar(
            exposed, 2 * _HALF, step.backward_end_s, step.end_s,
            facecolor="#f4cccc", edgecolor=_EXPOSED, hatch="///", linewidth=0.8,
        )  # fmt: skip
        names += [f"rank {rank}  {row}" for row in _ROWS]
        places += [compute, buckets, exposed]
        if at:
            axes.axhline(compute + 0.65, color="#999999", linewidth=0.8)
    axes.set_yticks(places, names, fontsize=9)
    axes.set_ylim(places[-1] - 0.6, places[0] + 0.6)
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _label_bars(axes: Axes, last: Mapping[int, StepTrace], zero: float) -> None:
    """Write into each bar that is wide enough, and beside a bucket's bar that is not."""
    left, right = axes.get_xlim()

    def label(y: float, begin: float, end: float, texts: Sequence[str], size: float, color: str) -> bool:
        low, high = max((begin - zero) * 1e3, left), min((end - zero) * 1e3, right)
        for text in texts:  # the longest text that fits: about 150 characters of size 9 fill the width
            if high - low > (len(text) + 1) * (right - left) / 150 * size / 9:
                axes.text(
                    (low + high) / 2, y, text, ha="center", va="center", fontsize=size, color=color,
                    clip_on=True,
                )  # fmt: skip
                return True
        return False

    for at, step in enumerate(last.values()):
        for name, begin, end, color in (
            ("forward", step.forward_start_s, step.backward_start_s, "black"),
            ("backward", step.backward_start_s, step.backward_end_s, "white"),
        ):
            texts = (f"{name} {(end - begin) * 1e3:.1f} ms", name)
            label(_y(at, 0), begin, end, texts, 9, color)
        for bucket, y, height in _bucket_places(step, _y(at, 1)):
            texts = (f"{bucket.index}: {bucket.nbytes / 2**20:.3g} MiB", f"{bucket.index}")
            size = 8 if height > 0.35 else 6.5
            if height > 0.2 and not label(y, bucket.launched_s, bucket.done_s, texts, size, "white"):
                free_s = 1e-3 * (right - left) * (len(texts[1]) + 1) / 150
                if all(
                    b.done_s <= bucket.done_s or b.launched_s > bucket.done_s + free_s for b in step.buckets
                ):
                    label(y, bucket.done_s, bucket.done_s + free_s, texts[1:], size, "#444444")
        wait = step.exposed_s
        axes.text(
            (step.backward_end_s - zero) * 1e3 - (right - left) * 0.004, _y(at, 2), f"{wait * 1e3:.2f} ms",
            ha="right", va="center", fontsize=8, color=_EXPOSED, clip_on=True,
        )  # fmt: skip


def _y(at: int, row: int) -> float:
    """The middle of a row of the rank drawn as number `at`."""
    return -(at * (len(_ROWS) + 0.3) + row)


def _bucket_places(step: StepTrace, middle: float) -> list[tuple[BucketTrace, float, float]]:
    """Each bucket with the middle and the height of its bar, in the row around `middle`."""
    chosen = rows(step.buckets)
    height = 2 * _HALF / (max(chosen, default=0) + 1)
    top = middle + _HALF
    return [
        (bucket, top - height * (row + 0.5), height)
        for bucket, row in zip(step.buckets, chosen, strict=True)
    ]  # fmt: skip


def _interesting_from(last: Mapping[int, StepTrace], zero: float, end: float) -> float:
    """Where the enlarged part begins: it shows a tenth of the step, or three times the longest wait."""
    wait = max(end - step.backward_end_s for step in last.values())
    return max(zero, end - max(0.1 * (end - zero), 3 * wait))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
