"""Which address and interface of this host lead to another, and how people write an endpoint."""

from __future__ import annotations

import contextlib
import re
import socket

import psutil

from imece.errors import UserError

Address = tuple[str, int]


class NoWayError(UserError):
    """No host of that name is known, or no interface leads to it; perhaps only not yet."""


_ENDPOINT = re.compile(
    r"(\[(?P<v6>[^][\s]+)\]|(?P<name>[^][:\s]+)):(?P<port>\d{1,5})",
    re.ASCII,
)


def parse_endpoint(text: str) -> Address:
    """HOST:PORT or [IPV6]:PORT; UserError if it is neither."""
    match = _ENDPOINT.fullmatch(text) if text.isprintable() else None
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise UserError(f"{text!r} is no HOST:PORT with a port from 1 to 65535")
    return match["v6"] or match["name"], int(match["port"])


def describe(address: Address) -> str:
    """The address as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(address: Address) -> str:
    """The own address from which `address` is reached; it may be `address` itself. UserError if there
    can be none, NoWayError if there is none now."""
    return way_to(address)[0]


def way_to(address: Address) -> tuple[str, str]:
    """The same, and the address there, as this host finds it."""
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(target)  # on a datagram socket this looks up the route, and sends nothing
            return str(sock.getsockname()[0]), str(target[0])
    except UnicodeError:  # getaddrinfo's, for an empty label or one of more than 63 letters
        raise UserError(f"no way from here to {describe(address)}: that is no host's name") from None
    except OSError as error:
        raise NoWayError(f"no way from here to {describe(address)}: {error.strerror or error}") from None


def address_of_name() -> str | None:
    """Where Gloo listens unless it is told an interface: the first address of this host's name that is its
    own. None if there is none, and it takes loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: an empty label, or one of more than 63 letters
        return None
    for family, kind, protocol, _, target in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.bind(target)
            return str(target[0])
    return None


def is_loopback(address: str) -> bool:
    """Whether no other host is reached from there."""
    return address == "::1" or address.startswith("127.")


def interfaces() -> list[str]:
    """The names of this host's interfaces."""
    return sorted(psutil.net_if_addrs())


def interface_of(address: str) -> str | None:
    """The network interface that has `address`; None if it is not one of this host."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None
