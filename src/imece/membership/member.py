"""This process as a member: it shows that it lives, sees new generations, and moves into them.

A thread does the first two, five times a second, so that the training thread need not ask the store. The
thread also ends calls on GPUs that would wait forever: for a rank that is given up, or since NCCL has failed.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from imece import moments, opening
from imece.collectives import companions, pending
from imece.collectives.shared_memory.runner import abort_all
from imece.errors import CollectiveError, PeerLostError, UserError
from imece.membership import gpu_errors
from imece.membership.aborting import Aborting
from imece.membership.beating import Beating
from imece.membership.guarded import GuardedStore
from imece.membership.roster import Generation, Roster, meeting_in, outcome_of
from imece.membership.where import Where
from imece.mesh import Mesh
from imece.status import says_peer_gone
from imece.store import client
from imece.system import connections
from imece.world import JOINING, LOOPBACK

_POLL_S = 0.004
_NEWS_S = 1.0
_LOST_S = 5.0  # for the launcher to see what a rank's peers have seen, if anything
_CUT_S = 1.0  # for connections to tell whoever waits for a lost rank
_STUCK_S = 1.0  # for waits to end after their connections have
_CONNECT_S = 60.0
_MET, _LEFT = "met", "left"  # what becomes of a generation while it is formed, if nobody of it ends


class SupersededError(CollectiveError):
    """The generation that was being formed is over: one of its members has ended already."""


class Member:
    """One process that goes on when others die. A job has one for each rank."""

    def __init__(self, mesh: Mesh, steps: int) -> None:
        """Begins to beat. The launcher of `mesh` must keep a roster (`keeps_roster`).

        steps: finished so far.
        """
        world = mesh.world
        assert world.member is not None and world.master_addr and world.master_port
        self.mesh, self.number = mesh, world.member
        self.steps = steps  # finished: the launcher gives up a member that makes none again and again
        self.where = Where(lambda: self.steps)
        self._meeting = (world.master_addr, world.master_port)
        own = world.agent_port
        self._launcher = self._meeting if own is None else (LOOPBACK, own)
        self._store = _connect(self._launcher)
        self._roster = Roster(self._store)
        self._alone = world.joining
        self._at = -1 if world.joining else self._first()
        self._newest = self._at
        self._members = set(self._roster.generation(self._at).members if self._at >= 0 else ())
        self._moving = threading.Lock()  # a cut must not hit the next generation's connections
        self._cut_at = math.inf
        self._has_groups = True  # of its present generation
        self._goes_on = False
        self.aborting = Aborting()
        gpu_errors.leave_to_member()
        pending.expect_giving_up()
        self._stores: list[GuardedStore] = []  # a PrefixStore does not keep what is written in Python alive
        self._beating = Beating(
            partial(_connect, self._launcher), self.number, lambda: self.steps, self._look
        )

    def _first(self) -> int:
        """The generation it was started in. The launcher may publish it a moment after the start."""
        while (number := self._roster.newest()) < 0:
            time.sleep(_POLL_S)
        return number

    @property
    def generation(self) -> int:
        """The number of its generation; -1 while it is alone."""
        return self._at

    @property
    def newest(self) -> int:
        """The newest generation's number, as of a moment ago."""
        return self._newest

    @property
    def is_joining(self) -> bool:
        """Whether it was started later and has not been taken in yet."""
        return self._alone

    def goes_on(self, resilient: bool = True) -> None:
        """From now on the launcher replaces others that die, and leaves this one running; or no longer."""
        self._goes_on = resilient
        self._roster.say_resilient(self.number, resilient)

    def went_on(self, again: int) -> None:
        """The first step in this generation is finished; again: how many had to be made again."""
        self._roster.say_went_on(self.number, self._at, time.monotonic(), again)

    def move(self, patience_s: float, leave: Callable[[], None]) -> Generation | None:
        """Move, with the mesh, into the newest generation that it is not in yet; None if none comes in time.

        All members of the new generation call this. A member that is joining waits without limit. leave: lets
        go of everything that belongs to the old groups, before they are destroyed: then ranks that wait for
        this one see it. If the launcher sees nobody end, this asks it for a generation of the same members: a
        network that closes connections and goes on is no death. A member that waits without limit for others
        to go does not ask. If a peer has finished, the launcher answers that there is nothing to wait for.
        SystemExit for a member that others have given up.
        """
        if self._alone:
            self._roster.say_ready(self.number)
        until, ask_at = time.monotonic() + patience_s, self._ask_at(patience_s)
        while True:
            newest = self._roster.newest()
            if newest > self._at:
                generation = self._roster.generation(newest)
                if self.number in generation.members:
                    leave()
                    if self._enter(generation, max(patience_s, _CONNECT_S)):
                        return generation
                elif not self._alone:
                    raise SystemExit(f"imece: member {self.number} was given up by generation {newest}")
            elif not self._alone and (time.monotonic() > until or self._roster.is_last(newest)):
                return None
            elif time.monotonic() > ask_at:
                self._roster.say_lost(self.number, self._at)
                ask_at = math.inf
            time.sleep(_POLL_S)

    def _ask_at(self, patience_s: float) -> float:
        return math.inf if self._alone or patience_s == math.inf else time.monotonic() + _LOST_S

    def _enter(self, generation: Generation, patience_s: float) -> bool:
        """False if the generation was over before it began. patience_s: how long it may take to hear that."""
        with self._moving:
            # Ranks that learned of it by an error: destroying a group waits for all that is under way in it,
            # on a GPU or with a rank that has gone on, while something there still refers to the group.
            if lost := _has_lost(self._members, self._roster.since(self._at)):
                connections.cut()
                self.aborting.abort()
            self._has_groups = False
            self._at = generation.number  # whoever fails from here on waits for the next generation
            self._members, self._cut_at = set(generation.members), math.inf
            connections.forget()
            self.aborting.begin()
        if lost:
            pending.give_up("a rank is gone, and this call was left", _STUCK_S)
        rank, size = generation.members.index(self.number), len(generation.members)
        guarded = GuardedStore(lambda: _connect(self._meeting), self._check, patience_s)
        self._stores = [*self._stores[-1:], guarded]
        store = meeting_in(guarded, generation.number)
        companions.forget()
        self.aborting.wait()
        try:
            reform = partial(opening.reform, rank, size, store, self._met)
            if self.mesh.device.type == "cpu":
                pending.make_groups(reform)
            else:  # NCCL's groups belong to the thread's own GPU
                reform()
        except (RuntimeError, UserError) as error:
            if self._is_over(generation, patience_s if is_peer_gone(error) else _NEWS_S):
                return False
            raise
        self._alone, self._has_groups = False, True
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.pop(JOINING, None)
        return True

    def _is_over(self, generation: Generation, within_s: float) -> bool:
        """Whether the generation is over. Ranks may know of a death before the launcher does."""
        until, ask_at = time.monotonic() + within_s, self._ask_at(within_s)
        while self._roster.newest() == generation.number and time.monotonic() < until:
            if self._roster.is_last(generation.number):
                return False
            if time.monotonic() > ask_at:
                self._roster.say_lost(self.number, generation.number)
                ask_at = math.inf
            time.sleep(_POLL_S)
        return self._roster.newest() > generation.number

    def _met(self) -> None:
        """All members of this generation have come. From here on only the loss of one ends it before the next
        border: whoever left it for one that has joined would leave others waiting in Gloo, which asks nobody.
        """
        agreed = self._stores[-1].compare_set(outcome_of(self._at), "", _MET).decode()
        if agreed == _LEFT:
            self._raise_superseded()

    def _check(self) -> None:
        if self._roster.newest() <= self._at:
            return
        if not _has_lost(self._members, self._roster.since(self._at)):
            with contextlib.suppress(dist.DistNetworkError):
                if self._stores[-1].first(outcome_of(self._at), _LEFT) == _MET:
                    return
        self._raise_superseded()

    def _raise_superseded(self) -> NoReturn:
        raise SupersededError(f"generation {self._at} is over: a newer one is there")

    def _look(self, roster: Roster) -> None:
        """After each beat, in its thread."""
        self._newest = roster.newest()
        self._cut_off(roster)
        self._end_failed()

    def _cut_off(self, roster: Roster) -> None:
        """If a host is silent, nobody hears that its ranks are gone: end whatever waits for them, and
        whatever waits for those that wait.
        """
        if self._newest <= self._at or len(self._members) < 2:
            return  # nor does who joins read all generations that there were
        newer = list(roster.since(self._at))
        with self._moving:
            # If it has moved meanwhile, what it had lost is nothing to the generation that it is in.
            newer = [each for each in newer if each.number > self._at]
            now = time.monotonic()
            if self._cut_at == math.inf and _has_lost(self._members, newer):
                self._cut_at = now + _CUT_S
            if now > self._cut_at:
                connections.cut()
                over = f"generation {self._at} is over: a rank of it is gone"
                abort_all(PeerLostError(over))
                self.aborting.abort()
                pending.give_up(over, _STUCK_S)
                for end in moments.once_lost:
                    end(over)

    def _end_failed(self) -> None:
        """After an error of NCCL, perhaps nobody has ended, and no new generation comes by itself: ask
        for one."""
        with self._moving:
            error = gpu_errors.error_on_gpus() if self._has_groups else ""
            if error and self._goes_on:
                self.aborting.abort()
            elif error:
                gpu_errors.end_process(error)


def _has_lost(members: set[int], newer: Iterable[Generation]) -> bool:
    """Whether calls of `members` may never end, now that there are `newer` generations."""
    # A member that is alone waits for nobody, though others may have come and gone during its step.
    return len(members) > 1 and any(each.lost or members - {*each.members} for each in newer)


def _connect(where: tuple[str, int]) -> dist.Store:
    return client(*where, timedelta(seconds=_CONNECT_S))


def keeps_roster(mesh: Mesh) -> bool:
    """Whether the launcher of these ranks replaces dead ones, and the mesh can go on with others."""
    return mesh.world.member is not None and mesh.can_change


def is_peer_gone(error: BaseException) -> bool:
    """Whether `error` may mean that another rank has ended, and not a mistake of this one."""
    if isinstance(error, PeerLostError | SupersededError | dist.DistNetworkError | dist.DistBackendError):
        return True  # DistBackendError: NCCL's own, also for an aborted communicator
    return isinstance(error, RuntimeError) and says_peer_gone(str(error))
