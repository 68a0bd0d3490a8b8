"""Keeps the memory that a training step on a CPU frees in the process for the next step (glibc only).

glibc returns free memory at the end of its heap to the system once it exceeds 64 MiB. The next step then
fetches its activations anew, and the system clears them page by page: thousands of page faults. Blocks beyond
32 MiB are mapped one by one, and stay so: in the heap they would leave holes.

Nothing is changed before an optimizer has stepped: memory that a program frees while it loads and wraps a
model goes back to the system, as other ranks may need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of mallopt's options
_MAPPED_BYTES = 2**25  # as far as glibc goes by itself; it would not if only the other threshold were set
_END_BYTES = 2**31 - 1
_THEIRS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_from_first_step() -> None:
    """Keep freed memory from the end of the next optimizer step of this process on.

    Does nothing if the environment sets glibc's thresholds, or with another C library.
    """
    said = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(map(os.environ.get, _THEIRS))
    if sys.platform == "linux" and not said:
        register_optimizer_step_post_hook(_after_step)


@torch._disable_dynamo(recursive=True)
def _after_step(*_: Any) -> None:
    _keep()


@functools.cache
def _keep() -> None:
    with contextlib.suppress(AttributeError):  # musl has no such function
        choose = ctypes.CDLL(None).mallopt
        if choose(_MMAP_THRESHOLD, _MAPPED_BYTES):
            choose(_TRIM_THRESHOLD, _END_BYTES)
