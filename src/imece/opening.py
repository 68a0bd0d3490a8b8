"""Calls to make whenever a mesh is opened, for modules that mesh.py may not import."""

from __future__ import annotations

from collections.abc import Callable

_calls: list[Callable[[], None]] = []


def at_opening(call: Callable[[], None]) -> None:
    """Run `call` at the end of each `imece.init` that makes a mesh."""
    _calls.append(call)


def opened() -> None:
    """Run these calls: a mesh was made."""
    for call in _calls:
        call()
