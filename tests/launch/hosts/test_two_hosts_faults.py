"""Ranks, launchers and links of two hosts die, are cut and return; the hosts are network namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from imece.bench.hosts.namespaces import reason_against, two_hosts
from tests.launch.hosts.two import RESILIENT, Agent, Pair, gone_within, is_whole, went_on

pytestmark = [
    pytest.mark.faults,
    pytest.mark.hosts,
    pytest.mark.skipif(reason_against() is not None, reason=str(reason_against())),
]
STEPS, SILENT_S = 1000, 3
KILLS = 4
# Its gradients, 8.7 MB, are on the cable for most of a step.
WIDE = RESILIENT.replace(
    "torch.nn.Linear(16, 1)",
    "torch.nn.Sequential(torch.nn.Linear(16, 2048), torch.nn.Linear(2048, 1024), torch.nn.Linear(1024, 1))",
)


@contextmanager
def pair(
    folder: Path, *, ranks: int = 1, steps: int = STEPS, strategy: str = "replicate", program: str = RESILIENT
) -> Iterator[Pair]:
    """Two hosts; in the end nothing is left of what was started on them."""
    script = folder / "script.py"
    script.write_text(program)
    with two_hosts() as hosts:
        words = ("--silent-s", str(SILENT_S), "--grace-s", "20", script, str(steps), strategy)
        made = Pair(hosts, folder, *words, ranks=ranks)
        yield made
        assert made.left() == []


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero3"])
def test_a_rank_is_killed_and_replaced(tmp_path: Path, strategy: str) -> None:
    with pair(tmp_path, ranks=2, strategy=strategy) as two:
        a, b = two.start("a"), two.start("b")
        b.wait_for_step(20)
        (victim,) = {line.pid for line in b.steps() if line.slot == 3}
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        three, four = went_on(a, since, 3), went_on(a, since, 4)
        two.hurry()
        assert (a.end(), b.end()) == (0, 0), a.text + b.text
    assert f"rank 3 (host 1, pid {victim}) was killed by signal 9" in a.text
    is_whole(a, b, steps=STEPS, again=1)
    print(
        f"\n{strategy}, a rank of host 1 killed: 3 ranks after {three.time_s - since:.2f} s, "
        f"4 again after {four.time_s - since:.1f} s"
    )


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "hybrid"])
def test_ranks_are_killed_in_the_middle_of_a_message(tmp_path: Path, strategy: str) -> None:
    """Whoever sends or receives the rest of one is told nothing by Gloo."""
    with pair(tmp_path, ranks=2, steps=300, strategy=strategy, program=WIDE) as two:
        a, b = two.start("a"), two.start("b")
        b.wait_for_step(20)
        gaps: list[float] = []
        killed: set[int] = set()

        def newest(agent: Agent) -> set[int]:
            return {line.pid for line in agent.steps() if line.slot == 3} - killed

        def without_it(since_s: float, _: object = None) -> list[float]:
            """When steps ended: of three ranks, or of its replacement where that came before any."""
            three = [line.time_s for line in a.steps() if line.ranks == 3 and line.time_s > since_s]
            return three or [line.time_s for line in b.steps() if line.pid in newest(b)]

        for kill in range(KILLS):
            b.wait_for(newest, "a step of rank 3")
            time.sleep(0.3 + 0.07 * kill)
            (victim,) = newest(b)
            since = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
            a.wait_for(partial(without_it, since), "a step without it", 60)
            gaps.append(without_it(since)[0] - since)
            went_on(a, since, 4)
        two.hurry()
        assert (a.end(), b.end()) == (0, 0), a.text + b.text
    is_whole(a, b, steps=300, again=KILLS)
    print(
        f"\n{strategy}, in the middle of a message: without it after {', '.join(f'{s:.2f}' for s in gaps)} s"
    )


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_launcher_is_killed_and_started_again(tmp_path: Path, name: str) -> None:
    """Of host 0 ("a") too, which led the job until then."""
    with pair(tmp_path) as two:
        agents = {each: two.start(each) for each in ("a", "b")}
        other = agents["b" if name == "a" else "a"]
        other.wait_for_step(20)
        pids = {line.pid for line in agents[name].steps()}
        since = time.monotonic()
        agents[name].process.kill()
        first = went_on(other, since, 1, {line.pid for line in other.steps()})
        died_s = gone_within(pids, 5.0)
        again = two.start(name)
        both = went_on(other, first.time_s, 2)
        two.hurry()
        statuses = again.end(), other.end()
    assert statuses == (0, 0), again.text + other.text
    number = "ab".index(name)
    assert f"host {number} (10.115.0.{number + 1}) is gone: its launcher has ended" in other.text
    assert ("host 1 leads the job now" in other.text) == (name == "a")
    assert f"host {number} has come; its ranks are starting" in again.text
    is_whole(agents[name], other, again, steps=STEPS, again=1)
    print(
        f"\nthe launcher of host {number} killed: its rank gone after {died_s:.2f} s, "
        f"the other's next step after {first.time_s - since:.2f} s, 2 ranks after {both.time_s - since:.1f} s"
    )


def test_the_link_is_cut_and_mended(tmp_path: Path) -> None:
    """Only the side of the coordinator goes on; the other one's ranks end, and it comes again."""
    with pair(tmp_path, steps=STEPS) as two:
        a, b = two.start("a"), two.start("b")
        a.wait_for_step(20)
        cut_off = {line.pid for line in b.steps()}
        since = time.monotonic()
        two.cut()
        first = went_on(a, since, 1)
        gone_within(cut_off, 20.0)
        fenced_s = time.monotonic() - since
        last = max(line.time_s for line in b.steps())
        two.mend()
        mended = time.monotonic()
        both = went_on(a, mended, 2)
        two.hurry()
        assert (a.end(), b.end()) == (0, 0), a.text + b.text
    assert "host 1 (10.115.0.2) was lost: it was silent for 3 s; 1 rank goes on" in a.text
    assert "host 1 was cut off from host 0" in b.text and "host 1 is back" in b.text
    assert last < since + 1.0, "no step is made by a host that is cut off"
    assert not [line for line in b.steps() if line.pid in cut_off and line.time_s > since + 1.0]
    is_whole(a, b, steps=STEPS, again=1)
    print(
        f"\nlink cut: the other side's rank ended after {fenced_s:.1f} s, host 0 went on after "
        f"{first.time_s - since:.1f} s (--silent-s {SILENT_S}), 2 ranks {both.time_s - mended:.1f} s after "
        "it was mended"
    )


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_host_is_asked_to_go(tmp_path: Path, name: str, strategy: str) -> None:
    """By SIGTERM, as before a preemption: its ranks leave in order, and no step is made again."""
    with pair(tmp_path, strategy=strategy) as two:
        agents = {each: two.start(each) for each in ("a", "b")}
        goes, stays = agents[name], agents["b" if name == "a" else "a"]
        stays.wait_for_step(20)
        since = time.monotonic()
        goes.process.terminate()
        assert goes.end(30) == 128 + signal.SIGTERM, goes.text
        left_s = time.monotonic() - since
        first = went_on(stays, since, 1)
        two.hurry()
        assert stays.end() == 0, stays.text
    number = "ab".index(name)
    assert goes.text.splitlines()[-1] == (
        f"imece: ended by SIGTERM: the ranks of host {number} have left in order, the others go on"
    )
    is_whole(goes, stays, steps=STEPS)
    print(
        f"\n{strategy}, host {number} asked to go: it left after {left_s:.2f} s, the other one's next step "
        f"alone after {first.time_s - since:.2f} s"
    )
