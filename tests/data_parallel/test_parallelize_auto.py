"""strategy="auto" in a user's own loop: the planner's rule, applied to the memory that is free."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer

import imece
from imece.data_parallel import auto
from imece.data_parallel.auto import Given, _would_fit, footprint_of
from imece.data_parallel.footprint import expected
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.gathering import GatherOptions
from imece.data_parallel.strategy import STRATEGIES
from imece.footprint import Footprint
from imece.mesh import Mesh
from imece.plan.answer.auto import ACTIVATIONS, Asked, Way, fitting
from imece.plan.answer.space import RESERVE
from tests.launch.launcher import run_launch
from tests.ranks import run_ranks

CAP_MB = 0.02
WAYS = ("replicate", "zero1", "zero2", "zero3")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))
        self.frozen = nn.Parameter(torch.ones(100), requires_grad=False)
        self.head = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.as_tensor(self.head(x)).square().mean()


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-3)]


def muon(model: nn.Module) -> list[Optimizer]:
    """Whole matrices, and momentum for what is none."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return [
        Muon([each for each in trained if each.ndim == 2], lr=1e-3),
        SGD([each for each in trained if each.ndim != 2], lr=1e-3, momentum=0.9),
    ]


def given(mesh: Mesh, model: nn.Module, optimizers: list[Optimizer], gather: bool = False) -> Given:
    return Given(model, optimizers, mesh, mesh.device, GatherOptions(always=gather), None, None, CAP_MB, None)


def foretold(gather: bool, ways: Sequence[str] = WAYS, **asked: Any) -> list[list[Any]]:
    """Of each strategy: what is weighed before, and what the engine says when it has laid all out."""
    mesh, told = imece.init(**asked), []
    for make in (adamw, muon):
        for name in ways:
            model = Model()
            optimizers = make(model)
            before = footprint_of(
                given(mesh, model, optimizers, gather), STRATEGIES[name], mesh.world_size, None
            )
            wrapped, made = imece.parallelize(model, optimizers, name, bucket_cap_mb=CAP_MB, gather=gather)
            after = expected(wrapped, made)
            assert after is not None
            told.append([f"{name} {make.__name__}", vars(before), vars(after)])
    return told


@pytest.mark.parametrize(("per_host", "gather"), [(2, False), (2, True), (1, False)])
def test_what_is_weighed_is_what_is_laid_out(per_host: int, gather: bool) -> None:
    compare(run_ranks(foretold, 2, args=(gather,), backend=None, ranks_per_host=per_host)[0])


def along_axes() -> list[list[Any]]:
    told, hybrids = [], ("hybrid", "hybrid_zero2")
    for backend in ("shm", "gloo"):  # with and without memory in common
        told += foretold(False, hybrids, axes={"replicate": 2, "shard": 2}, backend=backend)
        imece.mesh.current().close()
    return told


def test_what_is_weighed_of_hybrids() -> None:
    compare(run_ranks(along_axes, 4, backend=None)[0])


def compare(told: list[list[Any]]) -> None:
    for name, before, after in told:
        for what, nbytes in after.items():
            assert before[what] == pytest.approx(nbytes, rel=0.002), (name, what)


def needs() -> dict[str, int]:
    """Bytes of a rank by strategy."""
    mesh, model = imece.init(), Model()
    asked = given(mesh, model, adamw(model))
    return {name: footprint_of(asked, STRATEGIES[name], 2, None).total for name in WAYS}


def chosen(memory: list[int], activation_bytes: int | None) -> list[str]:
    """What is taken and said where ranks may have so much memory, the model's own included."""
    mesh, model = imece.init(), Model()
    own = sum(each.nbytes for each in model.parameters())
    said = io.StringIO()
    with (
        mock.patch.object(auto, "free_bytes", lambda device: memory[mesh.rank] - own),
        contextlib.redirect_stderr(said),
    ):
        try:
            wrapped, optimizer = imece.parallelize(
                model, adamw(model)[0], bucket_cap_mb=CAP_MB, activation_bytes=activation_bytes
            )
        except ValueError as error:
            return ["error", str(error)]
    wrapped(torch.ones(2, 64)).backward()
    optimizer.step()
    name = wrapped.sharding.strategy.name if isinstance(wrapped, ShardedDataParallel) else "replicate"
    return [name, said.getvalue()]


