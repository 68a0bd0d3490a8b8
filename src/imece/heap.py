"""What a training step on a CPU frees stays with the process for the next one, where glibc keeps the heap.

glibc gives what is free at the end of its heap back to the system, from 64 MiB on at the latest. So a step
takes much of its activations anew, and the system clears page after page of them: thousands of page faults.
Blocks beyond 32 MiB it maps one by one, and goes on to do so: kept in the heap they would leave holes there.

Nothing is changed before an optimizer has stepped: what a program frees while it loads and wraps a model goes
back, as other ranks may need it.
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

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_MAPPED_BYTES = 2**25  # as far as glibc goes by itself; it would go no further if only the other one were set
_END_BYTES = 2**31 - 1
_THEIRS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@functools.cache
def keep_from_first_step() -> None:
    """From the end of the next optimizer step in this process on.

    Not where the environment says how glibc is to do it, nor with another C library.
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
