"""What stays of objects that nobody refers to any more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any


def left_of(make: Callable[[], Iterable[Any]]) -> list[Any]:
    """What is left of the objects that `make` returns, when only weak references to them are. The garbage
    collector, which may come much later, does not run."""
    make()  # what is imported and made only once may leave cycles
    gc.collect()
    gc.disable()
    try:
        refs = [weakref.ref(each) for each in make()]
        return [each for ref in refs if (each := ref()) is not None]
    finally:
        gc.enable()
