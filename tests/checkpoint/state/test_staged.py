"""Checkpoints of models cut into stages: saved with one number of stages, loaded with any other."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import imece
from imece.checkpoint import Checkpoints, open_checkpoint
from imece.checkpoint.files import step_folder
from imece.checkpoint.state.training_state import TrainingState
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.divided import divided_parameters
from imece.models.transformer import Transformer
from tests.model_parallel.test_cutting import config
from tests.ranks import run_ranks

EXACT = 1e-12
BEFORE, AFTER, LR = 1, 1, 3e-3  # steps before and after the checkpoint, and what they are made with after it
SAVED: list[tuple[dict[str, int], str, str]] = [
    ({"pipeline": 2, "replicate": 2}, "interleaved", "zero1"),
    ({"pipeline": 2, "tensor": 2}, "1f1b", "zero1"),
    ({"replicate": 2}, "1f1b", "zero2"),
]
LOADED: list[tuple[dict[str, int], str, str]] = [
    ({"pipeline": 4}, "gpipe", "replicate"),
    ({"replicate": 2}, "1f1b", "zero2"),
]


class Counted(nn.Module):
    """Has a buffer, which changes, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.note = "none"

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(x))

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def whole(seed: int = 0) -> Transformer:
    shape = config(vocab_size=12, kv_heads=2, tied_head=True)
    return Transformer(shape, generator=torch.Generator().manual_seed(seed)).double()


def adamw(model: nn.Module) -> AdamW:
    """In two groups."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    groups = {0.1: matrices, 0.0: vectors}
    return AdamW([{"params": each, "weight_decay": decay} for decay, each in groups.items()], lr=1e-2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(12, (8, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return imece.cross_entropy(output, targets)


def set_lr(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = LR * (1 + group["weight_decay"])


def one_rank(steps: int) -> dict[str, Tensor]:
    model = whole()
    optimizer = adamw(model)
    for step in range(steps):
        if step == BEFORE:
            set_lr(optimizer)
        loss_of(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach() for name, each in model.named_parameters()}


def made(mesh: Mesh, schedule: str, strategy: str, seed: int) -> tuple[Any, Any, Any]:
    """A pipeline, also of one stage; its wrapped part and optimizer."""
    model = imece.tensor_parallel(whole(seed), mesh)
    pipeline = imece.Pipeline(model, mesh, micro_batches=4, schedule=schedule, loss=loss_of)
    return pipeline, *imece.parallelize(pipeline.part, adamw(pipeline.part), strategy, mesh)


def train(pipeline: Any, optimizer: Optimizer, steps: range, mesh: Mesh) -> None:
    for step in steps:
        inputs, targets = (each.chunk(mesh.batch_ranks)[mesh.batch_rank] for each in batch(step))
        pipeline.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()


def write(state: TrainingState, mesh: Mesh, folder: str) -> bool:
    alarms: list[str] = []
    writer = Checkpoints(folder, rank=mesh.rank, world_size=mesh.world_size, alarm=alarms.append)
    writer.save(BEFORE, state.tensors(), {}, None)
    done = writer.finish()
    writer.close()
    assert not alarms, alarms
    return done


def save(axes: dict[str, int], schedule: str, strategy: str, folder: str) -> bool:
    mesh = imece.init(axes)
    pipeline, part, optimizer = made(mesh, schedule, strategy, seed=0)
    train(pipeline, optimizer, range(BEFORE), mesh)
    set_lr(optimizer)
    return write(TrainingState(part, optimizer), mesh, folder)


def go_on(axes: dict[str, int], schedule: str, strategy: str, folders: list[str]) -> int:
    warnings.simplefilter("error", UserWarning)
    mesh = imece.init(axes)
    expected = one_rank(BEFORE + AFTER)
    for folder in folders:
        pipeline, part, optimizer = made(mesh, schedule, strategy, seed=5)
        TrainingState(part, optimizer).load(open_checkpoint(Path(folder)))
        assert {group["lr"] for group in optimizer.param_groups} == {LR, LR * 1.1}
        train(pipeline, optimizer, range(BEFORE, BEFORE + AFTER), mesh)
        parts = divided_parameters(part.module)
        with part.gathered():
            for name, each in part.module.named_parameters():
                right = parts[name].of(expected[name]) if name in parts else expected[name]
                assert (each - right).abs().max() < EXACT, (folder, name)
        other, _, _ = made(mesh, schedule, strategy, seed=7)
        imece.load_weights(other.part, folder)
    return len(folders)


def group_of_the_last_stage(folder: str) -> None:
    """Only the last layer's bias is in a group of its own."""
    mesh = imece.init({"pipeline": 2})
    pipeline = imece.Pipeline(counted(), mesh, micro_batches=2, loss=nn.functional.mse_loss)
    named = dict(pipeline.part.named_parameters())
    alone = {name: each for name, each in named.items() if name == "3.layer.bias"}
    groups = [{"params": [named[name] for name in named if name not in alone]}, {"params": [*alone.values()]}]
    part, optimizer = imece.parallelize(pipeline.part, AdamW(groups, lr=0.1), "replicate", mesh)
    state = TrainingState(part, optimizer)
    optimizer.param_groups[1]["lr"] = LR
    assert write(state, mesh, folder)
    optimizer.param_groups[1]["lr"] = 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        state.load(open_checkpoint(step_folder(Path(folder), BEFORE)))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, LR]


