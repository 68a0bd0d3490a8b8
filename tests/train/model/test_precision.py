"""The number format of products."""

from __future__ import annotations

import pytest
import torch

from imece.errors import UserError
from imece.train.config import Dtype
from imece.train.model import precision
from imece.train.model.precision import Precision, choose_precision, multiplies_bf16

CPU = torch.device("cpu")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_what_the_processor_is_made_for(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bf16", lambda device: fast)
    assert choose_precision("auto", CPU) == Precision("bf16" if fast else "fp32", "cpu")


@pytest.mark.parametrize(("avx", "amx"), [(False, False), (True, False), (False, True)])
def test_processors_that_multiply_bf16(avx: bool, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert multiplies_bf16(CPU) == (avx or amx)
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not multiplies_bf16(CPU)


@pytest.mark.parametrize(("asked", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_what_is_asked_for(asked: Dtype, dtype: torch.dtype) -> None:
    chosen = choose_precision(asked, CPU)
    left, right = torch.ones(2, 3), torch.ones(3, 2)
    with chosen.autocast():
        assert (left @ right).dtype == chosen.dtype == dtype
    assert (left @ right).dtype == torch.float32
    assert chosen.scaler() is None


def test_fp16_is_for_gpus() -> None:
    with pytest.raises(UserError, match=r"--compute\.dtype fp16 needs a GPU: on a CPU take bf16 or fp32"):
        choose_precision("fp16", CPU)
    chosen = choose_precision("fp16", torch.device("cuda"))
    assert chosen == Precision("fp16", "cuda") and chosen.dtype == torch.float16
    assert Precision("fp16", "cpu").scaler() is not None
