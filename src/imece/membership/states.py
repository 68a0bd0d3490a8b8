"""State dicts as JSON text, from which they come back as they were: see `imece.checkpoint.states`."""

from __future__ import annotations

import json
from typing import Any

from imece.checkpoint.states import as_json, from_json


def packed(state: dict[str, Any]) -> str:
    """As text, and so as it is now: the state may change afterwards. TypeError for what is no JSON,
    ValueError for what is too large."""
    return json.dumps(as_json(state, "state", instead="keep it in the model, as a buffer"))


def unpacked(text: str) -> dict[str, Any]:
    """The inverse: keys that are numbers, tuples and Counters are again what they were."""
    state: dict[str, Any] = from_json(json.loads(text))
    return state
