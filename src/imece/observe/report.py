"""report.html: a run at a glance, in one file that can be sent to anybody."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from imece.observe.chart import Axis, Chart
from imece.observe.curves import MOST_POINTS, Curve, curve, frame, piecewise_mean, smoothed, thinned
from imece.observe.events import VAL_LOSS_OF
from imece.observe.loss_plot import write_loss_plot
from imece.observe.metrics import FILE as METRICS
from imece.observe.page import page
from imece.observe.run_files import BY_SOURCE, RunFiles
from imece.observe.units import duration, gigabytes, milliseconds, si
from imece.observe.visible import visible
from imece.writing import write_whole

# The parts of a step: key of the record, which is also the CSS class, and name.
_PARTS = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "optimizer": "optimizer",
    "copy": "copies for recovery",
    "other": "other",
}
_MOST_AREAS = 240  # pieces of the stacked chart
_MOST_ROWS = 100  # of a table of steps
# The page's colours that are told apart best, for sources.
_LINES = ("main", "exposed", "data", "optimizer", "beside", "copy", "forward", "other")


def write_report(run: Path) -> Path:
    """Write report.html into the run folder `run` and return the file's path.

    OSError if that fails; an earlier report.html is then still there.
    """
    files = RunFiles.read(run)
    sections = [
        _head(files),
        _tiles(files),
        _baselines(files),
        _learning(files),
        _time(files),
        _skipped(files),
        _watched(files),
        _sample(files),
        _commands(files),
        _environment(files),
        _config(files),
    ]
    path = run / "report.html"
    write_whole(path, page(f"{files.name} · imece", "\n".join(filter(None, sections))).encode())
    return path


def catch_up(run: Path) -> None:
    """Write loss.png and report.html again if the run made steps after them, because its ranks died before
    they could.

    A full disk is not reported here: whoever writes figures and checkpoints reports it.
    """
    report = run / "report.html"
    with contextlib.suppress(OSError):
        steps = (run / METRICS).stat()
        if steps.st_size and (not report.exists() or report.stat().st_mtime < steps.st_mtime):
            write_loss_plot(run)
            write_report(run)


def _head(files: RunFiles) -> str:
    done, total = files.steps_done, files.total_steps
    if not done:
        state = "No step is recorded yet."
    elif files.ended:
        state = f"Ended after step {done:,} of {total:,}: {_text(files.ended.rstrip('.'))}."
    elif done >= total and files.kept != done:
        newest = "none is on the disk" if files.kept is None else f"the newest is of step {files.kept:,}"
        state = f"Made {done:,} of {total:,} steps, but the last checkpoint could not be saved: {newest}."
    elif done >= total:
        state = f"Finished: {done:,} of {total:,} steps."
    else:
        state = f"Step {done:,} of {total:,}: the run goes on, or was killed here."
    if files.records and (at := files.records[-1].get("time")):
        state += time.strftime(" The last step ended on %Y-%m-%d at %H:%M UTC.", time.gmtime(at))
    return f'<h1>{_text(files.name)}</h1>\n<p class="under">{state}</p>'


def _tiles(files: RunFiles) -> str:
    """The figures at the end, or so far."""
    summary, records = files.summary, files.records
    tiles = []
    if files.val_loss is not None:
        tiles.append((f"{files.val_loss:.3f}", "nats a token, validation"))
    if bits := summary.get("val_bits_per_byte"):
        tiles.append((f"{bits:.3f}", "bits a byte, validation"))
    seconds = summary.get("seconds", sum(record.get("step_s") or 0.0 for record in records))
    tokens = summary.get("tokens", sum(record.get("tokens") or 0 for record in records))
    if seconds and tokens:
        tiles.append((si(summary.get("tokens_per_s", tokens / seconds)), "tokens a second"))
        tiles.append((duration(seconds), f"for {si(tokens)} tokens"))
    if parameters := summary.get("parameters"):
        tiles.append((si(parameters), "parameters"))
    if memory := max((record.get("memory_bytes") or 0 for record in records), default=0):
        tiles.append((gigabytes(memory), "memory, largest rank"))
    if shares := [record["mfu"] for record in records if record.get("mfu") is not None]:
        tiles.append((f"{100 * float(np.median(shares)):.0f} %", "of measured peak (MFU)"))
    inner = "".join(f"<div><b>{_text(number)}</b><span>{_text(what)}</span></div>" for number, what in tiles)
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _baselines(files: RunFiles) -> str:
    """Bars: what models without training would reach, and what this one reached."""
    if not files.baselines or files.val_loss is None:
        return ""
    rows = [*files.baselines.items(), ("this model", files.val_loss)]
    most = max(loss for _, loss in rows)
    cells = []
    for name, loss in rows:
        own = ' class="own"' if name == "this model" else ""
        number = "number own" if own else "number"
        cells.append(
            f'<span{own}>{_text(name)}</span><i{own} style="width:{max(loss, 0) / most:.1%}"></i>'
            f'<span class="{number}">{loss:.3f}</span>'
        )
    counted = files.summary.get("baselines_counted_in")
    some = f" Counted in {_text(str(counted))}." if counted else ""
    if by_source := files.summary.get(BY_SOURCE):
        some += f" By source: {_text(', '.join(f'{name} {loss:.3f}' for name, loss in by_source.items()))}."
    return (
        '<h2>Validation loss beside baselines</h2>\n<div class="card"><div class="bars">'
        + "".join(cells)
        + '</div><p class="note">Nats a token on documents that were never trained on; less is better. '
        "Uniform: all tokens alike. Unigram: by how often each comes. Bigram: by the one before it."
        f"{some}</p></div>"
    )


def _learning(files: RunFiles) -> str:
    charts = [each for each in (_loss(files), _by_source(files), _optimization(files)) if each]
    return "\n".join(["<h2>Learning</h2>", *charts]) if charts else ""


def _loss(files: RunFiles) -> str:
    raw, validation = curve(files.records, "loss"), curve(files.records, "val_loss")
    if not len(raw):
        return ""
    low, high = frame([raw, validation], [*files.baselines.values()])
    chart = Chart("Loss", "nats a token, by step", _steps(files), Axis(low, high), wide=True, tall=True)
    for name, value in files.baselines.items():
        chart.level(value, f"{name} {value:.2f}")
    chart.line(thinned(raw), "raw", "each step")
    chart.line(thinned(smoothed(raw)), "main", "smoothed")
    chart.line(thinned(validation), "thread")
    chart.dots(thinned(validation, 200), "validation")
    losses = np.concatenate([raw.values, validation.values])
    if above := int((losses > high).sum()):
        chart.note = f"Losses above the frame: {above:,}; the highest was {losses.max():.4g}. "
    if len(raw) > MOST_POINTS:
        chart.note += (
            f"{len(raw):,} losses are drawn with {MOST_POINTS:,} points: the lowest and the highest of each "
            "piece. The other charts are thinned in the same way."
        )
    return chart.html()


def _by_source(files: RunFiles) -> str:
    """The validation loss of each source, of a run that reads several in a proportion."""
    keys = list(dict.fromkeys(key for each in files.records for key in each if key.startswith(VAL_LOSS_OF)))
    named = {key.removeprefix(VAL_LOSS_OF): curve(files.records, key) for key in keys}
    drawn = [(name, each) for name, each in named.items() if len(each)][: len(_LINES)]
    if not drawn:
        return ""
    y = Axis(*frame([each for _, each in drawn], []))
    chart = Chart("Validation loss by source", "nats a token, by step", _steps(files), y, wide=True)
    for (name, each), style in zip(drawn, _LINES, strict=False):
        chart.line(thinned(each), style, visible(name))
    if len(named) > len(drawn):
        chart.note = f"Of {len(named)} sources the first {len(drawn)}; metrics.jsonl has all."
    return chart.html()


def _optimization(files: RunFiles) -> str:
    """Two small charts."""
    charts = []
    if len(rate := curve(files.records, "lr")):
        charts.append(Chart("Learning rate", "", _steps(files), _from_zero(rate)))
        charts[-1].line(thinned(rate), "main")
    if len(norm := curve(files.records, "grad_norm")):
        low, high = float(norm.values.min()), float(norm.values.max())
        spiky = low > 0 and high > 20 * float(np.median(norm.values))
        y = Axis(low / 1.2, high * 1.2, log=True) if spiky else _from_zero(norm)
        charts.append(Chart("Gradient norm", "before clipping", _steps(files), y))
        charts[-1].line(thinned(norm), "raw")
        charts[-1].line(thinned(smoothed(norm)), "main")
    return f'<div class="two">{"".join(chart.html() for chart in charts)}</div>' if charts else ""


def _time(files: RunFiles) -> str:
    """How fast the run was, and what a step's time consists of."""
    html = []
    if len(speed := curve(files.records, "tokens_per_s")):
        chart = Chart("Throughput", "tokens a second, all ranks", _steps(files), _from_zero(speed), wide=True)
        chart.line(thinned(speed), "raw")
        chart.line(thinned(smoothed(speed)), "main")
        html.append(chart.html())
    parts = {part: curve(files.records, f"{part}_s") for part in _PARTS}
    parts = {part: times for part, times in parts.items() if len(times)}
    if len(parts.get("copy", ())) < max(map(len, parts.values()), default=0):  # recovery was off at times
        parts.pop("copy", None)
    if parts and len({len(times) for times in parts.values()}) == 1:
        html += [_split(files, parts), _time_table(files, parts)]
    return "<h2>Time</h2>\n" + "\n".join(html) if html else ""


