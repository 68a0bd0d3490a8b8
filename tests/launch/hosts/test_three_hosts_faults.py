"""Three hosts on a switch: leaders die one after the other, one host is cut off, one is asked to leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from imece.bench.hosts.namespaces import reason_against
from tests.launch.hosts.switch import Switched, on_a_switch
from tests.launch.hosts.two import RESILIENT, gone_within, is_whole, went_on

pytestmark = [
    pytest.mark.faults,
    pytest.mark.hosts,
    pytest.mark.skipif(reason_against() is not None, reason=str(reason_against())),
]
STEPS, SILENT_S, END_S = 1000, 3, 120
HOSTS = ("a", "b", "c")


@contextmanager
def three(folder: Path, strategy: str = "replicate") -> Iterator[Switched]:
    """Three hosts with a rank each; in the end nothing is left of what was started on them."""
    script = folder / "script.py"
    script.write_text(RESILIENT)
    words = ("--silent-s", str(SILENT_S), "--grace-s", "20", script, str(STEPS), strategy)
    with on_a_switch(len(HOSTS), folder, *words) as made:
        yield made
        assert made.left() == []


def test_those_that_lead_die_one_after_the_other_and_come_again(tmp_path: Path) -> None:
    with three(tmp_path) as made:
        a, b, c = (made.start(name) for name in HOSTS)
        c.wait_for_step(20, 3)
        first = time.monotonic()
        a.process.kill()
        two = went_on(c, first, 2)
        second = time.monotonic()
        b.process.kill()
        one = went_on(c, second, 1)
        third = time.monotonic()
        again = made.start("b")
        pair = went_on(c, third, 2)
        fourth = time.monotonic()
        last = made.start("a")
        whole = went_on(c, fourth, 3)
        made.hurry()
        statuses = [agent.end(END_S) for agent in (c, again, last)]
    assert statuses == [0, 0, 0], c.text + again.text + last.text
    assert "host 0 (10.116.0.1) is gone: its launcher has ended; host 1 leads the job now" in b.text
    assert "host 1 (10.116.0.2) is gone: its launcher has ended; host 2 leads the job now" in c.text
    assert c.text.count("leads the job now") == 1, "whoever comes again follows"
    is_whole(a, b, c, again, last, steps=STEPS, again=2)  # one for each death
    print(
        f"\nhost 0 of three killed: 2 go on after {two.time_s - first:.2f} s; then host 1: 1 goes on after "
        f"{one.time_s - second:.2f} s; host 1 again: 2 ranks after {pair.time_s - third:.1f} s; "
        f"host 0 again: 3 ranks after {whole.time_s - fourth:.1f} s"
    )


@pytest.mark.parametrize("name", ["a", "c"])
def test_one_of_three_is_cut_off(tmp_path: Path, name: str) -> None:
    """The other two go on, also without the one that led; it joins again."""
    with three(tmp_path) as made:
        agents = {each: made.start(each) for each in HOSTS}
        cut_off = agents.pop(name)
        others = list(agents.values())
        for agent in (cut_off, *others):
            agent.wait_for_step(20, 3)
        pids = {line.pid for line in cut_off.steps()}
        since = time.monotonic()
        made.cut(name)
        first = [went_on(agent, since, 2) for agent in others]
        gone_within(pids, 20.0)
        fenced_s = time.monotonic() - since
        made.mend(name)
        mended = time.monotonic()
        whole = [went_on(agent, mended, 3) for agent in others]
        made.hurry()
        statuses = [agent.end(END_S) for agent in (cut_off, *others)]
    texts = "\n".join(agent.text for agent in (cut_off, *others))
    assert statuses == [0, 0, 0], texts
    number = HOSTS.index(name)
    assert f"host {number} was cut off from host" in cut_off.text and f"host {number} is back" in cut_off.text
    assert ("host 1 leads the job now" in texts) == (name == "a")
    late = [line for line in cut_off.steps() if line.pid in pids and line.time_s > since + 1.0]
    assert late == [], "no step is made by a host that is cut off"
    is_whole(cut_off, *others, steps=STEPS, again=1)
    print(
        f"\nhost {number} of three cut off: its rank ended after {fenced_s:.1f} s, the others went on after "
        f"{max(line.time_s for line in first) - since:.1f} s (--silent-s {SILENT_S}), 3 ranks "
        f"{max(line.time_s for line in whole) - mended:.1f} s after it was mended"
    )


@pytest.mark.parametrize(("name", "strategy"), [("a", "replicate"), ("c", "replicate"), ("b", "zero1")])
def test_one_of_three_is_asked_to_go(tmp_path: Path, name: str, strategy: str) -> None:
    with three(tmp_path, strategy) as made:
        agents = {each: made.start(each) for each in HOSTS}
        goes = agents.pop(name)
        stay = list(agents.values())
        stay[0].wait_for_step(20, 3)
        since = time.monotonic()
        goes.process.terminate()
        assert goes.end(END_S) == 128 + signal.SIGTERM, goes.text
        left_s = time.monotonic() - since
        first = [went_on(agent, since, 2) for agent in stay]
        made.hurry()
        statuses = [agent.end(END_S) for agent in stay]
    assert statuses == [0, 0], "\n".join(agent.text for agent in stay)
    is_whole(goes, *stay, steps=STEPS)
    before = max(line.time_s for line in stay[0].steps() if line.ranks == 3)
    print(
        f"\n{strategy}, host {HOSTS.index(name)} of three asked to go: it left after {left_s:.2f} s, the "
        f"others waited for {max(line.time_s for line in first) - before:.2f} s"
    )
