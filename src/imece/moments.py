"""Calls to make at moments of a mesh's life, for modules that it may not import: lists to append to."""

from __future__ import annotations

import atexit
from collections.abc import Callable

at_opening: list[Callable[[], None]] = []
"""Called at the end of each `imece.init` that makes a mesh."""
once_arranged: list[Callable[[], None]] = []
"""Called when a mesh has got its ranks, and again when it has got others."""
once_lost: list[Callable[[str], None]] = []
"""Called with a reason when ranks are gone, to end all waits for them. May be called from any thread."""
before_closing: list[Callable[[], None]] = []
"""Called before groups are destroyed, by a mesh or by torch."""
ended_last: list[Callable[[], None]] = []
"""Called at the exit of this process, after all other exit handlers."""


@atexit.register  # as imece is imported, before others can: what is registered first is called last
def _end_the_last() -> None:
    for end in ended_last:
        end()