def _split(files: RunFiles, parts: dict[str, Curve]) -> str:
    """The parts of a step stacked, over the run."""
    areas = []
    for part, times in parts.items():
        mean = piecewise_mean(times, _MOST_AREAS)
        areas.append((Curve(mean.steps, 1e3 * mean.values), f"{part} area", _PARTS[part]))
    total = np.sum([each.values for each, _, _ in areas], axis=0)
    y = Axis(0.0, 1.15 * float(np.quantile(total, 0.97)))
    chart = Chart("Time of a step", "ms, by step", _steps(files), y, wide=True, tall=True)
    chart.stack(areas)
    if len(files.records) > _MOST_AREAS:
        chart.note = f"Means of {_MOST_AREAS} pieces of the run. "
    if total.max() > y.high:
        chart.note += f"What is above the frame goes up to {milliseconds(total.max() / 1e3)} a step."
    return chart.html()


def _time_table(files: RunFiles, parts: dict[str, Curve]) -> str:
    sums = {_PARTS[part]: (part, float(times.values.sum()), len(times)) for part, times in parts.items()}
    for key, name in (("val_s", "validation"), ("save_s", "waiting for saves")):
        times = curve(files.records, key)
        if len(times):
            sums[name] = ("beside", float(times.values.sum()), 0)
    whole = sum(seconds for _, seconds, _ in sums.values()) or 1.0
    rows = [
        f'<tr><td><i class="{style}"></i>{name}</td><td class="number">{100 * seconds / whole:.1f} %</td>'
        f'<td class="number">{f"{1e3 * seconds / count:.1f} ms" if count else ""}</td>'
        f'<td class="number">{duration(seconds)}</td></tr>'
        for name, (style, seconds, count) in sums.items()
    ]
    return (
        '<div class="card"><table class="wide"><tr><th>what</th><th class="number">share</th>'
        f'<th class="number">a step</th><th class="number">in all</th></tr>{"".join(rows)}</table>'
        '<p class="note">As rank 0 saw it. Exposed communication is what backward did not hide.</p></div>'
    )


