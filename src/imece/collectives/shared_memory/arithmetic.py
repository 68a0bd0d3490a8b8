"""What is computed when ranks meet: one reduction over the ranks' pieces, always in rank order.

The order makes bits equal: ((x0 + x1) + x2) + ... for every element, whichever rank computes it, in whichever
strategy. Half precision is summed in fp32 and rounded once, so the error does not grow with the number of
ranks; averages of integers are summed in int64 and truncated toward zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "premul_sum": torch.add,  # of values that are multiplied before they come here
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_ROUNDS = ("sum", "premul_sum", "avg", "product")
_HALVES = (torch.float16, torch.bfloat16)
Scratch = Callable[[int, torch.dtype], torch.Tensor]
"""(n, dtype) -> memory of this process, [n], which the next call may return again."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """`op` over pieces of `dtype`."""

    op: str
    binary: Callable[..., torch.Tensor]
    dtype: torch.dtype
    within: torch.dtype  # dtype of the running result

    def __call__(
        self, pieces: Sequence[torch.Tensor], out: torch.Tensor, scratch: Scratch, in_place: bool
    ) -> None:
        """out = op over pieces, in their order.

        pieces: one a rank, each [n] of `dtype`. out: [n]. scratch: for the running result, unless that is in
        `out`. in_place: `out` may hold the running result: it is none of the pieces, except perhaps the first
        or second.
        """
        if len(pieces) == 1:
            if out.data_ptr() != pieces[0].data_ptr():
                out.copy_(pieces[0])
            return
        if self.within is self.dtype:
            result = out if in_place else scratch(out.numel(), self.within)
            self.binary(pieces[0], pieces[1], out=result)
            rest = pieces[2:]
        else:
            result = scratch(out.numel(), self.within)
            result.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            self.binary(result, piece, out=result)
        if self.op == "avg":
            if result.dtype.is_floating_point or result.dtype.is_complex:
                result.div_(len(pieces))
            else:
                result.div_(len(pieces), rounding_mode="trunc")
        if result is not out:
            out.copy_(result)


@functools.cache
def reduction(op: str, dtype: torch.dtype) -> Reduction:
    """The reduction `op` (sum, premul_sum, avg, product, min, max, band, bor, bxor) over `dtype`.

    ValueError if torch has no such operation on that dtype, before anything is sent. Which those are (a sum
    of uint16, of float8) changes with torch, so it is tried out.
    """
    if op not in BINARY:
        raise ValueError(f"the shm backend cannot reduce with {op!r}; it knows {', '.join(BINARY)}")
    floating = dtype.is_floating_point or dtype.is_complex
    if op.startswith("b") and floating:
        raise ValueError(f"{op} works on integers, not on {dtype}")
    if op == "premul_sum" and not floating:
        raise ValueError(f"{op} multiplies by a fraction, which {dtype} does not hold")
    if op in ("min", "max") and dtype.is_complex:
        raise ValueError(f"complex numbers have no order: {op} of {dtype} does not exist")
    within = dtype
    if op in _ROUNDS and dtype in _HALVES:
        within = torch.float32
    elif op == "avg" and not floating:
        within = torch.int64
    how = Reduction(op, BINARY[op], dtype, within)
    one = torch.zeros(1, dtype=dtype, device="cpu")
    try:
        how([one, one, one], torch.empty_like(one), lambda _, dtype: torch.empty_like(one, dtype=dtype), True)
    except RuntimeError as error:
        raise ValueError(
            f"the shm backend cannot reduce {dtype} with {op!r}: torch has no such operation on CPUs; "
            "convert the tensor first"
        ) from error
    return how
