"""`imece bench step --parameters`: what a wrapper costs in backward per parameter, however small it is."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from imece.bench import report
from imece.bench.crew import Crew
from imece.bench.rounds import Taken, alternate
from imece.bench.step.step import MODULE, Plan
from imece.bench.step.ways import ALONE, OURS
from imece.bench.targets import Verdict, at_most
from imece.listing import many

_WAYS = (ALONE, OURS, "torch-shm")
_COST_US = 8.0  # of processor time in backward, per parameter
_GROWTH = 1.25  # ratio of that cost at 10,000 and at 1,000 parameters: linear, up to noise


@dataclass
class Results(report.Results):
    """Seconds of one backward in each round: the larger of the ranks' figures."""

    plan: Plan
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Number of parameters -> way -> a figure for each round."""
    processor_s: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """The same in processor time of the thread that runs backward, which excludes waiting for other ranks and
    other programs' time."""
    taken: dict[int, Taken] = field(default_factory=dict)
    """Number of parameters -> processor time that others took meanwhile."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of parameters, ascending; each has 8 elements."""
        return sorted(self.plan.parameters)

    def cost_us(self, parameters: int, way: str) -> float:
        """Microseconds of processor time that `way` adds per parameter: median of the differences."""
        return self._added_us(self.processor_s[parameters], parameters, way)

    def wall_us(self, parameters: int, way: str) -> float:
        """The same by the clock."""
        return self._added_us(self.seconds[parameters], parameters, way)

    def _added_us(self, rounds: dict[str, list[float]], parameters: int, way: str) -> float:
        pairs = zip(rounds[way], rounds[ALONE], strict=True)
        return statistics.median(ours - alone for ours, alone in pairs) / parameters * 1e6

    @property
    def growth(self) -> float:
        """Cost of a parameter among the most, over that among the fewest: 1 if the cost is linear."""
        fewest, most = self.sizes[0], self.sizes[-1]
        return self.cost_us(most, OURS) / max(1e-3, self.cost_us(fewest, OURS))

    def as_json(self) -> dict[str, Any]:
        costs = {n: {way: self.cost_us(n, way) for way in _WAYS[1:]} for n in self.seconds}
        return asdict(self) | {"cost_us": costs}


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    results = Results(plan)
    with Crew.of_ranks("parameters", MODULE, plan.ranks) as crew:
        for parameters in results.sizes:
            for way in _WAYS:
                crew.ask("chain", way=way, parameters=parameters)
                crew.ask("backward", way=way)  # the first backward makes buckets
            rounds, results.taken[parameters] = alternate(
                _WAYS, plan.rounds, lambda way: crew.ask("backward", way=way)
            )
            for name, figures in (("seconds", results.seconds), ("processor", results.processor_s)):
                figures[parameters] = {
                    way: [max(answer[name] for answer in answers) for answers in rounds[way]] for way in _WAYS
                }
    for line in lines(results):
        say(line)
    return results


def lines(results: Results) -> list[str]:
    """The table."""
    plan = results.plan
    shown = [
        f"backward of a model of many parameters of 8 elements on shm, {plan.ranks} ranks, 1 thread a rank, "
        f"medians of {many(plan.rounds, 'alternating round')}",
        f"  {'parameters':>10}  {'':<12}{'backward ms':>12}{'added us a parameter':>22}"
        f"{'of processor time':>19}",
    ]
    for parameters, rounds in results.seconds.items():
        for way in _WAYS:
            added, cost = (
                "" if way == ALONE else f"{figure(parameters, way):.2f}"
                for figure in (results.wall_us, results.cost_us)
            )
            number = f"{parameters:,}" if way == ALONE else ""
            median = statistics.median(rounds[way]) * 1e3
            shown.append(f"  {number:>10}  {way:<12}{median:>12.2f}{added:>22}{cost:>19}")
        shown += results.taken.get(parameters, Taken()).lines
    return shown


def judged(results: Results) -> list[Verdict]:
    shown = []
    for parameters in results.sizes:
        text = f"{parameters:,} parameters: at most {_COST_US:g} us of processor time each"
        shown.append(at_most(text, results.cost_us(parameters, OURS), _COST_US, "{:.2f} us"))
    if len(results.sizes) > 1:
        fewest, most = results.sizes[0], results.sizes[-1]
        text = f"linear: a parameter of {most:,} costs at most {_GROWTH:g} x one of {fewest:,}"
        shown.append(at_most(text, results.growth, _GROWTH, "{:.2f} x"))
    return shown
