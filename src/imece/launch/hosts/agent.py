"""`imece launch` on one of several hosts: its ranks, its links to the others, and its part in the job.

here                              what an agent has and knows, whatever its role
seeker, follower, coordinator     the roles
wide_job, wide_generations        what to do on all hosts (../job.py), and who is in which generation
far, words                        the hands of another host, and what is said about members
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imece.errors import UserError
from imece.launch.crew import Crew
from imece.launch.endings import Outcome
from imece.launch.environment import worker_environment
from imece.launch.host import Host, Order, Start
from imece.launch.hosts.coordinator import Coordinator
from imece.launch.hosts.events import Down, Event, Refused, Said, Up
from imece.launch.hosts.follower import Follower
from imece.launch.hosts.here import Follow, Here, Lead, Plan, Role, Seek, Turn
from imece.launch.hosts.network import Network
from imece.launch.hosts.seeker import SILENT_S, Seeker
from imece.launch.hosts.token import find_token
from imece.launch.hosts.wide_view import WideView
from imece.launch.output import say
from imece.launch.view import watched
from imece.system.addresses import (
    Address,
    NoWayError,
    address_towards,
    describe,
    interface_of,
    is_loopback,
)
from imece.world import AGENT_PORT

_AGAIN_S = 0.5


def launch_here(
    command: Sequence[str],
    plan: Plan,
    *,
    job: str,
    environ: Mapping[str, str],
    logs: Path | None = None,
    rank_silent_s: float = 10.0,
    watch: Callable[[WideView], None] | None = None,
) -> int:
    """Run `command` as this host's ranks, together with the agents of the other hosts; returns the
    exit status.

    As launch/local.py, on several hosts. job: a name that all agents must give. watch: called in a thread of
    its own, with a view that shows something while this host leads. UserError if the other agents cannot be
    met, or have another plan.
    """
    own = _own_address(plan)
    token, said = find_token(environ, create=plan.me == 0)
    if said:
        say(said)
    order = Order(command, False, rank_silent_s, plan.grace_s)
    # It serves stores by torch, whose import holds Python's lock for seconds: others would find it silent.
    importlib.import_module("torch.distributed")
    hello = {"hosts": plan.hosts, "ranks": plan.ranks}
    with Network(token, plan.me, job, hello, silent_s=plan.silent_s) as network:
        _listen(network, plan, own)
        with Crew(logs) as crew:
            crew.wakes(network.wake)
            host = Host(order, crew, _environment(plan, network, environ, own, lambda: here.run), plan.me)
            here = Here(plan, host, network)
            view = WideView(plan.ranks, here.hit)
            if watch is not None:
                here.view = view
            with watched(watch, lambda: view):
                outcome = Agent(here).run()
        host.tell(outcome)
    return outcome.status


class Agent:
    """Tells its role what happens, and changes it."""

    def __init__(self, here: Here) -> None:
        self._here = here
        self.role: Role = self._role_of(Lead() if here.me == 0 else Seek())
        self._turn()

    def run(self) -> Outcome:
        """Until all is over for this host."""
        here, host = self._here, self._here.host
        while here.outcome is None:
            ended, signals = host.wait(self.role.next_time())
            for number in signals:
                self.role.signalled(number)
            for event in here.network.events():
                self.happened(event)
            if ended:
                now = time.monotonic()
                self.role.ended(host.ended(ended, now), now)
            now = time.monotonic()
            host.on_time(now)
            self.on_time(now)
        return here.outcome

    def on_time(self, now: float) -> None:
        """Let the role do what is due."""
        self.role.on_time(now)
        self._turn()

    def happened(self, event: Event) -> None:
        """Tell the role."""
        self._tell(event)
        self._turn()

    def _tell(self, event: Event) -> None:
        here = self._here
        match event:
            case Up(host, _, address, hello):
                here.dead.discard(host)
                here.up[host] = event
                if self._agrees(host, hello):
                    here.note_book([[host, *address]])
                    self.role.up(host)
            case Said(host, link, message) if self._is_up(host, link):
                try:
                    self.role.said(host, message)
                except (KeyError, TypeError, ValueError) as error:
                    here.say(f"host {host} says what is not understood ({error!r}); its link is dropped")
                    why = "it spoke of what is not understood"
                    here.drop(host, why)
                    self.role.down(host, why, False, False)
            case Down(host, link, why, surely, told) if link is None or self._is_up(host, link):
                here.up.pop(host, None)
                here.whys[host] = why
                if surely:
                    here.dead.add(host)
                self.role.down(host, why, surely, told)
            case Refused(address, why):
                here.say(f"somebody at {address} was not let in: {why}")

    def _is_up(self, host: int, link: int) -> bool:
        """Whether that is a link which was not dropped here meanwhile."""
        return host in self._here.up and self._here.up[host].link == link

    def _agrees(self, host: int, hello: Mapping[str, object]) -> bool:
        """Whether the other agent was started with the same plan; tells it if not."""
        here, wrong = self._here, []
        for name, own in (("hosts", here.plan.hosts), ("ranks", here.plan.ranks)):
            if hello.get(name) != own:
                wrong.append(f"--{name} {hello.get(name)} on host {host}, but {own} on host {here.me}")
        if not wrong:
            return True
        why = f"the hosts do not agree: {'; '.join(wrong)}"
        here.send(host, {"do": "refuse", "why": why})
        here.drop(host, why)
        if here.standing is None and host == 0:
            raise UserError(why)
        here.say(why)
        return False

    def _turn(self) -> None:
        here = self._here
        while here.turn is not None and here.outcome is None:
            turn, here.turn = here.turn, None
            self.role = self._role_of(turn)

    def _role_of(self, turn: Turn) -> Role:
        here = self._here
        match turn:
            case Seek():
                return Seeker(here, turn)
            case Follow():
                return Follower(here, turn)
            case Lead():
                return Coordinator(here, turn)


def _own_address(plan: Plan) -> str:
    """The address by which this host reaches the rendezvous; UserError if there is none."""
    own = _towards_host_0(plan)
    name = plan.rendezvous[0]
    if is_loopback(own) and not (is_loopback(name) or name.startswith("localhost")):
        raise UserError(
            f"--rendezvous {describe(plan.rendezvous)}: this host takes {name} for {own}, which is itself "
            "alone; give host 0's address"
        )
    if plan.me == 0 and own not in _addresses(plan.rendezvous):
        raise UserError(
            f"--rendezvous {describe(plan.rendezvous)} is not an address of this host, which is host 0; "
            f"{own} is one"
        )
    return own


def _towards_host_0(plan: Plan) -> str:
    """Waits until host 0's name is known and an interface leads there: names may be given only once hosts
    run, as in Kubernetes, and a host that starts may run this before its network is up."""
    begin, said = time.monotonic(), False
    while True:
        try:
            return address_towards(plan.rendezvous)
        except NoWayError as error:
            waited_s = time.monotonic() - begin
            if plan.me == 0 or waited_s >= plan.patience_s:
                raise
            if waited_s >= SILENT_S and not said:
                said = True
                say(f"imece: {error}; host {plan.me} tries for {plan.patience_s:.0f} s")
            time.sleep(_AGAIN_S)


def _listen(network: Network, plan: Plan, own: str) -> None:
    """Host 0 listens where the hosts meet; any other at the same port of its own, if that is free: the others
    look for it there when it has been started again."""
    if plan.me and own not in _addresses(plan.rendezvous):
        with contextlib.suppress(UserError):
            network.listen(own, plan.rendezvous[1])
            return
    network.listen(own, 0 if plan.me else plan.rendezvous[1])


def _addresses(where: Address) -> set[str]:
    return {str(found[4][0]) for found in socket.getaddrinfo(*where)}


def _environment(
    plan: Plan, network: Network, environ: Mapping[str, str], own: str, run: Callable[[], str]
) -> Callable[[Start, Host], Mapping[str, str]]:
    """The environment of a member's process."""
    interface = interface_of(own)
    defaults = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface) if interface else {}
    theirs = {**defaults, **environ}

    def environment(start: Start, host: Host) -> Mapping[str, str]:
        local = worker_environment(
            theirs, start.slot % plan.ranks, plan.ranks, network.tunnel_port, run(),
            member=start.member, joining=start.joining, starts=start.starts,
        )  # fmt: skip
        rank, size = (0, 1) if start.joining else (start.rank, start.world_size)
        wide = {
            "RANK": rank, "WORLD_SIZE": size, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": plan.me, "GROUP_WORLD_SIZE": plan.hosts, AGENT_PORT: host.port,
        }  # fmt: skip
        return {**local, **{name: str(value) for name, value in wide.items()}}

    return environment
