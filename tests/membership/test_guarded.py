"""The store of a generation may be gone for a while; connections of groups can be cut."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from imece.errors import PeerLostError
from imece.membership.guarded import GuardedStore
from imece.membership.member import SupersededError, is_peer_gone
from imece.system import connections


class Gone(dist.Store):
    """A connection whose other side has gone: `set` does not notice it, as torch's does not."""

    def set(self, key: str, value: Any) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        raise dist.DistNetworkError("Connection reset by peer")


CALLS: list[tuple[Callable[[dist.Store], Any], Any]] = [
    (lambda store: store.set("key", "value"), None),
    (lambda store: store.get("there"), b"1"),
    (lambda store: store.check(["key"]), False),
    (lambda store: store.add("count", 2), 2),
    (lambda store: store.compare_set("key", "", "value"), b"value"),
]


@pytest.mark.parametrize(("call", "answer"), CALLS)
def test_it_is_asked_again_elsewhere(call: Callable[[dist.Store], Any], answer: Any) -> None:
    there = dist.HashStore()
    there.set("there", "1")
    answers: list[dist.Store | None] = [Gone(), None, there]

    def connect() -> dist.Store:
        store = answers.pop(0)
        if store is None:
            raise dist.DistNetworkError("Connection refused")
        return store

    assert call(GuardedStore(connect, lambda: None, 10)) == answer
    assert not answers
    if answer is None:
        assert there.get("key") == b"value"


def test_nobody_waits_for_a_generation_that_is_over() -> None:
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) > 5:
            raise SupersededError("a newer one is there")

    for connect in (dist.HashStore, Gone, lambda: time.sleep(600)):
        looks.clear()
        with pytest.raises(SupersededError):
            GuardedStore(connect, look, 600).get("never")  # type: ignore[arg-type]


def test_patience_comes_to_an_end() -> None:
    with pytest.raises(dist.DistNetworkError):
        GuardedStore(Gone, lambda: None, 0.05).check(["key"])
    with pytest.raises(dist.DistNetworkError, match="no store to meet in within 0 s"):
        GuardedStore(lambda: time.sleep(600), lambda: None, 0.05).check(["key"])  # type: ignore[arg-type, return-value]
    with pytest.raises(dist.DistStoreError, match="keys: key"):
        GuardedStore(dist.HashStore, lambda: None, 10).wait(["key"], timedelta(seconds=0.05))


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (PeerLostError("rank 1"), True),
        (SupersededError("over"), True),
        (dist.DistNetworkError("anything"), True),
        (RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [10.1.1.1]:1"), True),
        (RuntimeError("connect: No route to host"), True),
        (RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("broken pipe"), False),
    ],
)
def test_what_may_be_anothers_end(error: BaseException, gone: bool) -> None:
    assert is_peer_gone(error) is gone


def pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    return socket.create_connection(listener.getsockname()), listener.accept()[0]


def test_only_connections_of_groups_are_cut() -> None:
    connections.forget()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        others = pair(listener)
        with connections.of_groups():
            groups = pair(listener)
        later = pair(listener)
        with connections.of_groups():  # a group that is being made, whose other side does not answer
            half_made = pair(listener)
            of_group = socket.create_server(("127.0.0.1", 0))
            assert connections.cut() == 4
        for mine, theirs in (groups, half_made):
            assert mine.recv(1) == b"" == theirs.recv(1)
        for mine, theirs in (others, later, pair(of_group)):
            mine.sendall(b"1")
            assert theirs.recv(1) == b"1"
        connections.forget()
        assert connections.cut() == 0
        for each in (*others, *groups, *later, *half_made, of_group):
            each.close()
