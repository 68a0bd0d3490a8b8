"""Checks that ranks which divide a model or its sequences read the same data.

Data parallelism gives each rank other data. Here that would add up to sums without meaning, and nobody would
notice.
"""

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
    """The tensors in `given` that have values; when somebody only asks for shapes, there are none."""
    return [each for each in tree_leaves(given) if type(each) is Tensor and not each.is_meta]


@torch._disable_dynamo(recursive=True)
def content_of(tensors: Sequence[Tensor]) -> str:
    """Shapes, dtypes, and a checksum of the values."""
    return " ".join(map(_content, tensors))


def check_alike(content: str, group: dist.ProcessGroup, device: torch.device, axis: str) -> None:
    """UserError, on all ranks, unless all ranks of a group along `axis` have the same content."""
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
