"""State dicts as JSON text, and back without loss: see `imece.checkpoint.states`."""

from __future__ import annotations

import json
from typing import Any

from imece.checkpoint.states import as_json, from_json


def packed(state: dict[str, Any]) -> str:
    """The state as text, as it is now: it may change afterwards. TypeError if it is no JSON, ValueError if it
    is too large."""
    return json.dumps(as_json(state, "state", instead="keep it in the model, as a buffer"))


def unpacked(text: str) -> dict[str, Any]:
    """The inverse of `packed`: keys that are numbers, tuples and Counters come back as they were."""
    state: dict[str, Any] = from_json(json.loads(text))
    return state
