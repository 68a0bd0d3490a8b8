"""Cross-entropy of logits divided by vocabulary, a DTensor: each rank has some columns."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from imece.model_parallel.crossing import cross
from imece.models.cross_entropy import OF_CLASS, Columns, cross_entropy, summed_cross_entropy

__all__ = ["cross_entropy"]


@torch._disable_dynamo(recursive=True)
def _summed(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """`summed_cross_entropy` of a DTensor [..., V] whose ranks all have the same targets (int64 [...])."""
    whole, last = cast(DTensor, logits), logits.ndim - 1
    mine, flat = whole.to_local().flatten(0, -2), targets.flatten()
    axes = [axis for axis, each in enumerate(whole.placements) if not each.is_replicate()]
    if not axes:
        return summed_cross_entropy(mine, flat, ignore)
    if len(axes) > 1 or whole.placements[axes[0]] != Shard(last):
        raise ValueError(
            f"cross_entropy takes logits that are whole, or sharded along the vocabulary, dim {last} of "
            f"{list(logits.shape)}, over one axis of ranks; these are placed as {list(whole.placements)}"
        )
    group, rank = whole.device_mesh.get_group(axes[0]), whole.device_mesh.get_local_rank(axes[0])

    def merged(totals: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        every = cross(torch.stack((totals, chosen))[None], group, Shard(0), Replicate())  # [ranks, 2, N]
        totals, chosen = every.unbind(1)
        return totals.logsumexp(0), chosen.sum(0)

    each = -(-logits.shape[last] // group.size())  # the last ranks may have fewer columns
    if each * (group.size() - 1) >= logits.shape[last]:
        raise ValueError(
            f"cross_entropy of {logits.shape[last]} entries of a vocabulary, {each} on a rank: the last of "
            f"{group.size()} ranks has none; let fewer ranks divide them"
        )
    return summed_cross_entropy(mine, flat, ignore, Columns(rank * each, logits.shape[last], merged))


OF_CLASS[DTensor] = _summed