def _skipped(files: RunFiles) -> str:
    rows = [(record["step"], record["skipped"]) for record in files.records if record.get("skipped")]
    return _by_step("Skipped steps", "why no update was made", rows)


def _watched(files: RunFiles) -> str:
    """Which ranks drifted, and for which ranks all waited."""
    rows, before = [], None
    for record in files.records:
        if drift := record.get("drift"):
            rows.append((record["step"], drift))
        slow = (record.get("slowest_rank"), record.get("slowest_phase"))
        if slow != before and None not in slow:
            own, others = milliseconds(record["slowest_s"]), milliseconds(record["others_s"])
            rows.append((record["step"], f"rank {slow[0]} is slow in {slow[1]}: {own}, the others {others}"))
        before = slow
    return _by_step("Ranks that were not like the others", "what was seen", rows)


def _by_step(title: str, what: str, rows: Sequence[tuple[int, str]]) -> str:
    """A table of (step, text)s."""
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td class="number">{step:,}</td><td>{_text(text)}</td></tr>' for step, text in rows[:_MOST_ROWS]
    )
    more = f'<p class="note">And {len(rows) - _MOST_ROWS:,} more.</p>' if len(rows) > _MOST_ROWS else ""
    return (
        f'<h2>{title}</h2>\n<div class="card"><table class="wide">'
        f'<tr><th class="number">step</th><th>{what}</th></tr>{cells}</table>{more}</div>'
    )


