"""Several hosts, each with its own cable to a switch: namespaces, and a bridge in one of them."""

from __future__ import annotations

import os
import string
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from imece.bench.hosts import namespaces
from imece.bench.hosts.namespaces import INTERFACE, Hosts
from imece.launch.signals import signals_as_exit
from tests.launch.hosts.two import Launchers

_SWITCH, _BRIDGE = "s", "switch"


class Switched(Launchers):
    """Launchers of hosts on a switch, any of which can be cut off from the others."""

    def __init__(
        self, hosts: Hosts, switch: str, addresses: dict[str, str], folder: Path, *words: str | Path
    ) -> None:
        """`switch`: its namespace."""
        super().__init__(hosts, addresses, folder, *words)
        self._switch = switch

    def cut(self, name: str) -> None:
        """Nothing crosses between this host and all others from now on, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port-{name}", "down")

    def mend(self, name: str) -> None:
        """All crosses again."""
        _ip("-n", self._switch, "link", "set", f"port-{name}", "up")


@contextmanager
def on_a_switch(count: int, folder: Path, *words: str | Path) -> Iterator[Switched]:
    """Make so many hosts, and remove them at the end. words: as for `Launchers`."""
    namespaces.remove_leftovers()
    prefix = f"imece-{os.getpid()}-{namespaces._started_at(os.getpid())}"
    names = {name: f"{prefix}-{name}" for name in string.ascii_lowercase[:count]}
    addresses = {name: f"10.116.0.{number}" for number, name in enumerate(names, 1)}
    switch = f"{prefix}-{_SWITCH}"
    hosts = Hosts(names, rate="")
    with signals_as_exit():
        try:
            _make(hosts, switch, addresses)
            yield Switched(hosts, switch, addresses, folder, *words)
        finally:
            for process in hosts._started:
                namespaces._end(process)
            for each in (*names.values(), switch):
                namespaces._remove(each)


def _make(hosts: Hosts, switch: str, addresses: dict[str, str]) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge")
    _ip("-n", switch, "link", "set", _BRIDGE, "up")
    for name, host in hosts.names.items():
        port = f"port-{name}"
        _ip("netns", "add", host)
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host)
        _ip("-n", switch, "link", "set", port, "master", _BRIDGE)
        _ip("-n", switch, "link", "set", port, "up")
        _ip("-n", host, "link", "set", "lo", "up")
        _ip("-n", host, "address", "add", f"{addresses[name]}/24", "dev", INTERFACE)
        _ip("-n", host, "link", "set", INTERFACE, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
