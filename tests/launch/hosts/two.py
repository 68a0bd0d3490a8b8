"""Launchers of one job, each on its own host: network namespaces, or two names on loopback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from imece.bench.hosts.namespaces import ADDRESSES, INTERFACE, Hosts
from imece.launch.left_over import Traces

PORT = 29411
NAMES = ("a", "b")

# A line for each step of each rank, with the clock that all processes of this machine share. Steps are slow
# until a file is there, for a new process may take a while to join.
RESILIENT = """
import os, sys, time
import torch
import imece
mesh = imece.init()
torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = imece.parallelize(model, optimizer, strategy=sys.argv[2])
for step in imece.steps(int(sys.argv[1]), model, optimizer):
    with step as number:
        points = torch.randn(24, 16, generator=torch.Generator().manual_seed(number))
        mine = points.chunk(mesh.world_size)[mesh.rank]
        torch.nn.functional.mse_loss(model(mine), mine.sum(dim=1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0 if os.path.exists(sys.argv[3]) else 0.04)
    print("step", number, mesh.world_size, os.getpid(), time.monotonic(), flush=True)
"""


@dataclass(frozen=True)
class Line:
    """What a rank printed of a finished step."""

    slot: int
    step: int
    ranks: int
    pid: int
    time_s: float


class Agent:
    """A running `imece launch`, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self.output = process, output

    @property
    def text(self) -> str:
        """What it and its ranks have printed."""
        return self.output.read_text(errors="replace")

    def steps(self) -> list[Line]:
        """The finished steps of its ranks."""
        found = re.findall(r"^\[rank (\d+)\] step (\d+) (\d+) (\d+) ([\d.]+)$", self.text, re.MULTILINE)
        return [Line(int(a), int(b), int(c), int(d), float(e)) for a, b, c, d, e in found]

    def wait_for(self, done: Callable[[Agent], object], what: str, timeout_s: float = 200) -> None:
        """Until `done` of this one."""
        deadline = time.monotonic() + timeout_s
        while not done(self):
            assert self.process.poll() is None, f"it ended before {what}\n{self.text}"
            assert time.monotonic() < deadline, f"{what} did not come\n{self.text}"
            time.sleep(0.02)

    def wait_for_step(self, step: int, ranks: int | None = None, timeout_s: float = 200) -> None:
        """Until one of its ranks has finished that step, or a later one (as one of `ranks`)."""
        self.wait_for(
            lambda self: any(line.step >= step and ranks in (None, line.ranks) for line in self.steps()),
            f"step {step} of {ranks} ranks",
            timeout_s,
        )

    def end(self, timeout_s: float = 200) -> int:
        """Its exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher still runs\n{self.text}") from None


class Launchers:
    """Hosts in namespaces, "a" (number 0), "b" and so on, and the launchers on them."""

    def __init__(
        self, hosts: Hosts, addresses: Mapping[str, str], folder: Path, *words: str | Path, ranks: int = 1
    ) -> None:
        """`words`: more options, and the script with its arguments; the file to hurry follows."""
        self.hosts, self.traces = hosts, Traces()
        self._addresses, self._folder, self._ranks = addresses, folder, ranks
        self._files: list[BinaryIO] = []
        self._words = [*words, folder / "hurry"]
        self._environ = {**os.environ, **self.traces.environ, "IMECE_TOKEN": "0123456789abcdef" * 2}

    def start(self, name: str) -> Agent:
        """Start the launcher of a host; again, if there was one."""
        output = self._folder / f"{name}-{len(self._files)}.out"
        self._files.append(output.open("wb"))
        names = list(self._addresses)
        command = [
            sys.executable, "-m", "imece", "launch", "--hosts", str(len(names)),
            "--host-rank", str(names.index(name)), "--rendezvous", f"{self._addresses['a']}:{PORT}",
            "--ranks", str(self._ranks), *map(str, self._words),
        ]  # fmt: skip
        return Agent(self.hosts.start(name, command, self._environ, self._files[-1]), output)

    def hurry(self) -> None:
        """Nobody is waited for any more."""
        (self._folder / "hurry").touch()

    def left(self) -> list[str]:
        """What is left of the job: processes, files in /dev/shm, ports."""
        listening = [self.hosts.run(name, ["ss", "-ltnH"]) for name in self._addresses]
        return [*self.traces.left(), *(each for each in listening if each)]


class Pair(Launchers):
    """Two hosts, joined by a cable."""

    def __init__(self, hosts: Hosts, folder: Path, *words: str | Path, ranks: int = 1) -> None:
        super().__init__(hosts, ADDRESSES, folder, *words, ranks=ranks)

    def cut(self) -> None:
        """Nothing crosses from now on."""
        self._link("down")

    def mend(self) -> None:
        """All crosses again."""
        self._link("up")

    def _link(self, state: str) -> None:
        command = ["ip", "-n", self.hosts.names["a"], "link", "set", INTERFACE, state]
        subprocess.run(command, check=True)


def went_on(
    agent: Agent, since_s: float, ranks: int, pids: set[int] | None = None, timeout_s: float = 200
) -> Line:
    """The first step that one of its ranks finished after `since_s` as one of so many."""

    def lines() -> list[Line]:
        return [
            line
            for line in agent.steps()
            if line.time_s > since_s and line.ranks == ranks and (pids is None or line.pid in pids)
        ]

    agent.wait_for(lambda _: lines(), f"a step of {ranks} ranks", timeout_s)
    return lines()[0]


def is_whole(*agents: Agent, steps: int, again: int = 0) -> None:
    """Every one of so many steps was finished, and no rank made more than `again` of them once more."""
    lines = [line for agent in agents for line in agent.steps()]
    assert {line.step for line in lines} == set(range(steps))
    for pid in {line.pid for line in lines}:
        own = [line.step for line in lines if line.pid == pid]
        assert len(own) - len(set(own)) <= again, f"pid {pid} made steps again: {own}"


def gone_within(pids: set[int], limit_s: float) -> float:
    """Seconds until none of these lives."""
    begin = time.monotonic()
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < begin + limit_s, "ranks outlived their launcher"
        time.sleep(0.01)
    return time.monotonic() - begin


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def environment(name: str, token: str) -> Mapping[str, str]:
    """Of a launcher that is to take itself for another host than its neighbour on loopback."""
    return {"IMECE_HOST": name, "IMECE_TOKEN": token}