def _sample(files: RunFiles) -> str:
    if "sample" in files.summary and files.summary["sample"] is None:
        return "<h2>A sample</h2>\n<p>None: what the model computes is not finite any more.</p>"
    sample = files.summary.get("sample") or {}
    text, prompt = str(sample.get("text") or ""), str(sample.get("prompt") or "")
    if not text:
        return ""
    rest = text.removeprefix(prompt)
    given = f"<b>{_text(prompt)}</b>" if rest != text else ""
    note = '<p class="note">Bold: what the model was given. The rest is its own.</p>' if given else ""
    return f"<h2>A sample</h2>\n<pre>{given}{_text(rest)}</pre>{note}"


def _commands(files: RunFiles) -> str:
    run, kept = files.argument, files.kept
    whole = kept == files.steps_done >= files.total_steps and not files.ended
    longer = f"imece train --run {run} --steps {max(2 * files.total_steps, 1)}"
    on = ("Train on" if kept is not None else "Begin anew", f"imece train --run {run}")
    commands = [
        ("More text from this model", f'imece sample {run} --prompt "Once"'),
        ("Its loss on other text", f"imece eval {run} --data FILES"),
        ("Train for longer", longer) if whole else on,
        ("Weights for transformers and others", f"imece export {run} --to hf FOLDER"),
        ("All curves in TensorBoard", f"tensorboard --logdir {run}/tensorboard"),
    ]
    if kept is None:  # commands that read the model need a checkpoint
        commands = [on, commands[-1]]
    rows = "".join(f"{what}<pre>{_text(command)}</pre>" for what, command in commands)
    return f'<h2>To go on</h2>\n<div class="commands">{rows}</div>'


def _environment(files: RunFiles) -> str:
    if not files.environment:
        return ""
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in _readable(files.environment)
    )
    return f'<h2>What it ran on</h2>\n<div class="card"><table>{rows}</table></div>'


def _readable(environment: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if name.endswith("_bytes") and isinstance(value, int | float):
            yield name.removesuffix("_bytes"), gigabytes(value)
        elif name == "gpus" and isinstance(value, list):
            yield "GPUs", ", ".join(_gpu(gpu) for gpu in value) or "none"
        elif value is not None:
            yield name.replace("_", " "), value if isinstance(value, str) else json.dumps(value)


def _gpu(facts: Any) -> str:
    if isinstance(facts, dict) and "memory_bytes" in facts:
        return f"{facts.get('name')} ({gigabytes(facts['memory_bytes'])})"
    return json.dumps(facts)


def _config(files: RunFiles) -> str:
    if not files.config:
        return ""
    return f"<details><summary>The whole config</summary><pre>{_text(files.config)}</pre></details>"


def _from_zero(values: Curve) -> Axis:
    return Axis(0.0, 1.08 * float(values.values.max()))


def _steps(files: RunFiles) -> Axis:
    return Axis(0.0, 1.01 * files.steps_done, whole=True)  # wider, so that the last point is drawn whole


def _text(text: str) -> str:
    return escape(visible(text))
