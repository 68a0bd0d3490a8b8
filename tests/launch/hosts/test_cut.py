"""Agents on two emulated hosts whose cable is cut and mended, and which are killed and stopped."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import pytest

from imece.bench.hosts.namespaces import ADDRESSES, INTERFACE, Hosts, two_hosts
from imece.launch.hosts.events import Up
from tests.launch.hosts.agents import TOKEN, Probing

pytestmark = [pytest.mark.faults, pytest.mark.hosts]
SILENT_S = 2.0
LIMIT_S = 30.0
PORT = 29_400


class Remote:
    """A process with an agent on one of the hosts: calls go there, and its events come back."""

    def __init__(self, hosts: Hosts, host: str, me: int) -> None:
        self.me, self.address = me, (ADDRESSES[host], PORT)
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stopped = False
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            try:
                with open(f"/run/netns/{hosts.names[host]}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                self._serve(far)
            except BaseException:  # noqa: BLE001  (a copy of pytest must never return from here)
                traceback.print_exc()
            finally:
                os._exit(70)
        far.close()

    def _serve(self, control: socket.socket) -> NoReturn:
        with Probing(TOKEN, self.me, "job", {}, silent_s=SILENT_S) as network:
            network.listen(*self.address)
            links: dict[int, Up] = {}  # the last one to each host
            while True:
                ready, _, _ = select.select([control, network.wake], [], [])
                for event in network.events():
                    if isinstance(event, Up):
                        links[event.host] = event
                    control.send(json.dumps([type(event).__name__, vars(event)]).encode())
                if control in ready:
                    name, arguments, more = json.loads(control.recv(1 << 16) or "[]")
                    if name == "send":
                        arguments[0] = links[arguments[0]]
                    got = getattr(network, name)(*arguments, **more)
                    if name == "probe":
                        control.send(json.dumps(["Probed", {"answer": got}]).encode())

    def ask(self, name: str, *arguments: Any, **more: Any) -> None:
        """Call a method of its network."""
        self._control.send(json.dumps([name, arguments, more]).encode())

    def next(self, kind: str, within_s: float = LIMIT_S) -> dict[str, Any]:
        """The next event, which has to be of that kind."""
        assert select.select([self._control], [], [], within_s)[0], f"no {kind} within {within_s} s"
        name, fields = json.loads(self._control.recv(1 << 17))
        assert name == kind, f"{name} {fields} and not {kind}"
        assert isinstance(fields, dict)
        return fields

    def is_calm(self, for_s: float) -> bool:
        return not select.select([self._control], [], [], for_s)[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._control.close()


@contextmanager
def linked() -> Iterator[tuple[Hosts, Remote, Remote]]:
    """Host 0 on "a" and host 1 on "b", with a link that 1 has made."""
    with two_hosts() as hosts, ExitStack() as stack:
        zero, one = Remote(hosts, "a", 0), Remote(hosts, "b", 1)
        stack.callback(zero.end)
        stack.callback(one.end)
        one.ask("dial", 0, zero.address, patience_s=20)
        assert zero.next("Up")["address"] == list(one.address) and one.next("Up")["host"] == 0
        yield hosts, zero, one


def cut(hosts: Hosts) -> None:
    hosts.run("b", ["ip", "link", "set", INTERFACE, "down"])
    state = hosts.run("b", ["cat", f"/sys/class/net/{INTERFACE}/operstate"])
    assert state.strip() == "down", "the fault has to happen"


def mend(hosts: Hosts) -> None:
    hosts.run("b", ["ip", "link", "set", INTERFACE, "up"])


def test_a_long_cut_ends_the_link_on_both_sides_and_it_can_be_made_again() -> None:
    with linked() as (hosts, zero, one):
        started = time.monotonic()
        cut(hosts)
        for remote, other in ((zero, one), (one, zero)):
            down = remote.next("Down")
            assert (down["host"], down["why"]) == (other.me, f"it was silent for {SILENT_S:g} s")
            assert not down["surely"] and not down["told"]
        print(f"a cut was noticed on both sides after {time.monotonic() - started:.1f} s, limit {SILENT_S} s")
        one.ask("dial", 0, zero.address, patience_s=60)
        zero.ask("dial", 1, one.address, patience_s=60)
        assert one.is_calm(3.0) and zero.is_calm(0.0)
        mend(hosts)
        started = time.monotonic()
        zero.next("Up"), one.next("Up")
        print(f"mended, the link was there again after {time.monotonic() - started:.1f} s")
        zero.ask("send", 1, {"again": True})
        assert one.next("Said")["message"] == {"again": True}


def test_a_short_cut_is_not_noticed_and_nothing_is_lost() -> None:
    with linked() as (hosts, zero, one):
        cut(hosts)
        for number in range(20):
            zero.ask("send", 1, {"number": number})
        time.sleep(0.6 * SILENT_S)
        mend(hosts)
        assert [one.next("Said")["message"]["number"] for _ in range(20)] == list(range(20))
        assert zero.is_calm(SILENT_S) and one.is_calm(0.0)


def test_a_killed_agent_is_surely_gone_and_one_behind_a_cut_is_not() -> None:
    with linked() as (_, zero, one):
        one.signal(signal.SIGKILL)
        down = zero.next("Down")
        assert down["surely"] and down["why"] != f"it was silent for {SILENT_S:g} s"
        zero.ask("probe", one.address, 1.0)
        assert zero.next("Probed")["answer"] == "refused"
    with linked() as (hosts, zero, one):
        cut(hosts)
        one.signal(signal.SIGKILL)
        assert not zero.next("Down")["surely"]
        zero.ask("probe", one.address, 1.0)
        assert zero.next("Probed")["answer"] == "silent"


def test_an_agent_that_was_stopped_for_long_learns_that_it_was_given_up() -> None:
    with linked() as (_, zero, one):
        one.signal(signal.SIGSTOP)
        down = zero.next("Down")
        assert (down["why"], down["surely"]) == (f"it was silent for {SILENT_S:g} s", False)
        zero.signal(signal.SIGKILL)  # while it is stopped: nobody knows what zero did before
        one.signal(signal.SIGCONT)
        down = one.next("Down")
        assert down["why"].startswith("it closed the connection; this launcher had not run for ")
        assert not down["surely"]


def test_a_cut_that_hides_a_death_leaves_no_link_that_looks_alive() -> None:
    """Host 1 loses power and is there again, before host 0 has noticed."""
    with linked() as (hosts, zero, one):
        cut(hosts)
        one.end()
        mend(hosts)
        again = Remote(hosts, "b", 1)
        try:
            again.ask("dial", 0, zero.address, patience_s=20)
            assert zero.next("Down")["host"] == 1 and again.next("Up")["host"] == 0
            assert zero.next("Up")["host"] == 1
        finally:
            again.end()
            one.pid = os.fork()  # for the end of the block
            if one.pid == 0:
                os._exit(0)


def test_nothing_but_the_rendezvous_listens_on_the_network() -> None:
    with linked() as (hosts, _, _):
        for host in ("a", "b"):
            rows = [line.split() for line in hosts.run(host, ["cat", "/proc/net/tcp"]).splitlines()[1:]]
            listening = [row[1].split(":") for row in rows if row[3] == "0A"]
            found = {(socket.inet_ntoa(bytes.fromhex(a)[::-1]), int(port, 16)) for a, port in listening}
            assert {at for at in found if at[0] != "127.0.0.1"} == {(ADDRESSES[host], PORT)}
            assert not [x for x in hosts.run(host, ["cat", "/proc/net/tcp6"]).splitlines()[1:] if " 0A " in x]
