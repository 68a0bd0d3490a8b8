"""`imece launch --hosts 2`: two launchers on loopback that act as two hosts."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from imece.cli.main import main
from imece.launch.generations import Limits
from imece.launch.hosts import agent
from imece.launch.hosts.here import Plan
from tests.launch.hosts.two import environment, free_port
from tests.launch.launcher import Launcher, Outcome

TOKEN = "0123456789abcdef" * 2


class Two:
    """Starts launchers of one job."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port, self._stack = folder, free_port(), ExitStack()

    def start(
        self, host: int, text: str, *words: str, ranks: int = 1, token: str = TOKEN, command: str = "launch"
    ) -> Launcher:
        """The launcher of a host, with this script."""
        script = self._folder / "script.py"
        script.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        rendezvous = ["--host-rank", str(host), "--rendezvous", f"127.0.0.1:{self.port}"]
        hosts = [] if "--hosts" in words else ["--hosts", "2"]
        argv = [command, *hosts, *rendezvous, "--ranks", str(ranks), *words, str(script), str(self._folder)]

        def call() -> int:
            os.environ.update(environment("ab"[min(host, 1)], token))
            return main(argv)

        return self._stack.enter_context(Launcher(call=call))

    def both(self, text: str, *words: str, ranks: int = 1) -> tuple[Outcome, Outcome]:
        """Two launchers to their ends."""
        launchers = [self.start(host, text, *words, ranks=ranks) for host in (0, 1)]
        first, second = [launcher.wait(30) for launcher in launchers]
        return first, second

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    """Two launchers, which are ended with the test."""
    pair = Two(tmp_path)
    yield pair
    pair.close()


