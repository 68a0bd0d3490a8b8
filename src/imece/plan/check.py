"""Compares a run's prediction with its measurements: the file with both, and lines that say where it was off.

PLAN_FILE in the run folder holds {"predicted": {...}, "measured": {...}}; the second is added when the run
ends.
"""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from imece.errors import UserError
from imece.plan.answer.words import seconds

PLAN_FILE = "plan.json"
VERSION = 1
_STATE = ("parameters", "gradients", "optimizer", "communication")


@dataclass(frozen=True)
class Row:
    """One figure, predicted and measured."""

    what: str
    unit: Literal["bytes", "s"]
    predicted: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """How much too high the prediction was, as a part of the measured value; None if one is missing."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def read_plan(run: Path) -> dict[str, Any]:
    """The content of a run folder's plan file. UserError if there is none, or imece train did not write
    it."""
    path = run / PLAN_FILE
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise UserError(f"{path} has format {content['version']}; this imece reads format {VERSION}")
        _check("predicted", content["predicted"], "counted_bytes", "needed_bytes")
        if content.get("measured"):
            _check("measured", content["measured"], "memory_bytes", "rank_bytes")
    except OSError as error:
        raise UserError(
            f"{run}: no {PLAN_FILE} ({error.strerror}): imece train writes it into its run folder; check the "
            "path"
        ) from error
    except KeyError as error:
        raise UserError(f"{path} is not what imece train writes: it has no {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not what imece train writes: {error}") from error
    return dict(content)


def _check(where: str, table: object, sizes: str, whole: str) -> None:
    """ValueError if a table is missing, or a figure is impossible."""
    for name, each in ((where, table), (sizes, table.get(sizes, {}) if isinstance(table, dict) else {})):
        if not isinstance(each, dict):
            raise ValueError(f"{name} is no table")
        for key in each if name == sizes else (whole, "step_s"):
            figure = each.get(key)
            is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
            if figure is not None and not (is_number and 0 <= figure <= sys.float_info.max):  # false for NaN
                raise ValueError(f"{key} is {reprlib.repr(figure)}, which is no size or time")


def rows(content: Mapping[str, Any]) -> list[Row]:
    """Everything that was predicted or measured."""
    predicted, measured = content["predicted"], content.get("measured") or {}
    state, counted = predicted.get("counted_bytes", {}), measured.get("memory_bytes", {})
    found = [Row(name, "bytes", state.get(name), counted.get(name)) for name in _STATE]
    found.append(Row("state", "bytes", _total(state), _total(counted)))
    found.append(Row("host memory", "bytes", state.get("host"), counted.get("host")))
    found.append(Row("whole rank", "bytes", predicted.get("needed_bytes"), measured.get("rank_bytes")))
    found.append(Row("step", "s", predicted.get("step_s"), measured.get("step_s")))
    return [row for row in found if row.predicted or row.measured]


def check_lines(content: Mapping[str, Any]) -> Iterator[str]:
    """A table, and its summary in a sentence."""
    found = rows(content)
    yield f"{'':<14} {'predicted':>12} {'measured':>12} {'off':>8}"
    for row in found:
        off = "" if row.off is None else f"{100 * row.off:+z.1f} %"
        both = f"{_figure(row, row.predicted):>12} {_figure(row, row.measured):>12}"
        yield f"{row.what:<14} {both} {off:>8}".rstrip()
    yield ""
    if not content.get("measured"):
        yield "nothing is measured: that is written when the run ends, and it goes on, or was killed"
        return
    known = [row for row in found if row.off is not None]
    worst = max(known, key=lambda row: abs(row.off or 0.0), default=None)
    if worst is not None:
        assert worst.off is not None
        how = "too high" if worst.off > 0 else "too low"
        off = f"{abs(100 * worst.off):.1f}"
        if float(off):
            yield f"furthest off: {worst.what}, predicted {off} % {how}"
        else:
            yield "all within 0.1 % of what was predicted"
    if predicted_nothing := [row.what for row in found if row.predicted is None]:
        yield f"not predicted: {', '.join(predicted_nothing)} ({content['predicted'].get('why', 'unknown')})"


def check_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison for a program."""
    return {
        "predicted": content["predicted"],
        "measured": content.get("measured"),
        "rows": [asdict(row) | {"off": row.off} for row in rows(content)],
    }


def _total(table: Mapping[str, Any]) -> float | None:
    known = [float(table[name]) for name in _STATE if table.get(name) is not None]
    return sum(known) if known else None


def _figure(row: Row, value: float | None) -> str:
    if value is None:
        return "-"
    return seconds(value) if row.unit == "s" else f"{value / 1e6:,.1f} MB"
