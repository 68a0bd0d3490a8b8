"""On a GPU: the place of a call in the order of its stream, even if another thread carries the call out.

A collective of torch's begins when the work that the *current* stream holds at its launch is over, and
waiting for it makes the current stream wait. A thread that launches for another one has its own current
stream; and by then the caller's stream holds later work, which the collective need not wait for.

    place     an event on the caller's stream, at the call
    beside    a stream that only one thread uses, for work that comes behind a place
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_FIRST = -1  # priority: what others wait for goes before computation


class _Here(threading.local):
    def __init__(self) -> None:
        self.beside: dict[int, torch.cuda.Stream] = {}  # by device
        self.device: torch.device | None = None  # the current one, in a thread that launches for another


_here = _Here()


class Place:
    """The present place in the current stream. Without a GPU there is none, and nothing to wait for."""

    def __init__(self, device: torch.device | None = None, *, beside: bool = True) -> None:
        """device: of the call's tensors; None: the current one. beside: if False, work behind this place is
        queued on the caller's own stream, after all that it holds by then.
        """
        self._beside = beside
        self._caller = threading.get_ident()
        self._stream: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None
        if torch.cuda.is_initialized() and (device is None or device.type == "cuda"):
            self._stream = torch.cuda.current_stream(device)
            self._begin = self._stream.record_event()

    @property
    def on_gpu(self) -> bool:
        """Whether the host only queues work there, and does not know when it is over."""
        return self._stream is not None

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Work that this thread queues inside begins when all before the place is over, beside later work.

        Tensors of the caller must live until it has called `join`, or has waited for what was launched.
        """
        if self._stream is None:
            yield
            return
        if self._caller != threading.get_ident() and _here.device != self._stream.device:
            # Otherwise the thread would return to GPU 0 each time, and take memory there for a context.
            torch.cuda.set_device(self._stream.device)
            _here.device = self._stream.device
        stream = _beside(self._stream.device) if self._beside else self._stream
        with torch.cuda.stream(stream):  # makes its device the current one too
            stream.wait_event(self._begin)
            try:
                yield
            finally:
                self._end = stream.record_event()

    def join(self) -> None:
        """Later work of the current stream begins when all that was queued in `behind` is over."""
        if self._end is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._end)


def _beside(device: torch.device) -> torch.cuda.Stream:
    """One stream a thread, which keeps its work in order: two threads' streams cannot wait for each other in
    a circle."""
    index = device.index or 0
    if index not in _here.beside:
        _here.beside[index] = torch.cuda.Stream(device, priority=_FIRST)
    return _here.beside[index]
