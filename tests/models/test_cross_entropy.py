"""Cross-entropy in pieces, compared with torch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imece.models import cross_entropy
from imece.models.cross_entropy import summed_cross_entropy


@pytest.fixture(autouse=True)
def three_rows_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_CPU_PIECE_BYTES", 3 * 4 * 50)


def some(rows: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, 50, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(50, (rows,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignore", [-100, 3])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_loss_and_gradient_are_torchs(dtype: torch.dtype, ignore: int, rows: int) -> None:
    logits, targets = some(rows, dtype)
    before = logits.detach().clone()
    targets[: rows // 2 : 2] = ignore
    loss = summed_cross_entropy(logits, targets, ignore)
    (gradient,) = torch.autograd.grad(2 * loss, logits)
    expected = F.cross_entropy(logits.float(), targets, ignore_index=ignore, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(2 * expected, logits)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert gradient.any()
    assert torch.equal(logits, before)


def test_no_target_at_all() -> None:
    logits, targets = some()
    loss = summed_cross_entropy(logits, targets.fill_(-100), -100)
    assert float(loss.detach()) == 0
    assert not torch.autograd.grad(loss, logits)[0].any()
    assert float(summed_cross_entropy(*some(0), -100).detach()) == 0


def test_small_gradients_are_scaled_before_they_are_narrowed() -> None:
    logits, targets = some(dtype=torch.float16)
    narrow, wide = 2.0**-30, 2.0**10  # a mean over many tokens, and the scale of a GradScaler
    loss = summed_cross_entropy(logits, targets, -100) * narrow * wide
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(summed_cross_entropy(logits, targets, -100), logits)
    assert gradient.any()
    torch.testing.assert_close(gradient.float() / narrow / wide, expected.float(), rtol=0.1, atol=0.2)


def test_what_is_not_finite_stays_visible() -> None:
    logits, targets = some()
    with torch.no_grad():
        logits[4, 7] = math.nan
    assert math.isnan(float(summed_cross_entropy(logits, targets, -100).detach()))
    targets[4] = -100
    assert math.isfinite(float(summed_cross_entropy(logits, targets, -100).detach()))


def test_a_target_outside_the_vocabulary() -> None:
    logits, targets = some()
    targets[5] = 50
    with pytest.raises((RuntimeError, IndexError), match="50"):
        summed_cross_entropy(logits, targets, -100)


def test_a_second_derivative_is_refused() -> None:
    logits, targets = some()
    loss = summed_cross_entropy(logits, targets, -100)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_compiled_it_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = some()
    expected = summed_cross_entropy(logits, targets, -100)
    compiled = torch.compile(summed_cross_entropy, backend="eager", fullgraph=True)
    monkeypatch.setattr(cross_entropy, "_pieces", lambda _: pytest.fail("in pieces"))
    torch.testing.assert_close(compiled(logits, targets, -100), expected)
