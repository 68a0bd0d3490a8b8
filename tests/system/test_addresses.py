"""Endpoints as users write them, and the addresses of this host."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.errors import UserError
from imece.system.addresses import (
    address_of_name,
    address_towards,
    describe,
    interface_of,
    is_loopback,
    parse_endpoint,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:1234", ("10.0.0.1", 1234)),
        ("[fe80::1]:80", ("fe80::1", 80)),
        ("a:65535", ("a", 65535)),
    ],
)
def test_an_endpoint_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected
    assert parse_endpoint(describe(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", ":", ":80", "a", "::1", "[::1]", "a:0", "a:65536", "a:000080", "a:b", "a:-1", "a:1e3", "[::1",
        "[::1]80", "a b:1", "a\n:1", "a:²",
    ],
)  # fmt: skip
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no HOST:PORT"):
        parse_endpoint(text)


@settings(max_examples=25)
@given(st.text())
def test_whatever_it_is_it_is_one_line(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
        assert host and 1 <= port <= 65535
    except UserError as error:
        assert "\n" not in str(error)


def test_the_way_to_this_host_is_over_loopback() -> None:
    assert address_towards(("127.0.0.1", 9)) == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name in {name for _, name in socket.if_nameindex()}
    assert interface_of("203.0.113.7") is None


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "me.invalid", "localhost"])
def test_where_gloo_listens_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    found = address_of_name()
    assert (found is None) == (name != "localhost") and (found is None or is_loopback(found))


def test_no_way_is_one_line() -> None:
    with pytest.raises(UserError, match=r"no way from here to nowhere\.invalid:1: "):
        address_towards(("nowhere.invalid", 1))
    for name in ("a..b", "x" * 64):
        with pytest.raises(UserError, match=f"no way from here to {name}:1: that is no host's name"):
            address_towards((name, 1))
