"""Training state saved under any strategy and number of ranks, loaded under any other, bit-equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, AdamW, Muon, Optimizer

import imece
from imece.checkpoint import Checkpoints, Saved, Slice, open_checkpoint
from imece.checkpoint.files import step_folder
from imece.checkpoint.state import full
from imece.checkpoint.state.names import MADE_BY, MODEL, NUMBERS, OPTIMIZER
from imece.checkpoint.state.training_state import TrainingState
from imece.checkpoint.state.weights import check_shapes
from imece.collectives import ops
from imece.data_parallel.replicate import DistributedDataParallel
from imece.errors import UserError
from tests.checkpoint.crew import crew
from tests.ranks import run_ranks

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
HYBRIDS = ("hybrid", "hybrid_zero2")  # of 4 ranks, on two hosts of 2
WORLDS = (1, 2, 3, 4)
STEPS = 3


class Model(nn.Module):
    """Matrices for Muon, the rest for AdamW; one parameter is frozen and one is never used.

    Of its buffers one is its state, which differs between ranks after a forward, and one is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(5, 7), nn.Linear(7, 7, bias=False), nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.full((4,), 0.5))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("table", torch.ones(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        hidden = self.inner(torch.tanh(self.first(x)))
        return torch.as_tensor(self.head(hidden) + self.frozen)


def parallel(strategy: str, seed: int) -> tuple[DistributedDataParallel, list[Optimizer]]:
    torch.manual_seed(seed)
    model = Model()
    rest = [each for each in model.parameters() if each is not model.inner.weight]
    lr = 0.1 * seed  # whoever loads has another one, and goes on with that of the checkpoint
    optimizers: list[Optimizer] = [Muon([model.inner.weight], lr=lr), AdamW(rest, lr=lr)]
    wrapped, _ = imece.parallelize(model, optimizers, strategy)
    return wrapped, optimizers


def train(model: DistributedDataParallel, optimizers: list[Optimizer], steps: int, rank: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def save(folder: str, strategy: str, loaded: str | None = None) -> list[str]:
    """Train, or load what there is, and save; the alarms."""
    mesh = imece.init()
    model, optimizers = parallel(strategy, seed=1)
    if loaded is None:
        train(model, optimizers, STEPS, mesh.rank)
    else:
        TrainingState(model, optimizers).load(open_checkpoint(step_folder(Path(loaded), STEPS)))
    alarms: list[str] = []
    checkpoints = Checkpoints(Path(folder), rank=mesh.rank, world_size=mesh.world_size, alarm=alarms.append)
    checkpoints.save(STEPS, TrainingState(model, optimizers).tensors(), {}, None)
    checkpoints.finish()
    checkpoints.close()
    return alarms


def save_all(folder: str, ranks: int, strategies: list[str]) -> list[str]:
    return [alarm for each in strategies for alarm in save(f"{folder}/{ranks}-{each}", each)]


def save_again(folder: str) -> list[str]:
    """What another strategy saved, out of two hosts."""
    return [alarm for each in HYBRIDS for alarm in save(f"{folder}/again-{each}", each, f"{folder}/4-zero1")]


def differences(saved: Saved, found: dict[str, Tensor | Slice]) -> list[str]:
    """Names of what this rank holds otherwise than the checkpoint has it."""
    wrong = sorted(set(saved.names()) ^ set(found))
    for name, value in found.items():
        if isinstance(value, Slice):
            kept = saved.slice(name, value.start, value.start + value.tensor.numel())
            same = saved.shape(name) == value.shape and torch.equal(kept, value.tensor.reshape(-1))
        else:
            same = torch.equal(saved.tensor(name), value)
        wrong += [] if same else [name]
    return wrong


def load_all(folder: str, folders: list[str], strategies: list[str]) -> dict[str, Any]:
    """{(checkpoint, strategy): what differs}, and the losses that follow."""
    mesh = imece.init()
    wrong: dict[str, list[str]] = {}
    losses: dict[str, list[list[float]]] = {}
    for name in folders:
        saved = open_checkpoint(step_folder(Path(folder) / name, STEPS))
        for strategy in strategies:
            model, optimizers = parallel(strategy, seed=2)
            state = TrainingState(model, optimizers)
            state.load(saved)
            for number, optimizer in enumerate(optimizers):
                through_a_file(model, optimizer, Path(folder) / f"full-{mesh.world_size}-{number}")
            found = differences(saved, state.tensors())
            assert isinstance(model.module, Model)
            values = [*model.module.named_parameters(), ("seen", model.module.seen)]
            if strategy == "hybrid":  # each rank has a part, and `differences` has seen it
                values = values[-1:]
            found += [key for key, each in values if not torch.equal(saved.tensor(MODEL + key), each)]
            if found:
                wrong[f"{name} as {strategy}"] = found
            losses.setdefault(name, []).append(train(model, optimizers, 2, mesh.rank))
    return {"wrong": wrong, "losses": losses}


def through_a_file(model: DistributedDataParallel, optimizer: Optimizer, file: Path) -> None:
    """What `full_optimizer_state` gives is that of whole parameters, and comes back where all was lost."""
    whole = imece.full_optimizer_state(model, optimizer)
    assert bool(whole) == (imece.init().rank == 0)
    if whole:
        torch.save(whole, file)
    imece.barrier()
    whole = torch.load(file, weights_only=True)
    imece.barrier()  # before the next one is written there
    plain = Model()
    given = [plain.inner.weight]
    if isinstance(optimizer, AdamW):
        given = [each for each in plain.parameters() if each is not plain.inner.weight]
    like_it: Optimizer = AdamW(given) if isinstance(optimizer, AdamW) else Muon(given)
    like_it.load_state_dict(whole)
    for each, kept in like_it.state.items():
        assert {value.shape for value in kept.values()} <= {each.shape, ()}
    assert (plain.unused in like_it.state) is False
    optimizer.state.clear()
    optimizer.load_state_dict(whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints WORLD-STRATEGY of all worlds and strategies."""
    made = tmp_path_factory.mktemp("saved")
    for ranks in WORLDS:
        results = run_ranks(save_all, ranks, args=(str(made), ranks, STRATEGIES), backend=None)
        assert results == [[]] * ranks
    for call, args in ((save_all, (str(made), 4, HYBRIDS)), (save_again, (str(made),))):
        assert run_ranks(call, 4, args=args, backend=None, ranks_per_host=2) == [[]] * 4
    return made


def all_names() -> list[str]:
    return [f"{world}-{each}" for world in WORLDS for each in STRATEGIES] + [f"4-{each}" for each in HYBRIDS]


def test_strategies_save_the_same_bits(folder: Path) -> None:
    for ranks in WORLDS:
        first, *others = (
            open_checkpoint(step_folder(folder / f"{ranks}-{each}", STEPS)) for each in STRATEGIES
        )
        kept = {name.rpartition("/")[2] for name in first.names() if name.startswith(OPTIMIZER)}
        assert kept == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        assert f"{OPTIMIZER}unused/step" not in first.names()
        made_by = sorted(name for name in first.names() if name.startswith(MADE_BY))
        assert made_by == [
            *(f"{MADE_BY}first.{each}/AdamW.Adam" for each in ("bias", "weight")),
            *(f"{MADE_BY}head.{each}/AdamW.Adam" for each in ("bias", "weight")),
            f"{MADE_BY}inner.weight/Muon",
        ]
        seen = torch.zeros(2, 3)
        for step in range(STEPS):
            seen += batch(step, 0).mean()  # a buffer is rank 0's
        assert torch.equal(first.tensor(f"{MODEL}seen"), seen)
        for other in others:
            assert set(other.names()) == set(first.names())
            assert all(torch.equal(first.tensor(name), other.tensor(name)) for name in first.names())


def test_two_hosts_save_what_one_does(folder: Path) -> None:
    """The bits of the state that they loaded; what they trained themselves, within rounding: other sums."""
    expected = open_checkpoint(step_folder(folder / "4-zero1", STEPS))
    for each in HYBRIDS:
        again = open_checkpoint(step_folder(folder / f"again-{each}", STEPS))
        own = open_checkpoint(step_folder(folder / f"4-{each}", STEPS))
        assert set(again.names()) == set(own.names()) == set(expected.names())
        for name in expected.names():
            assert torch.equal(again.tensor(name), expected.tensor(name)), name
            torch.testing.assert_close(own.tensor(name), expected.tensor(name), rtol=0.01, atol=0.01)


def test_ranks_with_the_same_shard_write_a_piece_of_it_each(folder: Path) -> None:
    """Of four ranks on two hosts each two have the shard that one has of two."""

    def nbytes(file: Path) -> int:
        content = file.read_bytes()
        return (
            len(content) - 8 - int.from_bytes(content[:8], "little")
        )  # safetensors' header names more pieces

    two, four = (
        sorted(map(nbytes, step_folder(folder / each, STEPS).glob("*.safetensors")))
        for each in ("2-zero1", "4-hybrid")
    )
    assert len(four) == 4 and max(four) < 0.6 * max(two), (two, four)


# From fewer and from more: three have both, with uneven parts.
@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_any_loads_any(folder: Path, ranks: int) -> None:
    check_loads(run_ranks(load_all, ranks, args=(str(folder), all_names(), STRATEGIES), backend=None), 4)


@pytest.mark.slow
def test_two_hosts_load_any(folder: Path) -> None:
    args = (str(folder), all_names(), HYBRIDS)
    check_loads(run_ranks(load_all, 4, args=args, backend=None, ranks_per_host=2), 2)


def check_loads(results: list[dict[str, Any]], strategies: int) -> None:
    for result in results:
        assert result["wrong"] == {}
        assert len(result["losses"]) == len(all_names())
        for losses in result["losses"].values():
            assert losses == losses[:1] * strategies


def test_each_rank_writes_its_own(folder: Path) -> None:
    """Of what is sharded nothing is written twice, and no rank writes it all."""
    where = step_folder(folder / "4-zero1", STEPS)
    written = []
    for path in sorted(where.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            written.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
    saved = open_checkpoint(where)
    assert sum(written) == sum(saved.tensor(name).numel() for name in saved.names())
    assert len(written) == 4 and 0 < max(written) < sum(written)


def differs(folder: str) -> list[str]:
    """What is said of a checkpoint of another model, and that a changed value is seen."""
    imece.init()
    saved = open_checkpoint(step_folder(Path(folder) / "2-zero1", STEPS))
    model, optimizers = parallel("zero2", seed=2)
    state = TrainingState(model, optimizers)
    state.load(saved)
    with torch.no_grad():
        for part in model.sharding.parts:  # type: ignore[union-attr]
            part.parameter.add_(1.0)
    found = differences(saved, state.tensors())
    shapes = {"first.weight": (7, 6), "first.bias": (7,), "more": (2,), "seen": (2, 3)}
    with pytest.raises(UserError) as error:
        check_shapes(saved, shapes)
    return [*found, str(error.value)]


def test_another_model_and_a_changed_value(folder: Path) -> None:
    for *names, said in run_ranks(differs, 2, args=(str(folder),), backend=None):
        assert names and all(name.startswith(MODEL) for name in names)
        assert "first.weight should be [7, 6], the checkpoint has [7, 5]" in said
        assert "more should be [2], the checkpoint has none; it has frozen too and" in said


# ---------------------------------------------------------------- one process, any optimizer

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


def small(make: Make, strategy: str = "replicate") -> tuple[DistributedDataParallel, Optimizer]:
    """A convolution whose weight lies in another order in memory than its dims say."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    return imece.parallelize(model, make(model.parameters()), strategy)


def small_steps(model: DistributedDataParallel, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(images).square().sum().backward()
        optimizer.step()


def saved_small(
    folder: Path, model: DistributedDataParallel, optimizer: Optimizer, *, tags: bool = True
) -> Saved:
    tensors = TrainingState(model, [optimizer]).tensors()
    with crew(folder, 1) as ranks:
        assert ranks.save(0, {name: each for name, each in tensors.items() if tags or MADE_BY not in name})
    return open_checkpoint(step_folder(folder, 0))


def weights(model: DistributedDataParallel) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.module.parameters()])


def test_torchs_state_dicts_say_what_to_call(mesh: object) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = small(Adam, "zero1")
    told = "Adam steps this rank's parts .* imece.full_optimizer_state"
    with pytest.raises(RuntimeError, match=told):
        get_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=told):
        set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={"state": {}})
    _, other = small(Adam, "zero1")
    with pytest.raises(ValueError, match="this Adam was not given to parallelize together with this model"):
        imece.full_optimizer_state(model, other)
    plain: Any = model.module
    with pytest.raises(TypeError, match=r"full_optimizer_state: a .* is not wrapped"):
        imece.full_optimizer_state(plain, optimizer)
    several: Any = [optimizer]
    with pytest.raises(TypeError, match="one optimizer is expected, not list; call it for each"):
        imece.full_optimizer_state(model, several)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_the_whole_state_is_of_the_parameters_that_were_wrapped(mesh: object, strategy: str) -> None:
    model, optimizer = small(Adam, strategy)
    small_steps(model, optimizer, range(1))
    before = imece.full_optimizer_state(model, optimizer)
    model.module.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))
    found = imece.full_optimizer_state(model, optimizer)
    assert found["param_groups"] == before["param_groups"]
    for number in (0, 1):
        for key, value in before["state"][number].items():
            assert torch.equal(found["state"][number][key], value)


