"""`imece train --compute.compile`: with inductor, in every strategy; and what is not compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import imece
from imece.errors import UserError
from imece.models.cross_entropy import cross_entropy
from imece.models.foreign import ForeignConfig, ForeignModel
from imece.models.generate import generate
from imece.models.language_model import give_memory
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.batch import BatchPlan
from imece.train.config import LoraSection
from imece.train.model import compiling
from imece.train.model.adapters import add
from imece.train.model.precision import Precision
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SEQ, MICRO, LAYERS = 8, 2, 2
PLAN = BatchPlan(SEQ, 2 * MICRO, 2, MICRO, 1)


def made(recompute: bool = False, **options: Any) -> Transformer:
    config = dataclasses.replace(
        PRESETS["tiny"], vocab_size=32, width=16, mlp_width=24, max_seq=4 * SEQ, **options
    )
    assert config.layers == LAYERS
    model = Transformer(config, generator=torch.Generator().manual_seed(1))
    model.checkpoint_blocks = recompute
    return model


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(rows * length))


def compiled_calls(
    model: Any, inputs: Tensor, precision: Precision, backward: bool, **more: Tensor
) -> tuple[int, int, float]:
    """Compiled forwards and backwards of one step, and its loss."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with precision.autocast():
            loss = cross_entropy(model(inputs, **more), inputs)
        if backward:
            loss.backward()
    names = [event.name for event in seen.events()]
    return names.count("CompiledFunction"), names.count("CompiledFunctionBackward"), float(loss.detach())


def trained(strategy: str, options: dict[str, Any], recompute: bool, dtype: str, compile: bool) -> list[Any]:
    """Two steps; each [compiled forwards, backwards, loss]."""
    mesh, model, precision = imece.init(), made(recompute), Precision(dtype, "cpu")
    torch.compiler.set_stance("default")  # or a plain block in a checkpoint would use what another one has
    if compile:
        compiling.compile_now(model, PLAN, precision, CPU)
    wrapped, optimizer = imece.parallelize(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), strategy, mesh, **options
    )
    told = []
    for step in range(2):
        inputs = tokens(MICRO, SEQ).roll(step + mesh.rank)
        told.append(list(compiled_calls(wrapped, inputs, precision, True)))
        optimizer.step()
        optimizer.zero_grad()
    return told


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate": ("replicate", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "zero3 gathered": ("zero3", {"gather": True}),
}


def all_strategies() -> list[str]:
    """What is wrong, in words."""
    wrong = []
    for dtype, recompute in (("fp32", False), ("bf16", False), ("fp32", True)):
        torch._dynamo.reset()
        for name, (strategy, options) in STRATEGIES.items():
            where = f"{name}, {dtype}{', recomputed' if recompute else ''}"
            counters.clear()
            plain = trained(strategy, options, recompute, dtype, False)
            got = trained(strategy, options, recompute, dtype, True)
            calls = [each[:2] for each in got]
            if calls != [[LAYERS * (1 + recompute), LAYERS]] * 2 or any(each[0] for each in plain):
                wrong.append(f"{where}: compiled calls {calls}")
            graphs = counters["stats"]["unique_graphs"]
            if graphs > 1 or counters["graph_break"]:
                wrong.append(f"{where}: {graphs} graphs, breaks {dict(counters['graph_break'])}")
            losses, expected = ([each[2] for each in steps] for steps in (got, plain))
            if losses != pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 2e-2):
                wrong.append(f"{where}: {losses}, not {expected}")
    return wrong


@pytest.mark.slow
def test_in_every_strategy() -> None:
    for wrong in run_ranks(all_strategies, 2, backend="gloo", timeout_s=400):
        assert not wrong, "\n".join(wrong)


def steps_of(model: Transformer, rows: int, length: int, backward: bool) -> list[int]:
    """Compiled forwards and backwards of one."""
    return list(compiled_calls(model, tokens(rows, length), Precision("fp32", "cpu"), backward)[:2])


