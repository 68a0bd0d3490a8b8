"""A script may say `torch.set_default_device("cuda")`: what imece makes for itself stays where it belongs.

The default here is "meta", whose tensors have no memory: whatever takes one for its own fails on it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import imece
from imece.checkpoint import Checkpoints, TrainingState, newest
from tests.ranks import run_ranks

SRC = Path(imece.__file__).parent
OF_COMMANDS = {"bench", "cli", "train"}  # a script does not call them in its own process
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
AS_TORCHS = "torch.tensor(0.0)"  # what torch's clip_grad_norm_ returns for no gradients
STEPS = 3


def test_every_tensor_names_its_device() -> None:
    unnamed = []
    for file in sorted(SRC.rglob("*.py")):
        if file.relative_to(SRC).parts[0] in OF_COMMANDS:
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=given) if (
                    name in FACTORIES and not {"device", None} & {each.arg for each in given}
                ):
                    if (text := ast.unparse(call)) != AS_TORCHS:
                        unnamed.append(f"{file.relative_to(SRC)}:{call.lineno}: {text}")
    assert not unnamed, "these lie on the default device: " + "; ".join(unnamed)


def trained(strategy: str) -> tuple[Any, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(5, 7, device="cpu"), nn.Linear(7, 5, device="cpu")) for _ in range(3))
    )
    wrapped, optimizer = imece.parallelize(model, AdamW(model.parameters(), lr=0.1), strategy)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + imece.init().rank)
        wrapped(torch.randn(4, 5, generator=generator, device="cpu")).square().mean().backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped, optimizer


def values(model: Any) -> list[Tensor]:
    with model.gathered():
        return [each.detach().clone() for each in model.module.parameters()]


def whole_and_saved(folder: str, default: str) -> list[str]:
    """All that a script does, with and without the default; which strategies differ."""
    mesh = imece.init()
    differ = []
    for strategy in ("replicate", "zero1", "zero2", "zero3"):
        expected = values(trained(strategy)[0])
        torch.set_default_device(default)
        model, optimizer = trained(strategy)
        if not all(map(torch.equal, values(model), expected)):
            differ.append(strategy)
        imece.full_optimizer_state(model, optimizer)
        state, name = TrainingState(model, [optimizer]), Path(folder) / strategy
        checkpoints = Checkpoints(name, rank=mesh.rank, world_size=mesh.world_size, alarm=differ.append)
        checkpoints.save(STEPS, state.tensors(), {}, None)
        checkpoints.finish()
        checkpoints.close()
        saved = newest(name, damaged=differ.append)
        assert saved is not None
        state.load(saved)
        if not all(map(torch.equal, values(model), expected)):
            differ.append(f"{strategy}, loaded")
        torch.set_default_device(None)
    return differ


def early_message(default: str) -> list[float]:
    """A message that comes before somebody asks for it."""
    mesh = imece.init()
    torch.set_default_device(default)
    sent = torch.full((100,), 3.0, device="cpu")
    if mesh.rank:
        imece.send(sent, 0)
        imece.barrier()
        return []
    imece.barrier()
    received = torch.empty(100, device="cpu")
    imece.recv(received, 1)
    return [float(received.min()), float(received.max())]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_default_device(tmp_path: Path, backend: str) -> None:
    env = {"IMECE_BACKEND": backend}
    assert run_ranks(whole_and_saved, 2, args=(str(tmp_path), "meta"), env=env) == [[], []]
    assert run_ranks(early_message, 2, args=("meta",), env=env) == [[3.0, 3.0], []]