def fused(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize("saves", ["replicate", "zero1"])
@pytest.mark.parametrize("loads", ["replicate", "zero1"])
def test_what_lies_in_another_order_in_memory(tmp_path: Path, mesh: object, saves: str, loads: str) -> None:
    """torch's fused optimizers on CPUs pair elements by where they lie."""
    model, optimizer = small(fused, saves)
    small_steps(model, optimizer, range(3))
    saved = saved_small(tmp_path, model, optimizer)
    again, another = small(fused, loads)
    TrainingState(again, [another]).load(saved)
    small_steps(model, optimizer, range(3, 5))
    small_steps(again, another, range(3, 5))
    # Sharded weights lie in the order of their dims, for which some processors have another convolution.
    rtol, atol = (0.0, 0.0) if saves == loads else (1e-5, 1e-6)
    torch.testing.assert_close(weights(model), weights(again), rtol=rtol, atol=atol)


def adagrad(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adagrad(parameters, lr=0.1)


@pytest.mark.parametrize("make", [fused, adagrad])
def test_an_optimizer_that_has_stepped_since(tmp_path: Path, mesh: object, make: Make) -> None:
    """What it keeps is of no use any more; Adagrad's is there from the beginning."""
    model, optimizer = small(make)
    start = saved_small(tmp_path / "start", model, optimizer)
    for _ in range(2):
        small_steps(model, optimizer, range(2))
        found = weights(model)
        TrainingState(model, [optimizer]).load(start)
    small_steps(model, optimizer, range(2))
    assert torch.equal(weights(model), found)


MOMENTUM: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", MOMENTUM)
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_what_another_optimizer_kept(tmp_path: Path, mesh: object, name: str, strategy: str) -> None:
    model, optimizer = small(fused)
    small_steps(model, optimizer, range(1))
    saved = saved_small(tmp_path / "named", model, optimizer)
    again, another = small(MOMENTUM[name], strategy)
    before = weights(again)
    with pytest.raises(UserError) as mistake:
        TrainingState(again, [another]).load(saved)
    assert str(mistake.value) == (
        f"{saved.folder}: weight was stepped by AdamW, not by {name}: take AdamW again, or the weights alone "
        "with imece.load_weights"
    )
    assert not another.state and torch.equal(weights(again), before)


def test_what_a_kind_of_this_optimizer_kept(tmp_path: Path, mesh: object) -> None:
    """Adam is as good as AdamW; a checkpoint of before there were names is taken as it is."""
    for then, now in ((AdamW, Adam), (Adam, AdamW)):
        model, optimizer = small(then)
        small_steps(model, optimizer, range(1))
        named = saved_small(tmp_path / then.__name__, model, optimizer)
        again, another = small(now)
        TrainingState(again, [another]).load(named)
        assert all(float(each["step"]) == 1 for each in another.state.values()) and len(another.state) == 2
    unnamed = saved_small(tmp_path / "unnamed", model, optimizer, tags=False)
    again, another = small(MOMENTUM["SGD"])
    TrainingState(again, [another]).load(unnamed)
    assert [set(each) for each in another.state.values()] == [{"exp_avg", "exp_avg_sq", "step"}] * 2


# ---------------------------------------------------------------- groups

Groups = Callable[[nn.Linear], list[Optimizer]]


class Counting(AdamW):
    """A count of its own, a number for each of three things, and a text."""

    def __init__(self, parameters: Any, count: int = 0, **options: Any) -> None:
        super().__init__(parameters, **options)
        for group in self.param_groups:
            group |= {"k": count, "scales": torch.ones(3), "mode": "x"}


def linear(groups: Groups, strategy: str, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 1).to(dtype)
    wrapped, optimizers = imece.parallelize(model, groups(model), strategy)
    return wrapped, optimizers


def linear_steps(model: DistributedDataParallel, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(inputs.to(weights(model).dtype)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def saved_linear(folder: Path, model: DistributedDataParallel, optimizers: list[Optimizer]) -> Saved:
    with crew(folder, 1) as ranks:
        assert ranks.save(0, TrainingState(model, optimizers).tensors())
    return open_checkpoint(step_folder(folder, 0))


def apart(model: nn.Linear, **options: Any) -> list[Optimizer]:
    return [
        Counting(
            [{"params": model.weight, "weight_decay": 0.1}, {"params": model.bias, "weight_decay": 0}],
            **options,
        )
    ]


def in_another_order(model: nn.Linear) -> list[Optimizer]:
    return [
        Counting([{"params": model.bias}, {"params": model.weight}], lr=torch.tensor(0.5), weight_decay=0.5)
    ]


def two(model: nn.Linear) -> list[Optimizer]:
    return [AdamW([model.bias], lr=0.25), Counting([model.weight], lr=0.5)]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_numbers_find_their_group(tmp_path: Path, mesh: object, strategy: str) -> None:
    """By the parameters in it and their names, wherever it stands and in whatever order they were given."""
    model, optimizers = linear(lambda model: apart(model, count=5, lr=0.25, betas=(0.5, 0.99)), strategy)
    torch.optim.lr_scheduler.StepLR(optimizers[0], 1)  # adds initial_lr
    saved = saved_linear(tmp_path, model, optimizers)
    for groups in (in_another_order, two):
        again, others = linear(groups, strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TrainingState(again, others).load(saved)
        bias, weight = (group for each in others for group in each.param_groups)
        for group, decay in ((weight, 0.1), (bias, 0)):
            assert float(group["lr"]) == group["initial_lr"] == 0.25 and group["weight_decay"] == decay
            assert group["betas"] == (0.5, 0.99) and group["eps"] == 1e-8
            assert type(group["k"]) is int and group["k"] == 5
        assert isinstance(weight["lr"], Tensor) == (groups is in_another_order)


def test_other_groups_keep_their_numbers(tmp_path: Path, mesh: object) -> None:
    model, optimizers = linear(lambda model: [AdamW(model.parameters(), lr=0.25)], "zero1")
    saved = saved_linear(tmp_path / "one", model, optimizers)
    again, others = linear(two, "zero1")
    with pytest.warns(UserWarning, match="of those that begin with bias nothing is taken"):
        TrainingState(again, others).load(saved)
    assert [each.param_groups[0]["lr"] for each in others] == [0.25, 0.25]
    tensors = TrainingState(model, optimizers).tensors()
    old = {name: each for name, each in tensors.items() if not name.startswith(NUMBERS)}
    with crew(tmp_path / "old", 1) as ranks:  # of before groups had names
        assert ranks.save(0, old | {f"{NUMBERS}0": torch.ones(5, dtype=torch.float64)})
    with pytest.warns(UserWarning, match="of those that begin with bias, weight nothing"):
        TrainingState(again, others).load(open_checkpoint(step_folder(tmp_path / "old", 0)))
    assert [each.param_groups[0]["lr"] for each in others] == [0.25, 0.25]


# ---------------------------------------------------------------- what is kept of a parameter


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_of_a_model_in_another_dtype(tmp_path: Path, mesh: object, strategy: str) -> None:
    """The state is cast with the parameter, but for counts: as torch's load_state_dict does."""
    model, optimizers = linear(lambda model: [AdamW(model.parameters())], strategy, torch.bfloat16)
    linear_steps(model, optimizers, range(2))
    saved = saved_linear(tmp_path, model, optimizers)
    again, others = linear(lambda model: [AdamW(model.parameters())], strategy, torch.float64)
    TrainingState(again, others).load(saved)
    kept = [{key: value.dtype for key, value in each.items()} for each in others[0].state.values()]
    assert kept == [{"step": torch.float32, "exp_avg": torch.float64, "exp_avg_sq": torch.float64}] * 2
    linear_steps(again, others, range(2, 3))


def test_an_option_that_needs_more_than_was_kept(tmp_path: Path, mesh: object) -> None:
    model, optimizers = linear(lambda model: [AdamW(model.parameters())], "zero1")
    linear_steps(model, optimizers, range(1))
    saved = saved_linear(tmp_path, model, optimizers)
    again, others = linear(lambda model: [AdamW(model.parameters(), amsgrad=True)], "zero1")
    with pytest.raises(
        UserError, match="weight was stepped without amsgrad=True, which cannot begin amid a run"
    ):
        TrainingState(again, others).load(saved)
    assert not others[0].state


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex128))

    def forward(self) -> Tensor:
        return self.weight.abs().sum()


def test_a_complex_model_comes_back(tmp_path: Path, mesh: object) -> None:
    """torch.complex128, which safetensors does not have."""
    wrapped, optimizer = imece.parallelize(model := Complex(), AdamW(model.parameters()), "zero1")
    wrapped().backward()
    optimizer.step()
    saved = saved_small(tmp_path, wrapped, optimizer)
    again, empty = imece.parallelize(model := Complex(), AdamW(model.parameters()), "zero1")
    state = TrainingState(again, [empty])
    state.load(saved)
    assert not differences(saved, state.tensors()) and torch.equal(weights(again), weights(wrapped))
    assert saved.dtype(f"{OPTIMIZER}weight/exp_avg") == torch.complex128


class Rows(Optimizer):
    """Looks at whole matrices: keeps a vector of their rows, and lists. Of the weight [6, 1]."""

    def __init__(self, parameters: Iterable[nn.Parameter], other: object = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.other = other

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad.flatten(1)
            if not state:
                state |= {"step": 0, "row": torch.zeros(len(gradient)), "factors": [torch.zeros(6, 6), []]}
                state |= {"other": self.other}
            state["step"] += 1
            state["row"] = 0.9 * state["row"] + gradient.square().mean(1)
            state["factors"][0] += gradient @ gradient.T
            update = state["factors"][0] @ (gradient / (state["row"].sqrt() + 0.1)[:, None])
            parameter -= 0.1 / state["step"] * update / (1 + update.norm())


def rows(strategy: str, other: object = None) -> tuple[DistributedDataParallel, list[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(1, 6, bias=False)
    return imece.parallelize(model, [Rows(model.parameters(), other)], strategy)


def rows_steps(model: DistributedDataParallel, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        optimizers[0].zero_grad()
        model(torch.randn(4, 1, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizers[0].step()


@pytest.mark.parametrize("saves", ["replicate", "zero1"])
@pytest.mark.parametrize("loads", ["replicate", "zero1"])
def test_what_is_kept_of_whole_matrices(tmp_path: Path, mesh: object, saves: str, loads: str) -> None:
    """A tensor of as many elements but another shape keeps that; lists are all there."""
    model, optimizers = rows(saves)
    rows_steps(model, optimizers, range(3))
    saved = saved_linear(tmp_path, model, optimizers)
    rows_steps(model, optimizers, range(3, 5))
    again, others = rows(loads)
    TrainingState(again, others).load(saved)
    (kept,) = others[0].state.values()
    assert kept["step"] == 3 and kept["row"].shape == (6,) and kept["factors"][1] == []
    rows_steps(again, others, range(3, 5))
    assert torch.equal(weights(again), weights(model))


def test_of_rows_in_an_optimizer_that_has_stepped_before(mesh: object) -> None:
    optimizer = Rows([weight := nn.Parameter(torch.ones(6, 1))])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    imece.parallelize(nn.ParameterList([weight]), optimizer, "zero1")
    assert [each["row"].shape for each in optimizer.state.values()] == [(6,)]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_nothing_is_kept_by_halves(mesh: object, strategy: str) -> None:
    model, optimizers = rows(strategy, other=object())
    rows_steps(model, optimizers, range(1))
    state = TrainingState(model, optimizers)
    with pytest.warns(
        UserWarning, match="what Rows keeps of weight is left out, .* other is of the type object"
    ):
        tensors = state.tensors()
    assert not [name for name in tensors if name.startswith((OPTIMIZER, MADE_BY))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert set(state.own()) == {f"{MODEL}weight"}


class Named(Optimizer):
    """Keeps a sum of gradients, by any name."""

    def __init__(self, parameters: Iterable[nn.Parameter], key: object) -> None:
        super().__init__(parameters, {"lr": 0.1, "decay/fast:": 0.5})
        self.key = key

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault(self.key, torch.zeros_like(parameter))
            parameter -= 0.1 * kept.mul_(self.param_groups[0]["decay/fast:"]).add_(parameter.grad)


def named(strategy: str, key: object) -> tuple[DistributedDataParallel, list[Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(1, 6, bias=False)
    return imece.parallelize(model, [Named(model.parameters(), key)], strategy)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
@pytest.mark.parametrize("key", ["slow/buffer", "slow:buffer", "100%", "%41"])
def test_what_is_kept_by_any_name(tmp_path: Path, mesh: object, key: str, strategy: str) -> None:
    model, optimizers = named(strategy, key)
    rows_steps(model, optimizers, range(2))
    optimizers[0].param_groups[0]["decay/fast:"] = 0.25
    saved = saved_linear(tmp_path, model, optimizers)
    rows_steps(model, optimizers, range(2, 4))
    again, others = named(strategy, key)
    TrainingState(again, others).load(saved)
    rows_steps(again, others, range(2, 4))
    assert torch.equal(weights(again), weights(model))


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_what_is_kept_by_no_name(mesh: object, strategy: str) -> None:
    model, optimizers = named(strategy, 0)
    rows_steps(model, optimizers, range(1))
    with pytest.warns(UserWarning, match="of weight is left out, .*: the key 0 is of the type int"):
        tensors = TrainingState(model, optimizers).tensors()
    assert not [name for name in tensors if name.startswith((OPTIMIZER, MADE_BY))]


class Scaled(nn.Linear):
    """What it has beside parameters and buffers."""

    extra: object = None

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_extra_states_of_modules(tmp_path: Path, mesh: object, strategy: str) -> None:
    def make() -> tuple[DistributedDataParallel, list[Optimizer], Scaled]:
        model = nn.Sequential(inner := Scaled(2, 2))
        optimizers: list[Optimizer] = [AdamW(model.parameters())]
        return *imece.parallelize(model, optimizers, strategy), inner

    model, optimizers, inner = make()
    inner.extra = {"amax": 5.0, "history": torch.arange(3)}
    saved = saved_linear(tmp_path, model, optimizers)
    again, others, found = make()
    TrainingState(again, others).load(saved)
    assert isinstance(found.extra, dict) and found.extra["amax"] == 5.0
    assert torch.equal(found.extra["history"], torch.arange(3))
    state = TrainingState(model, optimizers)
    first = state.own()
    inner.extra = {"amax": 6.0}
    assert state.own() is not first and state.own()["extra/0/state:dict:amax:float"] == 6.0
    inner.extra = object()
    with pytest.warns(UserWarning, match=r"extra state of 0 \(Scaled\) is left out"):
        assert not [name for name in state.tensors() if name.startswith("extra/")]


def test_parts_of_an_optimizers_state_go_over_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU too: NCCL would make a communicator of the first rank with each other."""
    group: Any = SimpleNamespace(rank=lambda: 1, _device_types=[torch.device("cpu"), torch.device("cuda")])
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "send", lambda tensor, *_, **__: sent.append(tensor))
    own = Slice(torch.ones(2), (4,), 2)
    assert full._whole(own, [(0, 2), (2, 2)], group, torch.device("cuda")) is None
    assert [each.device.type for each in sent] == ["cpu"]
