"""A frozen base: left out of checkpoints on request, recognised by its digests, also quantised."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW, Optimizer

import imece
from imece.checkpoint import Checkpoints, Saved, TrainingState, load_weights, newest, open_checkpoint
from imece.checkpoint.files import step_folder
from imece.checkpoint.state import base
from imece.checkpoint.state.base import Digests
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.membership.behind import catch_up
from tests.checkpoint.crew import crew
from tests.data_parallel.test_tensor_subclasses import Quantised
from tests.ranks import run_ranks

STRATEGIES = ("replicate", "zero2", "zero3", "zero3 gathered")
WIDTH = 64


class Coded(nn.Module):
    """A frozen layer of all sorts: plain, quantised in one tensor, with scales that are no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.quantised = nn.Parameter(Quantised.of(torch.randn(WIDTH, WIDTH)), requires_grad=False)
        self.codes = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)
        self.scales = torch.rand(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        quantised: Any = self.quantised
        out: Tensor = x @ self.weight @ (quantised.codes * quantised.scale) * (self.codes * self.scales)
        return out

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scales"] = self.scales.detach()


class Adapted(nn.Module):
    def __init__(self, base: int, adapters: int) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = Coded()
        torch.manual_seed(adapters)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.base(x) + self.up(self.down(x)))


def wrapped(way: str, base: int = 0, adapters: int = 1) -> tuple[DistributedDataParallel, Optimizer]:
    model = Adapted(base, adapters)
    trained = [each for each in model.parameters() if each.requires_grad]
    strategy, _, gathered = way.partition(" ")
    return imece.parallelize(model, AdamW(trained, lr=0.1), strategy, gather=bool(gathered))


def step(model: DistributedDataParallel, optimizer: Optimizer, number: int) -> float:
    optimizer.zero_grad()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def from_any_to_any(folder: str) -> dict[str, list[float]]:
    """The losses that follow, without the base and with it; and what is said of another base."""
    mesh, losses = imece.init(), dict[str, list[float]]()
    for frozen in (False, True):
        for strategy, other in zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True):
            model, optimizer = wrapped(strategy)
            step(model, optimizer, 0)
            where = Path(folder) / f"{strategy}-{frozen}"
            checkpoints = Checkpoints(where, rank=mesh.rank, world_size=mesh.world_size, alarm=print)
            checkpoints.save(1, TrainingState(model, optimizer, frozen=frozen).tensors(), {}, None)
            assert checkpoints.finish()
            checkpoints.close()
            saved = newest(where, print)
            assert saved is not None
            again, fresh = wrapped(other, adapters=2)
            TrainingState(again, [fresh], frozen=not frozen).load(saved)
            losses[f"{strategy} to {other}, {frozen}"] = [step(again, fresh, at) for at in (1, 2)]
            another, fresh = wrapped(other, base=3)
            with pytest.raises(UserError, match=r"base\.quantised:codes is another|base\.scales is another"):
                TrainingState(another, [fresh]).load(saved)
            losses[f"{strategy}, {frozen}"] = [step(model, optimizer, at) for at in (1, 2)]
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved")
    for losses in run_ranks(from_any_to_any, 2, args=(str(made),), backend=None):
        first = losses["replicate, True"]
        assert all(found == first for found in losses.values()), losses
    return made


