"""`imece bench memory`: a rank's bytes by category and strategy, predicted from the layout and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from imece.bench import report
from imece.bench.crew import Crew
from imece.bench.options import Options, check_ranks, counts, names
from imece.bench.reference_model import MODELS
from imece.bench.step.ways import STRATEGIES
from imece.errors import UserError
from imece.footprint import Offload
from imece.observe.pictures import panels, save

MODULE = "imece.bench.step.rank"
CATEGORIES = ("parameters", "gradients", "optimizer", "communication", "host")
_COLORS = ("#0b5394", "#6fa8dc", "#b45f06", "#999999", "#6aa84f")
_TOKENS, _STEPS = 128, 3
CLOSE = 0.05  # largest relative difference between counted and predicted


@dataclass(frozen=True)
class Plan(Options):
    """What to measure."""

    strategies: Annotated[tuple[str, ...], names("--strategies", STRATEGIES)] = STRATEGIES
    """Which strategies: a list. zero3-gather is zero3 as it runs between hosts."""
    models: Annotated[tuple[str, ...], names("--models", [*MODELS])] = tuple(MODELS)
    """Which models: a list of 10.9M, 29.5M, 97M."""
    ranks: Annotated[tuple[int, ...], counts("--ranks")] = (2, 4)
    """Numbers of ranks: a list."""
    bf16: bool = False
    """Keep parameters and gradients in bf16 with masters in fp32, instead of all in fp32."""
    offload: Offload | None = None
    """Count the optimizer, or the parameters too, as lying in a GPU's host. Here all of it is in the CPU's
    memory."""
    json: Path | None = None
    """Write all figures to this file."""
    plot: Path | None = None
    """Draw stacked bars (PNG) to this file."""
    quick: bool = False
    """The small model on 2 ranks: to see that it works."""

    def check(self) -> None:
        check_ranks(*self.ranks)
        if not any(map(self.can_be, self.strategies)):
            given = "--bf16" if self.offload is None else f"--offload {self.offload}"
            can = ", ".join(filter(self.can_be, STRATEGIES))
            asked = ",".join(self.strategies)
            raise UserError(f"{given} cannot be with --strategies {asked}: name one of {can}")

    def shortened(self) -> Plan:
        return replace(self, models=self.models[:1], ranks=self.ranks[:1])

    def can_be(self, strategy: str) -> bool:
        """Whether a strategy supports the other options."""
        if self.offload == "parameters":
            return strategy == "zero3-gather"
        return strategy != "replicate" or not (self.bf16 or self.offload)


@dataclass(frozen=True)
class Row:
    """One strategy, on the rank that needs most."""

    model: str
    ranks: int
    strategy: str
    parameters: int
    """In the model."""
    predicted: dict[str, int]
    """Category -> bytes."""
    counted: dict[str, int]
    peak_bytes: int
    """The peak of resident memory, with interpreter and libraries."""

    @property
    def apart(self) -> float:
        """Relative difference between the counted and predicted totals."""
        predicted = sum(self.predicted.values())
        return abs(sum(self.counted.values()) - predicted) / predicted


@dataclass
class Results(report.Results):
    """All rows, in the order of measurement."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Rows whose counted bytes are not close to the prediction."""
        return [
            f"{row.model}, {row.ranks} ranks, {row.strategy}: {row.apart:.1%} from what was predicted"
            for row in self.rows
            if row.apart > CLOSE
        ]


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure, printing as it goes: each strategy in ranks of its own."""
    results = Results(plan)
    for model in plan.models:
        for ranks in plan.ranks:
            for strategy in plan.strategies:
                if not plan.can_be(strategy):
                    continue
                with Crew.of_ranks(f"memory of {strategy}", MODULE, ranks) as crew:
                    answers = crew.ask(
                        "footprint",
                        way=strategy,
                        model=model,
                        bf16=plan.bf16,
                        offload=plan.offload,
                        tokens=_TOKENS,
                        steps=_STEPS,
                    )
                most = max(answers, key=lambda answer: sum(answer["counted"].values()))
                results.rows.append(
                    Row(
                        model, ranks, strategy, most["parameters"], most["predicted"], most["counted"],
                        max(answer["peak_bytes"] for answer in answers),
                    )
                )  # fmt: skip
            rows = [row for row in results.rows if (row.model, row.ranks) == (model, ranks)]
            for line in lines(rows) if rows else ():
                say(line)
    return results


def lines(rows: Sequence[Row]) -> list[str]:
    """The table of one model and number of ranks."""
    first, names = rows[0], _names(rows)
    heads = "".join(f"{name:>16}" for name in (*names, "all"))
    shown = [
        "",
        f"a GPT of {first.parameters / 1e6:.1f}M parameters, AdamW, {first.ranks} ranks; MB of the rank that "
        "takes most, counted before a step (predicted)",
        f"  {'':<14}{heads}{'a parameter':>13}{'peak':>7}",
    ]
    for row in rows:
        cells = [_cell(row.counted[name], row.predicted[name]) for name in names]
        total = sum(row.counted.values())
        cells.append(_cell(total, sum(row.predicted.values())))
        each = f"{total / row.parameters:.2f} B"
        shown.append(
            f"  {row.strategy:<14}" + "".join(f"{cell:>16}" for cell in cells)
            + f"{each:>13}{row.peak_bytes / 1e6:>7.0f}"
        )  # fmt: skip
    return shown


def draw(results: Results, path: Path, subtitle: str) -> None:
    """Draw stacked bars: for each strategy the prediction, hatched, beside the count."""
    from matplotlib.patches import Patch

    colors = {name: _COLORS[CATEGORIES.index(name)] for name in _names(results.rows)}
    shown = list(dict.fromkeys((row.model, row.ranks) for row in results.rows))
    figure, grid = panels(len(shown), 2, 5.6, 3.6, 1.6, 8.0)
    for axes, (model, ranks) in zip(grid, shown, strict=True):
        rows = [row for row in results.rows if (row.model, row.ranks) == (model, ranks)]
        for at, row in enumerate(rows):
            for offset, bytes_of, hatch in ((-0.2, row.predicted, "///"), (0.2, row.counted, "")):
                bottom = 0.0
                for name, color in colors.items():
                    height = bytes_of[name] / 1e6
                    axes.bar(
                        at + offset, height, 0.36, bottom,
                        color=color, hatch=hatch, edgecolor="white", linewidth=0.5,
                    )  # fmt: skip
                    bottom += height
            axes.margins(y=0.08)
            axes.text(at + 0.2, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(rows)), [row.strategy for row in rows], fontsize=9, rotation=20)
        axes.set_title(f"{rows[0].parameters / 1e6:.1f}M parameters, {ranks} ranks", fontsize=11)
        axes.set_ylabel("MB a rank")
        axes.grid(True, axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    which = "predicted (left), counted (right)"
    patches.append(Patch(facecolor="#dddddd", hatch="///", edgecolor="white", label=which))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"Memory that training takes on one rank\n{subtitle}", fontsize=10)
    save(figure, path)


def _names(rows: Sequence[Row]) -> list[str]:
    """The categories; those of the host's memory only if something lies there."""
    return [name for name in CATEGORIES if name != "host" or any(row.counted[name] for row in rows)]


def _cell(counted: int, predicted: int) -> str:
    return f"{counted / 1e6:.1f} ({predicted / 1e6:.1f})"
