"""The phase and step in which a member is, noted in memory that its launcher shares and reads after its end.

    forward, backward   of the wrapped model; backward lasts until the update
    update              the optimizer's step
    validation          forward of a model that is not in training
    saving              until a checkpoint is copied; it is written beside the steps that follow
    between steps       everything else: messages to others, copies

Noting it costs a microsecond, so it is always done; a process that was killed cannot be asked.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a launcher does not wait for torch before it starts ranks
    from torch import nn
    from torch.optim import Optimizer

RECORD = "IMECE_RECORD"
"""The environment variable with the file descriptor of that memory."""
PHASES = ("", "forward", "backward", "update", "validation", "between steps", "saving")
_AFTER = ("between steps", "saving")  # phases that belong to no step
_NAME = "imece-where"
_RECORD = struct.Struct("=qq")  # finished steps, the phase's number


def new_record() -> int:
    """A file descriptor of a member's record, for the launcher to pass on and to close."""
    fd = os.memfd_create(_NAME)
    os.ftruncate(fd, _RECORD.size)
    return fd


def read_record(fd: int) -> str:
    """Such as "in backward of step 41"; "" if nothing was noted."""
    content = os.pread(fd, _RECORD.size, 0)
    steps, number = _RECORD.unpack(content) if len(content) == _RECORD.size else (0, 0)
    if not 0 < number < len(PHASES):
        return ""
    phase = PHASES[number]
    return f"{phase}, after step {steps:,}" if phase in _AFTER else f"in {phase} of step {steps + 1:,}"


class Where:
    """Notes where this process is, if its launcher has given it a record."""

    def __init__(self, steps: Callable[[], int]) -> None:
        """steps: returns the number of finished steps."""
        self._steps = steps
        self._memory = _own_record()

    def note(self, phase: str) -> None:
        """From now on this process is in `phase`, one of PHASES."""
        if self._memory is not None:
            _RECORD.pack_into(self._memory, 0, self._steps(), PHASES.index(phase))

    def watch(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Note automatically what these do."""
        if self._memory is None:
            return
        model.register_forward_pre_hook(lambda *_: self.note("forward" if model.training else "validation"))

        def forward_is_over(*_: Any) -> None:
            self.note("backward" if model.training else "between steps")

        model.register_forward_hook(forward_is_over)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.note("update"))


def _own_record() -> mmap.mmap | None:
    """None for a process that a rank has started: it has the rank's environment, but not its descriptor."""
    text = os.environ.get(RECORD, "")
    try:
        if text.isdecimal() and os.readlink(f"/proc/self/fd/{text}").startswith(f"/memfd:{_NAME}"):
            return mmap.mmap(int(text), _RECORD.size)
    except (OSError, ValueError):
        pass
    return None