@pytest.fixture
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def test_other_shapes_are_not_compiled(anew: None) -> None:
    model, cheap = made(), functools.partial(imece.compile_blocks, backend="aot_eager")
    with mock.patch("imece.train.model.compiling.compile_blocks", cheap):
        compiling.compile_now(model, PLAN, Precision("fp32", "cpu"), CPU)
    assert all(each.grad is None for each in model.parameters())
    assert steps_of(model, MICRO, SEQ, True) == [LAYERS, LAYERS]
    assert steps_of(model, 1, SEQ, True) == [0, 0], "a micro-batch that is smaller"
    with torch.no_grad():
        for length in (SEQ, SEQ + 1, SEQ + 2):
            assert steps_of(model, 4, length, False) == [0, 0], "validation"
    assert len(list(generate(model, [1, 2], 4))) == 4
    assert steps_of(model, MICRO, SEQ, True) == [LAYERS, LAYERS]
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_blocks_that_differ_are_all_compiled(anew: None) -> None:
    model = made(head_norms=True, qkv_bias=True, window=SEQ - 2, full_layers=(1,), nope_layers=(1,))
    cheap = functools.partial(imece.compile_blocks, backend="aot_eager")
    expected = compiled_calls(model, tokens(MICRO, SEQ), Precision("fp32", "cpu"), True)
    with mock.patch("imece.train.model.compiling.compile_blocks", cheap):
        compiling.compile_now(model, PLAN, Precision("fp32", "cpu"), CPU)
    found = compiled_calls(model, tokens(MICRO, SEQ), Precision("fp32", "cpu"), True)
    assert found[:2] == (LAYERS, LAYERS) and found[2] == pytest.approx(expected[2], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert len(list(generate(model, [1, 2], 12))) == 12


def test_blocks_that_see_one_document(anew: None) -> None:
    model, plain, inputs = made(), Precision("fp32", "cpu"), tokens(MICRO, SEQ)
    begins = torch.arange(SEQ).sub(1).clamp(0, 3).expand(MICRO, -1)
    expected = compiled_calls(model, inputs, plain, True, begins=begins)
    cheap = functools.partial(imece.compile_blocks, backend="aot_eager")
    with mock.patch("imece.train.model.compiling.compile_blocks", cheap):
        compiling.compile_now(model, PLAN, plain, CPU, separate=True)
    found = compiled_calls(model, inputs, plain, True, begins=begins)
    assert found[:2] == (LAYERS, LAYERS) and found[2] == pytest.approx(expected[2], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_blocks_with_adapters_are_all_compiled(anew: None) -> None:
    """The first one too, which reads from a frozen embedding: nothing wants a gradient of that."""
    pytest.importorskip("peft")
    model, plain = made(), Precision("fp32", "cpu")
    add(model, LoraSection(rank=2, dropout=0.1))
    expected = compiled_calls(model, tokens(MICRO, SEQ), plain, True)
    cheap = functools.partial(imece.compile_blocks, backend="aot_eager")
    with mock.patch("imece.train.model.compiling.compile_blocks", cheap):
        compiling.compile_now(model, PLAN, plain, CPU)
    found = compiled_calls(model, tokens(MICRO, SEQ), plain, True)
    assert found[:2] == (LAYERS, LAYERS) and found[2] == pytest.approx(expected[2], rel=1e-5)
    assert steps_of(model, 1, SEQ, True) == [0, 0], "a micro-batch that is smaller"
    assert steps_of(model, MICRO, SEQ, True) == [LAYERS, LAYERS]
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


_SIZE = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 4 * SEQ,
}  # fmt: skip
FOREIGN: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 32, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 4 * SEQ},
    "gemma3_text": _SIZE | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": _SIZE | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "separate", "graphs"), [("gpt2", False, 1), ("gemma3_text", True, 3), ("qwen3_moe", False, 2)]
)
def test_blocks_of_transformers(kind: str, separate: bool, graphs: int, anew: None) -> None:
    """All kinds of them, before the first step: none in a step."""
    pytest.importorskip("transformers")
    model = ForeignModel(ForeignConfig.of(FOREIGN[kind] | {"model_type": kind})).train()
    cheap = functools.partial(imece.compile_blocks, backend="aot_eager")
    with mock.patch("imece.train.model.compiling.compile_blocks", cheap):
        compiling.compile_now(model, PLAN, Precision("fp32", "cpu"), CPU, separate)
    assert all(each.is_meta for each in model.parameters())
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
    give_memory(model, CPU)
    torch.manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.3)
    begins = {"begins": torch.arange(SEQ).sub(1).clamp(0, 3).expand(MICRO, -1)} if separate else {}
    found = []
    for stance in ("eager_on_recompile", "force_eager"):
        with torch.compiler.set_stance(stance):
            torch.manual_seed(2)
            model.zero_grad()
            calls = compiled_calls(model, tokens(MICRO, SEQ), Precision("fp32", "cpu"), True, **begins)
        assert calls[:2] == ((4, 4) if stance == "eager_on_recompile" else (0, 0)), stance
        gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
        found.append((calls[2], torch.cat(gradients)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == graphs
    assert len(list(generate(model, [1, 2], 4))) == 4


def test_blocks_that_do_not_run_alone(anew: None) -> None:
    pytest.importorskip("transformers")
    model = ForeignModel(ForeignConfig.of(FOREIGN["gpt2"] | {"model_type": "gpt2"}))
    with (
        mock.patch.object(compiling._Alone, "forward", side_effect=RuntimeError("another\nand more")),
        pytest.raises(
            UserError, match=r"compile: blocks of the kind gpt2 do not run alone \(another\): leave"
        ),
    ):
        compiling.compile_now(model, PLAN, Precision("fp32", "cpu"), CPU)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("no working C++ compiler\nand a long story"), r"no working C.. compiler; on a CPU .*"),
        (OSError(28, "No space left"), r".* No space left; set TORCHINDUCTOR_CACHE_DIR to a folder .*"),
    ],
)
def test_without_a_compiler(error: OSError, told: str, anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(graph: Any, inputs: Any) -> Any:
        raise error

    monkeypatch.setattr(compiling, "compile_blocks", functools.partial(imece.compile_blocks, backend=none))
    with pytest.raises(UserError, match=rf"compile: {told}, or leave that option out$") as said:
        compiling.compile_now(made(), PLAN, Precision("fp32", "cpu"), CPU)
    assert "\n" not in str(said.value)
