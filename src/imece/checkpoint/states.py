"""States as JSON, and back as they were; JSON itself has only texts as keys and finite numbers.

A scheduler that looks up step 30 in {"30": 1} silently finds nothing. Learning rates and the states of random
generators may be small tensors and arrays, which are written as their bytes.

{"imece/kind": KIND, "of": [...]} stands for what JSON cannot express, and for a dict that looks like this.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from imece.listing import kind_of

_KIND = "imece/kind"
_KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "Counter": lambda pairs: Counter(dict(pairs)),
    "tuple": tuple,
    "float": lambda text: float(*text),
    "tensor": lambda said: _tensor(*said),
    "array": lambda said: _array(*said),
}
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset({int, str, bool, type(None)})  # long lists mostly have these: not one call for each
_MOST_BYTES = 2**20  # of one tensor or array: all ranks' states are in the one manifest
_DEEPEST = 100  # levels; the reader's stack may be deep already


class _TooLargeError(Exception):
    """A tensor or an array is too large."""


def as_json(value: Any, name: str, instead: str = "save it with the tensors") -> Any:
    """A copy that JSON can express; the value may change afterwards.

    name: of the value, for messages; instead: what to do with a tensor that is too large. TypeError, with its
    place, for anything but numbers, texts, None, lists, tuples, dicts, dense tensors and arrays of numbers;
    ValueError for what is nested too deeply or too large.
    """
    try:
        return _as_json(value, name, _DEEPEST)
    except _TooLargeError as error:
        raise ValueError(f"{error}: {instead}") from None


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
    if isinstance(value, torch.Tensor) and type(value) in _TENSORS and value.layout == torch.strided:
        dtype = str(value.dtype).removeprefix("torch.")
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return _of_bytes("tensor", dtype, value.shape, raw, name)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _of_bytes("array", value.dtype.str, value.shape, np.asarray(value), name)
    raise TypeError(f"{name}: {kind_of(value)} is not JSON serializable")


def _of_bytes(kind: str, dtype: str, shape: Sequence[int], raw: Any, name: str) -> Any:
    if raw.nbytes > _MOST_BYTES:
        raise _TooLargeError(f"{name}: {raw.nbytes} bytes, and {_MOST_BYTES} at most")
    return {_KIND: kind, "of": [dtype, [*shape], base64.b64encode(raw.tobytes()).decode()]}


def _tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    raw = np.frombuffer(base64.b64decode(text), dtype=np.uint8)
    if not isinstance(kind, torch.dtype) or len(raw) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{len(raw)} bytes are no {dtype}{shape}")
    made = torch.empty(shape, dtype=kind, device="cpu")
    made.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    return made


def _array(dtype: str, shape: list[int], text: str) -> Any:
    if np.dtype(dtype).kind not in "biufc":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape).copy()[()]


def from_json(value: Any) -> Any:
    """The inverse: keys that are numbers, tuples, Counters and infinities come back as they were.

    Tensors are on the CPU. KeyError, TypeError, ValueError or RecursionError for anything that `as_json` did
    not make.
    """
    if isinstance(value, list):
        return [each if type(each) in _PLAIN else from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND in value:
        return _KINDS[value[_KIND]](from_json(value["of"]))
    return {key: from_json(each) for key, each in value.items()}