def for_a_rank() -> tuple[int, int]:
    """What a rank may use of the 1 MB that is free on its host, and the bytes that its model has already."""
    mesh, model = imece.init(), Model()
    with mock.patch.object(auto, "free_bytes", lambda device: 1_000_000):
        return auto._memory(given(mesh, model, adamw(model)), mesh.world_group), sum(
            each.nbytes for each in model.parameters()
        )


@pytest.mark.parametrize(("ranks_per_host", "share"), [(2, 500_000), (1, 1_000_000)])
def test_the_ranks_of_a_host_share_its_memory(ranks_per_host: int, share: int) -> None:
    for may_use, own in run_ranks(for_a_rank, 2, backend=None, ranks_per_host=ranks_per_host):
        assert may_use == share + own


def with_less_and_less() -> dict[str, Any]:
    """For each strategy: bytes that it needs, and what comes of just enough of them on the one rank."""
    needed: dict[str, int] = needs()
    told: dict[str, Any] = {}
    for name, nbytes in needed.items():
        enough = int((nbytes + 1000 + 5000) / (1 - RESERVE))
        told[name] = [nbytes, enough, chosen([10**9, enough], 5000)]
    bare, least = (int((needed[name] + 1000) / (1 - RESERVE)) for name in ("replicate", "zero3"))
    told["reserve"], told["least"] = chosen([bare, bare], None), chosen([least, least], None)
    small = int(needed["zero3"] * 0.9)
    told["nothing"] = [needed["zero3"] + 5000 - (1 - RESERVE) * small, chosen([small, 10**9], 5000)]
    return told


def test_it_takes_what_fits() -> None:
    """On two hosts replicate is the usual one; with less memory what shards as much as is needed."""
    first, second = run_ranks(with_less_and_less, 2, backend=None, ranks_per_host=1)
    usual = first["replicate"][0]
    needed = [first[name][0] for name in WAYS]
    assert needed == sorted(needed, reverse=True)
    for name in WAYS:
        nbytes, enough, (taken, said) = first[name]
        assert taken == name == second[name][2][0], "as the rank with less needs it, on all alike"
        assert said.startswith(f"imece: strategy {name}") and said.count("\n") == 1
        assert second[name][2][1] == "", "rank 0 says it for all"
        assert f"{nbytes / 1e6:.2f} MB a rank of {enough / 1e6:.2f} MB" in said
        if name != "replicate":
            assert f"replicate, the usual one here, needs {usual / 1e6:.2f} MB" in said
    taken, said = first["reserve"]
    assert taken != "replicate", "it fits, but for activations"
    assert f"{100 * ACTIVATIONS:.0f} % are kept" in said
    taken, said = first["least"]
    assert taken == "zero3" and "nothing needs less" in said, "it may run all the same"
    for told in (first, second):
        missing, (taken, said) = told["nothing"]
        assert taken == "error" and said.startswith("no strategy fits: zero3, which needs least, takes ")
        assert f"{missing / 1e6:.2f} MB too much" in said
        assert "zero3 fits on 4 ranks on 2 times as many hosts" in said


