"""The pictures of `imece plan`: a PNG, and an HTML page that explains the plan to whoever opens it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from imece.observe.page import page
from imece.observe.pictures import save
from imece.plan.answer.call import Next
from imece.plan.answer.explain import parts
from imece.plan.answer.picture import draw, whole
from imece.plan.answer.search import Answer, Candidate
from imece.plan.answer.shortfall import Way, state_arithmetic
from imece.plan.answer.space import Question
from imece.plan.answer.spans import Span, spans, what_is_drawn
from imece.plan.answer.text import Explained, memory_parts, speed, subject
from imece.plan.answer.words import device, gb, kinds, meanings, seconds, share, title
from imece.writing import asked_for, write_whole

_LISTED = 25
_ALT = (
    "Memory and step of the ways above, and all ways that fit by memory and speed, as in the tables; the "
    "step on a time axis, which is told below"
)


def write_pictures(explained: Explained, png: Path | None, page_file: Path | None) -> None:
    """Write the picture and the page that were asked for. UserError if a file cannot be written."""
    if png is not None:
        with asked_for(png):
            draw(explained, png)
    if page_file is not None:
        _write(page_file, page_of(explained))


def write_shortfall(question: Question, least: Candidate, found: Sequence[Way], page_file: Path) -> None:
    """Write a page that says how much is missing and what would fit. UserError if it cannot be written."""
    room = question.room_bytes
    missing = f"{gb(least.needed)} of {gb(room)} GB a {device(question.cluster)}"
    missing += f", {gb(least.needed - room)} GB too much"
    body = [
        "<h1>Nothing fits</h1>",
        f'<p class="under">{html.escape(subject(question))}</p>',
        f"<p>{html.escape(state_arithmetic(question))}</p>",
        "<h2>What needs least</h2>",
        f"<p>{html.escape(title(least.setup))}: needs {missing}</p>",
        _memory(least, question),
        "<h2>What would fit instead</h2>",
        _table([(way.name, way.sentence) for way in found] or [("", "nothing that was tried")]),
    ]
    _write(page_file, page(f"imece plan: {question.model.name}", "\n".join(body)))


def _write(path: Path, text: str) -> None:
    with asked_for(path):
        write_whole(path, text.encode())


def page_of(explained: Explained) -> str:
    """The whole page in one file: it fetches nothing and has no script."""
    answer, question, winner = explained.answer, explained.question, explained.winner
    cluster = question.cluster
    picture = io.BytesIO()
    save(whole(explained), picture)
    encoded = base64.b64encode(picture.getvalue()).decode()
    body = [
        f"<h1>{html.escape(title(winner.setup))}</h1>",
        f'<p class="under">{html.escape(subject(question))}</p>',
        _tiles(explained),
        "<h2>What it means</h2>",
        _table([(word, text) for word, text in meanings(winner.setup, cluster)]),
        f"<h2>Memory of a {device(cluster)}</h2>",
        _memory(winner, question),
        f'<p class="note">{gb(winner.needed)} of {gb(cluster.gpu.memory_bytes)} GB (10<sup>9</sup>).</p>',
        "<h2>A step</h2>",
        _bars((name, spent, seconds(spent)) for name, spent in parts(winner.timed).items()),
        f'<p class="note">{html.escape(speed(winner, explained.tokens, cluster))}.{_messages(explained)}</p>',
        *(
            ["<h2>What lost, and why</h2>", _table((each.name, each.sentence) for each in explained.others)]
            if explained.others
            else []
        ),
        "<h2>What would change the answer</h2>",
        _table([("", gain) for gain in explained.gains]),
        "<h2>How to do it with imece</h2>",
        _next(explained.next),
        f'<figure class="picture"><figcaption>All of it</figcaption><div><img alt="{_ALT}" '
        f'src="data:image/png;base64,{encoded}"></div></figure>',
        "<details><summary>The time axis in words</summary>",
        f"<p>{html.escape(what_is_drawn(winner.setup))}</p>",
        _table(_time_axis(explained)),
        "</details>",
        f"<h2>The first {min(_LISTED, len(answer.ranked))} of {len(answer.ranked):,} that fit</h2>",
        _ranking(answer),
        *(f'<p class="note">{html.escape(note)}</p>' for note in explained.notes),
    ]  # fmt: skip
    return page(f"imece plan: {question.model.name}", "\n".join(body))


def _time_axis(explained: Explained) -> list[tuple[str, str]]:
    """The drawing of the step: for each lane, everything that lies on it."""
    lanes: dict[str, dict[str, list[Span]]] = {}
    for span in spans(explained.winner.setup, explained.question.cluster):
        lanes.setdefault(span.lane, {}).setdefault(span.name, []).append(span)
    return [
        (lane, "; ".join(_on_lane(name, found) for name, found in names.items()))
        for lane, names in lanes.items()
    ]


def _on_lane(name: str, found: Sequence[Span]) -> str:
    start, stop = min(each.start_s for each in found), max(each.stop_s for each in found)
    busy = seconds(sum(each.stop_s - each.start_s for each in found))
    pieces = f" in {len(found)} pieces" if len(found) > 1 else ""
    return f"{name} {busy}{pieces}, from {seconds(start) if start else 0} to {seconds(stop)}"


def _messages(explained: Explained) -> str:
    time = explained.winner.timed
    if not sum(time.exposed.values()) + time.hidden:  # one GPU communicates nothing
        return ""
    waiting = f"{device(explained.question.cluster)}s wait for messages"
    more = f" {html.escape(seconds(time.hidden))} more are hidden behind computing." if time.hidden else ""
    return f" Exposed: {waiting}.{more}"


def _tiles(explained: Explained) -> str:
    winner, cluster = explained.winner, explained.question.cluster
    tiles = [
        (f"{winner.timed.tokens_per_s:,.0f}", "tokens/s"),
        (seconds(winner.seconds), "a step"),
        (f"{100 * winner.timed.mfu:.0f} %", "MFU, the part of the peak that the model's own products use"),
        (f"{gb(winner.needed)} GB", f"of {gb(cluster.gpu.memory_bytes)} a {device(cluster)}"),
    ]
    if winner.setup.parallel.strategy not in ("zero3", "hybrid") and winner.setup.parallel.data > 1:
        tiles.append((f"{winner.setup.recipe.bucket_bytes / 2**20:g} MiB", "buckets"))
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{big}</b><span>{small}</span></div>" for big, small in tiles)
        + "</div>"
    )


def _memory(candidate: Candidate, question: Question) -> str:
    glosses = kinds(question.cluster)
    return _bars(
        (f"{name}: {glosses[name]}" if name in glosses else name, size, f"{gb(size)} GB")
        for name, size in memory_parts(candidate, question.cluster).items()
    )


def _next(found: Next) -> str:
    """The calls for this plan, and what is left to the script."""
    says = [("", found.says)] if found.says else []
    if found.call is None:
        return _table(says)
    return f"<pre>{html.escape(found.call.text())}</pre>" + _table([*says, *found.call.left()])


def _bars(rows: Iterable[tuple[str, float, str]]) -> str:
    found = list(rows)
    most = max(size for _, size, _ in found)
    lines = [
        f'<span>{html.escape(name)}</span><i style="width:{100 * size / most:.1f}%"></i>'
        f'<span class="number">{html.escape(text)}</span>'
        for name, size, text in found
    ]
    return f'<div class="card"><div class="bars">{"".join(lines)}</div></div>'


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """A table of (name, text) rows; without a column for names if no row has one."""
    found = list(rows)
    named = any(name for name, _ in found)
    cells = "".join(
        f"<tr>{f'<th>{html.escape(name)}</th>' if named else ''}<td>{html.escape(text)}</td></tr>"
        for name, text in found
    )
    return f'<div class="card"><table class="wide">{cells}</table></div>'


def _ranking(answer: Answer) -> str:
    rows = "".join(
        f'<tr><td class="number">{each.timed.tokens_per_s:,.0f}</td>'
        f'<td class="number">{seconds(each.seconds)}</td>'
        f'<td class="number">{share(each.timed.mfu, 1.0)}</td><td class="number">{gb(each.needed)}</td>'
        f"<td>{html.escape(title(each.setup))}</td></tr>"
        for each in answer.ranked[:_LISTED]
    )
    head = "".join(f'<th class="number">{name}</th>' for name in ("tokens/s", "step", "MFU", "GB"))
    return f'<div class="card"><table class="wide"><tr>{head}<th>plan</th></tr>{rows}</table></div>'
