"""What was promised, beside what was found: a verdict for each.

The bounds are wishes, not results: they were set before anything was written, from a rough prototype on two
idle cores.
"""

from __future__ import annotations

from dataclasses import dataclass

_WORDS = {True: "met   ", False: "MISSED", None: "--    "}


@dataclass(frozen=True)
class Verdict:
    """One promise."""

    text: str
    met: bool | None = None
    """None: not judged."""
    figure: str = "not measured in this run"
    measured: float | None = None

    @property
    def line(self) -> str:
        """For people."""
        return f"  {_WORDS[self.met]}  {self.text}: {self.figure}"


def at_most(text: str, found: float | None, bound: float, form: str = "") -> Verdict:
    """Met if `found` is `bound` or less; None was not measured. form: how the figure is shown, "{:.1%}" say;
    by default as `times` has it."""
    return _judged(text, found, bound, form, found is not None and found <= bound)


def at_least(text: str, found: float | None, bound: float, form: str = "") -> Verdict:
    """Met if `found` is `bound` or more; the rest as for at_most."""
    return _judged(text, found, bound, form, found is not None and found >= bound)


def _judged(text: str, found: float | None, bound: float, form: str, met: bool) -> Verdict:
    if found is None:
        return Verdict(text)
    return Verdict(text, met, form.format(found) if form else times(found, bound), found)


def times(found: float, bound: float) -> str:
    """`found` with three digits, or enough to tell it from the `bound` beside it: 1.4493 is not 1.45 x."""
    digits = 3
    while found != bound and f"{found:.{digits}g}" == f"{bound:.{digits}g}":
        digits += 1
    return f"{found:.{digits}g} x"
