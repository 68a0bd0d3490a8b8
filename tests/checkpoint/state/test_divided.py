"""Checkpoints of models with divided matrices: saved at one number of ranks, loaded at any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import AdamW, Muon

import imece
from imece.checkpoint import Checkpoints, open_checkpoint
from imece.checkpoint.files import step_folder
from imece.checkpoint.state.training_state import TrainingState
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.divided import Divided, divided_parameters, places_in_parts
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from tests.ranks import run_ranks

CONFIG = TransformerConfig(
    vocab_size=36, layers=1, width=16, heads=4, kv_heads=4, mlp_width=24, max_seq=16, tied_head=True,
    head_norms=True, out_bias=True, qkv_bias=True,
)  # fmt: skip
EXACT = 1e-12
BEFORE, AFTER = 2, 2  # steps before and after the checkpoint
SAVED: list[tuple[dict[str, int], str]] = [
    ({"tensor": 2}, "replicate"),
    ({"replicate": 2, "tensor": 2}, "zero3"),
    ({"replicate": 2, "tensor": 2}, "replicate"),
    ({"replicate": 2}, "zero1"),
]
LOADED: list[tuple[dict[str, int], str]] = [
    ({"tensor": 4}, "replicate"),
    ({"tensor": 2}, "zero2"),
    ({"replicate": 2, "tensor": 2}, "zero1"),
    ({"replicate": 2}, "zero3"),
]


def batch(step: int, share: int = 0, shares: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 36, (4, 9), generator=torch.Generator().manual_seed(step))
    tokens = tokens.chunk(shares)[share]
    return tokens[:, :-1], tokens[:, 1:]


def whole(seed: int) -> Transformer:
    model = Transformer(CONFIG).double()
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        nn.init.normal_(each, std=0.3, generator=generator)
    return model


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-2)


def train(model: nn.Module, optimizer: Any, steps: range, share: int = 0, shares: int = 1) -> Tensor:
    losses = []
    for step in steps:
        tokens, targets = batch(step, share, shares)
        loss = imece.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def wrapped(mesh: Mesh, strategy: str, seed: int) -> tuple[Any, Any]:
    model = imece.tensor_parallel(whole(seed), mesh)
    return imece.parallelize(model, adamw, strategy, mesh)


def save(axes: dict[str, int], strategy: str, folder: str) -> bool:
    mesh = imece.init(axes)
    model, optimizer = wrapped(mesh, strategy, seed=0)
    train(model, optimizer, range(BEFORE), mesh.batch_rank, mesh.batch_ranks)
    alarms: list[str] = []
    writer = Checkpoints(folder, rank=mesh.rank, world_size=mesh.world_size, alarm=alarms.append)
    writer.save(BEFORE, TrainingState(model, optimizer).tensors(), {}, None)
    done = writer.finish()
    writer.close()
    assert not alarms, alarms
    return done


def go_on(axes: dict[str, int], strategy: str, folders: list[str]) -> int:
    mesh = imece.init(axes)
    exact = whole(seed=0)
    stepper = adamw(exact.parameters())
    train(exact, stepper, range(BEFORE))
    then = {name: each.clone() for name, each in exact.named_parameters()}
    expected = train(exact, stepper, range(BEFORE, BEFORE + AFTER))
    group = mesh.data_group
    for folder in folders:
        model, optimizer = wrapped(mesh, strategy, seed=5)
        TrainingState(model, optimizer).load(open_checkpoint(Path(folder)))
        parts = divided_parameters(model.module)
        with model.gathered():
            for name, each in model.module.named_parameters():
                right = parts[name].of(then[name]) if name in parts else then[name]
                assert (each - right).abs().max() < EXACT, (folder, name)
        losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER), mesh.batch_rank, mesh.batch_ranks)
        imece.all_reduce(losses, "sum", group=group)
        worst = (losses / group.size() - expected).abs().max().item()
        assert worst < EXACT, (folder, worst)
        again, _ = wrapped(mesh, strategy, seed=6)
        assert imece.load_weights(again, folder).missing == ()
        torch.testing.assert_close(again(batch(0)[0]), exact_at(then)(batch(0)[0]), rtol=0, atol=EXACT)
    return len(folders)


def exact_at(then: dict[str, Tensor]) -> Transformer:
    model = whole(seed=1)
    model.load_state_dict(then)
    return model


def _ranks(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for axes, strategy in SAVED:
        folder = str(tmp_path_factory.mktemp("divided"))
        assert run_ranks(save, _ranks(axes), args=[axes, strategy, folder]) == [True] * _ranks(axes)
        found.append(str(step_folder(Path(folder), BEFORE)))
    return found


@pytest.mark.parametrize(("axes", "strategy"), LOADED)
def test_any_other_number_of_ranks_goes_on(axes: dict[str, int], strategy: str, folders: list[str]) -> None:
    assert run_ranks(go_on, _ranks(axes), args=[axes, strategy, folders]) == [len(SAVED)] * _ranks(axes)


def test_one_process_reads_the_whole_model(folders: list[str]) -> None:
    exact = whole(seed=0)
    train(exact, adamw(exact.parameters()), range(BEFORE))
    names = []
    for folder in folders:
        saved = open_checkpoint(Path(folder))
        names.append(sorted(saved.names()))
        model = whole(seed=9)
        loaded = imece.load_weights(model, saved)
        assert loaded.missing == loaded.unexpected == ()
        for name, each in model.named_parameters():
            assert (each - exact.get_parameter(name)).abs().max() < EXACT, (folder, name)
        out = "model/blocks.0.attention.out.weight"
        assert torch.equal(saved.slice(out, 5, 37), saved.tensor(out).view(-1)[5:37])
        with pytest.raises(UserError, match="no tensor 'model/nothing'"):
            saved.shape("model/nothing")
    assert all(each == names[0] for each in names)


def test_the_files_have_the_parts_by_name(folders: list[str]) -> None:
    manifest = json.loads((Path(folders[0]) / "manifest.json").read_text())
    down = {name: shape for name, (_, shape) in manifest["tensors"].items() if "mlp.down" in name}
    assert down["model/blocks.0.mlp.down.weight@dim1-1of2"] == [16, 12]
    assert down["optimizer/blocks.0.mlp.down.weight/exp_avg@dim1-0of2"] == [16, 12]
    with safe_open(Path(folders[0]) / "rank-00001.safetensors", "pt") as file:
        part = file.get_tensor("model/blocks.0.mlp.down.weight@dim1-1of2")
    read = open_checkpoint(Path(folders[0])).tensor("model/blocks.0.mlp.down.weight")
    assert torch.equal(read[:, 12:], part)
    assert not any(
        "@" in name for name in json.loads((Path(folders[3]) / "manifest.json").read_text())["tensors"]
    )


@pytest.mark.parametrize(("shape", "dim"), [((6, 4), 0), ((6, 4), 1), ((8,), 0), ((3, 4, 2), 1)])
def test_places(shape: tuple[int, ...], dim: int) -> None:
    count = 2
    tensor = torch.arange(math.prod(shape)).view(shape)
    parts = [Divided(dim, at, count).of(tensor).flatten() for at in range(count)]
    flat = tensor.flatten()
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            found = [parts[i][a : a + n] for i, a, n in places_in_parts(shape, dim, count, start, stop)]
            assert torch.equal(torch.cat([flat[:0], *found]), flat[start:stop])
    for index, part in enumerate(parts):
        divided = Divided(dim, index, count)
        own = divided.part_shape(shape)
        for start in range(len(part) + 1):
            places = list(divided.places(own, start, len(part)))
            assert torch.equal(torch.cat([flat[:0], *(flat[a : a + n] for a, n in places)]), part[start:])


def refused() -> None:
    mesh = imece.init({"tensor": 2})
    with pytest.raises(ValueError, match=r"Muon may look at whole matrices, and of blocks\.0\.attention\.q"):
        model = imece.tensor_parallel(whole(0), mesh)
        matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]
        imece.parallelize(model, Muon(matrices, lr=1e-2), "zero1", mesh)
    model, optimizer = wrapped(mesh, "replicate", 0)
    with pytest.raises(ValueError, match="each rank has a part of the base"):
        TrainingState(model, optimizer, frozen=False)
    train(model, optimizer, range(1))
    query = model.module.blocks[0].attention.q.weight
    optimizer.state[query]["rows"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"rows is \[3\], of a part \[8, 16\] of a matrix"):
        TrainingState(model, optimizer).tensors()


def test_what_cannot_be_put_together_is_refused() -> None:
    run_ranks(refused, 2)
