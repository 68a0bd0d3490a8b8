"""Which TCP connections of this process are its groups', so that they can be cut where nobody closes them.

A rank that has ended has closed its connections, and whoever waits for it is told so. Of a host whose network
is gone nothing comes at all: Gloo would wait for all of its group's timeout, and its abort() does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"  # where there is none, nothing is known and nothing cut

_known: set[str] = set()
_before: list[set[str]] = []  # of each `of_groups` under way, what there was when it began


@contextlib.contextmanager
def of_groups() -> Iterator[None]:
    """What is connected inside belongs to a group that is being made. A decorator too."""
    before = set(_sockets().values())
    _before.append(before)
    try:
        yield
    finally:
        _before.remove(before)
        _known.update(set(_sockets().values()) - before)


def forget() -> None:
    """The groups until now are gone."""
    _known.clear()


def cut() -> int:
    """Shut down all connections of groups, as if the other sides had; how many. From any thread."""
    count = 0
    for fd, name in _sockets().items():
        if name in _known or any(name not in before for before in _before):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family == socket.AF_UNIX or _name(fd) != name:
                    continue
                connection.getpeername()  # OSError for one that listens: Gloo ends the process if that fails
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets() -> dict[int, str]:
    """This process' sockets: by descriptor a name that no other one has."""
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
