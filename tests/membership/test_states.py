"""State dicts come back unchanged."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from imece.checkpoint.states import from_json
from imece.membership.states import packed, unpacked


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"last": 3, "rates": [0.1, 2.5e-300, float("inf")], "name": "cosine", "none": None},
        {"milestones": Counter({30: 1, 80: 2}), "by": {1: {2.5: "x"}, None: (1, (2, [3]))}},
        {"of": {"imece/kind": "tuple", "of": [1]}, "imece/kind": "dict"},
        {(1, "two"): {True: False}},
    ],
)
def test_whatever_its_keys_are(state: dict[Any, Any]) -> None:
    found = unpacked(packed(state))
    assert found == state and repr(found) == repr(state), "of the same types too"


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.5),
        torch.ones(2, 3, dtype=torch.bfloat16).t(),
        torch.empty(0, 3, dtype=torch.int64),
        np.arange(6).reshape(2, 3).T,
        np.arange(4, dtype=">i4"),
        np.float32(3.5),
    ],
)
def test_tensors_and_arrays(value: Any) -> None:
    found = unpacked(packed({"of": value}))["of"]
    assert type(found) is type(value) and found.dtype == value.dtype and found.shape == value.shape
    assert found.tolist() == value.tolist()


def test_as_it_was_then() -> None:
    state: dict[str, Any] = {"seen": [1]}
    text = packed(state)
    state["seen"].append(2)
    assert unpacked(text) == {"seen": [1]}


def test_what_is_no_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        packed({"tensor": torch.ones(1).to_sparse()})
    with pytest.raises(TypeError, match="a ndarray is not JSON serializable"):
        packed({"array": np.array([object()])})


@pytest.mark.parametrize(
    "said",
    [
        {"imece/kind": "tensor", "of": ["float32", [2], "AAAA"]},
        {"imece/kind": "tensor", "of": ["load", [0], ""]},
        {"imece/kind": "array", "of": ["O", [0], ""]},
        {"imece/kind": "array", "of": ["<i4", [3], "AAAA"]},
    ],
)
def test_what_is_no_tensor_and_no_array(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_json(said)
