"""The handle of an operation, as torch.distributed and torch's C++ code expect it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from imece.errors import CollectiveTimeoutError

_MOST_CALLBACKS = 64  # that wait for each other at the same time
_DONE_LOCK = threading.Lock()  # for work that was over before anybody saw it; nothing contends for it


def _new_pool() -> ThreadPoolExecutor:
    """Threads for callbacks on futures; a new one is made if none is idle."""
    return ThreadPoolExecutor(_MOST_CALLBACKS, "imece-future")


_callbacks = _new_pool()


def _forget_after_fork() -> None:
    global _callbacks
    _callbacks = _new_pool()


os.register_at_fork(after_in_child=_forget_after_fork)


class ShmWork(dist.Work):
    """What an operation of the shm backend returns. Its future gives `result`."""

    def __init__(self, result: Any, *, done: bool) -> None:
        super().__init__()
        self._result = result
        self._done = done
        self._error: BaseException | None = None
        self._event: threading.Event | None = None if done else threading.Event()
        self._future: torch.futures.Future[Any] | None = None
        self._lock = _DONE_LOCK if done else threading.Lock()
        self.source = -1

    def giving(self, result: Any) -> ShmWork:
        """The same work with another result: that of several operations, this being the last."""
        self._result = result
        return self

    def finish(self, error: BaseException | None) -> None:
        """Called once, by the worker, at the end of the operation."""
        with self._lock:
            self._error = error
            self._done = True
            future = self._future
        if self._event is not None:
            self._event.set()
        if future is not None:
            # Callbacks on it run now, and may wait for another collective: not on this thread.
            try:
                _callbacks.submit(self._settle, future)
            except RuntimeError:  # the interpreter ends
                self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over; raise its error if it failed."""
        if not self._done and self._event is not None:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._event.wait(seconds if seconds > 0 else None):
                raise CollectiveTimeoutError(f"the operation did not end within {seconds:.3f} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as wait: there is no stream to synchronise with."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the result, settled at the end of the operation."""
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = torch.futures.Future()
                if self._done:
                    self._settle(future)
        return future

    def is_completed(self) -> bool:
        """True once the operation is over, well or badly."""
        return self._done

    def is_success(self) -> bool:
        """True once the operation is over and went well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """The operation's error; None if it went well or goes on."""
        return self._error

    def result(self) -> Any:
        """The tensors of the operation."""
        return self._result

    def source_rank(self) -> int:
        """The sender, for a receive from any rank."""
        return self.source

    _source_rank = source_rank

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            # As set_exception does, but with a value that torch's C++ code may take too.
            future._set_unwrap_func(_Failed.raise_it)
            future.set_result(_Failed(self._error))


class _Failed:
    """What a future has in the place of a result when the operation failed.

    torch's DistributedDataParallel takes the results of its buckets in C++, which knows no errors of Python:
    it pickles what is there to find the tensors in it, and takes the first. Of an exception, which has none,
    that is a segmentation fault. Pickling this one raises the error.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def raise_it(self) -> NoReturn:
        """Raise the operation's error."""
        raise self._error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.raise_it()
