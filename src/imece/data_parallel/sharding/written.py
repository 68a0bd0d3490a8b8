"""What a rank writes into parameters itself, outside of a step, where it would be lost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from imece.data_parallel.sharding.stores import Division, Store

_COMMON = (
    "and the ranks of this host have its memory in common, so that each of them changed what the others had "
    "written: do it inside of `with model.gathered(write=True):`"
)
_FROM_MASTER = (
    "and the optimizer steps a master copy of it, from which the next step would fill it again: do it inside "
    "of `with model.gathered(write=True):`, or by model.load_state_dict"
)


class Written:
    """Counts how often the parameters of one sharded model were, those of which it would be lost.

    A step writes into parts, and a gather into buckets, which count their own versions. Parameters that are
    gathered by unit are freed between, and say so by themselves; or gathered, see Gathering.
    """

    def __init__(self, stores: Sequence[Store], division: Division) -> None:
        self._guarded: list[tuple[str, torch.Tensor, str]] = []  # name, parameter, what becomes of it
        self._versions: list[int] = []  # of those
        common = division.common_parameters and division.groups.shard.size() > 1
        for store in stores if division.gathering is None else ():
            if common or store.own is not store.master:
                lost = _COMMON if common else _FROM_MASTER
                self._guarded += (
                    (item.name, each, lost) for item, each in zip(store.items, store.members, strict=True)
                )
        self.note()

    def note(self) -> None:
        """What has been written until now was meant to be."""
        self._versions = [_version(parameter) for _, parameter, _ in self._guarded]

    def check(self) -> None:
        """RuntimeError that names a parameter which was written into since `note`."""
        for (name, parameter, lost), version in zip(self._guarded, self._versions, strict=True):
            if _version(parameter) != version:
                raise RuntimeError(f"parameter {name} was written into, {lost}")


def _version(parameter: torch.Tensor) -> int:
    """How often it was written into; one that is coming is not waited for."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter._version
