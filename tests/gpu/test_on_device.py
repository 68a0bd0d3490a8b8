"""Code that runs only on a GPU: branches on streams, scaled losses with offload, links over Gloo."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import imece
from imece.collectives.links import measure
from tests.gpu.devices import DEVICES, run_on

WIDTH, STEPS = 512, 4
SLOW_ROUNDS = 20  # of products, so that a stream that did not wait would be ahead


class Branches(nn.Module):
    """Blocks by turns on the stream of the model and on another one, which begin side by side."""

    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.beside = beside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            if self.beside is None:
                x = (one(x) + other(x)).tanh()
                continue
            here = torch.cuda.current_stream()
            self.beside.wait_stream(here)
            x.record_stream(self.beside)
            with torch.cuda.stream(self.beside):
                there = _slowly(other(x))
            mine = one(x)
            here.wait_stream(self.beside)
            there.record_stream(here)
            x = (mine + there).tanh()
        return x


def _slowly(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(WIDTH, device=x.device)
    for _ in range(SLOW_ROUNDS):
        x = x @ eye
    return x


def branches(device: str) -> dict[str, list[float]]:
    """The losses by strategy, with the branches on one stream and on two."""
    mesh = imece.init(device=device, backend="gloo")
    found = {}
    for strategy in ("zero1", "zero2", "zero3"):
        for two in (False, True):
            torch.manual_seed(3)
            model = Branches(torch.cuda.Stream() if two and device == "cuda" else None).to(device)
            wrapped, optimizer = imece.parallelize(
                model, AdamW(model.parameters(), 1e-3), strategy, gather=strategy == "zero3"
            )
            inputs = torch.ones(64, WIDTH, device=device) * (mesh.rank + 1)
            losses = []
            for _ in range(STEPS):
                loss = wrapped(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            found[f"{strategy} {'two' if two else 'one'}"] = losses
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_branches_on_two_streams_train_as_on_one(device: str) -> None:
    for found in run_on(branches, 2, device):
        for strategy in ("zero1", "zero2", "zero3"):
            assert found[f"{strategy} two"] == pytest.approx(found[f"{strategy} one"], abs=1e-4), strategy
            assert found[f"{strategy} one"][-1] < found[f"{strategy} one"][0]


def scaled(device: str) -> dict[str, list[Any]]:
    """Losses and scales of steps of which the second overflows, with and without offload."""
    imece.init(device=device, backend="gloo")
    found: dict[str, list[Any]] = {}
    ways: list[tuple[Literal["optimizer"] | None, bool]] = [
        (None, True), ("optimizer", True), ("optimizer", False)
    ]  # fmt: skip
    for offload, unscaled in ways:
        if offload is not None and device == "cpu":
            continue  # it is for GPUs
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
        wrapped, optimizer = imece.parallelize(
            model, AdamW(model.parameters(), 1e-3, fused=True), "zero1", offload=offload
        )
        scaler = imece.GradScaler(init_scale=1024.0)
        losses: list[Any] = []
        for step in range(STEPS):
            loss = wrapped(torch.ones(8, WIDTH, device=device)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses += [float(loss.detach()), scaler.get_scale()]
        found[f"{offload}, {unscaled}"] = losses
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_losses_train_alike_with_offload(device: str) -> None:
    for found in run_on(scaled, 2, device):
        plain = found.pop("None, True")
        assert len(found) == (2 if device == "cuda" else 0)
        assert plain[1::2] == [1024.0, 512.0, 512.0, 512.0]
        assert plain[2] == pytest.approx(plain[4]) and plain[-2] < plain[0]
        for name, losses in found.items():
            assert losses == pytest.approx(plain, abs=1e-4), name


def links_over_gloo(device: str) -> float:
    mesh = imece.init(device=device, backend="gloo")
    links = measure(mesh.world_group, mesh.hosts, mesh.device)
    assert links.inside is not None
    return links.inside.bytes_per_s


@pytest.mark.parametrize("device", DEVICES)
def test_links_are_measured_between_ranks_that_share_a_gpu(device: str) -> None:
    assert all(each > 0 for each in run_on(links_over_gloo, 2, device))
