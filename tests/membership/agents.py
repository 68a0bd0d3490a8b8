"""Plays the launchers of several hosts in the test's own process, for ranks that learn.

    with Agents(learn, 4, ranks_per_host=2, args=["zero1", {}]) as agents:
        learnt = agents.watch()

Each host has its own store; ranks meet in another one, which a tunnel leads to. When a member dies, the
stores of all hosts name the others as the next generation. In the middle of step `pause` ranks wait for
`go_on`, so that what a test does after some steps comes before the last one, however busy the machine is.
Steps are slow then, so that ranks ask at each step border whether all should move on.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import hierarchical
from imece.data_parallel.sharding import stores
from imece.data_parallel.sharding.parts import move_into
from imece.layout import Bucket
from imece.membership.recovery import Recovered
from imece.membership.roster import Generation, Roster
from imece.store import listen, serve
from tests.membership.tunnel import Tunnel
from tests.ranks import RankResult, Ranks, start_ranks

STEPS, SAMPLES, WIDTH = 14, 12, 8
NEVER = 999
_POLL_S = 0.002
_PAUSE, _STEP_S = "IMECE_TEST_PAUSE", "IMECE_TEST_STEP_S"
_SLOW_S, _NEWS_S = 0.3, 1.2  # of a step; and for news to come to a rank
_PASSED_ON = (
    "IMECE_TEST_AS_"  # a prefix: the name without it could be read at an import, for all that tests know
)


class Agents:
    """Ranks on emulated hosts, and their launchers. Leaving the block ends all."""

    def __init__(
        self,
        fn: Callable[..., Any],
        ranks: int,
        *,
        ranks_per_host: int,
        args: Sequence[Any] = (),
        pause: int = NEVER,
    ) -> None:
        """fn: calls `as_member` first."""
        self._fn, self._args, self._per_host = fn, list(args), ranks_per_host
        self._step_s = 0.0 if pause == NEVER else _SLOW_S
        self._pause = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115  (closed on leaving the block)
        self.go_on(pause)
        listeners = [listen() for _ in range(ranks // ranks_per_host)]
        self._ports = [listener.getsockname()[1] for listener in listeners]
        self._stores = [serve(listener) for listener in listeners]
        self.rosters = [Roster(store) for store in self._stores]
        self.generation = Generation(-1, ())
        self.dead: list[int] = []
        self.publish(range(ranks))
        self._ranks: list[tuple[int, Ranks]] = []  # the first member of each, and all of it
        self._meeting, port = _served()
        self.tunnel = Tunnel(port)
        started = start_ranks(fn, ranks, args=args, env=self._environ, ranks_per_host=ranks_per_host)
        self._ranks.append((0, started))
        self._members = ranks

    def publish(self, members: Sequence[int], leaving: Sequence[int] = ()) -> None:
        """The next generation, on all hosts."""
        self.generation = Generation(self.generation.number + 1, tuple(members), (), tuple(leaving))
        for roster in self.rosters:
            roster.publish(self.generation)

    def go_on(self, pause: int = NEVER) -> None:
        """Ranks go on to the middle of step `pause`, or to the end."""
        os.pwrite(self._pause.fileno(), b"%3d" % pause, 0)

    def join(self, host: int) -> int:
        """Start one more member on a host; its number. It is taken in once it is ready."""
        member, self._members = self._members, self._members + 1
        environ = self._environ(host * self._per_host) | {
            "IMECE_HOST": f"host{host}",
            f"{_PASSED_ON}MEMBER": str(member),
            f"{_PASSED_ON}JOINING": "1",
            "LOCAL_WORLD_SIZE": str(self._per_host),
        }
        ranks = start_ranks(self._fn, 1, args=self._args, env=environ, ranks_per_host=1)
        self._ranks.append((member, ranks))
        return member

    def signal(self, member: int, number: int) -> None:
        """Send it a signal."""
        first, ranks = self._of(member)
        ranks.kill(member - first, number)

    def serve_elsewhere(self) -> int:
        """Ranks are to meet in another store, at this port; that until now is gone."""
        self._meeting, port = _served()
        return port

    def is_ready(self, member: int) -> bool:
        """Whether it waits to be taken in."""
        return any(roster.is_ready(member) for roster in self.rosters)

    def steps(self) -> int:
        """Finished ones, of the member that is furthest."""
        beats = [roster.beat(member) for roster in self.rosters for member in self.generation.members]
        return max((beat[1] for beat in beats if beat is not None), default=0)

    def watch(
        self, until: Callable[[], bool] = lambda: False, timeout_s: float = 200
    ) -> dict[int, RankResult]:
        """Until all have ended, or `until`: the others go on without those that died. What became of each."""
        deadline = time.monotonic() + timeout_s
        while any(ranks.alive() for _, ranks in self._ranks) and not until():
            assert time.monotonic() < deadline, f"they still run: {self._reports()}"
            died = [member for member in self.generation.members if self._has_ended(member)]
            dead = [member for member in died if self.result(member).returncode]
            if dead or set(died) & set(self.generation.leaving):
                self.dead += dead
                others = [member for member in self.generation.members if member not in died]
                self.publish(others, [each for each in self.generation.leaving if each not in died])
            time.sleep(_POLL_S)
        return {member: self.result(member) for member in range(self._members)}

    def result(self, member: int) -> RankResult:
        """How it is, or has ended."""
        first, ranks = self._of(member)
        return ranks._look(member - first)

    def _has_ended(self, member: int) -> bool:
        first, ranks = self._of(member)
        return member - first not in ranks.alive()

    def _of(self, member: int) -> tuple[int, Ranks]:
        return next(each for each in reversed(self._ranks) if each[0] <= member)

    def _environ(self, rank: int) -> dict[str, str]:
        passed_on = {"MEMBER": rank, "AGENT_PORT": self._ports[rank // self._per_host]}
        environ = {_PASSED_ON + name: str(value) for name, value in passed_on.items()}
        environ |= {_PAUSE: self._pause.name, _STEP_S: str(self._step_s)}
        return environ | {"MASTER_PORT": str(self.tunnel.port), "GROUP_WORLD_SIZE": str(len(self._ports))}

    def _reports(self) -> str:
        return "\n".join(self.result(member).report() for member in range(self._members))

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, ranks in self._ranks:
            ranks.close()
        self._pause.close()


def _served() -> tuple[dist.Store, int]:
    listener = listen()
    port: int = listener.getsockname()[1]
    return serve(listener), port


# In the ranks.


def as_member() -> int:
    """Be the member that `Agents` has started; its number."""
    for name in [name for name in os.environ if name.startswith(_PASSED_ON)]:
        os.environ["IMECE_" + name.removeprefix(_PASSED_ON)] = os.environ.pop(name)
    return int(os.environ["IMECE_MEMBER"])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one step, of all ranks."""
    draw = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, WIDTH, generator=draw), torch.randn(SAMPLES, 1, generator=draw)


