"""What is asked of all ranks that have parts of one model: those along the mesh's axes tensor and pipeline.

The engine sums gradients among the ranks that have the same part. A norm is of all parts, and whether a step
is skipped is decided by all of them: ranks that did not do the same would part from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import mesh as meshes
from imece.collectives import ops
from imece.collectives.texts import gather_json
from imece.data_parallel.norm import norm_of
from imece.data_parallel.optimizer import may_be_cut, parameters_of
from imece.mesh import Mesh
from imece.model_parallel.cutting import Part
from imece.model_parallel.divided import divided_parameters

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel


class AcrossModel:
    """The ranks that have the parts of one model between them, and what of it this rank counts."""

    def __init__(self, mesh: Mesh, model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        """All of these ranks construct together."""
        self._group = mesh.group("pipeline", "tensor")
        self._device = mesh.device
        tensor, at = mesh.size("tensor"), mesh.coordinate("tensor")
        names = {slot.index: slot.name for slot in model.reducer.slots}
        every = gather_json([*names.values()], self._group, mesh.device, "names of parameters")
        # Stages that share a parameter have it by one name, with one gradient.
        before = set[str]().union(*every[at : self._group.rank() : tensor])
        divided = divided_parameters(model.module)
        self._counted = {
            number for number, name in names.items() if name not in before and (name in divided or at == 0)
        }
        for each in optimizers:
            each._imece_across = self  # type: ignore[attr-defined]

    @staticmethod
    def of(optimizer: Optimizer) -> AcrossModel | None:
        """None: each of its ranks has all of the model."""
        return getattr(optimizer, "_imece_across", None)

    def counted(self, only: Collection[int] | None) -> Collection[int]:
        """The parameters, of `only` these, that no other of the ranks counts in a norm."""
        return self._counted if only is None else self._counted.intersection(only)

    def norm(self, mine: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Of all parts, fp64 scalar; mine: of what this rank counts. To the same bits on all of the ranks."""
        everybody = mine.new_empty(self._group.size())
        ops.all_gather(everybody, mine, group=self._group, label="norms of parts of the model")
        return norm_of([everybody], self._device, norm_type)

    def ask_all(self, flag: torch.Tensor) -> None:
        """flag: whether gradients of this rank are not finite; then whether any rank's are."""
        ops.all_reduce(flag, "max", group=self._group, label="overflow in parts of the model")


def refuse_other_parts(model: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError for a group some of whose ranks have another part of this model: it would be made the same
    as theirs, and its gradients their mean."""
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
    """ValueError for one that looks at whole matrices where a rank has parts of them."""
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


def across_model(
    ranks: Mesh | dist.ProcessGroup, model: DistributedDataParallel, optimizers: Sequence[Optimizer]
) -> AcrossModel | None:
    """None where each rank has all of the model."""
    if not isinstance(ranks, Mesh) or ranks.size("pipeline") * ranks.size("tensor") == 1:
        return None
    return AcrossModel(ranks, model, optimizers)
