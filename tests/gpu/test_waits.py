"""In a step the host only queues work: it never waits for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

import imece
from imece.models.cross_entropy import cross_entropy
from tests.gpu.devices import DEVICES, run_on
from tests.gpu.training import batch, new_model

_WARM_UP = 3
WAYS = {
    "replicate": {}, "zero1": {}, "zero2": {"bucket_cap_mb": 0.05}, "zero3": {},
    "tokens": {"average": "tokens"},
}  # fmt: skip


def steps_without_waiting(device: str) -> dict[str, bool]:
    """Ways -> done; and whether a wait would have been noticed. torch raises for each on a GPU."""
    imece.init(device=device)
    found = {}
    for name, how in WAYS.items():
        model = new_model(device)
        strategy = "zero1" if name == "tokens" else name
        wrapped, optimizer = imece.parallelize(model, AdamW(model.parameters()), strategy, **how)  # type: ignore[arg-type]
        inputs, targets = batch(device, 0, 0)
        for step in range(_WARM_UP + 2):
            if step == _WARM_UP:
                _notice(device, "error")
            loss = cross_entropy(wrapped(inputs), targets)
            (wrapped.weigh(loss, targets.numel()) if name == "tokens" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = True
        try:
            float(loss.detach())
            noticed = False
        except RuntimeError:
            noticed = True
        _notice(device, "default")
        found[f"{name}: noticed"] = noticed
    return found


def _notice(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_does_not_wait_in_a_step(device: str) -> None:
    (found,) = run_on(steps_without_waiting, 1, device)
    for name in WAYS:
        assert found[name]
        assert found[f"{name}: noticed"] == (device == "cuda")
