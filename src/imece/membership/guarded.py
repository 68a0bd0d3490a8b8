"""The store in which a generation meets; nobody waits there for members that will never come.

The process that serves it may end, and another one then serves it: on several hosts, if the launcher dies
that made the generations. Calls meanwhile wait, and are repeated over a new connection, until a newer
generation is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_POLL_S = 0.004
_WAIT_S = 60.0


class GuardedStore(dist.Store):
    """A connection to the store, renewed when it is lost. `check` raises once the generation is over."""

    def __init__(
        self, connect: Callable[[], dist.Store], check: Callable[[], None], patience_s: float
    ) -> None:
        """patience_s: for how long there may be no server; then dist.DistNetworkError."""
        super().__init__()
        self._connect, self._look, self._patience_s = connect, check, patience_s
        self._timeout = timedelta(seconds=_WAIT_S)
        self._inner: dist.Store | None = None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > until:
                raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        self._look()
        return self._ask(lambda store: store.check(keys))

    def set(self, key: str, value: Any) -> None:
        def both(store: dist.Store) -> None:
            store.set(key, value)
            store.check([key])  # torch does not wait for an answer, and does not notice a loss on the way

        self._ask(both)

    def add(self, key: str, value: int) -> int:
        self._ask(lambda store: store.check([key]))  # somebody answers now: to add twice would be wrong
        assert self._inner is not None
        return self._inner.add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._ask(lambda store: store.compare_set(key, expected_value, desired_value))

    def first(self, key: str, value: str) -> str:
        """The value for `key` of whichever rank was the first to call this. `check` may call it: it does not
        look, nor repeat itself. dist.DistNetworkError without a connection."""
        if self._inner is None:
            raise dist.DistNetworkError(f"there is no connection to ask for {key}")
        return self._inner.compare_set(key, "", value).decode()

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda store: store.delete_key(key))

    def num_keys(self) -> int:
        return self._ask(lambda store: store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def _ask(self, call: Callable[[dist.Store], Answer]) -> Answer:
        until = time.monotonic() + self._patience_s
        while True:
            try:
                if self._inner is None:
                    self._inner = self._connected(until)
                return call(self._inner)
            except dist.DistNetworkError:
                self._look()
                self._inner = None
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_S)

    def _connected(self, until: float) -> dist.Store:
        """Made in a thread of its own: if the port is open but nobody answers, torch waits without end."""
        made: list[dist.Store | RuntimeError] = []

        def connect() -> None:
            try:
                made.append(self._connect())
            except RuntimeError as error:
                made.append(error)

        threading.Thread(target=connect, name="imece-meeting", daemon=True).start()
        while not made:
            self._look()
            if time.monotonic() > until:
                raise dist.DistNetworkError(f"no store to meet in within {self._patience_s:.0f} s")
            time.sleep(_POLL_S / 4)
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]
