"""Emulates two hosts on one machine: network namespaces joined by a cable (a veth pair) of limited rate.

    with two_hosts(rate="1gbit") as hosts:
        process = hosts.start("a", [sys.executable, "train.py"], environ, log)

Each host has only its own loopback and the cable, so nothing else joins them. Both ends of the cable send
through a token bucket (tc tbf). The namespaces' names contain the process that made them, so the next
benchmark can remove what a killed one left.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from imece.bench.crew import Start, start_here
from imece.launch.signals import signals_as_exit

HOSTS = ("a", "b")
ADDRESSES = {"a": "10.115.0.1", "b": "10.115.0.2"}  # exist inside the namespaces only
INTERFACE = "imece0"
# A burst must hold the largest segment of TCP offload (64 KiB), or tbf splits every one; a ten times larger
# burst would let the first megabyte of a message pass for free.
_BURST = "128kb"
# How long packets may queue. A shorter queue drops packets that a switch would keep; a longer one only adds
# delay.
_QUEUE = "10ms"
_NAME = re.compile(r"^imece-(\d+)-(\d+)-[a-z]$")


class HostsUnavailable(Exception):
    """This machine cannot make two hosts; the message says why."""


@dataclass
class Hosts:
    """Two hosts, "a" and "b", while they exist."""

    names: dict[str, str]  # of the namespaces
    rate: str  # in tc's notation
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, host: str) -> dict[str, str]:
        """What a rank on `host` needs: its host's name, and the interface that leads to the other host."""
        return {"IMECE_HOST": host, "GLOO_SOCKET_IFNAME": INTERFACE}

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs on `host`."""
        return ["ip", "netns", "exec", self.names[host], *argv]

    def starter(self, host: str) -> Start:
        """For Crew.of_ranks: starts a rank on `host`."""
        return partial(self.start, host)

    def start(
        self, host: str, argv: Sequence[str], environ: Mapping[str, str], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        """Start `argv` on `host`; it is killed when the hosts end."""
        process = start_here(self.command(host, argv), {**environ, **self.environment(host)}, output)
        self._started.append(process)
        return process

    def run(self, host: str, argv: Sequence[str]) -> str:
        """Run `argv` on `host` to its end and return its output; CalledProcessError if it fails."""
        environ = {**os.environ, **self.environment(host)}
        done = subprocess.run(
            self.command(host, argv), env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60.0, check=True,
        )  # fmt: skip
        return done.stdout


def reason_against() -> str | None:
    """Why two hosts cannot be made here, in words; None if they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the commands ip and tc are missing (package iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    return None


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[Hosts]:
    """Make hosts "a" and "b", joined at `rate` in both directions, and remove them at the end.

    They are removed on exceptions, SIGINT, SIGTERM and SIGHUP too. HostsUnavailable if they cannot be made.
    """
    reason = reason_against()
    if reason is not None:
        raise HostsUnavailable(reason)
    remove_leftovers()
    names = {host: f"imece-{os.getpid()}-{_started_at(os.getpid())}-{host}" for host in HOSTS}
    hosts = Hosts(names, rate)
    with signals_as_exit():
        try:
            _make(hosts)
            yield hosts
        finally:
            for process in hosts._started:
                _end(process)
            for name in names.values():
                _remove(name)


def remove_leftovers() -> list[str]:
    """Remove the hosts of benchmarks that are gone; returns their names."""
    removed = []
    for name in existing():
        match = _NAME.match(name)
        if match and _started_at(int(match[1])) != int(match[2]):
            _remove(name)
            removed.append(name)
    return removed


def existing() -> list[str]:
    """The namespaces on this machine that benchmarks made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    words = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [word for word in words if _NAME.match(word)]


def _make(hosts: Hosts) -> None:
    a, b = (hosts.names[host] for host in HOSTS)
    limit = ["tbf", "rate", hosts.rate, "burst", _BURST, "latency", _QUEUE]
    commands = [
        ["ip", "netns", "add", a],
        ["ip", "netns", "add", b],
        # Made inside the namespaces, so that nothing ever appears among the machine's own interfaces.
        ["ip", "-n", a, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", b],
    ]
    for host in HOSTS:
        name = hosts.names[host]
        commands += [
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", name, "address", "add", f"{ADDRESSES[host]}/24", "dev", INTERFACE],
            ["ip", "-n", name, "link", "set", INTERFACE, "up"],
            ["tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit],
        ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostsUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _remove(name: str) -> None:
    """Remove a namespace and the processes in it; the cable disappears with it."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
    for pid in inside.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _started_at(pid: int) -> int:
    """When `pid` was started, in clock ticks since boot; 0 if it is gone. Distinguishes it from a later
    process of the same number, and does not change when the clock is set."""
    try:
        # The command, in parentheses, may contain spaces; field 22 of proc(5) is the 20th after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0
