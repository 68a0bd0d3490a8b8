"""Lists of names, counts, sizes, kinds of things and words of errors, within one line of a message."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPOKEN_WITH_A_VOWEL = re.compile(r"[AEIaei]|[Oo](?!ne)|[Uu](?!se|ni(?!n)|t|[A-Z])|[FHLMNRSX](?=[A-Z])")
"""Names before which one says "an": also "an LSTM", spelt letter by letter, but "a User" and "a UNet"."""
_MOST_RUNS = 8  # of ranks, in a message
_MOST_WRITTEN = 60  # characters of a value, in a message


def some(names: Sequence[object], most: int, between: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more


def many(number: int, noun: str) -> str:
    """(1, "host") -> "1 host", (8, "host") -> "8 hosts", (8000, "batch") -> "8,000 batches"."""
    plural = "es" if noun.endswith("batch") else "s"  # but "epochs"
    return f"{number:,} {noun}{plural * (number != 1)}"


def ends_of(names: Sequence[str]) -> str:
    """(["a", "b", "c"]) -> "a .. c": of names in their order, the first and the last."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def rank_words(ranks: Sequence[int]) -> str:
    """[2] -> "rank 2"; [0, 1, 3] -> "ranks 0, 1, 3"; runs of three or more as "ranks 0-3". Of many runs the
    first, and how many ranks more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    left = sum(map(len, runs[_MOST_RUNS:]))
    return f"ranks {', '.join(shown)}" + (f" and {left:,} more" if left else "")


def size_text(nbytes: int) -> str:
    """1536 -> "1.5 KiB", 1000 -> "1000 bytes"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


def kind_of(value: object) -> str:
    """What a wrong value is: (3) -> "an int", ([]) -> "a list", (UserDict()) -> "a UserDict",
    (UserDict) -> "the class UserDict", (None) -> "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if _SPOKEN_WITH_A_VOWEL.match(name) else 'a'} {name}"


def shown(value: object) -> str:
    """A wrong value as it was written, if that is short; else what it is: a model's text has many lines."""
    text = repr(value)
    return text if len(text) <= _MOST_WRITTEN and "\n" not in text else kind_of(value)


def words_of(error: BaseException) -> str:
    """What an error says, however many lines it took; the name of its class if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
