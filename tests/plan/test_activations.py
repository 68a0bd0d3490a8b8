"""Bytes of activations: table 2 of Korthikanti et al. 2022, and the switches of frameworks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imece.models.presets import PRESETS
from imece.models.transformer import Transformer, rotation_at
from imece.plan.memory.activations import kept_layer, layers_in_flight, whole_layer
from imece.plan.memory.frameworks import IMECE, IMECE_CPU, NANOTRON, PAPER, TORCHTITAN
from imece.plan.memory.held import held
from imece.plan.models.by_name import find_model
from imece.plan.models.model import Model, from_shape
from imece.plan.setup import Parallel, Recipe, Recomputation, Setup

S, B, H, A, T = 2048, 4, 6144, 64, 8
GPT = Model("22B", 48, H, A, A, H // A, 4 * H, False, 51200, learned_positions=S, norm="layer")


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "expected"),
    [
        (1, False, "none", 34 + 5 * A * S / H),
        (T, False, "none", 10 + 24 / T + 5 * A * S / (H * T)),
        (T, True, "none", 34 / T + 5 * A * S / (H * T)),
        (T, False, "selective", 10 + 24 / T),
        (T, True, "selective", 34 / T),
        (T, False, "full", 2),
    ],
)
def test_table_2_to_the_byte(tensor: int, sequence: bool, recompute: Recomputation, expected: float) -> None:
    recipe = Recipe(S, B, recompute=recompute, attention="plain", dropout=True)
    found = kept_layer(GPT, Parallel(tensor=tensor, sequence=sequence), recipe, PAPER)
    assert found.total == pytest.approx(S * B * H * expected, rel=1e-12)


def test_flash_attention_keeps_a_number_a_row() -> None:
    plain = whole_layer(GPT, Parallel(), Recipe(S, B, attention="plain"), PAPER)
    flash = whole_layer(GPT, Parallel(), Recipe(S, B), PAPER)
    assert flash.scores == 4 * A * S * B
    assert plain.scores == 2 * A * S * S * B
    assert flash.attention == plain.attention == 4 * S * B * H * 2


def test_nanotron_keeps_26_hidden_states_of_a_llama_layer_four_times_as_wide() -> None:
    model = Model("1B", 16, 2048, 32, 32, 64, 8192, True, 131072)
    found = whole_layer(model, Parallel(), Recipe(4096), NANOTRON)
    assert found.total - found.scores == 26 * 4096 * 2048 * 2


def test_torchtitan_keeps_every_second_product() -> None:
    model = find_model("llama-8b")
    found = kept_layer(model, Parallel(), Recipe(8192, 2, recompute="selective"), TORCHTITAN)
    widths = 4 * 4096 + 1024 + 14336  # input, queries, attention, what the MLP gives out; values; gate
    assert found.total - found.scores == 16384 * 2 * widths
    compiled = Recipe(8192, 2, recompute="selective", compiled=True)
    found = kept_layer(model, Parallel(), compiled, TORCHTITAN)
    assert found.total - found.scores == 16384 * 2 * (widths - 4096), "backward reads no output of the MLP"


def test_layers_in_flight() -> None:
    recipe = Recipe(S, 1, 32)
    assert layers_in_flight(12, Parallel(pipeline=4), recipe, 0) == 48
    assert layers_in_flight(12, Parallel(pipeline=4), recipe, 3) == 12
    assert layers_in_flight(12, Parallel(pipeline=4), Recipe(S, 1, 2), 0) == 24  # no more than there are
    assert layers_in_flight(12, Parallel(pipeline=4, interleave=3), recipe, 0) == 48 * (1 + 3 / 12)
    assert layers_in_flight(12, Parallel(pipeline=4, interleave=3), recipe, 3) == 4 * 9


@pytest.mark.parametrize("autocast", [False, True])
def test_of_our_model_it_is_what_autograd_saves(autocast: bool) -> None:
    """Counted from the storages that autograd holds between forward and backward, without parameters.

    Under autocast with the copies of matrices, which last as long.
    """
    shape = PRESETS["small"]
    model = Transformer(shape)
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # else an address may come again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage.nbytes()
        kept.append(tensor)
        return tensor

    x = model.embed(torch.zeros(2, 128, dtype=torch.int64))
    rotation = rotation_at(shape, torch.arange(128, device=x.device))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        for block in model.blocks:
            x = block(x, rotation)
    counted = (sum(saved.values()) - sum(each.nbytes for each in rotation)) / shape.layers
    precision = replace(IMECE_CPU.precision, activations=2) if autocast else IMECE_CPU.precision
    recipe = Recipe(128, 2, precision=precision)
    planned = from_shape("small", shape)
    expected = whole_layer(planned, Parallel(), recipe, IMECE_CPU).total
    if autocast:
        expected += 2 * held(Setup(planned, Parallel(), recipe), 0, IMECE_CPU.stages).products
    assert counted == pytest.approx(expected, rel=0.01)


def test_adapters_keep_what_is_between_their_two_matrices() -> None:
    model, recipe = find_model("llama-8b"), Recipe(4096, 2, adapters="lora", adapter_rank=64)
    plain = whole_layer(model, Parallel(), Recipe(4096, 2), IMECE)
    assert whole_layer(model, Parallel(), recipe, IMECE).total - plain.total == 2 * 4096 * 7 * 64 * 2