def network(seed: int = 0, frozen: bool = False) -> nn.Module:
    """The same on all ranks, in 353 elements: they lie unevenly on any number of ranks. frozen: some are."""
    torch.manual_seed(1 + seed)
    made = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 1))
    made[2].requires_grad_(not frozen)
    return made


def learn(*args: Any) -> dict[str, Any]:
    """As `learn_all`; of a rank that leaves before the end, the exit status with which it does."""
    try:
        return learn_all(*args)
    except SystemExit as leaving:
        return {"left": leaving.code}


def learn_dying_again(dying: int, place: str, *args: Any) -> dict[str, Any]:
    """`learn`, but that a member dies when ranks change. dying: it; place: "moving" (while frozen parameters
    go to the new ranks' memory) or "moved" (they are there)."""
    if int(os.environ[f"{_PASSED_ON}MEMBER"]) == dying:
        moved = itertools.count()

        def move(flat: torch.Tensor, plan: Bucket, members: Sequence[torch.Tensor], copy: bool) -> None:
            if not members[0].requires_grad and next(moved) == 1:  # 0: at the beginning
                os.kill(os.getpid(), signal.SIGKILL)
            move_into(flat, plan, members, copy)

        def load(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if place == "moving":
            mock.patch.object(stores, "move_into", move).start()
        else:
            mock.patch.object(TrainingState, "load", load).start()
    return learn(*args)


def learn_all(
    strategy: str,
    deaths: dict[str, list[Any]],
    gather: bool = False,
    frozen: bool = False,
) -> dict[str, Any]:
    """STEPS steps; what this rank has seen, and the parameters at the end.

    deaths: {member: [step, place]}, where it kills itself: "backward", "gather" (of what was stepped, which
    the others are in or have gone on from) or "step" (after it). frozen: some parameters are, of which a
    member that joins has other values.
    """
    member = as_member()
    step_of, place_of = deaths.get(str(member), [-1, ""])

    def here(number: int, place: str) -> None:
        if (number, place) == (step_of, place_of):
            os.kill(os.getpid(), signal.SIGKILL)

    mesh, told = imece.init(), []

    def recovered(found: Recovered) -> None:
        hosts = [len(host) for host in mesh.hosts]
        told.append([found.generation.number, found.step, found.lost_steps, hosts])

    inner = network(member if frozen else 0, frozen)
    trained = [each for each in inner.parameters() if each.requires_grad]
    model, optimizer = imece.parallelize(inner, torch.optim.AdamW(trained, lr=1e-2), strategy, gather=gather)
    for step in imece.steps(STEPS, model, optimizer, recovered=recovered):
        with step as number:
            inputs, targets = batch(number)
            mine = slice(mesh.rank, None, mesh.world_size)
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
            loss.backward()
            here(number, "backward")
            if (number, "gather") == (step_of, place_of):
                dies = mock.patch.object(
                    hierarchical, "all_gather", lambda *_, **_more: here(step_of, "gather")
                )
                dies.start()
            optimizer.step()
            optimizer.zero_grad()
            here(number, "step")
            time.sleep(float(os.environ[_STEP_S]))
            if number >= int(Path(os.environ[_PAUSE]).read_text()):
                while number >= int(Path(os.environ[_PAUSE]).read_text()):
                    time.sleep(_POLL_S)
                time.sleep(_NEWS_S)
    parameters = torch.cat([each.flatten() for each in model.state_dict().values()])
    return {"told": told, "parameters": parameters.tolist()}


def learnt_alone(frozen: bool = False) -> torch.Tensor:
    """What `learn` comes to without ranks."""
    model = network(frozen=frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(STEPS):
        inputs, targets = batch(number)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def difference(parameters: Sequence[float], expected: torch.Tensor) -> float:
    """The largest, as a share of the largest element."""
    return float((torch.tensor(parameters) - expected).abs().max() / expected.abs().max())
