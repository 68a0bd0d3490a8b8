"""What was promised for recovery, and whether it was met."""

from __future__ import annotations

import statistics

from imece.bench.recovery.record import Kills, Results
from imece.bench.targets import Verdict, at_least, at_most

MEDIAN_S, WORST_S = 1.0, 2.0
AGAIN_STEPS = 1  # per kill
APART = 1e-5
COMPARED_STEPS = 200  # at least
GOODPUT, EVERY_S = 0.80, 15.0
COST_STRATEGIES = {"replicate": 0.01, "zero1": 0.05, "zero3": 0.05}
"""How much readiness may add to a step."""


def judged(results: Results) -> list[Verdict]:
    shown = [each for found in results.kills.values() for each in _of_kills(found, results.plan.every_s)]
    for strategy, bound in COST_STRATEGIES.items():
        text = f"{strategy}: being ready adds at most {bound:.0%} to a step"
        shown.append(at_most(text, results.cost.get(strategy, {}).get("cost"), bound, "{:+.2%}"))
    shown.append(_beside_torchrun(results))
    text = "start of 2 ranks to the first step: at most torchrun's time"
    shown.append(at_most(text, results.slower_start, 1.0, "{:.2f} x its time"))
    return shown


def _of_kills(found: Kills, every_s: float) -> list[Verdict]:
    figures, name = found.drill, found.strategy
    count, recovered = len(figures["faults"]), figures["median_s"] is not None
    shown = [
        Verdict(f"{name}: every kill survived, nothing left behind", figures["passed"],
                f"{figures['survived']} of {count}", figures["survived"]),
        Verdict(f"{name}: recovery in {MEDIAN_S:g} s in the median, {WORST_S:g} s at worst",
                recovered and figures["median_s"] <= MEDIAN_S and figures["worst_s"] <= WORST_S,
                f"{figures['median_s']:.2f} s, {figures['worst_s']:.2f} s" if recovered else "none",
                figures["median_s"]),
        Verdict(f"{name}: at most {AGAIN_STEPS} step made again for a kill",
                all(fault["again"] <= AGAIN_STEPS for fault in figures["faults"]),
                f"{figures['again']} for {count}", figures["again"]),
    ]  # fmt: skip
    text = f"{name}: parameters after {found.compared} steps at most {APART:g} apart"
    if found.difference is not None and found.kills_compared:
        judged = found.compared >= COMPARED_STEPS  # fewer steps were not promised
        met = found.difference <= APART if judged else None
        shown.append(Verdict(text, met, f"{found.difference:.1e}", found.difference))
    else:
        shown.append(Verdict(text))
    if found.goodput is not None:
        met = found.goodput >= GOODPUT if every_s >= EVERY_S else None  # more of them were not promised
        text = f"{name}: goodput at least {GOODPUT:.0%} with a kill every {EVERY_S:g} s"
        shown.append(Verdict(text, met, f"{found.goodput:.0%} with one every {every_s:g} s", found.goodput))
    return shown


def _beside_torchrun(results: Results) -> Verdict:
    text = "recovery faster than torchrun's where it recovers"
    ours = [seconds for found in results.kills.values() for seconds in recoveries(found)]
    theirs = [
        kill.recovery_s for runs in results.torchrun.values() for kill in runs if kill.recovery_s is not None
    ]
    if not ours or not theirs:
        return Verdict(text)
    ratio = statistics.median(theirs) / statistics.median(ours)
    return at_least(text, ratio, 1.0)


def recoveries(found: Kills) -> list[float]:
    """Seconds of each recovery."""
    return [fault["recovery_s"] for fault in found.drill["faults"] if fault["recovery_s"] is not None]
