"""Ordering and sleeping between processes, without compiled code of ours.

Ordering. Ranks talk by plain 8-byte stores to aligned words: CPython writes an item of a memoryview
of format "q" with one store instruction, so a reader sees the old value or the new one, never half.
What must hold is that data written before a word is seen by whoever sees the word.

- x86-64 keeps stores in order and loads in order (total store order), and CPython cannot move them:
  each is made inside a separate call. Nothing is needed.
- arm64 may reorder both. `fence()` takes and releases an uncontended lock twice. The first release
  (store-release) keeps the data before it; the second acquisition (load-acquire) keeps the word after
  it; and an acquire that follows a release in program order is not moved before it (the RCsc rule for
  LDAR/STLR and the A/L forms of the atomics that the C library uses). One round would not do: both
  sides could be moved into the middle of it, and there they could swap.

The writer fences before it stores the word, the reader after it has seen it.

Sleeping is the kernel's futex on one of these words. A wake-up can be missed when a writer reads
"nobody sleeps" before its own store is visible to the sleeper, so every sleep has a short limit:
a missed wake-up costs that limit, never a hang.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time

_MACHINE = platform.machine().lower()
_SYSCALL_NUMBER = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "ppc64le": 221}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_EVERYBODY = 2**31 - 1

NEEDS_FENCE = _MACHINE not in ("x86_64", "amd64")
_fence_lock = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def fence() -> None:
    """Everything before stays before, everything after stays after; see the file's docstring."""
    for _ in range(2):
        # One lock for each thread would do as well; contention only makes the order stronger.
        with _fence_lock:
            continue


def _load_syscall() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux") or _MACHINE not in _SYSCALL_NUMBER:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


_syscall = _load_syscall()
_number = ctypes.c_long(_SYSCALL_NUMBER.get(_MACHINE, 0))


def wait(address: int, expected: int, limit_s: float) -> None:
    """Sleep until the 32-bit word at `address` is woken or is not `expected`, `limit_s` at most.

    May return early for no reason: the caller checks its condition again anyway.
    """
    if _syscall is None:
        time.sleep(min(limit_s, 0.0002))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    word, value = ctypes.c_void_p(address), ctypes.c_uint32(expected & 0xFFFFFFFF)
    _syscall(_number, word, ctypes.c_int(_FUTEX_WAIT), value, ctypes.byref(limit), None, ctypes.c_int(0))


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`, in any process."""
    if _syscall is not None:
        word, most = ctypes.c_void_p(address), ctypes.c_int(_EVERYBODY)
        _syscall(_number, word, ctypes.c_int(_FUTEX_WAKE), most, None, None, ctypes.c_int(0))
