"""Parameters of a subclass that keeps its values in other tensors, as quantising libraries make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece import DistributedDataParallel, MixedPrecision, parallelize
from imece.errors import MismatchError
from tests.data_parallel.checks import Check, Job, jobs, passed

WAYS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "FULL_SHARD": {"gather": True},
    "ZeRO-3": {"precision": MixedPrecision(torch.bfloat16, torch.float32)},
}


class Quantised(torch.Tensor):
    """A matrix in 8 bits with one scale a row. It can be copied and cast, but not viewed."""

    codes: torch.Tensor  # int8 [rows, columns]
    scale: torch.Tensor  # [rows, 1]

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Quantised:
        scale = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Quantised:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].codes, args[0].scale.to(kwargs["dtype"]))
        raise NotImplementedError(f"Quantised has no {func}")


class Adapted(nn.Module):
    """A quantised layer, with an adapter beside it."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantised.of(torch.randn(8, 8)), requires_grad=trained)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.codes * self.weight.scale  # type: ignore[attr-defined]
        out: torch.Tensor = x @ weight.t() + self.up(self.down(x))
        return out


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of a few steps, all ranks with the same samples."""
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        dtype = next(each.dtype for each in model.parameters() if each.requires_grad)
        loss = model(x.to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen(group: dist.ProcessGroup) -> None:
    """Rank 0's codes and scales are everybody's, and adapters train as on one process."""
    for way, options in WAYS.items():
        torch.manual_seed(0)
        plain = Adapted()
        trained = [each for each in plain.parameters() if each.requires_grad]
        expected = losses_of(plain, torch.optim.AdamW(trained, lr=0.1))
        torch.manual_seed(dist.get_rank(group))
        model = Adapted()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
        wrapped, optimizer = parallelize(model, optimizer, way, group, **options)
        assert isinstance(model.weight, Quantised)
        assert torch.equal(model.weight.codes, plain.weight.codes), way  # type: ignore[attr-defined]
        assert model.weight.dtype == model.weight.scale.dtype, way
        close = 0.1 if "precision" in options else 1e-5
        assert losses_of(wrapped, optimizer) == pytest.approx(expected, rel=close), way


def trained(group: dist.ProcessGroup) -> None:
    """Parts of it cannot be; where it is whole, it is looked at where its values are."""
    model = Adapted(trained=True)
    optimizer = torch.optim.SGD(model.parameters())
    for way in ("zero1", "zero3"):
        with pytest.raises(ValueError, match=r"parameter weight is of the class Quantised.*'replicate'"):
            parallelize(model, optimizer, way, group)
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.check_parameters()
    if dist.get_rank(group) == 1:
        model.weight.codes[3, 4] ^= 1  # type: ignore[attr-defined]
    with pytest.raises(MismatchError, match="drifted apart: weight"):
        wrapped.check_parameters()


CHECKS: dict[str, Check] = {"frozen": frozen, "trained": trained}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm")))
def test_tensor_subclasses(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
