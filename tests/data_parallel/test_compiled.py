"""Blocks compiled one by one: all share one graph, and gradients leave block by block."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters

import imece
from imece.data_parallel.compiled import waits_before_compiled
from tests.dropped import left_of
from tests.ranks import run_ranks

LAYERS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.up(self.norm(x)).tanh()
        return out


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Backend:
    """Runs graphs as they are, and counts how often."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.compile: Callable[..., Any] = aot_autograd(
            fw_compiler=self._counted("forwards"), bw_compiler=self._counted("backwards")
        )

    def _counted(self, name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            def run(values: list[Any]) -> Any:
                setattr(self, name, getattr(self, name) + 1)
                found = graph(*values)
                values.clear()
                return found

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiler


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made() -> Small:
    torch.manual_seed(1)
    return Small()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_one_graph_for_all_blocks() -> None:
    model, backend, x = made(), Backend(), torch.randn(4, 5, 8)
    names, expected = list(model.state_dict()), gradients(model, x)
    assert imece.compile_blocks(model, backend=backend.compile) == [f"blocks.{at}" for at in range(LAYERS)]
    assert list(model.state_dict()) == names
    for _ in range(2):
        for got, each in zip(gradients(model, x), expected, strict=True):
            torch.testing.assert_close(got, each)
    assert (backend.forwards, backend.backwards) == (2 * LAYERS, 2 * LAYERS)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_other_lengths_are_one_graph_more() -> None:
    model, backend = made(), Backend()
    imece.compile_blocks(model, backend=backend.compile)
    gradients(model, torch.randn(4, 5, 8))
    with torch.no_grad():
        for length in range(6, 12):
            model(torch.randn(4, length, 8))
    # One that trains; one of the first other length, and one of any.
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]
    assert backend.forwards == 7 * LAYERS, "all of them compiled"


def gone_before_the_first(compile: Callable[[Small, Backend], object]) -> tuple[int, int]:
    """Graphs of backward that had run when a gradient of the last block came, and in all."""
    model, backend = made(), Backend()
    compile(model, backend)
    seen: list[int] = []
    weight = model.get_parameter(f"blocks.{LAYERS - 1}.up.weight")
    weight.register_post_accumulate_grad_hook(lambda _: seen.append(backend.backwards))
    left = []
    model.get_parameter("blocks.0.up.weight").register_post_accumulate_grad_hook(
        lambda _: left.append(weight.grad is not None)
    )
    model(torch.randn(2, 8)).sum().backward()
    assert left == [True]
    return seen[0], backend.backwards


def test_gradients_of_a_block_leave_when_it_is_over() -> None:
    blocks = gone_before_the_first(lambda m, b: imece.compile_blocks(m, backend=b.compile))
    assert blocks == (1, LAYERS)
    whole = gone_before_the_first(lambda m, b: m.compile(backend=b.compile))
    assert whole == (1, 1), "compiled as a whole, all of backward is over before the first gradient leaves"


@pytest.mark.parametrize("block", [Block, lambda: nn.Linear(8, 8)], ids=["a block", "torch's own class"])
def test_a_dropped_model_gives_its_memory_back(block: Callable[[], nn.Module]) -> None:
    def trained() -> list[Any]:
        model = nn.Sequential(*(block() for _ in range(LAYERS)))
        imece.compile_blocks(model, backend="eager")
        assert waits_before_compiled(model)
        model(torch.randn(2, 8)).sum().backward()
        return [*model.modules(), *model.parameters()]

    assert left_of(trained) == []


def test_a_copy_is_not_compiled() -> None:
    model, backend = made(), Backend()
    imece.compile_blocks(model, backend=backend.compile)
    copy.deepcopy(model)(torch.randn(2, 8))
    assert not backend.forwards
    model(torch.randn(2, 8))
    assert backend.forwards == LAYERS


def copy_a_wrapped_model() -> None:
    model, x = imece.DistributedDataParallel(made()), torch.randn(2, 8)
    model.compile(backend="eager")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        torch.nn.utils.vector_to_parameters(torch.zeros(1000), copied.parameters())
        assert torch.equal(copied(x), copied.module(x))


def test_a_copy_of_a_wrapped_model_is_not_compiled() -> None:
    """It would run with the parameters of the original."""
    run_ranks(copy_a_wrapped_model, 1, backend="gloo")


