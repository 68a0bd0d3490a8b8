"""Lists of names within one line of a message, however many names there are."""

from __future__ import annotations

from collections.abc import Sequence


def some(names: Sequence[object], most: int, between: str = ", ") -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more
