"""Python values as plain tensors, by key: checkpoints and copies in memory hold nothing else.

KEY          a tensor; names that others choose are quoted as in a URL
KEY:int      a number, without dims; int, float or bool
KEY:str      a text, as JSON in UTF-8
KEY:none     None
KEY:list     how many; KEY:list:0 is the first of them, and so on. The same for a tuple
KEY:dict     how many; KEY:dict:NAME is the value of this key, which is quoted too
KEY:scale    one of the tensors that make up a tensor: torchao's have codes, scale and qmap
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from imece.data_parallel.same import is_made_of_others

_NUMBERS = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}  # a bool is an int to isinstance
_MANY = (list, tuple, dict)  # not their subclasses, which would come back as something else


def plain(key: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `value`. TypeError, with the key, for a value that is or contains something else."""
    kind = type(value).__name__
    if hasattr(value, "__tensor_flatten__"):  # torch's protocol for a tensor that is made of others
        for name in value.__tensor_flatten__()[0]:
            yield f"{key}:{name}", getattr(value, name).detach()
    elif isinstance(value, Tensor):
        yield key, value.detach()
    elif value is None:
        yield f"{key}:none", torch.tensor(0, dtype=torch.uint8, device="cpu")
    elif type(value) is str:
        yield f"{key}:str", torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    elif type(value) in _MANY:
        yield f"{key}:{kind}", torch.tensor(len(value), device="cpu")
        for name, each in value.items() if kind == "dict" else enumerate(value):
            if kind == "dict" and type(name) is not str:
                raise TypeError(f"{key} is a dict with the key {name!r}")
            yield from plain(f"{key}:{kind}:{quoted(str(name))}", each)
    else:
        for name, (of, dtype) in _NUMBERS.items():
            if isinstance(value, of):
                yield f"{key}:{name}", torch.tensor(value, dtype=dtype, device="cpu")
                return
        raise TypeError(f"{key} is of the type {kind}")


def quoted(name: object) -> str:
    """A key in which no character has a special meaning; `unquote` gives the name. TypeError unless it is
    a text."""
    if type(name) is not str:
        raise TypeError(f"the key {name!r} is of the type {type(name).__name__}")
    return quote(name, safe="")


def memory_of(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold its values, by name: itself, or those that it is made of, as for a
    quantised one."""
    if not is_made_of_others(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from memory_of(f"{name}:{part}", getattr(tensor, part))


def by_key(found: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What belongs to each key, by what follows it: "" for a tensor, else "int", "list:0" and so on."""
    inner: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in found.items():
        key, _, rest = name.partition(":")
        inner[key][rest] = value
    return inner


def value_of(
    found: Mapping[str, Tensor],
    tensor: Callable[[Tensor], Tensor] = lambda value: value,
    join: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
) -> Any:
    """The inverse of `plain`. found: what `by_key` gives for one key.

    tensor: converts each tensor. join: makes one tensor from those that it is made of. ValueError if that is
    needed, and there is no `join`.
    """
    kinds = by_key(found)
    if "" in kinds:
        return tensor(found[""])
    kind = next(iter(kinds))
    if kind in _NUMBERS:
        return found[kind].item()
    if kind == "none":
        return None
    if kind == "str":
        return json.loads(bytes(found[kind].tolist()))
    if kind in {each.__name__ for each in _MANY}:
        inner = {
            unquote(name): value_of(each, tensor, join) for name, each in by_key(kinds[kind]).items() if name
        }
        in_order = [inner[str(at)] for at in range(len(inner))] if kind != "dict" else []
        return inner if kind == "dict" else in_order if kind == "list" else tuple(in_order)
    if join is None:
        raise ValueError(f"a tensor that is made of {', '.join(kinds)}")
    return join(found)
