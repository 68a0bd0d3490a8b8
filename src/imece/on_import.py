"""What `import imece` changes in a process, without waiting for torch, which takes a second to import.

"shm" becomes known to torch.distributed as soon as torch is imported, by whoever. Nothing of imece is
imported at that moment: the module that imports torch may be one of imece's, and only half done.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

_BACKEND = "imece.collectives.shared_memory.group"


def register_backend() -> None:
    """Make "shm" known to torch.distributed: now, or when torch is imported. A second call does nothing."""
    _after_torch(_register)


def _register() -> None:
    dist = importlib.import_module("torch.distributed")
    if "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return importlib.import_module(_BACKEND).SharedMemoryGroup(store, rank, size, timeout)


def _after_torch(call: Callable[[], None]) -> None:
    if "torch" in sys.modules:
        call()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(call))


class _Finder:
    """Finds torch once, as Python would, with a loader that calls back. Neither class derives from
    importlib.abc: importing that takes as long as the rest of `import imece`.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._call)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, inner: Loader, call: Callable[[], None]) -> None:
        self._inner, self._call = inner, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # from here on nobody can tell that we were there
        self._inner.exec_module(module)
        self._call()
