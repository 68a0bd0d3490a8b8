"""What "sum", "avg", "min", "max" and "product" mean for each dtype, on backends that know only some of them.

`prepared` gives a flat buffer and one of the four operations that every backend has; then comes the
collective; `landed` puts the result where it belongs. shm needs neither: its engine knows all of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from imece.collectives.schedules import nearest
from imece.collectives.shared_memory.tensors import check_dense, plain

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_OF_BOOL = {"sum": "max", "max": "max", "product": "min", "min": "min", "avg": "min"}


def op_name(op: object) -> str:
    """The name of a reduction given by name or as torch's ReduceOp. ValueError for any other."""
    if isinstance(op, str):
        if op in TORCH_OPS:
            return op
        raise ValueError(f"unknown reduction {op!r}{nearest(op, [*TORCH_OPS])}")
    for name, known in TORCH_OPS.items():
        if known == op:
            return name
    raise ValueError(f"unknown reduction {op}: one of {', '.join(TORCH_OPS)}")


def prepared(tensor: torch.Tensor, op: str, world_size: int) -> tuple[torch.Tensor, str]:
    """(buffer, op): what to reduce, flat and contiguous, and with which of sum, min, max, product.

    The buffer shares memory with a contiguous tensor wherever possible. An average becomes a sum: of int64
    for integers (exact unless it overflows), of quotients for fp16 (a sum of gradients easily passes its
    65,504). bool travels as uint8: some backends would add True and True to 2, which is no bool. Sum and max
    mean "any", the others "all".
    """
    flat = flattened(tensor)
    if tensor.dtype == torch.bool:
        return flat.view(torch.uint8), _OF_BOOL[op]
    if op != "avg":
        return flat, op
    if tensor.dtype == torch.float16:
        return flat.div(world_size), "sum"
    if not _divides(tensor.dtype):
        return flat.to(torch.int64), "sum"
    return flat, "sum"


def landed(buffer: torch.Tensor, tensor: torch.Tensor, op: str, world_size: int) -> torch.Tensor:
    """Write the reduced buffer into `tensor` (as many elements), and return that. op: the one asked for.

    Integers are divided with truncation toward zero.
    """
    if tensor.dtype == torch.bool:
        buffer = buffer.view(torch.bool)
    elif op == "avg" and not _divides(tensor.dtype):
        buffer = buffer.div(world_size, rounding_mode="trunc")
    elif op == "avg" and tensor.dtype != torch.float16:
        buffer.div_(world_size)
    if not shares_memory(buffer, tensor):
        tensor.copy_(buffer.view(tensor.shape))
    return tensor


def _divides(dtype: torch.dtype) -> bool:
    """Whether quotients have this dtype too; those of integers are truncated."""
    return dtype.is_floating_point or dtype.is_complex


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, 1D with stride 1: the tensor's own memory if it is contiguous and its values are
    its bytes (those of `z.conj()` are not), else a copy.

    view(-1) would not do: a single element is contiguous with any stride, and such a tensor has no view as
    bytes. ValueError for a sparse tensor.
    """
    check_dense(tensor)
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.dim() == 1 and tensor.stride(0) == 1 and not (tensor.requires_grad or lazy):
        return tensor
    tensor = plain(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def shares_memory(flat: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `flat` is `tensor`'s own memory, seen flat (and perhaps as another dtype of that size)."""
    return flat is tensor or (flat.data_ptr() == tensor.data_ptr() and tensor.is_contiguous())
