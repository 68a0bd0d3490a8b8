"""Sends bf16 instead of fp32, and still sums in fp32. Half the bytes on every backend.

A ring that sums in bf16 rounds at every hop, so its error grows with the number of ranks. Here each element
is rounded twice, whatever the number of ranks: each rank sends its slices in bf16 to their owners, an owner
sums in fp32 in the order of ranks and rounds once, and the sums travel back in bf16. The owner's own
contribution is rounded like the others', and every rank takes the rounded sum, so all ranks hold the same
bits. bf16 keeps 8 bits, so rounding errs by 2⁻⁸ at most:

    |result − exact| <= 2⁻⁸ · (sum of |contributions| + |sum|)

A reduce-scatter ends with its owners' sums, which stay in fp32: its elements are rounded once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from imece.collectives import native
from imece.collectives.execute import TAG_WIRE, Message, post
from imece.collectives.given_up import Waitable
from imece.collectives.pending import wait_for
from imece.collectives.reduction import flattened

OPS = ("sum", "avg")


def check_wire(wire: str | None) -> None:
    """ValueError unless `wire` is None or "bf16"."""
    if wire not in (None, "bf16"):
        raise ValueError(f"unknown wire {wire!r}: None or 'bf16'")


def check_bf16(tensor: torch.Tensor, op: str) -> None:
    """ValueError unless a bf16 sum of this tensor makes sense."""
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"wire='bf16' carries floating point numbers, not {tensor.dtype}")
    if op not in OPS:
        raise ValueError(f"wire='bf16' is for sum and avg, not {op!r}")


class Bf16Sum:
    """One all-reduce in three stages: post_slices, post_sums (waits for the slices), finish (for the sums).

    A reduce-scatter is over after `total`. Bytes sent a rank: (N−1)/N · M in all, M being the bytes of the
    fp32 tensor. Scratch: M, and M/N in fp32.
    """

    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup, op: str, *, collective: bool) -> None:
        """flat: 1D and contiguous, any floating dtype; the result is written into it. op: sum or avg.

        collective: whether the group's own all_to_all and all_gather may be used; the background thread must
        not, since the order of its calls among those of other threads is not the same on all ranks.
        """
        self.flat, self.group, self.op, self.collective = flat, group, op, collective
        self.rank, self.world_size = group.rank(), group.size()
        self.works: list[Waitable] = []
        length = -(-flat.numel() // self.world_size)
        self.rows = flat.new_zeros((self.world_size, length), dtype=torch.bfloat16)  # [rank, slice], padded
        self.arrived = torch.empty_like(self.rows)  # my slice as each rank has it

    def post_slices(self) -> None:
        self.rows.view(-1)[: self.flat.numel()].copy_(self.flat)
        if self.collective:
            work = native.all_to_all(self.arrived.view(-1), self.rows.view(-1), self.group)
            if work is not None:
                self.works = [work]
                return
            self.collective = False
        self.arrived[self.rank].copy_(self.rows[self.rank])
        self._exchange({peer: self.rows[peer] for peer in self._peers()}, self.arrived)

    def total(self) -> torch.Tensor:
        """This rank's slice, reduced, once the slices are there: fp32 [slice]."""
        self._wait()
        total = self.arrived[0].float()
        for contribution in self.arrived[1:]:
            total.add_(contribution)
        return total.div_(self.world_size) if self.op == "avg" else total

    def post_sums(self) -> None:
        mine = self.rows[self.rank]
        mine.copy_(self.total())
        if self.collective:
            self.works = [native.all_gather(self.rows.view(-1), mine, self.group)]
        else:
            self._exchange(dict.fromkeys(self._peers(), mine), self.rows)

    def finish(self) -> None:
        self._wait()
        self.flat.copy_(self.rows.view(-1)[: self.flat.numel()])

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks write to the same one."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _exchange(self, sent: dict[int, torch.Tensor], places: torch.Tensor) -> None:
        if self.flat.numel() == 0:
            return
        sends = [Message(row, peer, TAG_WIRE) for peer, row in sent.items()]
        receives = [Message(places[peer], peer, TAG_WIRE) for peer in self._peers()]
        self.works = post(sends, receives, self.group)

    def _wait(self) -> None:
        for work in self.works:
            wait_for(work, "a bf16 all_reduce")
        self.works = []


def all_reduce_bf16(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: str = "sum", *, collective: bool = True
) -> torch.Tensor:
    """Sum or average over the group, in place, with bf16 on the wire and sums in fp32.

    tensor: any shape and floating dtype, M bytes in fp32. Each rank sends (N−1)/N · M bytes, half as many
    as an fp32 ring. The result holds bf16 numbers, the same bits on every rank. ValueError for integers,
    min and max.
    """
    check_bf16(tensor, op)
    flat = flattened(tensor)
    with torch.no_grad():
        call = Bf16Sum(flat, group, op, collective=collective)
        call.post_slices()
        call.post_sums()
        call.finish()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
    return tensor


def reduce_scatter_bf16(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: str,
    *,
    collective: bool,
) -> torch.Tensor:
    """Sum or average `input` over the group, with bf16 on the wire; put slice `rank` of it into `output`.

    Both 1D and contiguous, input N times as long; output may be its own slice, and the others stay as they
    are. Each rank sends (N−1)/N · M/2 bytes, M being those of the input in fp32. ValueError as above.
    """
    check_bf16(input, op)
    assert input.numel() == output.numel() * group.size()
    with torch.no_grad():
        call = Bf16Sum(input, group, op, collective=collective)
        call.post_slices()
        return output.copy_(call.total())
