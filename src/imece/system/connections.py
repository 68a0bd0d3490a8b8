"""Which TCP connections of this process belong to its groups, so that they can be cut where nobody
closes them.

A rank that ends closes its connections, and ranks that wait for it notice. If a host loses its network,
nothing arrives at all: Gloo would wait for the group's whole timeout, and its abort() does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"  # on a system without it no connections are known, and none are cut

_known: set[str] = set()
_before: list[set[str]] = []  # for each `of_groups` under way, the sockets that existed when it began


@contextlib.contextmanager
def of_groups() -> Iterator[None]:
    """Connections made inside belong to a group that is being made. Works as a decorator too."""
    before = set(_sockets().values())
    _before.append(before)
    try:
        yield
    finally:
        if before in _before:
            _before.remove(before)
            _known.update(set(_sockets().values()) - before)


def forget() -> None:
    """Forget all connections: their groups are gone, also those that a thread which was left still makes."""
    _known.clear()
    _before.clear()


def cut() -> int:
    """Shut down all connections of groups as if the other sides had; returns how many. For any thread."""
    count = 0
    for fd, name in _sockets().items():
        if name in _known or any(name not in before for before in _before):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family == socket.AF_UNIX or _name(fd) != name:
                    continue
                connection.getpeername()  # OSError: a listener, which Gloo must not lose
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets() -> dict[int, str]:
    """This process' sockets: a unique name by descriptor."""
    try:
        found = {int(fd): _name(int(fd)) for fd in os.listdir(_FOLDER)}
    except OSError:
        return {}
    return {fd: name for fd, name in found.items() if name.startswith("socket:")}


def _name(fd: int) -> str:
    try:
        return os.readlink(f"{_FOLDER}/{fd}")
    except OSError:  # closed meanwhile
        return ""
