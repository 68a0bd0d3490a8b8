"""Which modules of a model are in training, and which parameters want gradients.

A block may change both for a while: for a validation, or in a GAN, which trains one network beside the other.
If an error leaves the block meanwhile, nothing changes them back.
"""

from __future__ import annotations

import torch
from torch import nn

_FLAGS = "01"


class Modes:
    """The modes of one model, as noted last."""

    def __init__(self, model: nn.Module) -> None:
        # Walk through the model only once: the modes are looked at in each step.
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._flags: tuple[list[bool], list[bool]] = [], []
        self.noted = ""
        """A text for all modes, the same on all ranks that are at the same place."""
        self.note()

    def note(self) -> bool:
        """Note the present modes. Returns whether they have changed since the last time."""
        trains, wants = self._now()
        if (trains, wants) == self._flags:
            return False
        self._flags = trains, wants
        self.noted = " ".join("".join(_FLAGS[each] for each in flags) for flags in self._flags)
        return True

    def restore(self, noted: str) -> None:
        """Set the modes to what was noted, here or on another rank."""
        trains, wants = ([_FLAGS.index(each) == 1 for each in part] for part in noted.split(" "))
        # From the outermost module on, each by its own method, which may do more than set a flag.
        for module, flag in zip(self._modules, trains, strict=True):
            if module.training != flag:
                module.train(flag)
        for parameter, flag in zip(self._parameters, wants, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        self._flags, self.noted = (trains, wants), noted

    def _now(self) -> tuple[list[bool], list[bool]]:
        with torch._C.DisableTorchFunctionSubclass():  # or a freed one's flag takes a microsecond
            wants = [each.requires_grad for each in self._parameters]
        return [each.training for each in self._modules], wants
