"""State dicts as JSON text, from which they come back as they were: JSON's keys are texts alone.

A scheduler that looks up step 30 in {"30": 1} finds nothing there, and nobody sees it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

_KIND = "imece/kind"
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "tuple": tuple,
}


def packed(state: dict[str, Any]) -> str:
    """As text, and so as it is now: the state may change afterwards. TypeError for what is no JSON."""
    return json.dumps(_pack(state))


def unpacked(text: str) -> dict[str, Any]:
    """The inverse: keys that are numbers, tuples and Counters are again what they were."""
    state: dict[str, Any] = json.loads(text, object_hook=_unpack)
    return state


def _pack(value: Any) -> Any:
    if isinstance(value, dict):
        counts = isinstance(value, Counter)
        if not counts and _KIND not in value and all(isinstance(key, str) for key in value):
            return {key: _pack(each) for key, each in value.items()}
        pairs = [[_pack(key), _pack(each)] for key, each in value.items()]
        return {_KIND: "Counter" if counts else "dict", "of": pairs}
    if isinstance(value, list | tuple):
        found = [_pack(each) for each in value]
        return found if isinstance(value, list) else {_KIND: "tuple", "of": found}
    return value


def _unpack(value: dict[str, Any]) -> Any:
    return _KINDS[value[_KIND]](value["of"]) if _KIND in value else value