def test_what_ranks_find(two: Two) -> None:
    text = "import json; print(json.dumps(dict(os.environ)), flush=True)"
    outcomes = two.both(text, ranks=2)
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert [outcome.err for outcome in outcomes] == ["", ""]
    found = {}
    for host, outcome in enumerate(outcomes):
        for line in outcome.out.splitlines():
            slot, _, content = line.removeprefix("[rank ").partition("] ")
            environ = found[int(slot)] = json.loads(content)
            assert int(slot) // 2 == host
            wanted = {
                "RANK": slot, "WORLD_SIZE": "4", "LOCAL_RANK": str(int(slot) % 2), "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                "IMECE_MEMBER": slot, "IMECE_HOST": "ab"[host], "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            assert {name: environ[name] for name in wanted} == wanted
            assert not [name for name in environ if "TOKEN" in name], "no rank needs to know the secret"
    assert sorted(found) == [0, 1, 2, 3]
    assert len({environ["TORCHELASTIC_RUN_ID"] for environ in found.values()}) == 1
    assert len({environ["IMECE_AGENT_PORT"] for environ in found.values()}) == 2


def test_torch_is_imported_before_there_are_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import holds Python's lock for seconds: no heartbeat would leave."""
    order = []

    def network(*_: object, **__: object) -> None:
        order.append("network")
        raise InterruptedError

    monkeypatch.setattr(importlib, "import_module", order.append)
    monkeypatch.setattr(agent, "Network", network)
    plan = Plan(2, 0, ("127.0.0.1", 29400), Limits(2), 30.0, 10.0)
    with pytest.raises(InterruptedError):
        agent.launch_here(["true"], plan, job="job", environ={"IMECE_TOKEN": TOKEN})
    assert order == ["torch.distributed", "network"]


def test_a_death_ends_all_and_is_told_on_both_hosts(two: Two) -> None:
    text = "if rank == 1: raise ValueError('the cause')\ntime.sleep(100)"
    begin = time.monotonic()
    first, second = two.both(text)
    assert time.monotonic() - begin < 15 and (first.status, second.status) == (1, 1)
    said = first.err.splitlines()[-1]
    assert said.startswith("imece: rank 1 (host 1, pid ") and said.endswith("; the other rank was ended")
    assert second.err.splitlines()[-2:] == ["[rank 1] ValueError: the cause", said]
    assert "Traceback" not in first.err


def test_all_start_again(two: Two) -> None:
    text = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and rank == 0: os.kill(os.getpid(), 9)
if attempt == 0: time.sleep(100)
print("attempt", attempt)
"""
    first, second = two.both(text, "--max-restarts", "1")
    assert (first.status, second.status) == (0, 0), (first, second)
    assert (first.out, second.out) == ("[rank 0] attempt 1\n", "[rank 1] attempt 1\n")
    assert first.err == second.err and first.err.endswith("; all 2 ranks start again now\n")


@pytest.mark.parametrize(
    ("host", "number", "said"),
    [
        (1, signal.SIGINT, "ended by SIGINT on host 1, passed on to 2 ranks"),
        (0, signal.SIGTERM, "ended by SIGTERM, passed on to 2 ranks"),
        (1, signal.SIGTERM, "ended by SIGTERM on host 1, passed on to 2 ranks"),
    ],
)
def test_a_signal_ends_ranks_that_are_not_resilient(
    two: Two, host: int, number: signal.Signals, said: str
) -> None:
    text = f"""
signal.signal({int(number)}, lambda *_: (print("saved"), sys.exit(0)))
print("ready", flush=True)
time.sleep(100)
"""
    launchers = [two.start(each, text) for each in (0, 1)]
    for launcher in launchers:
        launcher.wait_for("ready")
    launchers[host].signal(number)
    for launcher in launchers:
        outcome = launcher.wait(20)
        assert outcome.status == 128 + number and "saved" in outcome.out
        assert outcome.err == f"imece: {said}\n"


def test_a_killed_launcher_takes_its_ranks_with_it_and_the_job_ends(two: Two) -> None:
    launchers = [two.start(host, "print('ready', flush=True); time.sleep(100)") for host in (0, 1)]
    for launcher in launchers:
        launcher.wait_for("ready")
    launchers[1].signal(signal.SIGKILL)
    outcome = launchers[0].wait(15)
    assert outcome.status == 137
    assert (
        outcome.err == "imece: host 1 (127.0.0.1) is gone: its launcher has ended; the other rank was ended\n"
    )


@pytest.mark.slow
def test_agents_that_do_not_belong_together(two: Two) -> None:
    text = "time.sleep(1)"
    first = two.start(0, text)
    assert "another token" in refused(two.start(1, text, token="f" * 32))
    assert "--ranks 1 on host 0, but 2 on host 1" in refused(two.start(1, text, ranks=2)).replace("; ", "")
    assert "belongs to the job 'imece', not to 'other'" in refused(two.start(1, text, "--job", "other"))
    assert "choose another port" in refused(two.start(0, text))
    second = two.start(1, text)
    assert first.wait(20).status == 0 and second.wait(20).status == 0


@pytest.mark.slow
def test_a_drill_on_two_hosts(two: Two, tmp_path: Path) -> None:
    """On host 0 imece drill in the place of imece launch; the seed hits a rank of the other one."""
    text = """
import torch, imece
mesh = imece.init()
model = imece.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in imece.steps(500, model, optimizer):
    with step:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""
    figures = tmp_path / "drill.json"
    words = ("--kills", "1", "--every-s", "1", "--seed", "0", "--json", str(figures))
    first, second = two.start(0, text, *words, command="drill"), two.start(1, text)
    outcome = first.wait(150)
    assert outcome.status == 0 and second.wait(30).status == 0, outcome.out + outcome.err
    (fault,) = json.loads(figures.read_text())["faults"]
    assert fault["hosts"] == fault["ranks"] == [1] and 0 < fault["recovery_s"] < 30
    assert f"SIGKILL to rank 1 (host 1, pid {fault['pids'][0]}) {fault['where'][0]}: went on" in outcome.out
    assert fault["where"][0].startswith(("in ", "between steps")) and fault["survived"]


LEAVES = """
import atexit, pathlib
went_on = pathlib.Path(sys.argv[1], "went-on")
host, strategy, forever = {asked!r}

def hold():
    until = time.monotonic() + 20
    while forever or not went_on.exists() and time.monotonic() < until: time.sleep(0.01)
    print("the other went on" if went_on.exists() else "the other waits", flush=True)

if rank == host: atexit.register(hold)  # before the mesh, which has closed when it is called
import torch, imece
mesh = imece.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = imece.parallelize(model, optimizer, strategy=strategy)
for step in imece.steps(1000, model, optimizer):
    with step as number:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0 if went_on.exists() else 0.02)
    if number == 50: print("runs", flush=True)  # by then each launcher knows that the other goes on
    if mesh.world_size == 1 and not went_on.exists():
        print("alone", number, flush=True)
        went_on.touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "strategy", "forever"), [(0, "replicate", False), (1, "zero1", False), (1, "replicate", True)]
)
def test_the_other_host_waits_for_no_process_of_one_that_has_left(
    two: Two, host: int, strategy: str, forever: bool
) -> None:
    """It makes steps alone while that one's rank is held in its exit; if that never ends, it is killed."""
    text = LEAVES.format(asked=(host, strategy, forever))
    launchers = [two.start(each, text, "--grace-s", "3" if forever else "30") for each in (0, 1)]
    for launcher in launchers:
        launcher.wait_for("runs")
    launchers[host].signal(signal.SIGTERM)
    goes = launchers[host].wait(60)
    stays = launchers[1 - host].wait(60)
    assert (goes.status, stays.status) == (128 + signal.SIGTERM, 0), (goes, stays)
    assert stays.out.count("alone") == 1
    assert goes.out.splitlines()[1:] == ([] if forever else [f"[rank {host}] the other went on"])
    assert "its ranks leave in order" in stays.err and "made again" not in stays.err + goes.err
    assert "killed" not in stays.err, "how the process ended is nothing to the other one"


@pytest.mark.slow
def test_two_with_one_host_rank(two: Two) -> None:
    text = "print('ready', flush=True); time.sleep(5)"
    launchers = [two.start(host, text, "--silent-s", "1") for host in (0, 1)]
    launchers[1].wait_for("ready")
    assert "host 1 is here already" in refused(two.start(1, text, "--silent-s", "1"))
    assert [launcher.wait(20).status for launcher in launchers] == [0, 0]


def refused(launcher: Launcher) -> str:
    """The one line with which it ends."""
    outcome = launcher.wait(20)
    assert outcome.status == 2 and outcome.out == "" and outcome.err.count("\n") == 1, outcome
    return outcome.err
