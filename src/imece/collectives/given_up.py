"""Waits for Gloo that can be given up: each one then ends (pending.py says who gives up, and why).

A wait is made of slices, with a check after each.
"""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from imece.errors import PeerLostError

_SLICE = timedelta(seconds=1)
_SLICE_OVER = "Operation timed out!"  # torch's words; the work itself goes on


class Waitable(Protocol):
    """What torch's Work and imece's Task have in common."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...

    def is_completed(self) -> bool: ...


_reasons: list[str] = []  # of each time that calls were given up in this process


def tell(why: str) -> None:
    """Give up everything that is waited for here by now."""
    _reasons.append(why)


class Sliced:
    """A collective that Gloo carries out, waited for so that `give_up` ends the wait."""

    def __init__(self, work: Waitable, *groups: dist.ProcessGroup) -> None:
        """groups: those in which it may be stuck."""
        self._work, self._groups = work, groups
        self._given_up_before = len(_reasons)

    def wait(self, timeout: timedelta | None = None, /) -> bool:
        if timeout is not None:
            self._work.wait(timeout)
            return True
        while True:
            try:
                self._work.wait(_SLICE)
                return True
            except RuntimeError as error:
                if _SLICE_OVER not in str(error):
                    raise
            if len(_reasons) > self._given_up_before:
                for group in self._groups:
                    _keep_for_ever(group)
                raise PeerLostError(_reasons[-1])

    def is_completed(self) -> bool:
        return self._work.is_completed()


def value_of(future: torch.futures.Future[Any]) -> Any:
    """The value of a future that torch made of its own calls, waited for so that `give_up` ends the wait."""
    ended, before = threading.Event(), len(_reasons)
    future.add_done_callback(lambda _: ended.set())
    while not ended.wait(_SLICE.total_seconds()):
        if len(_reasons) > before:
            raise PeerLostError(_reasons[-1])
    return future.wait()


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    """Keep a group alive: destroying it would wait for its threads, which are stuck."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
