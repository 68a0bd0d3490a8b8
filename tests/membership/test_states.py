"""State dicts come back as they were."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

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


def test_as_it_was_then() -> None:
    state: dict[str, Any] = {"seen": [1]}
    text = packed(state)
    state["seen"].append(2)
    assert unpacked(text) == {"seen": [1]}


def test_what_is_no_json() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        packed({"tensor": torch.ones(1)})
