"""What floating point numbers travel as, where that is not what they are: in bf16, or in blocks of int8.

Both are summed in fp32 where they arrive (wire.py). They differ in what a number loses on the way:

    bf16    keeps 8 bits of each number: it errs by 2⁻⁸ of itself at most. Half the bytes of fp32.
    int8    a block's numbers become multiples of its step, which is the largest magnitude over 127, and
            travels with them: a number errs by half a step at most, 1/254 of the block's largest. A quarter
            of the bytes, and 3 % (block-wise quantisation, as Dettmers et al. 2022 and, for gradients, ZeRO++
            by Wang et al. 2023).

A number that is not finite makes its whole block so: who looks for such gradients still finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

Tensor = torch.Tensor
WireName = Literal["bf16", "int8"]
BLOCK = 128  # numbers that share a step
_STEPS = 127  # on either side of 0
_AT_ONCE = 512  # blocks of all rows: on a CPU what is made on the way stays in its cache
_LEAST_STEP = torch.finfo(torch.float32).tiny  # smaller ones have no reciprocal: their blocks become zeros


class Wire(Protocol):
    """A format. Rows are packed each by itself, so that each can go to another rank."""

    itemsize: int
    """Bytes of a number, without what several have in common."""

    def pack(self, values: Tensor) -> Tensor:
        """values: [..., n], any floating dtype. Returns new memory, [..., p], contiguous."""
        ...

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write what `packed`, [..., p], stands for into `out`, [..., n], any floating dtype."""
        ...

    def add(self, packed: Tensor, out: Tensor) -> None:
        """Add that to `out`, [..., n], fp32."""
        ...


class _Bf16:
    itemsize = 2

    def pack(self, values: Tensor) -> Tensor:
        return values.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed)

    def add(self, packed: Tensor, out: Tensor) -> None:
        out.add_(packed)  # without a copy in fp32


class _Int8:
    """A row is the steps of its blocks in fp32, then a byte for each number, padded to a multiple of four."""

    itemsize = 1

    def pack(self, values: Tensor) -> Tensor:
        *rows, numel = values.shape
        packed = values.new_zeros((*rows, 4 * (_blocks_of(numel) + -(-numel // 4))), dtype=torch.uint8)
        for blocks, steps, codes in _fields(packed, values):
            blocks = blocks.float()
            steps.copy_(torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_()).div_(_STEPS))
            per_step = torch.where(steps < _LEAST_STEP, 0.0, steps.reciprocal())
            codes.copy_(torch.mul(blocks, per_step.unsqueeze(-1)).round_())
        return packed

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        for numbers, steps, codes in _fields(packed, out):
            numbers.copy_(codes).mul_(steps.unsqueeze(-1))

    def add(self, packed: Tensor, out: Tensor) -> None:
        for numbers, steps, codes in _fields(packed, out):
            numbers.add_(codes * steps.unsqueeze(-1))


def _fields(packed: Tensor, numbers: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(numbers [..., b, BLOCK], steps [..., b], codes like numbers): views of full blocks, some at a time,
    and of the last block if that is shorter."""
    numel = numbers.shape[-1]
    if not numel:
        return
    blocks, full = _blocks_of(numel), numel // BLOCK
    steps = packed[..., : 4 * blocks].view(torch.float32)
    codes = packed[..., 4 * blocks : 4 * blocks + numel].view(torch.int8)
    if full:
        most = full * BLOCK
        numbers_of, codes_of = _cut(numbers[..., :most], BLOCK), _cut(codes[..., :most], BLOCK)
        at_once = max(1, _AT_ONCE * numel // numbers.numel()) if numbers.device.type == "cpu" else full
        yield from zip(
            numbers_of.split(at_once, -2),
            steps[..., :full].split(at_once, -1),
            codes_of.split(at_once, -2),
            strict=True,
        )
    if full < blocks:
        rest = numel - full * BLOCK
        yield _cut(numbers[..., -rest:], rest), steps[..., full:], _cut(codes[..., -rest:], rest)


def _blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


def _cut(tensor: Tensor, length: int) -> Tensor:
    """[..., b * length] -> [..., b, length], a view."""
    return tensor.view(*tensor.shape[:-1], -1, length)


FORMATS: dict[str, Wire] = {"bf16": _Bf16(), "int8": _Int8()}
