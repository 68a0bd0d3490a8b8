"""What was promised for `imece train`, and whether it was met."""

from __future__ import annotations

import statistics

from imece.bench.targets import Verdict, at_least, at_most
from imece.bench.train.contenders import ALONE, COMPILED, OURS, PLAIN
from imece.bench.train.train import Results


def judged(results: Results) -> list[Verdict]:
    default, save = results.plan.default, results.save
    delay = statistics.median(save.delays) if save.delays else None
    grown = None if save.grown_bytes is None else save.grown_bytes / save.written_bytes
    return [
        _speed(results, OURS["fp32"], OURS["fp32"], PLAIN["fp32"], 1.2),
        _speed(results, COMPILED["fp32"], COMPILED["fp32"], PLAIN["fp32"], 1.2),
        _speed(results, OURS["bf16"], OURS["bf16"], PLAIN["bf16"], 1.2),
        _speed(results, "default", default, PLAIN["fp32"], 1.6),
        at_least(
            "default: at least 95% of as many ranks that never wait for each other",
            _times_as_fast(results, default, ALONE),
            0.95,
            "{:.1%}",
        ),
        at_most("default: at most 2% of a step is the loop's own", results.overhead, 0.02, "{:.2%}"),
        at_most("save: holds training up for at most 1 step", delay, 1.0, "{:.2f}"),
        # The bound only tells one copy from two: a thread, a manifest and code that runs for the first time
        # need memory too.
        at_most("save: memory grows by at most 1 copy of what the rank writes", grown, 1.1, "{:.2f}"),
    ]


def _speed(results: Results, name: str, way: str, against: str, bound: float) -> Verdict:
    found = _times_as_fast(results, way, against)
    return at_least(f"{name}: at least {bound:g} x the tokens/s of {against}", found, bound)


def _times_as_fast(results: Results, way: str, than: str) -> float | None:
    measured = results.seconds.get(way) and results.seconds.get(than)
    return results.speed(way, than) if measured else None
