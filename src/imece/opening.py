"""What is to happen whenever a mesh is opened, for rooms that mesh.py may not import."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[], None]] = []


def at_opening(call: Callable[[], None]) -> None:
    """`call` runs at the end of each `imece.init` that makes a mesh."""
    _calls.append(call)


def opened() -> None:
    """A mesh was made."""
    for call in _calls:
        call()
