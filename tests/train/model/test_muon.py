"""Matrices that are iterated together get the same update as one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from imece.train.model import muon

SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16), (24, 8), (8, 24)]
HOW: dict[str, Any] = {
    "weight_decay": 0.1, "momentum": 0.9, "ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_steps": 5,
    "eps": 1e-7,
}  # fmt: skip


def matrices() -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("most_bytes", [0, 2 * 8 * 24 * 2, 2**20])
def test_together_they_go_as_one_by_one(
    nesterov: bool, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "_AT_ONCE_BYTES", most_bytes)
    alone, together = matrices(), matrices()
    torchs = torch.optim.Muon(alone, lr=0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **HOW)
    momenta = [torch.zeros_like(each) for each in together]
    draw = torch.Generator().manual_seed(2)
    groups = list(muon.alike(together))
    assert sorted(at for group in groups for at in group) == list(range(len(SHAPES)))
    assert len(groups) == {0: 6, 2 * 8 * 24 * 2: 4, 2**20: 3}[most_bytes]
    for _ in range(3):
        gradients = [torch.randn(shape, generator=draw) for shape in SHAPES]
        for one, gradient in zip(alone, gradients, strict=True):
            one.grad = gradient
        torchs.step()
        with torch.no_grad():
            for group in groups:
                given = [[every[at] for at in group] for every in (together, gradients, momenta)]
                rate = torch.optim._muon._adjust_lr(0.02, "match_rms_adamw", given[0][0].shape)
                muon.update(*given, lr=0.02, rate=rate, nesterov=nesterov, **HOW)
    for one, other, momentum in zip(alone, together, momenta, strict=True):
        assert torch.equal(torchs.state[one]["momentum_buffer"], momentum)
        moved = (one - matrices()[0]).abs().max() if one.shape == SHAPES[0] else torch.tensor(1.0)
        assert moved > 0.01
        assert torch.allclose(one, other, atol=2e-3)  # bf16 rounds by 0.4 % of steps of 0.02


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_is_that_of_torchs(device: str) -> None:
    found = []
    for kind in (torch.optim.Muon, muon.Muon):
        parameters = [nn.Parameter(each.detach().to(device)) for each in matrices()]
        optimizer = kind(parameters, lr=0.02, adjust_lr_fn="match_rms_adamw", **HOW)
        draw = torch.Generator().manual_seed(2)
        for _ in range(3):
            for each in parameters:
                each.grad = torch.randn(each.shape, generator=draw).to(device)
            optimizer.step()
        found.append([*parameters, *(optimizer.state[each]["momentum_buffer"] for each in parameters)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=2e-3) if device == "cuda" else torch.equal(one, other)