def opened(folder: Path, strategy: str = "zero2", frozen: bool = False) -> Saved:
    return open_checkpoint(step_folder(folder / f"{strategy}-{frozen}", 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_base_is_left_out(folder: Path, strategy: str) -> None:
    without, whole = (opened(folder, strategy, frozen) for frozen in (False, True))
    gone = {*whole.names()} - {*without.names()}
    parts = ["base.codes", "base.quantised:codes", "base.quantised:scale", "base.weight"]
    assert gone == {f"model/{name}" for name in parts}
    assert {*without.names()} - {*whole.names()} == {f"left_out/{name}" for name in parts}
    assert "beside/base.scales" in whole.names()
    taken = sum(path.stat().st_size for path in without.folder.glob("*.safetensors"))
    assert taken < 10_000  # bytes; the base has twice as many


def test_weights_need_the_same_base(folder: Path) -> None:
    saved = opened(folder)
    model = Adapted(0, 2)
    loaded = load_weights(model, saved)
    assert {name for name in loaded.missing if not name.startswith("base.")} == set()
    assert torch.equal(model.up.weight, saved.tensor("model/up.weight"))
    other = Adapted(3, 2)
    before = other.up.weight.clone()
    with pytest.raises(UserError, match=r"base\.codes|base\.quantised:codes is another; .* and 1 more"):
        load_weights(other, saved)
    assert torch.equal(other.up.weight, before)
    load_weights(other, saved, strict=False)
    assert torch.equal(other.up.weight, saved.tensor("model/up.weight"))


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_base_that_is_trained_now(folder: Path, mesh: object, strategy: str) -> None:
    """Of a sharded parameter no rank has all; whole, it can be compared."""
    model = Adapted(0, 2)
    model.base.weight.requires_grad_(True)
    optimizer = SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    both, _ = imece.parallelize(model, optimizer, strategy)
    if strategy == "replicate":
        assert "base.weight" in load_weights(both, opened(folder)).missing
        return
    with pytest.raises(UserError, match=r"this model has another: base\.weight is trained"):
        load_weights(both, opened(folder))


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_what_has_changed_stays_in(tmp_path: Path, mesh: object, strategy: str) -> None:
    """An average of weights is frozen too; and it is the checkpoint's when it is loaded."""
    model, optimizer = wrapped(strategy)
    state = TrainingState(model, optimizer, frozen=False)
    assert "left_out/base.weight" in state.tensors()
    assert isinstance(model.module, Adapted)
    with torch.no_grad():
        model.module.base.weight.mul_(0.5)
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state.tensors())
    saved = newest(tmp_path, print)
    assert saved is not None and "left_out/base.weight" not in saved.names()
    again, another = wrapped(strategy)
    state = TrainingState(again, another, frozen=False)
    state.load(saved)
    assert isinstance(again.module, Adapted)
    assert torch.equal(again.module.base.weight, model.module.base.weight)
    names = state.tensors().keys()
    assert "model/base.weight" in names and "left_out/base.quantised:codes" in names


def test_a_quantised_base_in_memory(mesh: imece.Mesh) -> None:
    """Ranks that are behind, or join, get a replica's base too."""
    model, optimizer = wrapped("replicate")
    state = TrainingState(model, optimizer)
    scale = state.own()["model/base.quantised:scale"]
    assert isinstance(scale, Tensor)
    expected = scale.clone()
    catch_up(state, 0, True, model.process_group, mesh.device)
    assert torch.equal(scale, expected) and step(model, optimizer, 0) > 0


# ---------------------------------------------------------------- all optimizers, or an error


def by_two(strategy: str) -> tuple[DistributedDataParallel, list[Optimizer]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers: list[Optimizer] = [AdamW(model[0].parameters()), SGD(model[1].parameters(), momentum=0.9)]
    return imece.parallelize(model, optimizers, strategy)


def test_one_of_two_optimizers(mesh: object) -> None:
    model, optimizers = by_two("zero1")
    with pytest.raises(ValueError, match="SGD steps this model too: give it with the others"):
        TrainingState(model, optimizers[:1])
    model, optimizers = by_two("replicate")
    with pytest.warns(UserWarning, match=r"none of the optimizers given steps 1\.weight and 1 more"):
        TrainingState(model, optimizers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainingState(model, optimizers)
        TrainingState(model, [])  # the model alone


def test_what_is_no_wrapped_model_no_optimizer_and_no_checkpoint(mesh: object, tmp_path: Path) -> None:
    plain: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="TrainingState: a Linear is not wrapped: give what imece"):
        TrainingState(plain, [])
    model, optimizers = by_two("replicate")
    wrong: Any
    for wrong in (None, [optimizers[0], None]):
        with pytest.raises(TypeError, match=r"TrainingState: None is no optimizer: give one, or"):
            TrainingState(model, wrong)
    for wrong, kind in ((tmp_path, "a PosixPath"), (None, "None"), ({"model": {}}, "a dict")):
        with pytest.raises(TypeError, match=rf"load: {kind} is no checkpoint: open it, as newest\(folder"):
            TrainingState(*by_two("replicate")).load(wrong)


def test_digests_keep_no_memory() -> None:
    """And what comes to lie where another tensor was is not taken for it."""
    place = bytearray(40)
    digests, tensor = Digests(nn.Linear(1, 1)), torch.frombuffer(place, dtype=torch.float32)
    first = digests.of({"base": tensor})
    with mock.patch.object(base, "digest_of", side_effect=AssertionError):
        assert digests.of({"base": tensor}) == first
    memory, address = StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr()
    del tensor
    assert memory.expired()
    place[0] = 1
    other = torch.frombuffer(place, dtype=torch.float32)
    assert other.data_ptr() == address and other._version == 0
    assert digests.of({"base": other}) != first


def test_one_that_is_compiled(tmp_path: Path, mesh: object) -> None:
    model, optimizers = by_two("zero1")
    compiled: Any = torch.compile(model)
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, TrainingState(compiled, optimizers).tensors())
    plain: Any = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert load_weights(plain, tmp_path).missing == load_weights(compiled, tmp_path).missing == ()
    assert torch.equal(plain._orig_mod[1].bias, model.module[1].bias)  # type: ignore[index]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_an_optimizer_of_another_model(mesh: object, strategy: str) -> None:
    model, optimizers = by_two(strategy)
    stranger = AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="AdamW steps what is none of this model's"):
        TrainingState(model, [*optimizers, stranger])
