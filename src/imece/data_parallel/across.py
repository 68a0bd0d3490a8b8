"""Answers that need all parts of one model: from the ranks along the mesh's axes tensor and pipeline.

The engine sums gradients only among ranks that have the same part. But a norm is over all parts, and all
parts must decide together whether to skip a step: otherwise they drift apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.collectives import ops
from imece.collectives.texts import gather_json
from imece.data_parallel.norm import norm_of
from imece.data_parallel.optimizer import may_be_cut, parameters_of
from imece.data_parallel.reducing.buckets import Slot
from imece.mesh import Mesh
from imece.model_parallel.cutting import Part
from imece.model_parallel.divided import divided_parameters


class AcrossModel:
    """The ranks that together hold one model, and the parameters that this rank counts in a norm."""

    def __init__(
        self, mesh: Mesh, module: nn.Module, slots: Sequence[Slot], optimizers: Sequence[Optimizer]
    ) -> None:
        """All of these ranks construct together. slots: of the module's trained parameters."""
        self._group = mesh.group("pipeline", "tensor")
        self._device = mesh.device
        tensor, at = mesh.size("tensor"), mesh.coordinate("tensor")
        names = {slot.index: slot.name for slot in slots}
        every = gather_json([*names.values()], self._group, mesh.device, "names of parameters")
        # Stages that share a parameter know it by one name and have the same gradient: one stage counts it.
        before = set[str]().union(*every[at : self._group.rank() : tensor])
        divided = divided_parameters(module)
        self._counted = {
            number for number, name in names.items() if name not in before and (name in divided or at == 0)
        }
        for each in optimizers:
            each._imece_across = self  # type: ignore[attr-defined]

    @staticmethod
    def of(optimizer: Optimizer) -> AcrossModel | None:
        """None if each rank of this optimizer has the whole model."""
        return getattr(optimizer, "_imece_across", None)

    def counted(self, only: Collection[int] | None) -> Collection[int]:
        """Those parameters, of `only` these, that no other of the ranks counts in a norm."""
        return self._counted if only is None else self._counted.intersection(only)

    def norm(self, mine: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm over all parts, an fp64 scalar with the same bits on all of these ranks. mine: the norm of
        the parameters that this rank counts."""
        everybody = mine.new_empty(self._group.size())
        ops.all_gather(everybody, mine, group=self._group, label="norms of parts of the model")
        return norm_of([everybody], self._device, norm_type)

    def ask_all(self, flag: torch.Tensor) -> None:
        """flag: whether this rank's gradients are not finite; afterwards, whether any rank's are."""
        ops.all_reduce(flag, "max", group=self._group, label="overflow in parts of the model")


def refuse_other_parts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError if a rank of `group` has another part of the model: it would get this part's values, and the
    mean of both gradients."""
    axes = []
    if divided_parameters(model):
        axes.append("tensor")
    if isinstance(model, Part):
        axes.append("pipeline")
    if not axes:
        return
    of_model = set(dist.get_process_group_ranks(meshes.current().group(*axes)))
    if len(of_model.intersection(dist.get_process_group_ranks(group))) > 1:
        raise ValueError(
            f"this model is divided along the axis {' and '.join(axes)}, and ranks of the group have other "
            "parts of it: wrap it by imece.parallelize(model, optimizer, strategy, mesh), or among those "
            "that have the same, process_group=mesh.data_group"
        )


def refuse_whole_matrices(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """ValueError for an optimizer that looks at whole matrices while a rank has only parts of them."""
    divided = divided_parameters(model)
    names = {id(each): name for name, each in model.named_parameters() if name in divided}
    for optimizer in optimizers if names else ():
        found = next((names[id(each)] for each in parameters_of(optimizer) if id(each) in names), None)
        if found is not None and not may_be_cut(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} may look at whole matrices, and of {found} each rank of the "
                "axis tensor has a part: step it with another optimizer, such as AdamW; one that treats each "
                "element alone, or is to treat each part alone, says so by optimizer.element_wise = True"
            )


def is_across(ranks: Mesh | dist.ProcessGroup) -> TypeGuard[Mesh]:
    """Whether several of these ranks together hold one model."""
    return isinstance(ranks, Mesh) and ranks.size("pipeline") * ranks.size("tensor") > 1