@pytest.mark.parametrize(
    "block",
    [
        lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    ],
    ids=["TransformerEncoderLayer", "Sequential"],
)
def test_blocks_of_torchs_own_classes(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model, backend, x = nn.Sequential(*(block() for _ in range(LAYERS))), Backend(), torch.randn(2, 5, 8)
    names, expected = list(model.state_dict()), gradients(model, x)
    imece.compile_blocks(model, backend=backend.compile)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(torch.compiler.is_compiling()))
    for _ in range(2):
        for got, each in zip(gradients(model, x), expected, strict=True):
            torch.testing.assert_close(got, each)
    assert (backend.forwards, backend.backwards) == (2 * LAYERS, 2 * LAYERS)
    assert calls == [False, False], "hooks are no part of the graph"
    assert not counters["graph_break"] and list(model.state_dict()) == names
    copy.deepcopy(model)(x)
    assert backend.forwards == 2 * LAYERS


def test_which_modules() -> None:
    model = made()
    assert imece.compile_blocks(model, units=[nn.Linear], backend="eager")[0] == "first"
    with pytest.raises(ValueError, match=r"Block has no list \(nn.ModuleList, nn.Sequential\) of blocks of"):
        imece.compile_blocks(Block())
    with pytest.raises(ValueError, match="no such module"):
        imece.compile_blocks(model, units=[nn.Conv1d])


class Gated(nn.Module):
    """Sizes after which the next parameter of a block would begin anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(7))
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gate * self.layer(x * self.scale)
        return out


def where_parameters_begin() -> list[int]:
    """What is left of their addresses divided by 16, while blocks run; under several strategies."""
    mesh = imece.init()
    found: list[int] = []
    ways: list[tuple[str, dict[str, Any]]] = [
        ("zero1", {}),
        ("zero1", {"precision": imece.MixedPrecision(torch.bfloat16)}),
        ("zero3", {"gather": True}),
    ]
    for strategy, options in ways:
        model: Any = nn.Sequential(*(Gated() for _ in range(LAYERS)))
        for block in model:
            block.register_forward_pre_hook(
                lambda block, _: found.extend(each.data_ptr() % 16 for each in block.parameters())
            )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = imece.parallelize(model, optimizer, strategy, mesh, **options)
        model(torch.ones(2, 7, dtype=torch.bfloat16 if "precision" in options else torch.float32))
    mesh.close()
    return found


def test_parameters_begin_where_compiled_code_expects_them() -> None:
    """Of one block it is made, for all of them: on a GPU it reads 16 bytes at a time, and does not look."""
    for found in run_ranks(where_parameters_begin, 2, backend=None):
        assert found == [0] * (3 * LAYERS * 4)


def graphs_of_a_step() -> int:
    """In how many graphs torch.compile cuts a forward with its backward."""
    model, graphs = imece.DistributedDataParallel(nn.Linear(8, 8)), 0

    def counted(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    @torch.compile(backend=counted)
    def step(x: Tensor) -> None:
        model(x).sum().backward()

    step(torch.ones(2, 8))
    return graphs


def test_what_autograd_calls_is_in_no_graph() -> None:
    """The module and the sum: no hook of ours."""
    assert run_ranks(graphs_of_a_step, 1, backend="gloo") == [2]


def under_compiled_autograd() -> None:
    model: Any = imece.DistributedDataParallel(nn.Linear(8, 8))
    for local in (True, False):
        with model.no_sync() if local else contextlib.nullcontext():
            loss = model(torch.ones(2, 8)).sum()
        with _enable(torch.compile(backend="eager")), pytest.raises(RuntimeError, match="stay on their rank"):
            loss.backward()


def test_compiled_autograd_is_refused() -> None:
    """It calls neither hooks of parameters nor what is to be called at the end of a backward."""
    run_ranks(under_compiled_autograd, 1, backend="gloo")


def whole_steps(strategies: list[str]) -> None:
    """Backward, the norm and the update: the same with and without torch.compile, under each strategy."""
    group, found = torch.distributed.group.WORLD, list[Tensor]()
    rank = torch.distributed.get_rank()
    for strategy in strategies:
        for compiles in (False, True):
            torch._dynamo.reset()
            model: Any = made()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = imece.parallelize(
                model, sgd, strategy, group, gather=strategy == "zero3", average="tokens"
            )

            def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
                loss: Tensor = model(x).pow(2).mean()
                model.weigh(loss, len(x)).backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                return norm

            run = torch.compile(step, backend="eager") if compiles else step
            norms = [run(torch.full((2 + rank, 8), 1.0 + at + rank)) for at in range(2)]
            found.append(torch.cat([each.flatten() for each in (*norms, *model.state_dict().values())]))
    for each in found:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize(
    "strategies",
    [["replicate", "zero3"], pytest.param(["replicate", "zero1", "zero2"], marks=pytest.mark.slow)],
    ids=["replicate and zero3", "all others"],
)
def test_whole_steps(strategies: list[str]) -> None:
    run_ranks(whole_steps, 2, args=[strategies], backend="shm")
