"""Lists of names, counts and kinds of things, within one line of a message."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[object], most: int, between: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more


def many(number: int, noun: str) -> str:
    """(1, "host") -> "1 host", (8, "host") -> "8 hosts", (8000, "host") -> "8,000 hosts"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def kind_of(value: object) -> str:
    """(3) -> "an int", ([]) -> "a list": what a wrong value is."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
