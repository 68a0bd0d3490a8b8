"""The line of the user's script that is running, for warnings that are to name it."""

from __future__ import annotations

import sys
from types import FrameType

_NOT_THE_SCRIPT = ("torch", "imece")


def is_script(frame: FrameType) -> bool:
    """Whether the code is neither torch's nor ours."""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] not in _NOT_THE_SCRIPT


def level() -> int:
    """The `stacklevel` of `warnings.warn`, called beside this, for the script's line: the hooks and wrappers
    between it and us are torch's."""
    frame, found = sys._getframe(1), 1
    while not is_script(frame) and frame.f_back is not None:
        frame, found = frame.f_back, found + 1
    return found
