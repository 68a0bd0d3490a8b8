"""Formats an answer: lines for a terminal, JSON for a program."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from imece.listing import many
from imece.observe.units import si
from imece.plan.answer.call import Next
from imece.plan.answer.explain import Other, parts
from imece.plan.answer.search import Answer, Candidate, hours_for
from imece.plan.answer.shortfall import Way, state_arithmetic
from imece.plan.answer.space import Question
from imece.plan.answer.words import device, gb, kinds, meanings, seconds, share, title
from imece.plan.hardware import Cluster
from imece.plan.speed.compute import hidden_part

_Item = TypeVar("_Item")

_LABEL = 9  # columns
_BAR, _LEAST_BAR, _SHARE = 40, 10, 9
_LEAST_TEXT = 18  # columns beside a name
_MUCH_HIDDEN = 0.25  # of what MFU counts
_AMOUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_BLOCKS = ("█", "░")  # used, and free


@dataclass(frozen=True)
class Explained:
    """An answer, and what is said of its winner."""

    answer: Answer
    others: Sequence[Other]
    gains: Sequence[str]
    tokens: float  # in the training, for its time and price
    next: Next
    notes: Sequence[str] = ()

    @property
    def question(self) -> Question:
        return self.answer.question

    @property
    def winner(self) -> Candidate:
        return self.answer.best


def subject(question: Question) -> str:
    """What is planned, in one line."""
    cluster, model = question.cluster, question.model
    where = f"{cluster.gpus_per_host} x {cluster.gpu.name}"
    if cluster.gpus > 1:
        where += f" in each of {cluster.hosts} hosts" if cluster.hosts > 1 else " in 1 host"
    return (
        f"{model.name}, {si(model.parameters)} parameters, on {where}; "
        f"{many(question.global_batch, 'sequence')} x {question.seq:,} = "
        f"{question.global_batch * question.seq:,} tokens a step"
    )


def lines(explained: Explained, width: int) -> Iterator[str]:
    """The whole answer."""
    question, winner = explained.question, explained.winner
    cluster = question.cluster
    yield from wrapped("", subject(question), width)
    yield ""
    yield from wrapped("plan", title(winner.setup), width)
    for word, meaning in meanings(winner.setup, cluster):
        yield from wrapped("", f"{word}: {meaning}", width, hang=2)
    if (message := messages(explained)) is not None:
        yield from wrapped("", message, width, hang=2)
    yield ""
    kept = f"; {_percent(question.reserve)} are to stay free" if question.reserve else ""
    there_is = f"{gb(cluster.gpu.memory_bytes)} GB a {device(cluster)}"
    yield from wrapped("fits", f"{gb(winner.needed)} of {there_is}{kept}", width)
    yield from bars(
        memory_parts(winner, cluster), cluster.gpu.memory_bytes, gb, width, kinds(cluster), free=True
    )
    yield ""
    yield from wrapped("speed", speed(winner, explained.tokens, cluster), width)
    waits = sum(winner.timed.exposed.values()) > 0
    exposed = f"; exposed: {device(cluster)}s wait for messages" if waits else ""
    yield from wrapped("step", f"{seconds(winner.seconds)}{exposed}", width)
    yield from bars(_without_trifles(parts(winner.timed)), winner.seconds, seconds, width)
    yield ""
    if explained.others:
        longest = max(len(other.name) for other in explained.others)
        for label, other in _labelled("others", explained.others):
            yield from wrapped(label, f"{other.name:<{longest}}  {other.sentence}", width, hang=longest + 2)
    for label, gain in _labelled("to gain", explained.gains):
        yield from wrapped(label, gain, width, hang=2)
    for note in explained.notes:
        yield from wrapped("note", note, width, hang=2)
    yield from _next_lines(explained.next, width)


def _next_lines(found: Next, width: int) -> Iterator[str]:
    """How to run it with imece."""
    if found.call is None:
        yield from wrapped("next", found.says, width)
        return
    for label, line in _labelled("next", found.call.text().splitlines()):
        yield from wrapped(label, line, width, hang=4)
    if found.says:
        yield from wrapped("", found.says, width, hang=2)
    for what, how in found.call.left():
        yield from wrapped("", f"{what}: {how}", width, hang=2)


def messages(explained: Explained) -> str | None:
    """The best size of messages between data-parallel ranks; None if there are none."""
    parallel = explained.winner.setup.parallel
    if parallel.peers == 1:
        return None
    if parallel.strategy in ("zero3", "hybrid"):
        return "messages: a layer's parameters come as one, and so do its gradients go"
    size = explained.winner.setup.recipe.bucket_bytes / 2**20
    return f"buckets of {size:g} MiB: gradients are summed in messages of that size while backward goes on"


def speed(winner: Candidate, tokens: float, cluster: Cluster) -> str:
    """Tokens per second, MFU, time and price."""
    hours = hours_for(tokens, winner)
    price = ""
    if cluster.gpu.price_per_hour is not None:
        price = f", about ${_round(hours * cluster.gpus * cluster.gpu.price_per_hour)}"
        price += f" at ${cluster.gpu.price_per_hour:.2f} a GPU-hour"
    each = (
        f", {winner.timed.tokens_per_s / cluster.gpus:,.0f} a {device(cluster)}" if cluster.gpus > 1 else ""
    )
    return (
        f"{winner.timed.tokens_per_s:,.0f} tokens/s{each}, {_percent(winner.timed.mfu)} MFU; "
        f"{_amount(tokens)} tokens in {_time(hours)}, {_round(hours * cluster.gpus)} "
        f"{device(cluster)}-hours{price}"
    )


def memory_parts(candidate: Candidate, cluster: Cluster) -> dict[str, float]:
    """Bytes of a GPU by category, including those outside the framework."""
    found = {name: float(size) for name, size in candidate.memory.by_category().items() if size}
    found["overhead"] = found.get("overhead", 0.0) + cluster.gpu.overhead_bytes
    return found


def bars(
    amounts: Mapping[str, float],
    whole: float,
    words: Callable[[float], str],
    width: int,
    glosses: Mapping[str, str] | None = None,
    free: bool = False,
) -> Iterator[str]:
    """One line per amount; each bar begins where the one before ended. words: amount -> text.

    glosses: the meaning of each name. free: a last line for the rest of the whole. If there are too few
    columns, glosses are dropped first, then bars, then shares.
    """
    full, empty = _BLOCKS if _can_print("".join(_BLOCKS)) else ("#", "-")
    rows = [(name, amount, full) for name, amount in amounts.items()]
    if free:
        rows.append(("free", whole - sum(amounts.values()), empty))
    longest = max(len(name) for name, _, _ in rows)
    wide = max(len(words(amount)) for _, amount, _ in rows)
    room = width - (_LABEL + longest + 2 + 2 + wide + 2 + _SHARE)
    glosses = glosses or {}
    if _BAR + 2 + max(len(glosses.get(name, "")) for name, _, _ in rows) > room:
        glosses = {}
    most = min(_BAR, room) if room >= _LEAST_BAR else 0
    shares = width >= _LABEL + longest + 2 + wide + 2 + _SHARE
    done = 0.0
    for name, amount, block in rows:
        left = min(round(most * done / whole), most - 1)
        right = min(max(round(most * (done + amount) / whole), left + 1), most)
        bar = " " * left + block * (right - left)
        cells = [f"{name:<{longest}}", f"{bar:<{most}}" if most else None, f"{words(amount):>{wide}}"]
        cells += [f"{share(amount, whole):>{_SHARE}}" if shares else None, glosses.get(name)]
        yield f"{'':<{_LABEL}}{'  '.join(cell for cell in cells if cell is not None)}".rstrip()
        done += amount


def table(ranked: Sequence[Candidate], most: int, width: int) -> Iterator[str]:
    """The top of the ranking, one line per plan; a plan that is too wide goes on below its column."""
    head = f"{'':>4} {'tokens/s':>12} {'step':>9} {'MFU':>5} {'GB':>6}  "
    beside = width - len(head) >= _LEAST_TEXT
    indent = " " * (len(head) if beside else 5)
    yield f"{head}plan" if beside else head.rstrip()
    for place, each in enumerate(ranked[:most], start=1):
        figures = (
            f"{place:>4} {each.timed.tokens_per_s:>12,.0f} {seconds(each.seconds):>9} "
            f"{_percent(each.timed.mfu):>5} {gb(each.needed):>6}  "
        )
        if not beside:
            yield figures.rstrip()
        yield from textwrap.wrap(
            title(each.setup), max(width, _LABEL + _LEAST_TEXT), initial_indent=figures if beside else indent,
            subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def shortfall_lines(question: Question, least: Candidate, found: Sequence[Way], width: int) -> Iterator[str]:
    """Nothing fits: the plan that needs least, and what would help."""
    room = question.room_bytes
    yield from wrapped("", subject(question), width)
    yield ""
    yield from wrapped("state", state_arithmetic(question), width, hang=2)
    yield from wrapped(
        "least", f"{title(least.setup)}: needs {gb(least.needed)} of {gb(room)} GB a "
        f"{device(question.cluster)}, "
        f"{gb(least.needed - room)} GB too much", width, hang=2,
    )  # fmt: skip
    yield from bars(memory_parts(least, question.cluster), least.needed, gb, width, kinds(question.cluster))
    longest = max((len(way.name) for way in found), default=0)
    for label, way in _labelled("instead", found):
        yield from wrapped(label, f"{way.name:<{longest}}  {way.sentence}", width, hang=longest + 2)


def as_json(candidate: Candidate, question: Question) -> dict[str, Any]:
    """One plan: bytes, seconds, and everything that was chosen."""
    setup = candidate.setup
    found: dict[str, Any] = {
        "plan": title(setup),
        "parallel": asdict(setup.parallel),
        "recipe": asdict(setup.recipe),
        "memory_bytes": memory_parts(candidate, question.cluster),
        "needed_bytes": candidate.needed,
        "fits": candidate.needed <= question.room_bytes,
    }
    if candidate.time is not None:
        found |= {
            "step_s": candidate.seconds,
            "parts_s": parts(candidate.time),
            "hidden_s": candidate.time.hidden,
            "tokens_per_s": candidate.time.tokens_per_s,
            "mfu": candidate.time.mfu,
        }
    return found


def explained_json(explained: Explained, most: int) -> dict[str, Any]:
    """The whole answer for a program, with so many plans of the ranking."""
    question, cluster = explained.question, explained.question.cluster
    hours = hours_for(explained.tokens, explained.winner)
    price = cluster.gpu.price_per_hour
    return question_json(question) | {
        "fits": True,
        "winner": as_json(explained.winner, question)
        | {"bucket_bytes": explained.winner.setup.recipe.bucket_bytes},
        "meaning": dict(meanings(explained.winner.setup, cluster)),
        "tokens": explained.tokens,
        "hours": hours,
        "dollars": hours * cluster.gpus * price if price is not None else None,
        "others": [
            {"name": each.name, "why": each.sentence} | as_json(each.candidate, question)
            for each in explained.others
        ],
        "to_gain": list(explained.gains),
        "next": _next_json(explained.next, question),
        "notes": list(explained.notes),
        "considered": explained.answer.considered,
        "ranking": [as_json(each, question) for each in explained.answer.ranked[:most]],
    }


def _next_json(found: Next, question: Question) -> dict[str, Any]:
    call = found.call
    return {
        "says": found.says,
        "call": call.text() if call else None,
        "left": dict(call.left()) if call else {},
        "does": as_json(call.candidate, question) if call else None,
    }


def question_json(question: Question) -> dict[str, Any]:
    """The question for a program."""
    return {
        "model": asdict(question.model) | {"parameters": question.model.parameters},
        "cluster": asdict(question.cluster),
        "global_batch": question.global_batch,
        "seq": question.seq,
    }


def shortfall_json(question: Question, least: Candidate, found: Sequence[Way]) -> dict[str, Any]:
    """For a program, that nothing fits."""
    room = question.room_bytes
    return question_json(question) | {
        "fits": False,
        "least": as_json(least, question),
        "missing_bytes": least.needed - room,
        "instead": [
            {"change": way.name, "says": way.sentence} | as_json(way.least, way.question) for way in found
        ],
    }


def _labelled(label: str, items: Iterable[_Item]) -> Iterator[tuple[str, _Item]]:
    """Each item with its label, which the first one alone has."""
    return zip(itertools.chain([label], itertools.repeat("")), items, strict=False)


def too_long(question: Question) -> tuple[str, ...]:
    """A note if sequences are longer than the model was made for."""
    model, seq = question.model, question.seq
    if not 0 < model.made_for < seq:
        return ()
    return (
        f"--seq {seq}: {model.name} was made for {model.made_for:,} tokens, says its file; beyond that it is "
        "of use only with its rotary positions scaled, and trained so",
    )


def hidden_scores(answer: Answer) -> tuple[str, ...]:
    """A note if much of what MFU counts is never computed, so that it may come out above the peak."""
    question, winner = answer.question, answer.best
    hidden = hidden_part(question.model, question.seq, frozen=question.adapters != "none")
    if question.attention == "plain" or hidden < _MUCH_HIDDEN:
        return ()
    return (
        f"MFU counts, as usual, scores that the causal mask hides: {_percent(hidden)} of its operations in "
        f"sequences as long as these; {_percent((1 - hidden) * winner.timed.mfu)} without them",
    )


def wrapped(label: str, text: str, width: int, hang: int = 0) -> list[str]:
    """`text` beside its label, with its continuation lines `hang` columns further in."""
    if width - _LABEL - hang < _LEAST_TEXT:  # narrow terminals: the text goes below its label
        text, hang = re.sub(" {3,}", "  ", text), min(hang, 2)
    first, rest = f"{label:<{_LABEL}}" if label or hang else "", " " * (_LABEL + hang)
    return textwrap.wrap(
        text, max(width, len(rest) + _LEAST_TEXT), initial_indent=first or (" " * _LABEL if hang else ""),
        subsequent_indent=rest if label or hang else "", break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip


def _without_trifles(amounts: Mapping[str, float]) -> dict[str, float]:
    """Amounts with all but the first below a thousandth of the total merged into one."""
    whole = sum(amounts.values())
    kept = {name: amount for name, amount in amounts.items() if amount >= 1e-3 * whole}
    rest = whole - sum(kept.values())
    return kept | ({"the rest": rest} if rest > 1e-6 * whole else {})


def _can_print(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def _amount(tokens: float) -> str:
    """1e9 -> "1B", 1.005e9 -> "1.005B": as --tokens takes it."""
    for unit, letter in _AMOUNTS:
        if tokens >= unit:
            return f"{tokens / unit:.4g}{letter}"
    return f"{tokens:,.0f}"


def _time(hours: float) -> str:
    """0.4 -> "24 min", 10.42 -> "10.4 h", 300 -> "12.5 days"."""
    if hours < 1:
        return f"{60 * hours:.2g} min"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"


def _round(number: float) -> str:
    """Two digits, or a whole number from 99.5 on, where two digits would give 1e+02."""
    return f"{number:,.0f}" if number >= 99.5 else f"{number:.2g}"
