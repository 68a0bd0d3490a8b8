"""Counts the bytes of tensors that are made while something runs, and let go of."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """A context. `most`: bytes of all storages made in it that lived at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, int] = {}  # storage -> bytes
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_plain(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if _is_plain(each):
                self._count(each.untyped_storage(), given)
        self.most = max(self.most, self.now)
        return result

    def _count(self, storage: Any, given: set[int]) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if nbytes and address not in given and address not in self._living:
            self._living[address] = nbytes
            self.now += nbytes
            weakref.finalize(storage, self._let_go, address)

    def _let_go(self, address: int) -> None:
        self.now -= self._living.pop(address)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
