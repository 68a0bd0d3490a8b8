"""How an agent finds the address by which it reaches host 0."""

from __future__ import annotations

import errno
import socket
from dataclasses import replace

import pytest

from imece.errors import UserError
from imece.launch.generations import Limits
from imece.launch.hosts import agent
from imece.launch.hosts.here import Plan
from tests.clock import Clock


def test_a_network_and_a_name_that_come_later_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes names a pod once it runs; host 0 knows its own name, or it is wrong."""
    found, clock, asked = socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM), Clock(), list[float]()

    def look_up(*_: object, **__: object) -> object:
        asked.append(clock.now)
        if clock.now < 2:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        if clock.now < 7:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(agent, "time", clock)
    plan = Plan(2, 1, ("localhost", 9), Limits(2), 30.0, 10.0)
    assert agent._own_address(plan) == "127.0.0.1" and asked[-1] == 7.0
    why = "no way from here to localhost:9: Name or service not known"
    assert capfd.readouterr().err == f"imece: {why}; host 1 tries for 600 s\n"
    for begin, end in ((0.0, 3.0), (2.0, 5.0)):
        clock.now = begin
        for wrong in (replace(plan, me=0), replace(plan, patience_s=3.0)):
            with pytest.raises(UserError, match="no way from here to localhost:9: N"):
                agent._own_address(wrong)
        assert clock.now == end