def on_one_host() -> dict[str, Any]:
    mesh = imece.init()
    model = Model()
    wrapped, _ = imece.parallelize(model, LBFGS(model.parameters()))
    told: dict[str, Any] = {"usual": chosen([10**9, 10**9], None)[0], "lbfgs": type(wrapped).__name__}
    with mock.patch.object(auto, "free_bytes", lambda device: 0):
        model = Model()
        try:
            imece.parallelize(model, LBFGS(model.parameters()))
        except ValueError as error:
            told["lbfgs, nothing"] = str(error)
    model = Model()
    on_gpu = replace(given(mesh, model, adamw(model)), device=torch.device("cuda"))
    least = footprint_of(on_gpu, STRATEGIES["zero3"], 2, None)
    for offload in ("optimizer", "parameters"):
        hosted = footprint_of(on_gpu, STRATEGIES["zero3"], 2, offload)
        assert hosted.total < least.total and hosted.host > 0
        room = Asked({"zero3": least}, int((hosted.total + 100) / (1 - RESERVE)), "zero1", 0)
        told[offload] = _would_fit(on_gpu, room, 2)
    return told


def test_one_host() -> None:
    for told in run_ranks(on_one_host, 2, backend=None):
        assert told["usual"] == "zero1"
        assert told["lbfgs"] == "DistributedDataParallel", "what cannot be sharded is replicated"
        assert told["lbfgs, nothing"].startswith("no strategy fits: replicate"), "on all ranks"
        assert "More ranks alone would not do" in told["lbfgs, nothing"]
        for offload in ("optimizer", "parameters"):
            assert told[offload][0].startswith(f"offload={offload!r} with zero3 fits: ")


def test_the_planner_is_not_loaded_before_it_is_asked() -> None:
    code = (
        "import sys, imece.data_parallel.parallelize; print(*(n for n in sys.modules if 'imece.plan' in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# The rule itself.


def test_the_rule_by_memory_and_by_time() -> None:
    ways = [Way("zero1", 10, 1.0), Way("replicate", 20, 0.99), Way("zero2", 8, 0.9)]
    unknown = [Way(each.strategy, each.needed) for each in ways]
    assert _name(fitting(unknown, 100, "replicate")) == "replicate"
    assert _name(fitting(unknown, 15, "replicate")) == "zero1", "the first that fits"
    assert fitting(unknown, 7, "replicate") is None
    assert _name(fitting(ways, 100, "zero1")) == "zero2", "measured to be faster"
    assert _name(fitting(ways[:2], 100, "zero1")) == "zero1", "no prediction is better than 2 %"


def _name(way: Way | None) -> str | None:
    return way.strategy if way is not None else None


def test_room() -> None:
    found = {"zero1": Footprint(50, 10, 10, 0)}
    assert Asked(found, 100, "zero1").room_bytes == pytest.approx(100 * (1 - RESERVE - ACTIVATIONS))  # type: ignore[arg-type]
    assert Asked(found, 100, "zero1", 30).take() is None  # type: ignore[arg-type]
    assert Asked(found, 100, "zero1", 20).take() == "zero1"  # type: ignore[arg-type]


# One that joins later: it is alone when it asks, and has to have what the others were told.

JOINS = """
import os, signal, time, torch, imece
from imece.data_parallel import auto
from imece.world import JOINING

free = 50_000 * (1 if os.environ.get(JOINING) != "1" else 100)
auto.free_bytes = lambda device: free
mesh = imece.init()
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
adamw = torch.optim.AdamW(model.parameters())
model, optimizer = imece.parallelize(model, adamw, bucket_cap_mb=0.004, activation_bytes=0)
print("has", model.sharding.strategy.name, os.environ.get(JOINING))
for step in imece.steps(300, model, optimizer):
    with step as number:
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and mesh.rank == 1 and os.environ.get(JOINING) != "1" and mesh.world.member == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1 * (mesh.world_size == 1))  # or all would be done before another comes
print("done")
"""


@pytest.mark.slow
def test_one_that_joins_has_what_the_others_were_told(tmp_path: Path) -> None:
    (tmp_path / "joins.py").write_text(JOINS)
    outcome = run_launch("--ranks", "2", tmp_path / "joins.py", timeout_s=200)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("has zero3 None") == 2, "which is not the usual one"
    assert outcome.out.count("has zero3 1") == 1 and outcome.out.count("done") == 2
