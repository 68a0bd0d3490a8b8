"""The progress line of a run, at any width: how far it is, how well it goes, how long it will take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from imece.observe.units import duration, gigabytes, si

_SHOWN_S = 3.0  # the line shows means over about this time: single losses jump too much to be read
_PACE_S = 60.0  # the remaining time is estimated from this time, with validations and saves in it
_GAP = "  "
_LEAST_BAR, _MOST_BAR = 5, 24

# If a line is too short for all fields, these stay beside the step as far as they fit, in this order.
_IMPORTANCE = ("loss", "left", "skipped", "tokens", "val", "bar", "exposed", "memory", "mfu")
# Least width of each field, so that its neighbours do not move when its text gets shorter.
_ROOM = {"loss": 10, "left": 10, "tokens": 14, "val": 9, "exposed": 14, "memory": 7, "mfu": 8}
_STYLES = {"loss": "bold", "val": "bold cyan", "skipped": "yellow", "left": "dim"}


def _bar(share: float, width: int, blocks: str) -> Text:
    """`width` columns, `share` (0 to 1) of them done; `blocks` are the two characters, for done and to do."""
    done = min(width, int(width * share))
    return Text.assemble((blocks[0] * done, "green"), (blocks[1] * (width - done), "dim"))


class _Recent:
    """Sums in which values older than `span_s` hardly count."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._sums: dict[str, float] = {}

    def add(self, took_s: float, **values: float) -> None:
        """Add `values` of something that took `took_s`."""
        fade = math.exp(-took_s / self._span_s)
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) * fade + value

    def ratio(self, above: str, below: str) -> float | None:
        """The ratio of two sums; None if the second is still 0."""
        divisor = self._sums.get(below, 0.0)
        return self._sums.get(above, 0.0) / divisor if divisor else None


class Progress:
    """The content of the line. `add` is called in every step, so it does little."""

    def __init__(self, total_steps: int, step: int) -> None:
        """`step` of `total_steps` steps are done."""
        self.total_steps, self.step = total_steps, step
        self._skipped = 0
        self._memory_bytes = 0
        self._val_loss: float | None = None
        self._exposes = False  # a run of one rank has no communication to show
        self._recent = _Recent(_SHOWN_S)
        self._pace = _Recent(_PACE_S)
        # When the last step ended. The first step's time does not count: it is slower than the others.
        self._at: float | None = None

    def add(self, record: Mapping[str, Any], now: float) -> None:
        """Add a step that ended at `now` seconds. record: as in metrics.jsonl."""
        self.step, self._memory_bytes = record["step"], record.get("memory_bytes") or 0
        step_s = record.get("step_s") or 0.0
        self._recent.add(
            step_s, s=step_s, exposed_s=record.get("exposed_s") or 0.0, tokens=record.get("tokens", 0)
        )
        loss = record.get("loss")
        if loss is not None and math.isfinite(loss):
            self._recent.add(step_s, loss=loss, losses=1)
        if (mfu := record.get("mfu")) is not None:
            self._recent.add(step_s, mfu=mfu, mfus=1)
        if self._at is not None:
            self._pace.add(now - self._at, s=now - self._at, steps=1)
        self._at = now
        self._val_loss = record.get("val_loss") or self._val_loss
        self._exposes = self._exposes or bool(record.get("exposed_s"))
        self._skipped += "skipped" in record

    def line(self) -> str:
        """All fields in one line, for a log."""
        fields = {"step": f"step {self.step}/{self.total_steps}"} | self._fields()
        return _GAP.join(fields.values())

    def drawn(self, width: int, blocks: str) -> Text:
        """What fits into `width` columns, with a bar; `blocks` are its two characters, for done and to do."""
        digits = len(str(self.total_steps))
        step = f"step {self.step:>{digits}}/{self.total_steps}"
        fields = {"step": step, "bar": blocks[1] * _LEAST_BAR} | self._fields()
        shown, left = {"step"}, width - len(step)
        for name in _IMPORTANCE:
            needed = len(_GAP) + max(len(fields.get(name, "")), _ROOM.get(name, 0))
            if name in fields and needed <= left:
                shown.add(name)
                left -= needed
        words = [
            _bar(self.step / self.total_steps, min(_LEAST_BAR + left, _MOST_BAR), blocks)
            if name == "bar"
            else Text(text, _STYLES.get(name, ""))
            for name, text in fields.items()
            if name in shown
        ]
        line = Text(_GAP).join(words)
        line.truncate(width, overflow="crop")
        return line

    def _fields(self) -> dict[str, str]:
        """Name -> words, in the order in which they are shown."""
        fields: dict[str, str] = {}
        if (loss := self._recent.ratio("loss", "losses")) is not None:
            fields["loss"] = f"loss {loss:.3f}"
        if self._val_loss is not None:
            fields["val"] = f"val {self._val_loss:.3f}"
        if tokens_per_s := self._recent.ratio("tokens", "s"):
            fields["tokens"] = f"{si(tokens_per_s)} tokens/s"
        if (exposed := self._recent.ratio("exposed_s", "s")) is not None and self._exposes:
            fields["exposed"] = f"exposed {100 * exposed:.1f} %"
        if (mfu := self._recent.ratio("mfu", "mfus")) is not None:
            fields["mfu"] = f"mfu {100 * mfu:.0f} %"
        if self._memory_bytes:
            fields["memory"] = gigabytes(self._memory_bytes)
        if self._skipped:
            fields["skipped"] = f"{self._skipped} skipped"
        pace_s = self._pace.ratio("s", "steps")
        if pace_s is not None and self.step < self.total_steps:
            fields["left"] = f"{duration(pace_s * (self.total_steps - self.step))} left"
        return fields