def test_a_stage_has_no_parameter_of_a_group(tmp_path: Path) -> None:
    run_ranks(group_of_the_last_stage, 2, args=[str(tmp_path)], backend=None)


def counted(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Counted() for _ in range(layers)))


def beside_parameters(folder: str) -> None:
    mesh = imece.init({"pipeline": 2})
    make = partial(imece.Pipeline, mesh=mesh, micro_batches=2, loss=nn.functional.mse_loss)
    part, optimizer = imece.parallelize(make(counted()).part, partial(AdamW, lr=0.1), "replicate", mesh)
    for name, module in part.module.named_children():
        assert isinstance(module, Counted)
        module.seen.fill_(int(name) + 1)
        module.note = f"of {name}"
    assert write(TrainingState(part, optimizer), mesh, folder)
    saved = open_checkpoint(step_folder(Path(folder), BEFORE))
    again, stepper = imece.parallelize(
        make(counted(), cuts=[1]).part, partial(AdamW, lr=0.1), "replicate", mesh
    )
    TrainingState(again, stepper).load(saved)
    for name, module in again.module.named_children():
        assert isinstance(module, Counted)
        assert (module.seen.item(), module.note) == (int(name) + 1, f"of {name}")
    longer, stepper = imece.parallelize(make(counted(3)).part, partial(AdamW, lr=0.1), "replicate", mesh)
    with pytest.raises(UserError, match=r"is of another model: it has 3\."):
        TrainingState(longer, stepper).load(saved)
    with pytest.raises(ValueError, match="divided along the axis tensor or pipeline each rank has a part"):
        TrainingState(part, optimizer, frozen=False)


def test_buffers_and_extra_states_come_from_their_stage(tmp_path: Path) -> None:
    run_ranks(beside_parameters, 2, args=[str(tmp_path)], backend=None)
    model = counted()
    imece.load_weights(model, step_folder(tmp_path, BEFORE))
    assert [module.note for module in model] == ["of 0", "of 1", "of 2", "of 3"]


def test_saved_at_some_stages_loaded_at_others(tmp_path: Path) -> None:
    folders = []
    for at, (axes, schedule, strategy) in enumerate(SAVED):
        folder = str(tmp_path / str(at))
        ranks = math.prod(axes.values())
        assert all(run_ranks(save, ranks, args=[axes, schedule, strategy, folder], backend=None))
        folders.append(str(step_folder(Path(folder), BEFORE)))
    for axes, schedule, strategy in LOADED:
        ranks = math.prod(axes.values())
        done = run_ranks(go_on, ranks, args=[axes, schedule, strategy, folders], backend=None)
        assert done == [len(folders)] * ranks
    expected = one_rank(BEFORE)
    for folder in folders:
        names = open_checkpoint(Path(folder)).names()
        assert {each for each in names if each.startswith("model/")} == {f"model/{each}" for each in expected}
        model = whole(seed=9)
        imece.load_weights(model, folder)
        assert all((model.state_dict()[name] - each).abs().max() < EXACT for name, each in expected.items())
