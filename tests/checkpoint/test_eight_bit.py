"""8-bit optimizer states: saved under any strategy and number of ranks, loaded under any other, bit-equal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer

import imece
from imece.checkpoint import Checkpoints, Slice, open_checkpoint
from imece.checkpoint.deal import kinds
from imece.checkpoint.files import step_folder
from imece.checkpoint.state.kept import Entry, Kept
from imece.checkpoint.state.names import NUMBERS, OPTIMIZER
from imece.checkpoint.state.plain import by_key, plain, value_of
from imece.checkpoint.state.training_state import TrainingState
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from imece.membership.copies import Copies
from tests.checkpoint.state.test_training_state import differences
from tests.data_parallel.sharding import test_block_wise as libraries
from tests.data_parallel.sharding.test_block_wise import Wide, interpreted, loss_of
from tests.ranks import run_ranks

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
HYBRIDS = ("hybrid", "hybrid_zero2")  # of 4 ranks, on two hosts of 2
WORLDS = (1, 2, 3)
# Of those that wrote the same into as many pieces, one.
LOADED = [f"{world}-{each}" for world in WORLDS for each in ("replicate", "zero2")] + ["4-hybrid"]
STEPS = 3
BLOCK = 64


class Blocks(Optimizer):
    """Momentum of 8 bits, a scale for each block; its count of steps is an int, its sum of rates a float."""

    element_wise = True
    elements_per = {"scale": BLOCK, "table": 0}  # noqa: RUF012

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self._step(parameter, self.state[parameter])

    def _step(self, parameter: Tensor, state: dict[str, Any]) -> None:
        size = parameter.numel()
        if not state:
            blocks = -(-size // BLOCK)
            state |= {"step": 0, "sum": 0.0, "begun": False, "nothing": None}
            state |= {"codes": torch.zeros_like(parameter, dtype=torch.int8), "scale": torch.ones(blocks)}
            state |= {"table": torch.arange(BLOCK, dtype=torch.float32)}
        assert type(state["step"]) is int and type(state["sum"]) is float and type(state["begun"]) is bool
        state |= {"step": state["step"] + 1, "sum": state["sum"] + 0.1, "begun": True}
        scale = state["scale"].repeat_interleave(BLOCK)[:size]
        momentum = 0.9 * state["codes"].view(-1) * scale + parameter.grad.reshape(-1)  # type: ignore[union-attr]
        padded = nn.functional.pad(momentum, (0, -size % BLOCK)).view(-1, BLOCK)
        state["scale"] = padded.abs().amax(1).clamp_min(1e-12) / 127
        codes = (padded / state["scale"][:, None]).round().to(torch.int8)
        state["codes"] = codes.view(-1)[:size].view(parameter.shape)
        parameter -= (state["sum"] / state["step"] * momentum).view(parameter.shape)


def own(model: nn.Module) -> Optimizer:
    return Blocks(model.parameters())


MAKES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "own": own,
    "bitsandbytes": libraries.bitsandbytes,
    "torchao": libraries.torchao,
}
needs = pytest.mark.parametrize("make", MAKES)


class Model(Wide):
    """One of its matrices has 256 * 256 elements, so as many blocks as a table of bitsandbytes has numbers.

    `single` is one block, and as large as such a table.
    """

    def __init__(self) -> None:
        super().__init__()
        self.square, self.single = nn.Linear(256, 256, bias=False), nn.Parameter(torch.ones(256))

    def forward(self, tokens: Tensor) -> Tensor:
        wide = torch.as_tensor(super().forward(tokens))
        added: Tensor = self.square(self.single + nn.functional.pad(wide, (0, 224)))[..., :32]
        return wide + added


def parallel(make: str, strategy: str, seed: int) -> tuple[DistributedDataParallel, Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = MAKES[make](model)
    wrapped, _ = imece.parallelize(model, optimizer, strategy)
    return wrapped, optimizer


def train(model: DistributedDataParallel, optimizer: Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save_all(folder: str, make: str, ranks: int, strategies: list[str]) -> list[str]:
    """Checkpoints WORLD-STRATEGY; the alarms."""
    mesh = imece.init()
    alarms: list[str] = []
    with interpreted():
        for strategy in strategies:
            model, optimizer = parallel(make, strategy, seed=1)
            train(model, optimizer, range(STEPS), mesh.rank)
            where = Path(folder) / f"{ranks}-{strategy}"
            checkpoints = Checkpoints(where, rank=mesh.rank, world_size=mesh.world_size, alarm=alarms.append)
            checkpoints.save(STEPS, TrainingState(model, [optimizer]).tensors(), {}, None)
            checkpoints.finish()
            checkpoints.close()
    return alarms


def load_all(folder: str, make: str, strategies: list[str]) -> dict[str, Any]:
    """{checkpoint as strategy: what differs}, and the losses that follow."""
    mesh = imece.init()
    wrong: dict[str, list[str]] = {}
    losses: dict[str, list[list[float]]] = {}
    with interpreted():
        for name, strategy in itertools.product(LOADED, strategies):
            saved = open_checkpoint(step_folder(Path(folder) / name, STEPS))
            model, optimizer = parallel(make, strategy, seed=2)
            state = TrainingState(model, [optimizer])
            state.load(saved)
            found = differences(saved, state.tensors()) + own_differs(state)
            if found:
                wrong[f"{name} as {strategy}"] = found
            following = train(model, optimizer, range(STEPS, STEPS + 2), mesh.rank)
            losses.setdefault(name, []).append(following)
    return {"wrong": wrong, "losses": losses}


def own_differs(state: TrainingState) -> list[str]:
    """Names that own() has otherwise than tensors(), of what this rank has of both."""
    mine, wrong = state.own(), []
    for name, value in state.tensors().items():
        if name.startswith(NUMBERS):
            continue  # of groups: kept in memory by who goes on with these optimizers
        if name not in mine:  # of a part that another rank has
            wrong += [] if isinstance(value, Slice) and not value.tensor.numel() else [name]
            continue
        ours = mine[name]
        same = kinds({name: ours}) == kinds({name: value})
        tensor = ours.tensor if isinstance(ours, Slice) else ours
        if isinstance(value, Slice):
            begin = value.start - (ours.start if isinstance(ours, Slice) else 0)
            part = tensor.reshape(-1)[begin : begin + value.tensor.numel()] if value.tensor.numel() else None
            same = same and (part is None or torch.equal(part, value.tensor.reshape(-1)))
        else:
            same = same and torch.equal(tensor, value)
        wrong += [] if same else [f"own {name}"]
    return wrong


@pytest.mark.slow
@needs
def test_any_loads_any(tmp_path: Path, make: str) -> None:
    if make != "own":
        pytest.importorskip(make)

    def run(call: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        per_host = 2 if args[-1] is HYBRIDS else None
        args = (str(tmp_path), make, *args)
        return run_ranks(call, ranks, args=args, backend=None, ranks_per_host=per_host, timeout_s=240)

    ways = [(ranks, STRATEGIES) for ranks in WORLDS] + [(4, HYBRIDS)]
    for ranks, strategies in ways:
        assert run(save_all, ranks, ranks, strategies) == [[]] * ranks
    for world in WORLDS:
        first, *others = (
            open_checkpoint(step_folder(tmp_path / f"{world}-{each}", STEPS)) for each in STRATEGIES
        )
        kept = {name.rpartition("/")[2] for name in first.names() if name.startswith(OPTIMIZER)}
        assert kept == KEYS[make]
        for other in others:
            assert set(other.names()) == set(first.names())
            assert all(torch.equal(first.tensor(name), other.tensor(name)) for name in first.names())
    for ranks, strategies in ways:
        for result in run(load_all, ranks, strategies):
            assert result["wrong"] == {}
            assert list(result["losses"]) == LOADED
            for losses in result["losses"].values():
                assert losses == losses[:1] * len(strategies)


KEYS = {
    "own": {"step:int", "sum:float", "begun:bool", "nothing:none", "codes", "scale", "table"},
    "bitsandbytes": {"step:int", "state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"},
    "torchao": {"step", "exp_avg", "exp_avg_sq"}
    | {
        f"{of}:{each}"
        for of, each in itertools.product(("exp_avg", "exp_avg_sq"), ("codes", "scale", "qmap"))
    },
}


def recovers(make: str) -> list[bool]:
    """From the copies that lie in memory after a step: whether the steps that follow are the same."""
    mesh = imece.init()
    same = []
    with interpreted():
        for strategy in STRATEGIES:
            model, optimizer = parallel(make, strategy, seed=1)
            train(model, optimizer, range(STEPS), mesh.rank)
            state, copies = TrainingState(model, [optimizer]), Copies(mesh)
            assert copies.exchange(STEPS, state.own()) == ""
            expected = train(model, optimizer, range(STEPS, STEPS + 1), mesh.rank)
            assert copies.write(STEPS + 1, state.own())  # they fit where those of the last step were
            expected += train(model, optimizer, range(STEPS + 1, STEPS + 3), mesh.rank)
            found = copies.recovered([copies.note()])
            assert found is not None and found[0] == STEPS + 1
            again, made_again = parallel(make, strategy, seed=2)
            TrainingState(again, [made_again]).load(found[1])
            following = train(again, made_again, range(STEPS + 1, STEPS + 3), mesh.rank)
            same.append(following == expected[1:])
            copies.drop()
    return same


@needs
def test_copies_in_memory_hold_it(make: str) -> None:
    if make != "own":
        pytest.importorskip(make)
    expected = [[True] * len(STRATEGIES)] * 2
    assert run_ranks(recovers, 2, args=(make,), backend=None, timeout_s=200) == expected


def stepped(make: Callable[[nn.Module], Optimizer], size: int) -> tuple[nn.Parameter, Optimizer]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(size))
    optimizer = make(model)
    model.weight.grad = torch.ones(size)
    with interpreted():
        optimizer.step()
    return model.weight, optimizer


@pytest.mark.parametrize("size", [1, BLOCK, BLOCK + 1, BLOCK * BLOCK])
def test_what_is_of_a_block_is_told_by_name(size: int) -> None:
    """Not by size: a part may have as many elements, or blocks, as a table."""
    parameter, optimizer = stepped(own, size)
    found = Kept(optimizer).entries(parameter)
    assert {key: per for key, (_, per) in found.items() if per} == {"codes": 1, "scale": BLOCK}
    assert set(found) == KEYS["own"]


@pytest.mark.parametrize("size", [1, 256, 65536])
def test_what_is_of_a_block_of_bitsandbytes(size: int) -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.optim import AdamW8bit

    parameter, optimizer = stepped(lambda model: AdamW8bit(model.parameters(), min_8bit_size=0), size)
    found = {key: per for key, (_, per) in Kept(optimizer).entries(parameter).items() if per}
    assert found == {"state1": 1, "state2": 1, "absmax1": 256, "absmax2": 256}


@pytest.mark.parametrize(
    ("name", "codes"),
    [("AdamW8bit", torch.uint8), ("AdamWFp8", torch.float8_e4m3fn), ("AdamW4bit", torch.uint8)],
)
def test_what_is_of_a_block_of_torchao(name: str, codes: torch.dtype) -> None:
    """And a tensor that is put together again is as it was."""
    optimizers = pytest.importorskip("torchao.optim")
    parameter, optimizer = stepped(lambda model: getattr(optimizers, name)(model.parameters()), 4096)
    found = Kept(optimizer).entries(parameter)
    block = 128 if name == "AdamW4bit" else 256
    assert {each.tensor.dtype for key, each in found.items() if key.endswith(":codes")} == {codes}
    assert {key.rpartition(":")[2]: per for key, (_, per) in found.items() if per} == {
        "codes": 2 if name == "AdamW4bit" else 1,
        "scale": block,
    }
    again = getattr(optimizers, name)([parameter])
    Kept(again).put(parameter, {key: each for key, (each, _) in found.items()})
    for key in ("exp_avg", "exp_avg_sq"):
        was, now = optimizer.state[parameter][key], again.state[parameter][key]
        assert type(now) is type(was) and now.__tensor_flatten__() == was.__tensor_flatten__()
        assert now.block_size == block and torch.equal(now.dequantize(), was.dequantize())


def test_numbers_come_back_as_they_were() -> None:
    parameter, optimizer = stepped(own, 5)
    before = dict(optimizer.state[parameter])
    again = own(nn.ParameterList([parameter]))
    Kept(again).put(parameter, {key: each for key, (each, _) in Kept(optimizer).entries(parameter).items()})
    after = again.state[parameter]
    for key in ("step", "sum", "begun", "nothing"):
        assert type(after[key]) is type(before[key]) and after[key] == before[key]
    assert set(after) == set(before)


@pytest.mark.parametrize(
    ("options", "where"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_a_count_of_steps_lies_where_torch_has_it(options: dict[str, bool], where: str) -> None:
    """The meta device stands for a GPU, where each step would wait for each count."""
    before = nn.Parameter(torch.ones(4))
    optimizer = AdamW([before])
    before.grad = torch.ones(4)
    optimizer.step()
    after = nn.Parameter(torch.empty(4, device="meta"))
    again = AdamW([after])
    again.param_groups[0] |= options
    Kept(again).put(after, {key: each for key, (each, _) in Kept(optimizer).entries(before).items()})
    found = {key: value.device.type for key, value in again.state[after].items()}
    assert found == {"step": where, "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_lists_come_back_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = LBFGS([weight], max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weight - torch.arange(3)).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    before, found = weight.detach().clone(), Kept(optimizer).entries(weight)
    found = {key: Entry(each.clone(), per) for key, (each, per) in found.items()}
    assert optimizer.state[weight]["old_dirs"] and "old_dirs:list:0" in found
    optimizer.step(closure)
    expected = weight.detach().clone()
    optimizer.state.clear()
    Kept(optimizer).put(weight, {key: each for key, (each, _) in found.items()})
    with torch.no_grad():
        weight.copy_(before)
    optimizer.step(closure)
    assert torch.equal(weight, expected) and not torch.equal(weight, before)


def test_what_values_are_made_of() -> None:
    value: dict[str, Any] = {
        "a/b": [1, 2.5, (True, None)],
        "empty": [[], {}, ""],
        "text:": "ä",
        "tensor": torch.ones(2),
    }
    found = dict(plain("key", value))
    assert all(type(each) is Tensor for each in found.values()) and not any("/" in name for name in found)
    again = value_of(by_key(found)["key"])
    assert torch.equal(again.pop("tensor"), value.pop("tensor")) and again == value
    for other in (object(), {1: 2}, [object()]):
        with pytest.raises(TypeError, match="key"):
            dict(plain("key", other))


def test_of_another_optimizer() -> None:
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit, AdamWFp8

    parameter, optimizer = stepped(libraries.torchao, 4096)
    saved = {key: each for key, (each, _) in Kept(optimizer).entries(parameter).items()}
    for other, said in (
        (AdamW([parameter]), "AdamW keeps nothing made of codes, scale, qmap"),
        (AdamW8bit([parameter], block_size=128), r"keeps scale as torch.float32 \[32\], .* \[16\]"),
        (AdamWFp8([parameter]), "keeps codes as torch.float8_e4m3fn .* this is torch.uint8"),
    ):
        with pytest.raises(ValueError, match=said):
            Kept(other).put(parameter, saved)


def another_optimizer(folder: str) -> list[str]:
    """What is said to ranks that have a part of the one parameter, and to those that have none."""
    mesh = imece.init()
    model, optimizer = parallel("own", "zero2", seed=1)
    saved = open_checkpoint(step_folder(Path(folder), STEPS))
    with pytest.raises(UserError) as error:
        TrainingState(model, [optimizer]).load(saved)
    return [str(mesh.rank), str(error.value)]


def test_of_another_optimizer_on_all_ranks(tmp_path: Path) -> None:
    plain = Model()
    tensors = {f"model/{name}": each.detach() for name, each in plain.named_parameters()}
    tensors["optimizer/single/momentum:codes"] = torch.ones(256)
    checkpoints = Checkpoints(tmp_path, rank=0, world_size=1, alarm=pytest.fail)
    checkpoints.save(STEPS, tensors, {}, None)
    checkpoints.finish()
    checkpoints.close()
    results = run_ranks(another_optimizer, 2, args=(str(tmp_path),), backend=None)
    assert all(
        "single had another optimizer: Blocks keeps nothing made of codes" in said for _, said in results
    )
    assert sum(said.startswith("rank ") for _, said in results) == 1  # who has no part of it
