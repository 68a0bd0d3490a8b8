"""Mixtures with MLPs beside experts and in place of them, and attention through few channels: what they add
to memory and time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imece.plan.memory.activations import whole_layer
from imece.plan.memory.frameworks import IMECE as FRAMEWORK
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import find_model
from imece.plan.models.model import Latent, Model
from imece.plan.presets import find_cluster
from imece.plan.setup import Parallel, Recipe, Setup
from imece.plan.speed.compute import LayerTime, flops_a_token, layer_time
from imece.plan.speed.manner import IMECE

CLUSTER = find_cluster("H100", 8)
RECIPE = Recipe(2048)
MIXTURE = Model(
    "mixture", 4, 1024, 16, 4, 64, 512, True, 8192, tied_head=False, experts=8, active_experts=2, ours=False
)
SHARED = replace(MIXTURE, name="shared", shared_width=2048)
UNEVEN = replace(SHARED, name="uneven", dense_layers=1, dense_width=3072)
DENSE = replace(MIXTURE, name="dense", experts=0, active_experts=0, mlp_width=3072)
LATENT = replace(
    MIXTURE, name="latent", kv_heads=16, head_width=48, latent=Latent(256, 128, turned=16, value_width=24)
)


def test_parameters_of_each_kind_of_layer() -> None:
    expert, shared, dense = (3 * 1024 * width for width in (512, 2048, 3072))
    assert SHARED.parameters - MIXTURE.parameters == 4 * shared
    assert UNEVEN.parameters - SHARED.parameters == dense - shared - 8 * expert - 8 * 1024  # its router, too
    assert UNEVEN.largest_matrix == 1024 * 3072
    gates = replace(UNEVEN, routing=100)
    assert gates.parameters - UNEVEN.parameters == 3 * 100


def test_a_token_goes_through_few_of_them() -> None:
    """6 FLOPs for each parameter that multiplies, and scores: DeepSeek-V3 is known for its 37B."""
    model = find_model("deepseek-v3")
    scores = 12 * model.layers * 128 * (192 + 128) / 2 * 4096
    assert (flops_a_token(model, 4096) - scores) / 6 == pytest.approx(37.5e9, rel=0.01)
    idle = 6 * 3 * 6 * 3 * 1024 * 512  # of 3 layers, 6 experts
    assert flops_a_token(UNEVEN, 1) - 12 * 4 * 1024 == 6 * UNEVEN.parameters - idle


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_what_ranks_hold(strategy: str) -> None:
    """All ranks together, each element's state; and of what zero3 gathers, the layers that have experts."""
    parallel = Parallel(strategy, 8, 8)  # type: ignore[arg-type]
    found, plain = (memory(Setup(model, parallel, RECIPE)) for model in (UNEVEN, MIXTURE))
    parameters = UNEVEN.parameters / MIXTURE.parameters
    assert found.optimizer / plain.optimizer == pytest.approx(parameters, rel=1e-3)
    if strategy == "zero3":
        even = memory(Setup(SHARED, parallel, RECIPE))
        assert found.communication == pytest.approx(even.communication, rel=0.05)
    else:
        assert found.parameters == pytest.approx(2 * UNEVEN.parameters, rel=1e-6)


def _layer(model: Model, tensor: int = 1) -> LayerTime:
    return layer_time(CLUSTER.gpu, model, IMECE, RECIPE, 1, tensor, False)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_average_layer_takes_the_average_time(tensor: int) -> None:
    half = replace(SHARED, name="half", dense_layers=2, dense_width=3072)
    found, *both = (_layer(model, tensor) for model in (half, SHARED, DENSE))
    for name in ("forward", "inputs", "weights", "products", "core"):
        each = [getattr(one, name) for one in both]
        assert (each[0] == each[1]) == (name == "core"), name
        assert getattr(found, name) == pytest.approx(sum(each) / 2), name


def test_activations_are_those_of_the_average_layer() -> None:
    half = replace(SHARED, dense_layers=2, dense_width=3072)
    found, *both = (whole_layer(model, Parallel(), RECIPE, FRAMEWORK) for model in (half, SHARED, DENSE))
    assert found.total == pytest.approx(sum(each.total for each in both) / 2)
    assert both[0].mlp - both[1].mlp == 2048 * (2 * 2 * 2 * 1024 + 8 * 4)  # of experts and router


def test_attention_through_few_channels() -> None:
    """Queries and keys of 48, values of 24 channels, made from 256 and from 128 with 16 that are turned."""
    shapes = {each.name: (each.rows, each.columns) for each in LATENT.attention}
    assert shapes == {
        "attention.q_a": (256, 1024), "attention.kv_a": (128 + 16, 1024), "attention.q_b": (16 * 48, 256),
        "attention.kv_b": (16 * (32 + 24), 128), "attention.out": (1024, 16 * 24),
    }  # fmt: skip
    straight = replace(LATENT, latent=Latent(0, 128, turned=16, value_width=24))
    assert [each.name.partition(".")[2] for each in straight.attention] == ["q", "kv_a", "kv_b", "out"]
    wide = replace(LATENT, latent=None)  # values of 48 channels, from the residual
    found, plain = (whole_layer(model, Parallel(), RECIPE, FRAMEWORK).attention for model in (LATENT, wide))
    fewer, between = 2 * 16 * (48 - 24), 2 * (256 + 128 + 16)  # values, outputs; before norms and after them
    assert found - plain == 2 * 2048 * (between - fewer)
    narrow, same = _layer(LATENT), _layer(replace(wide, head_width=36))
    assert narrow.core == same.core  # scores multiply by 48 channels and by 24
    assert narrow.weights < _layer(wide).weights
