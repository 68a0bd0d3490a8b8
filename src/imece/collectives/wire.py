"""Sends floating point numbers in fewer bytes (wire_formats.py), and still sums in fp32, on every backend.

A ring that sums in fewer bits rounds at every hop, so its error grows with the number of ranks. Here each
element is rounded twice, whatever the number of ranks: each rank sends its slices packed to their owners, an
owner sums in fp32 in the order of ranks and packs the sum, and the sums travel back. The owner's own
contribution is rounded like the others', and every rank takes the rounded sum, so all ranks hold the same
bits. In bf16, which keeps 8 bits, rounding errs by 2⁻⁸ at most:

    |result − exact| <= 2⁻⁸ · (sum of |contributions| + |sum|)

In int8 it is 1/254, of the largest magnitudes in the element's blocks instead of its own.

A reduce-scatter ends with its owners' sums, which stay in fp32: its elements are rounded once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from imece.collectives import native
from imece.collectives.execute import TAG_WIRE, Message, post
from imece.collectives.pending import wait_for
from imece.collectives.reduction import flattened
from imece.collectives.wire_formats import FORMATS

OPS = ("sum", "avg")


def check_wire(wire: str | None) -> None:
    """ValueError unless `wire` is None or a format's name."""
    if wire is not None and wire not in FORMATS:
        raise ValueError(f"unknown wire {wire!r}: None, {' or '.join(map(repr, FORMATS))}")


def check_sum(tensor: torch.Tensor, op: str, wire: str) -> None:
    """ValueError unless a sum of this tensor in fewer bits makes sense."""
    check_wire(wire)
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"wire={wire!r} carries floating point numbers, not {tensor.dtype}")
    if op not in OPS:
        raise ValueError(f"wire={wire!r} is for sum and avg, not {op!r}")


class _PackedSum:
    """One call under way. Scratch: 2P, P being the bytes of the packed tensor, and a slice in fp32; a tensor
    that does not divide by N is copied too."""

    def __init__(
        self, flat: torch.Tensor, group: dist.ProcessGroup, op: str, wire: str, *, collective: bool
    ) -> None:
        """flat: 1D and contiguous, any floating dtype. op: sum or avg.

        collective: whether the group's own all_to_all and all_gather may be used; the background thread must
        not, since the order of its calls among those of other threads is not the same on all ranks.
        """
        self.flat, self.group, self.op, self.collective = flat, group, op, collective
        self.wire, self._what = FORMATS[wire], f"an all_reduce in {wire}"
        self.rank, self.world_size = group.rank(), group.size()
        self.length = -(-flat.numel() // self.world_size)
        padding = self.length * self.world_size - flat.numel()
        padded = torch.cat((flat, flat.new_zeros(padding))) if padding else flat
        self.values = padded.view(self.world_size, self.length)  # [rank, slice]
        self.rows = self.wire.pack(self.values)  # [rank, packed slice]

    def total(self) -> torch.Tensor:
        """This rank's slice, reduced: fp32 [slice]. Sends (N−1)/N · P bytes."""
        arrived = torch.empty_like(self.rows)  # this rank's slice as each rank has it
        work = None
        if self.collective:
            work = native.all_to_all(arrived.view(-1), self.rows.view(-1), self.group)
        if work is not None:
            wait_for(work, self._what)
        else:
            self.collective = False
            arrived[self.rank].copy_(self.rows[self.rank])
            self._exchange({peer: self.rows[peer] for peer in self._peers()}, arrived)
        total = self.flat.new_empty(self.length, dtype=torch.float32)
        self.wire.unpack(arrived[0], total)
        for contribution in arrived[1:]:
            self.wire.add(contribution, total)
        return total.div_(self.world_size) if self.op == "avg" else total

    def write_everywhere(self, total: torch.Tensor) -> None:
        """Write all ranks' totals, rounded, into `flat`. Sends (N−1)/N · P bytes."""
        mine = self.rows[self.rank]
        mine.copy_(self.wire.pack(total))
        if self.collective:
            wait_for(native.all_gather(self.rows.view(-1), mine, self.group), self._what)
        else:
            self._exchange(dict.fromkeys(self._peers(), mine), self.rows)
        self.wire.unpack(self.rows, self.values)
        if self.values.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(self.values.view(-1)[: self.flat.numel()])

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all ranks write to the same one."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _exchange(self, sent: dict[int, torch.Tensor], places: torch.Tensor) -> None:
        if self.flat.numel() == 0:
            return
        sends = [Message(row, peer, TAG_WIRE) for peer, row in sent.items()]
        receives = [Message(places[peer], peer, TAG_WIRE) for peer in self._peers()]
        for work in post(sends, receives, self.group):
            wait_for(work, self._what)


def all_reduce_packed(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: str, wire: str, *, collective: bool
) -> None:
    """Sum or average over the group, in place, with fewer bytes on the wire and sums in fp32.

    tensor: any shape, M bytes in fp32; with op and wire as `check_sum` admits. Each rank sends (N−1)/N · M
    bytes in bf16, half as many as an fp32 ring, and half of that in int8. The result is the same bits on
    every rank.
    """
    flat = flattened(tensor)
    with torch.no_grad():
        call = _PackedSum(flat, group, op, wire, collective=collective)
        call.write_everywhere(call.total())
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def reduce_scatter_packed(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    op: str,
    wire: str,
    *,
    collective: bool,
) -> None:
    """Sum or average `input` over the group, with fewer bytes on the wire; put slice `rank` of it into
    `output`.

    Both 1D and contiguous, input N times as long; output may be its own slice, and the others stay as they
    are. Each rank sends half of what `all_reduce_packed` does.
    """
    assert input.numel() == output.numel() * group.size()
    with torch.no_grad():
        output.copy_(_PackedSum(input, group, op, wire, collective=collective).total())
