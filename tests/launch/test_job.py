"""What a job does about its ranks, with stand-ins for hosts."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from imece.launch import job
from imece.launch.endings import Ending
from imece.launch.generations import Limits
from imece.launch.host import CannotStart, Start
from imece.launch.job import Job
from imece.membership.roster import Generation
from imece.status import Failure
from tests.clock import Clock
from tests.launch.hosts.cluster import FakeHost


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(job, "time", clock)
    return clock


class Full(FakeHost):
    """A host that has no room for one more process at times."""

    full = False

    def start(self, starts: Sequence[Start]) -> None:
        if self.full:
            raise CannotStart(starts[0], BlockingIOError(11, "Resource temporarily unavailable"))
        super().start(starts)


def test_a_replacement_that_cannot_be_started_is_tried_again(clock: Clock) -> None:
    host = Full(0)
    ours = Job(Limits(2), 30.0, False, {0: host}, 2)
    ours.start()
    host.full = True
    host.dies(1)
    ours.ended(host.news, clock.now)
    for clock.now in (0.1, 29.0):
        ours.on_time(clock.now)
    assert host.said[1:] == [
        "imece: cannot start a replacement for rank 1: no more processes or threads may be started here: "
        "raise the limit (ulimit -u or -v, docker --pids-limit); tried again in 30 s"
    ]
    assert ours.next_time() < 31.0
    host.full = False
    for clock.now in (30.2, 31.5):
        ours.on_time(clock.now)
    assert list(host.crew.living) == [0, 3] and host.said[-1] == "imece: rank 1 joined; 2 ranks go on"


@pytest.mark.parametrize(
    ("direct", "status", "kind", "said"),
    [
        (True, 1, "", ""),
        (True, 2, "", ""),
        (True, 1, "ValueError", "imece: rank 0 (pid 100) failed with ValueError: no (exit status 1)"),
        (True, 3, "", "imece: rank 0 (pid 100) failed with exit status 3"),
        (False, 1, "", "imece: rank 0 (pid 100) failed with exit status 1"),
    ],
)
def test_a_rank_that_has_said_itself_why_it_ends(
    clock: Clock, direct: bool, status: int, kind: str, said: str
) -> None:
    """With a status of its own, and no exception that ended it."""
    host = FakeHost(0)
    ours = Job(Limits(1), 30.0, direct, {0: host}, 1)
    ours.start()
    failure = Failure(0.0, kind, "no", False) if kind else None
    ours.ended({0: Ending(0, 100, status, 0.0, failure)}, clock.now)
    assert (ours.outcome().status, ours.outcome().line) == (status, said)


def test_one_that_comes_when_the_steps_are_over_is_not_said_to_join(clock: Clock) -> None:
    host = FakeHost(0)
    ours = Job(Limits(2), 30.0, False, {0: host}, 2)
    ours.start()
    host.dies(1)
    ours.ended(host.news, clock.now)
    host.resilient = False
    for clock.now in (0.1, 1.5, 3.0):
        ours.on_time(clock.now)
    assert list(host.crew.living) == [0, 2] and len(host.published) == 2
    assert not any("joined" in line for line in host.said)
    host.resilient = True
    ours.on_time(4.5)
    assert host.published[-1].members == (0, 2)


def test_ranks_that_lost_each_other_meet_anew(clock: Clock) -> None:
    host = FakeHost(0)
    ours = Job(Limits(2), 30.0, False, {0: host}, 2)
    ours.start()
    host.lost_in = {1: 0}
    for clock.now in (1.5, 3.0):
        ours.on_time(clock.now)
    why = "rank 1 lost the connection to others, though no rank has ended"
    assert host.published == [Generation(0, (0, 1)), Generation(1, (0, 1), (why,))]
    assert host.said == [f"imece: {why}; 2 ranks go on"]


@pytest.mark.parametrize("how", ["ended", "closed", "asked to end"])
def test_ranks_that_have_lost_one_that_has_finished_are_told_so(clock: Clock, how: str) -> None:
    """They would wait a minute for a generation in which they meet anew."""
    host = FakeHost(0)
    ours = Job(Limits(3), 30.0, False, {0: host}, 3)
    ours.start()
    if how == "asked to end":
        host.obstinate = True
        ours.signalled(signal.SIGTERM)
    if how == "closed":
        host.told = {1}
    else:
        host.dies(1, 0)
        ours.ended(host.news, clock.now)
    host.lost_in = {2: 0}
    for clock.now in (1.5, 3.0):
        ours.on_time(clock.now)
    assert (host.published, host.last) == ([Generation(0, (0, 1, 2))], [0])


@pytest.mark.parametrize(
    ("status", "failure", "said"),
    [
        (1, None, "failed with exit status 1; rank 1 had finished before; the other rank was ended"),
        (1, Failure(0.0, "ValueError", "no", False), "(exit status 1); the other rank was ended"),
        (-11, None, "a segmentation fault; the other rank was ended"),
        (-7, None, "perhaps a file was cut that it reads, or /dev/shm is full; the other rank was ended"),
    ],
)
def test_who_had_finished_may_be_why_another_fails(
    clock: Clock, status: int, failure: Failure | None, said: str
) -> None:
    """torch's own collectives raise errors of many kinds where a rank has gone."""
    host = FakeHost(0)
    host.resilient = False
    ours = Job(Limits(3), 30.0, False, {0: host}, 3)
    ours.start()
    ours.ended({1: Ending(1, 101, 0, 0.0)}, clock.now)
    ours.ended({2: Ending(2, 102, status, 0.0, failure)}, clock.now)
    assert ours.outcome().line.startswith("imece: rank 2 (pid 102) ") and ours.outcome().line.endswith(said)
