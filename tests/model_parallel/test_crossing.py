"""Moves between placements give the same as DTensor's own `redistribute`, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import imece
from imece.model_parallel.crossing import cross
from tests.ranks import run_ranks

OLD = torch.__version__ < torch.torch_version.TorchVersion("2.13")  # 2.11's DTensor loses them, of gradients
# Before, after, and how the gradient is placed.
CROSSINGS: list[tuple[Placement, Placement, Placement | None]] = [
    (Replicate(), Replicate(), Partial()),
    (Replicate(), Replicate(), None),
    (Partial(), Replicate(), None),
    *((Shard(dim), Replicate(), Partial()) for dim in range(3)),
    *((Shard(dim), Replicate(), None) for dim in range(3)),
    *((Partial(), Shard(dim), None) for dim in range(3)),
    *((Replicate(), Shard(dim), None) for dim in range(3)),
]


def as_dtensor_does() -> int:
    mesh = imece.init({"replicate": 1, "tensor": 2})
    axis, group, generator = mesh.device_mesh["tensor"], mesh.group("tensor"), torch.Generator()
    generator.manual_seed(mesh.rank)
    compared = 0
    shape: tuple[int, ...]
    for shape, dtype, (before, after, placed) in product(
        [(1, 4, 6), (2, 4, 6)], [torch.float64, torch.bfloat16], CROSSINGS
    ):
        if isinstance(before, Replicate):  # the same on all ranks
            generator.manual_seed(7)
        if Shard(0) in (before, after):
            shape = (2, *shape[1:])
        lengths = [*shape[:-1], shape[-1] * 2]  # of which a part is taken: not contiguous
        x = (
            torch.randn(lengths, generator=generator, dtype=torch.float64)
            .to(dtype)[..., ::2]
            .requires_grad_()
        )

        def theirs(
            x: Tensor,
            before: Placement = before,
            after: Placement = after,
            placed: Placement | None = placed,
        ) -> Tensor:
            told = DTensor.from_local(x, axis, [before], run_check=False).redistribute(axis, [after])
            return told.to_local(grad_placements=None if placed is None else [placed])

        found, expected = cross(x, group, before, after, placed), theirs(x)
        case = f"{before} {after} {placed} {shape} {dtype}"
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=case)
        if not isinstance(placed, Partial):
            generator.manual_seed(8)
        seed = torch.randn(found.shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        pairs = [torch.autograd.grad(each, x, seed, create_graph=True) for each in (found, expected)]
        torch.testing.assert_close(*pairs, rtol=0, atol=0, msg=case)
        (ours_once,), (theirs_once,) = pairs
        (again,) = torch.autograd.grad(ours_once.sum(), seed)
        theirs_again: Tensor | None = torch.autograd.grad(theirs_once.sum(), seed, allow_unused=OLD)[0]
        if theirs_again is None:
            theirs_again = again  # nothing to compare with
        elif isinstance(before, Partial):  # each rank has used it for its addend; DTensor forgets the others'
            theirs_again = theirs_again * axis.size()
        torch.testing.assert_close(again, theirs_again, rtol=0, atol=0, msg=f"twice: {case}")
        compared += 1
    with FakeTensorMode():  # shapes alone, without the others
        if mesh.rank == 0:
            assert cross(torch.empty(2, 4, 6), group, Shard(1), Replicate()).shape == (2, 8, 6)
            assert cross(torch.empty(2, 4, 6), group, Partial(), Shard(1)).shape == (2, 2, 6)
            assert cross(torch.empty(2, 4, 6), group, Partial(), Replicate()).shape == (2, 4, 6)
    return compared


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_as_dtensor_does(backend: str) -> None:
    assert run_ranks(as_dtensor_does, 2, backend=backend) == [4 * len(CROSSINGS)] * 2
