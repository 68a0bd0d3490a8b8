"""States as JSON, from which they come back as they were: JSON's keys are texts alone, its numbers finite.

A scheduler that looks up step 30 in {"30": 1} finds nothing there, and nobody sees it.

{"imece/kind": KIND, "of": [...]} stands for what JSON has no word for; for a dict that looks like it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

_KIND = "imece/kind"
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "tuple": tuple,
    "float": lambda text: float(*text),
}
_PLAIN = frozenset({int, str, bool, type(None)})  # long lists are mostly of these: not one call for each
_DEEPEST = 100  # levels; whoever reads it may stand deep in calls already


def as_json(value: Any, name: str) -> Any:
    """A copy of which JSON can say all; the value may change afterwards.

    name: of the value, for messages. TypeError for what is neither number, text, None, list, tuple nor dict,
    with its place; ValueError for what is nested too deeply.
    """
    return _as_json(value, name, _DEEPEST)


def _as_json(value: Any, name: str, deepest: int) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "of": [str(float(value))]}
    if deepest == 0:
        raise ValueError(f"{name[:100]}...: nested more than {_DEEPEST} deep")
    deepest -= 1
    if isinstance(value, dict):
        counts = isinstance(value, Counter)
        if not counts and _KIND not in value and all(isinstance(key, str) for key in value):
            return {key: _as_json(each, f"{name}[{key!r}]", deepest) for key, each in value.items()}
        pairs = [
            [_as_json(key, f"a key of {name}", deepest), _as_json(each, f"{name}[{key!r}]", deepest)]
            for key, each in value.items()
        ]
        return {_KIND: "Counter" if counts else "dict", "of": pairs}
    if isinstance(value, list | tuple):
        found = [
            each if type(each) in _PLAIN else _as_json(each, f"{name}[{i}]", deepest)
            for i, each in enumerate(value)
        ]
        return found if isinstance(value, list) else {_KIND: "tuple", "of": found}
    raise TypeError(f"{name}: a {type(value).__name__} is not JSON serializable")


def from_json(value: Any) -> Any:
    """The inverse: keys that are numbers, tuples, Counters and infinities are again what they were.

    KeyError, TypeError, ValueError or RecursionError for what `as_json` has not made.
    """
    if isinstance(value, list):
        return [each if type(each) in _PLAIN else from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND in value:
        return _KINDS[value[_KIND]](from_json(value["of"]))
    return {key: from_json(each) for key, each in value.items()}
