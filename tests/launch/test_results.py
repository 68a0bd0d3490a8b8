"""A rank's return value arrives unchanged, and nothing else is read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imece.launch.results import decode, encode

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(_TREES)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(encode(value))
    assert back == value and repr(back) == repr(value)


def test_tensors_come_back_as_they_were() -> None:
    tensors = [
        torch.randn(3, 4).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
    ]
    tensors += [
        torch.randn(4, 6).t()[1:],
        torch.empty(2, 0),
        torch.tensor(5),
        torch.randn(3, requires_grad=True),
    ]
    tensors += [torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj()]
    tensors += [torch.randn(3, dtype=torch.complex64).conj().imag]
    back = decode(encode({"all": tensors, "one": tensors[0]}))
    for sent, came in zip([*tensors, tensors[0]], [*back["all"], back["one"]], strict=True):
        assert sent.dtype == came.dtype and sent.shape == came.shape
        assert torch.equal(sent.detach(), came)
        came.zero_()  # it is ordinary memory
    assert math.isnan(decode(encode(float("nan"))))


@pytest.mark.parametrize(
    "value",
    [
        object(), {1: 2}, {3}, b"bytes", lambda: 0, torch.Size([2]),
        torch.eye(2).to_sparse(), torch.ones(2, device="meta"),
    ],
)  # fmt: skip
def test_other_things_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"returned an? {type(value).__name__};"):
        encode([value])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch is about to give them up
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"returned a Tensor; return .* dense tensors"):
        encode(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_result(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(b"\0" * 7 + bytes([len(data)]) + data + b"?")


def test_a_result_that_lies_about_its_tensor() -> None:
    frame = encode(torch.zeros(4))
    for broken in (
        frame[:-1],
        frame + b"x",
        frame.replace(b"float32", b"Generator"),
        frame.replace(b"[", b"{", 1),
    ):
        with pytest.raises(ValueError):
            decode(broken)
