"""The share of the machine's peak rests on a count of operations and on a measured rate."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.peak import flops_per_token, measured_peak


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


def test_the_rate_of_this_machine() -> None:
    peak = measured_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e15
