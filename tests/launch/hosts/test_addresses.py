"""Endpoints as users write them, and the addresses of this host."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.errors import UserError
from imece.launch.generations import Limits
from imece.launch.hosts import agent
from imece.launch.hosts.addresses import address_towards, describe, interface_of, parse_endpoint
from imece.launch.hosts.here import Plan
from tests.launch.hosts.cluster import Clock


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


def test_a_name_that_nobody_knows_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes names a pod once it runs; host 0 knows its own name, or it is wrong."""
    found, clock, asked = socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM), Clock(), list[float]()

    def look_up(*_: object, **__: object) -> object:
        asked.append(clock.now)
        if clock.now < 7:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    plan = Plan(2, 1, ("localhost", 9), Limits(2), 30.0, 10.0)
    assert agent._own_address(plan) == "127.0.0.1" and asked[-1] == 7.0
    why = "no way from here to localhost:9: Name or service not known"
    assert capfd.readouterr().err == f"imece: {why}; host 1 tries for 600 s\n"
    clock.now = 0.0
    for wrong in (replace(plan, me=0), replace(plan, patience_s=3.0)):
        with pytest.raises(UserError, match=why):
            agent._own_address(wrong)
    assert clock.now == 3.0


def test_no_way_is_one_line() -> None:
    with pytest.raises(UserError, match=r"no way from here to nowhere\.invalid:1: "):
        address_towards(("nowhere.invalid", 1))
    for name in ("a..b", "x" * 64):
        with pytest.raises(UserError, match=f"no way from here to {name}:1: that is no host's name"):
            address_towards((name, 1))
