"""A model on the meta device gets memory and values unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece.data_parallel.sharding.freed import FreedParameter
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.data_parallel.sharding.blocks import (
    WIDTH,
    Small,
    Twice,
    assert_freed,
    plain,
    wrap,
)


class Scale(nn.Module):
    """Nothing fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Scaled(Small):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = Scale()


def from_meta(group: dist.ProcessGroup) -> None:
    most = 0

    def watch() -> Callable[[nn.Module], None]:
        def init(module: nn.Module) -> None:
            nonlocal most
            whole = {id(each): each for each in model.parameters() if not each.is_meta}
            most = max(most, sum(each.untyped_storage().nbytes() for each in heap(whole.values())))
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]

        return init

    found = []
    for options in ({"gather": True}, {"gather": False}, {"strategy": "zero1"}, {"init": watch()}):
        with torch.device("meta"):
            model = Small(tied="init" not in options)
        torch.manual_seed(dist.get_rank())
        wrapped, optimizer = wrap(model, group, **{"strategy": "zero3"} | options)
        assert not any(each.is_meta for each in wrapped.parameters())
        assert next(model.parameters()) is model.embed.weight
        state = {name: each.clone() for name, each in wrapped.state_dict().items()}
        assert all(bool(each.isfinite().all()) and float(each.std()) < 2 for each in state.values())
        digests = [None] * group.size()
        dist.all_gather_object(
            digests, {name: float(each.double().sum()) for name, each in state.items()}, group
        )
        assert all(each == digests[0] for each in digests), "ranks have other values"
        assert state["module.blocks.0.up.weight"].ne(state["module.blocks.1.up.weight"]).any()
        losses = list(plain(wrapped, optimizer, 3))
        assert losses[-1] < losses[0] * 1.5
        found.append(wrapped)
    assert found[0].module.head.weight is found[0].module.embed.weight
    largest = max(
        sum(4 * each.numel() for each in block.parameters()) for block in [model.blocks[0], model.head]
    )
    assert 0 < most <= 3 * largest, f"{most} bytes were there at a time; a block has {largest}"


def heap(parameters: Any) -> list[torch.Tensor]:
    return [each for each in parameters if not isinstance(each, FreedParameter)]


def from_meta_same_values(group: dist.ProcessGroup) -> None:
    """The values depend on rank 0's seed, not on the strategy."""
    states = []
    for strategy, options in (("zero3", {}), ("zero3", {"gather": False}), ("zero1", {})):
        with torch.device("meta"):
            model = Twice()  # the root has what its blocks share
        torch.manual_seed(40 + dist.get_rank())
        wrapped, _ = wrap(model, group, strategy, **options)
        states.append({name: each.clone() for name, each in wrapped.state_dict().items()})
    for other in states[1:]:
        assert all(torch.equal(each, other[name]) for name, each in states[0].items())


def from_meta_frozen(group: dist.ProcessGroup) -> None:
    """The root has nothing to train, and some of a block neither."""
    with torch.device("meta"):
        model = Small()
    for part in (model.embed, model.first, model.head, model.blocks[1].norm):
        part.requires_grad_(False)
    torch.manual_seed(dist.get_rank())
    wrapped, optimizer = wrap(model, group)
    assert not any(each.is_meta for each in model.parameters())
    assert_freed(wrapped)
    assert all(isinstance(each, FreedParameter) for each in model.parameters())
    with wrapped.gathered():
        embed = model.embed.weight.clone()
        dist.broadcast(embed, 0)
        assert torch.equal(embed, model.embed.weight) and embed.std() > 0.5
    list(plain(wrapped, optimizer, 2))
    assert torch.equal(embed, wrapped.state_dict()["module.embed.weight"])


def from_meta_unfilled(group: dist.ProcessGroup) -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(
        ValueError,
        match=r"^blocks.1.norm.by: on the meta device, and blocks.1.norm \(Scale\) has no reset_parameters",
    ):
        wrap(model, group)
    assert all(each.is_meta for each in model.parameters())
    with pytest.raises(ValueError, match=r"^blocks.1.norm.by was on the meta device, and init\(\) did not"):
        wrap(model, group, init=lambda module: getattr(module, "reset_parameters", lambda: None)())
    with torch.device("meta"):
        other = Small()
    with pytest.raises(ValueError, match="no model on the meta device"):
        wrap(other, group, "replicate")
    other = Small()
    other.head.to("meta")
    with pytest.raises(ValueError, match="on the meta device, without memory, and others are not: make all"):
        wrap(other, group)


CHECKS: dict[str, Check] = {
    "from meta": from_meta,
    "from meta, the same values": from_meta_same_values,
    "from meta, frozen": from_meta_frozen,
    "from meta, unfilled": from_meta_unfilled,
}


@pytest.mark.parametrize(
    "job",
    jobs(__name__, CHECKS, (2, "gloo"))
    + jobs(__name__, ["from meta"], (2, "shm"))
    + slow(jobs(__name__, ["from meta"], (3, "gloo"))),
)
def test_from_meta(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
