"""Checks that ranks which divide a model or its sequences read the same data, and draw the same.

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


class Draws:
    """Whether the ranks of a tensor group draw the same random numbers for what all of them compute, such as
    a dropout between divided layers. Else they go on with other activations, and what is whole on each rank,
    as norms and biases are, parts.

    Looked at when it is the 1st, 2nd, 4th, 8th ... time: ranks that have parted once do not meet again.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, what: str) -> None:
        """what: that may draw: forward or step."""
        self._group, self._device, self._what = group, device, what
        self._times = 0
        self._before: str | None = None

    @torch._disable_dynamo(recursive=True)
    def begin(self) -> None:
        """What may draw begins."""
        self._times += 1
        looks = self._times.bit_count() == 1 and not _is_captured(self._device)
        self._before = self._state() if looks else None

    @torch._disable_dynamo(recursive=True)
    def end(self) -> None:
        """UserError, on all ranks, if they have drawn since `begin`, from other states."""
        before, self._before = self._before, None
        if before is None or before == self._state():
            return
        said = gather_texts([before], self._group, self._device, "random states of a tensor group")
        if len({text for (text,) in said}) > 1:
            raise UserError(
                f"{self._what} {self._times}: the ranks of a tensor group drew different random numbers, for "
                "dropout say, where they compute the same: call torch.manual_seed(number) with one number "
                "for all of them, such as seed + mesh.batch_rank, and let what one rank alone draws come "
                "from a torch.Generator of its own"
            )

    def _state(self) -> str:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in states)).hexdigest()


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being made, in which nobody may ask for the generator's state."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _content(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().resolve_conj().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"
