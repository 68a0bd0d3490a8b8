"""`imece.load_weights`: into any model and strategy, the same on all ranks, within bounded memory."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import imece
from imece.checkpoint import Checkpoints, Loaded, load_weights, open_checkpoint
from imece.checkpoint.state.training_state import TrainingState
from imece.data_parallel.sharded import ShardedDataParallel
from imece.errors import UserError
from tests.checkpoint.crew import crew
from tests.ranks import run_ranks

WAYS = ("replicate", "zero1", "zero2", "zero3", "zero3-gather")
HYBRIDS = ("hybrid", "hybrid_zero2")


class Net(nn.Module):
    """Two layers that share a weight, and running means."""

    def __init__(self, seed: int, *, head: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.second.weight = self.first.weight
        self.norm.running_mean = torch.randn(6)
        if head is not None:
            self.head = nn.Linear(6, head)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.second(self.first(x)))
        return torch.as_tensor(self.head(hidden) if hasattr(self, "head") else hidden)


def save(folder: Path, step: int, net: Net) -> None:
    tensors = {f"model/{name}": each.detach() for name, each in net.state_dict().items()}
    del tensors["model/second.weight"]  # the first one's
    tensors["optimizer/first.weight/exp_avg"] = torch.ones(6, 6)
    with crew(folder, 3) as ranks:
        assert ranks.save(step, tensors)


def same(model: nn.Module, expected: Net) -> bool:
    found = {name.removeprefix("module."): each for name, each in model.state_dict().items()}
    wanted = expected.state_dict()
    return all(torch.equal(found[name], each.to(found[name].dtype)) for name, each in wanted.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Net(1) at step 1 and Net(2) at step 2, without heads; of Net(3) at step 3, with a head of 2."""
    made = tmp_path_factory.mktemp("run")
    for step, head in ((1, None), (2, None)):
        save(made / "checkpoints", step, Net(step, head=head))
    save(made / "other", 3, Net(3, head=2))
    return made


