"""What was promised for one GPU, and whether it was met."""

from __future__ import annotations

from imece.bench.gpu.gpu import Results
from imece.bench.gpu.ways import BARE, COMPILED, FLAT, FOREACH, FULLY_SHARD, FUSED, OURS, TORCH, ZERO3
from imece.bench.rounds import ratio
from imece.bench.targets import Verdict, at_least, at_most


def judged(results: Results) -> list[Verdict]:
    rate = results.rate(COMPILED) if COMPILED in results.ways else None
    return [
        _time(results, OURS, BARE, 1.01),
        _time(results, OURS, TORCH, 1.0),
        _peak(results, OURS, TORCH, 1.0),
        at_most(
            f"{OURS}: the host waits for the GPU at most 0 times in a step", results.syncs, 0.0, "{:.1f}"
        ),
        at_least(f"{COMPILED}: at least 50% of the rate of large matrix products", rate, 0.5, "{:.2%}"),
        at_most("imece train: at most 1% of a step is the loop's own", results.loop, 0.01, "{:.2%}"),
        _time(results, ZERO3, FULLY_SHARD, 1.0),
        _peak(results, ZERO3, FULLY_SHARD, 1.0),
        _optimizer(results, FLAT, FUSED, 1.0),
        _optimizer(results, FLAT, FOREACH, 1.0),
    ]


def _time(results: Results, way: str, against: str, bound: float) -> Verdict:
    found = results.time(way, against) if way in results.ways else None
    return at_most(f"{way}: at most {bound:g} x the time of {against}", found, bound, "{:.3f} x")


def _peak(results: Results, way: str, against: str, bound: float) -> Verdict:
    ours, theirs = results.peak_bytes(way), results.peak_bytes(against)
    found = ours / theirs if ours is not None and theirs is not None else None
    return at_most(f"{way}: peak memory at most {bound:g} x that of {against}", found, bound, "{:.3f} x")


def _optimizer(results: Results, way: str, against: str, bound: float) -> Verdict:
    timed = results.optimizers
    found = ratio(timed[way], timed[against]) if way in timed else None
    return at_most(f"AdamW {way}: at most {bound:g} x the time of AdamW {against}", found, bound, "{:.3f} x")
