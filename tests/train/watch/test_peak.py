"""The share of the machine's peak, from a count of operations and a measured rate."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from imece.models.foreign import ForeignConfig
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.watch import peak as peaks
from imece.train.watch.peak import flops_per_token, measured_peak


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("seq", [16, 64])
def test_operations_of_a_token(tied: bool, seq: int) -> None:
    """torch counts each product of the same forward and backward; attention whole, not its causal half."""
    config = dataclasses.replace(PRESETS["tiny"], vocab_size=257, tied_head=tied, max_seq=seq)
    model = Transformer(config)
    tokens = torch.randint(257, (2, seq))
    # Plain attention: the fused one computes a product of its forward again in backward.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(tokens, tokens).backward()
    hidden_half = 6 * config.layers * config.width * seq
    counted = counter.get_total_flops() / tokens.numel()
    scales = 6 * config.width * (2 * config.layers + 1)  # of norms: not multiplied as a matrix is
    assert flops_per_token(config) + hidden_half - scales == pytest.approx(counted, rel=1e-12)
    assert scales < 0.01 * flops_per_token(config)


def test_a_token_goes_through_some_of_the_experts() -> None:
    """Of the layers that have any."""
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    content = {
        "model_type": "qwen3_moe", "num_key_value_heads": 2, "intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0],
    }  # fmt: skip
    config = ForeignConfig.of(sizes | content)
    idle = 2 * 6 * 3 * 16 * 8
    assert config.parameter_count - config.active_count == idle
    lookup = 0 if config.tied_head else 300 * 16
    scores = 6 * config.q_width * 3 * 5
    assert flops_per_token(config, 5) - scores == 6 * (config.parameter_count - idle - lookup)


def test_the_rate_of_this_machine() -> None:
    peak = measured_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15


def test_its_matrices_are_in_no_step_s_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which counts the most that there ever was; this one is made up."""
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[Any] = []

    def randn(*size: int, **_: Any) -> torch.Tensor:
        one = torch.ones(*size)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(peaks, "_SIZE", {"cuda": 4})
    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.extend(each() for each in made))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", left.append)
    assert measured_peak.__wrapped__(torch.device("cuda", 0), torch.float32) > 0
    assert left == [None, None, torch.device("cuda", 0)]
