"""Two emulated hosts: the cable is as slow as it should be, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imece.bench.hosts import hosts, namespaces
from imece.bench.hosts import step as hosts_step
from imece.bench.hosts.namespaces import (
    HostsUnavailable,
    existing,
    reason_against,
    remove_leftovers,
    two_hosts,
)
from imece.bench.hosts.rank import WAYS
from imece.bench.hosts.step import WAYS as WAYS_OF_STEPS
from imece.bench.hosts.step import StepResults
from imece.cli.main import main

SOURCES = str(Path(namespaces.__file__).parents[2])
needs_hosts = pytest.mark.skipif(reason_against() is not None, reason=f"two hosts: {reason_against()}")

OWNER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from imece.bench.hosts.namespaces import two_hosts
with two_hosts() as hosts:
    sleeper = hosts.start("a", ["sleep", "600"], {"PATH": "/usr/bin:/bin"}, sys.stderr.buffer)
    print(hosts.names["a"], hosts.names["b"], sleeper.pid, flush=True)
    time.sleep(600)
"""


def start_owner() -> tuple[subprocess.Popen[str], list[str], int]:
    """A process that holds two hosts with a sleeping process in one; its namespaces; the sleeper."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, SOURCES], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    a, b, pid = owner.stdout.readline().split()
    return owner, [a, b], int(pid)


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def ended(pid: int) -> bool:
    """Whether the process ends within 5 s."""
    deadline = time.monotonic() + 5.0
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.hosts
@needs_hosts
def test_the_cable_is_the_only_way_and_as_fast_as_asked() -> None:
    with pytest.raises(ZeroDivisionError), two_hosts(rate="200mbit") as made:
        for source, target in (("a", "b"), ("b", "a")):
            # Of 200 Mbit/s headers take 4 %; a little flies ahead. A busy machine is slower, but not always.
            rates = [0.0]
            while max(rates) < 100 and len(rates) < 30:
                rates.append(hosts.plain_tcp(made, source, target, 4 * 2**20))
            assert 100 < max(rates) < 215
        links = made.run("a", ["ip", "-brief", "link"])
        assert [line.split()[0].split("@")[0] for line in links.splitlines()] == ["lo", namespaces.INTERFACE]
        inside = made.run("b", [sys.executable, "-c", "import os; print(os.environ['IMECE_HOST'])"])
        assert inside == "b\n"
        names = set(made.names.values())
        assert names <= set(existing())
        raise ZeroDivisionError
    assert not names & set(existing())


@pytest.mark.hosts
@needs_hosts
def test_hosts_of_a_killed_owner_are_removed_and_those_of_a_live_one_are_not() -> None:
    dead, dead_names, dead_sleeper = start_owner()
    live, live_names, live_sleeper = start_owner()
    try:
        dead.kill()
        dead.wait()
        assert set(dead_names) <= set(existing())
        assert set(remove_leftovers()) >= set(dead_names)
        assert not set(dead_names) & set(existing())
        assert set(live_names) <= set(existing())
        assert ended(dead_sleeper) and alive(live_sleeper)
    finally:
        live.send_signal(signal.SIGTERM)
        live.wait(20)
    assert live.returncode == 128 + signal.SIGTERM
    assert not set(live_names) & set(existing())
    assert ended(live_sleeper)


@pytest.mark.slow
@pytest.mark.hosts
@needs_hosts
def test_the_benchmark_measures_right_results() -> None:
    said: list[str] = []
    plan = hosts.Plan(size=2**20, rounds=2, rate="100mbit", steps=False)
    results = hosts.run(plan, said.append)
    assert set(results.right) == {*WAYS, "broadcast"} and all(results.right.values())
    assert all(len(rounds) == 2 for rounds in results.seconds.values())
    # 1 MiB at 100 Mbit/s: at least 80 ms each way for fp32, and nothing can be faster than the cable.
    assert min(results.seconds["hierarchical fp32"]) > 0.075
    assert min(results.seconds["gloo"]) > 0.110
    assert min(results.seconds["hierarchical bf16"]) < min(results.seconds["hierarchical fp32"])
    assert min(results.broadcast_s[8]) < min(results.broadcast_s[1])
    assert results.model_s(1) == pytest.approx(2 * results.model_s(10**9), rel=1e-6)
    assert any("x gloo" in line for line in said)


def test_where_hosts_cannot_be_made_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces, "reason_against", lambda: "making network namespaces needs root")
    with pytest.raises(HostsUnavailable), two_hosts():
        pass
    assert main(["bench", "hosts", "--quick"]) == 0
    assert capsys.readouterr().out == "skipped: making network namespaces needs root\n"


def test_the_verdicts_on_training_steps() -> None:
    slow, fast = [0.8, 0.9, 0.7], [0.4, 0.3, 0.5]
    ways = {"no-sync": [0.3] * 3, "torch-gloo": slow, "imece": slow, "imece bf16": fast}
    results = StepResults({128: ways, 512: ways}, dict.fromkeys(WAYS_OF_STEPS, 6.25))
    assert [each.met for each in hosts_step.judged(results, 125e6)] == [False, True, False]
    lines = hosts_step.lines(results)
    assert any(line.split() == ["imece", "bf16", "400.0", "2.00", "6.2500", "0.0"] for line in lines), lines


def test_the_verdicts_on_bytes() -> None:
    ways = {way: [0.5] * 3 for way in (*WAYS_OF_STEPS, *hosts_step.STRATEGIES)}
    sent = {"imece": 44e6, "zero1": 44.1e6, "zero2": 65e6, "zero3": 66.2e6, "hybrid": 44e6}
    results = StepResults({128: ways, 512: ways}, dict.fromkeys(ways, 6.25), sent)
    found = hosts_step.judged(results, 125e6)
    assert [each.met for each in found if "sends at most" in each.text] == [True, False, True]
