"""A step that is repeated does not do twice what it has already done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from imece.membership.block import Block
from tests.membership import two_updates
from tests.train.command import in_fork, launched


def test_a_step_of_two_updates_made_again(tmp_path: Path) -> None:
    """Deaths before the first update, between both, where a part is frozen, and after them in an evaluation,
    beside a collective of the script's."""
    status, _, err = in_fork(launched, str(tmp_path), "--ranks", "4", two_updates.__file__, str(tmp_path))
    assert status == 0, err
    assert err.count("was killed by signal 9") == len(two_updates.DEATHS), err

    assert (tmp_path / "begun").read_text() == "by 4\n", "by no replacement"

    alone = two_updates.Networks()
    steppers = two_updates.optimizers(alone)
    for number in range(two_updates.STEPS):
        two_updates.step(alone, steppers, number, lambda _: None)
    ends = [json.loads(file.read_text()) for file in tmp_path.glob("member-*.json")]
    assert ends
    for end in ends:
        for name, each in alone.state_dict().items():
            assert end[name] == pytest.approx(each.double().flatten().tolist(), rel=1e-12), name


def made() -> tuple[nn.Module, torch.optim.Optimizer, Block]:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, Block(model, [optimizer])


def run(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.arange(8.0).view(4, 2)).sum().backward()


def test_an_update_that_was_made_is_passed_over_once() -> None:
    model, optimizer, block = made()
    weight = model.get_parameter("1.weight")
    run(model)
    optimizer.step()
    assert block.updates == [1]
    block.take_back()
    block.begin([1])
    kept = {name: each.clone() for name, each in model.named_parameters()}
    moments = optimizer.state[weight]["exp_avg"].clone()
    run(model)
    gradient = weight.grad
    optimizer.step()
    assert all(torch.equal(each, kept[name]) for name, each in model.named_parameters())
    assert torch.equal(optimizer.state[weight]["exp_avg"], moments)
    assert weight.grad is gradient, "to be looked at"
    optimizer.step()
    assert block.updates == [2] and not torch.equal(weight, kept["1.weight"])


def test_updates_are_counted_by_optimizer() -> None:
    """A scaler has left out the first one's; when the step is made again its gradients are finite."""
    one, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([each], lr=1.0) for each in (one, other)]
    block = Block(nn.Module(), optimizers)
    other.grad = torch.ones(1)
    optimizers[1].step()
    block.take_back()
    block.begin(block.updates)
    for parameter, optimizer in zip((one, other), optimizers, strict=True):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert (one.item(), other.item()) == (-1.0, -1.0)


def test_buffers_begin_as_they_were() -> None:
    """Of a rank that joins too, which has begun no step."""
    model, _, block = made()
    norm = model.get_submodule("0")
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    mean = norm.running_mean
    run(model)
    assert norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 1
    norm.running_mean = norm.running_mean + 1.0  # another tensor in its place
    block.take_back()
    assert norm.running_mean is mean and not mean.any() and int(norm.num_batches_tracked) == 0


def test_gradients_put_aside_for_an_update_that_fails_belong_to_nobody() -> None:
    model, optimizer, block = made()
    run(model)
    block.begin([1])

    def fails(*_: object) -> None:
        raise RuntimeError("in a hook")

    optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in a hook"):
        optimizer.step()
    block.take_back()
    assert model.get_parameter("1.weight").grad is None and block.updates == [1]
