"""What a rank's function returned, as bytes: JSON and raw tensors, never a pickle.

A frame is 8 bytes with the length of the JSON part, that part, and the tensors' bytes one after another. In
the JSON part each container is tagged, so that tuples, lists and dicts come back as they were.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from imece.listing import kind_of

_LENGTH_BYTES = 8


def encode(value: object) -> bytes:
    """`value` as a frame. TypeError, naming the type, for anything but None, bool, int, float, str, list,
    tuple, dict with str keys, and dense tensors (which travel over the CPU)."""
    tensors: list[bytes] = []
    tree = json.dumps(_pack(value, tensors)).encode()
    return b"".join([len(tree).to_bytes(_LENGTH_BYTES, "big"), tree, *tensors])


def decode(frame: bytes) -> Any:
    """The value in `frame`. ValueError if it is not a frame that `encode` made."""
    end = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], "big")
    if end > len(frame):
        raise ValueError(f"a result of {len(frame)} bytes, of which {end} should be JSON")
    reader = _Reader(frame, end)
    value = reader.unpack(json.loads(frame[_LENGTH_BYTES:end]))
    if reader.position != len(frame):
        raise ValueError(f"{len(frame) - reader.position} bytes too many in a result")
    return value


def _pack(value: object, tensors: list[bytes]) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return {type(value).__name__: [_pack(each, tensors) for each in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack(each, tensors) for key, each in value.items()}}
    if isinstance(value, torch.Tensor) and _is_dense(value):
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        tensors.append(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(whole.dtype).removeprefix("torch."), *whole.shape]}
    return _refuse(value)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its bytes are its values."""
    return value.layout == torch.strided and not value.is_quantized and not value.is_meta


def _refuse(value: object) -> object:
    raise TypeError(
        f"a rank's function returned {kind_of(value)}; return None, numbers, strings, dense tensors, "
        "or lists, tuples and dicts (with str keys) of these"
    )


class _Reader:
    """Takes tensors from the bytes behind the JSON part, in order."""

    def __init__(self, frame: bytes, position: int) -> None:
        self._frame = frame
        self.position = position

    def unpack(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((tag, content),) = node.items()
        if tag == "tensor":
            return self._tensor(*content)
        if tag == "dict":
            return {key: self.unpack(each) for key, each in content.items()}
        values = [self.unpack(each) for each in content]
        return tuple(values) if tag == "tuple" else values

    def _tensor(self, dtype_name: str, *shape: int) -> torch.Tensor:
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r} is no dtype")
        size = math.prod(shape) * dtype.itemsize
        data = bytearray(self._frame[self.position : self.position + size])
        self.position += size
        if len(data) != size:
            raise ValueError(f"a tensor of {size} bytes, of which {len(data)} came")
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