def test_a_plain_model_from_wherever_a_checkpoint_is(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000001"
    for source, step in (
        (run, 2), (str(run / "checkpoints"), 2), (checkpoint, 1), (open_checkpoint(checkpoint), 1),
    ):  # fmt: skip
        net = Net(0)
        assert load_weights(net, source) == Loaded(step, (), ())
        assert same(net, Net(step)) and net.second.weight is net.first.weight
    half = Net(0).bfloat16()
    half.first.weight.data = half.first.weight.data.t().contiguous().t()
    load_weights(half, run)
    assert same(half, Net(2))


def test_what_one_side_has_not(run: Path) -> None:
    net = Net(0, head=4)
    with pytest.raises(
        UserError, match=r"000002 is of another model: head.weight should be \[4, 6\], .* none; "
    ):
        load_weights(net, run)
    assert same(net, Net(0))
    assert load_weights(net, run, strict=False) == Loaded(2, ("head.weight", "head.bias"), ())
    assert same(net, Net(2))
    net = Net(0)
    with pytest.raises(
        UserError, match=r"000003 is of another model: it has head.bias too; it has head.weight too"
    ):
        load_weights(net, run / "other")
    assert load_weights(net, run / "other", strict=False) == Loaded(3, (), ("head.bias", "head.weight"))
    assert same(net, Net(3))


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_never_taken(run: Path, strict: bool) -> None:
    net = Net(0, head=4)
    with pytest.raises(
        UserError, match=r"head.weight should be \[4, 6\], the checkpoint has \[2, 6\]; head.bias"
    ):
        load_weights(net, run / "other", strict=strict)
    assert same(net, Net(0))


def test_nothing_to_load(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none has no checkpoint: name a checkpoint, or a run folder"):
        load_weights(Net(0), tmp_path / "none")
    with pytest.raises(UserError, match=r"x: cannot be read \(File name too long\): check the path"):
        load_weights(Net(0), tmp_path / ("x" * 300))
    (tmp_path / "step-00000004").mkdir()
    with pytest.raises(UserError, match=r"has no checkpoint that can be read: .*step-00000004"):
        load_weights(Net(0), tmp_path)
    with torch.device("meta"):
        net = Net(0)
    with pytest.raises(ValueError, match=r"first.weight is on the meta device"):
        load_weights(net, run)


def test_a_damaged_one_is_passed_over_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_weights(Net(0), tmp_path).step == 1
    assert capsys.readouterr().err == (
        f"imece: damaged, so an older checkpoint is used: {path}: damaged (its checksum is not that of its "
        "content)\n"
    )


def wrap(way: str, net: Net) -> tuple[Any, torch.optim.Optimizer]:
    strategy, _, gather = way.partition("-")
    return imece.parallelize(net, torch.optim.AdamW(net.parameters()), strategy, gather=bool(gather))


def mistake(model: nn.Module, source: Path) -> str:
    try:
        imece.load_weights(model, source)
    except UserError as error:
        return str(error)
    return "none"


def into_all(folder: str, ways: list[str]) -> list[Any]:
    """What is wrong with the ways; then what is said on each rank where ranks differ."""
    mesh = imece.init()
    run, wrong = Path(folder), []
    for way in ways:
        model, optimizer = wrap(way, Net(0, head=4))
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()  # what it keeps is not changed by the weights
        kept = [each.clone() for state in optimizer.state.values() for each in state.values()]
        loaded = imece.load_weights(model, run, strict=False)
        if list(loaded.missing) != ["head.weight", "head.bias"] or not same(model, Net(2)):
            wrong.append(f"{way}: {loaded}")
        still = [each for state in optimizer.state.values() for each in state.values()]
        if not all(map(torch.equal, kept, still)) or not model(torch.randn(5, 6)).isfinite().all():
            wrong.append(f"{way}: what the optimizer keeps, or a forward")
    last = mesh.rank == mesh.world_size - 1
    model, _ = wrap(ways[1], Net(0))
    said = [
        mistake(model, run / "none" if last else run),
        mistake(model, run / "checkpoints" / "step-00000001" if last else run),
    ]
    return [wrong, said, same(model, Net(0))]


@pytest.mark.parametrize(("ways", "ranks"), [(WAYS, 3), (HYBRIDS, 4)])
def test_any_wrapped_model(run: Path, ways: tuple[str, ...], ranks: int) -> None:
    per_host = 2 if ways is HYBRIDS else None
    results = run_ranks(into_all, ranks, args=(str(run), ways), backend=None, ranks_per_host=per_host)
    for rank, (wrong, (lost, differ), untouched) in enumerate(results):
        assert wrong == []
        own = rank == ranks - 1
        assert lost.startswith("" if own else f"rank {ranks - 1}: ") and "none has no checkpoint" in lost
        assert "rank 0 found step 2" in differ and f"rank {ranks - 1} found step 1" in differ
        assert untouched


# ---------------------------------------------------------------- memory

LAYERS, WIDTH = 6, 1024  # 25 MB of parameters, 75 MB with what AdamW keeps


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def resident(name: str) -> int:
    """VmRSS, or VmHWM: the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def save_large(folder: str) -> None:
    mesh = imece.init()
    net = large()
    model, optimizer = imece.parallelize(net, torch.optim.AdamW(net.parameters()), "zero1")
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(Path(folder), rank=mesh.rank, world_size=mesh.world_size, alarm=print)
    checkpoints.save(1, TrainingState(model, [optimizer]).tensors(), {}, None)
    assert checkpoints.finish()


def load_large(folder: str) -> list[tuple[str, float]]:
    """MiB that are resident at most while a checkpoint is loaded, beyond what training keeps of it."""
    imece.init()
    grown = []
    for strategy in ("replicate", "zero1", "zero3"):
        net = large()
        model, optimizer = imece.parallelize(net, torch.optim.AdamW(net.parameters()), strategy)
        parts: list[Tensor] = list(net.parameters())
        if isinstance(model, ShardedDataParallel):
            parts = [part.parameter for part in model.sharding.parts]
        for parameter in parts:
            parameter.data.add_(0)  # resident from the beginning
        if isinstance(model, ShardedDataParallel):
            model.sharding.after_step((0,))  # as every step: it maps what the other rank has
        saved = open_checkpoint(Path(folder) / "step-00000001")
        before = forget_peak()
        TrainingState(model, [optimizer]).load(saved)
        peak = resident("VmHWM") - before
        state = sum(each.nbytes for one in optimizer.state.values() for each in one.values())
        grown.append((strategy, (peak - state) / 2**20))
    return grown


@pytest.mark.slow
def test_a_resume_needs_no_more_memory_than_training(tmp_path: Path) -> None:
    """It takes what the optimizer keeps: no copy of the model besides, and no mapped file."""
    run_ranks(save_large, 2, args=(str(tmp_path),), backend=None)
    for result in run_ranks(load_large, 2, args=(str(tmp_path),), backend=None):
        assert [strategy for strategy, _ in result] == ["replicate", "zero1", "zero3"]
        assert max(beyond_mb for _, beyond_mb in result) < 6, result
