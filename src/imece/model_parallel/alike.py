"""Ranks that divide a model or its sequences read the same data: of other data on each, as data parallelism
has it, they would make one sum that makes no sense, and nobody would see that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from imece.collectives.texts import gather_texts
from imece.errors import UserError


def plain_tensors(given: Any) -> list[Tensor]:
    """Those in it that have values. Of other types, or without: somebody asks for shapes."""
    return [each for each in tree_leaves(given) if type(each) is Tensor and not each.is_meta]


@torch._disable_dynamo(recursive=True)
def content_of(tensors: Sequence[Tensor]) -> str:
    """Their shapes, dtypes, and a sum of what is in them."""
    return " ".join(map(_content, tensors))


def check_alike(content: str, group: dist.ProcessGroup, device: torch.device, axis: str) -> None:
    """UserError, on all ranks, unless those of a group along `axis` have the same."""
    said = gather_texts([content], group, device, f"inputs of a {axis} group")
    if len({text for (text,) in said}) > 1:
        raise UserError(
            f"the ranks of a {axis} group have different inputs, and need the same: take share "
            "mesh.batch_rank of mesh.batch_ranks of the data, as imece.DistributedSampler does"
        )


def _content(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
