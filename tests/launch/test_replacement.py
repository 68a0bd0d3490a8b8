"""Ranks that die and are replaced, with real processes and signals.

Most scripts here talk to the launcher through files instead of the store (`FileRoster`), so their processes
need not import torch.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

import imece.launch.host
import imece.launch.job
from imece import status
from imece.launch.generations import Limits
from imece.launch.job import Job
from imece.launch.local import launch
from imece.membership.roster import Generation
from imece.status import Failure
from tests.launch.hosts.cluster import FakeHost
from tests.launch.launcher import Launcher, Outcome

HEAD = """
import os, json, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
member, slot = int(os.environ["IMECE_MEMBER"]), int(os.environ["LOCAL_RANK"])
joins = os.environ.get("IMECE_JOINING") == "1"
def say(what, text="1"):
    (folder / f".{what}-{member}").write_text(text)
    (folder / f".{what}-{member}").rename(folder / f"{what}-{member}")
def wait_for_all(what, members):  # so that no fault comes before the others are there
    while not all((folder / f"{what}-{each}").exists() for each in range(members)): time.sleep(0.01)
def newest():
    while not (folder / "newest").exists(): time.sleep(0.01)
    return json.loads((folder / "newest").read_text())
def wait_for(number):
    while newest()["number"] < number: time.sleep(0.01)
    return newest()
"""


class FileRoster:
    """What Roster says and asks, in files."""

    folder: Path  # set by the test

    def __init__(self, store: object) -> None:
        pass

    def publish(self, generation: Generation) -> None:
        new = self.folder / ".newest"
        new.write_text(json.dumps({"number": generation.number, "members": generation.members}))
        new.rename(self.folder / "newest")
        with (self.folder / "all").open("a") as file:
            print(generation.number, *generation.members, file=file)

    def forget(self, member: int) -> None: ...
    def has_lost(self, member: int, generation: int) -> bool:
        return False

    def all_resilient(self, members: Iterable[int]) -> bool:
        names = [self.folder / f"resilient-{member}" for member in members]
        return bool(names) and all(name.exists() for name in names)

    def is_ready(self, member: int) -> bool:
        return (self.folder / f"ready-{member}").exists()

    def beat(self, member: int) -> tuple[int, int] | None:
        try:
            beats, steps = map(int, (self.folder / f"beat-{member}").read_text().split())
        except FileNotFoundError:
            return None
        return beats, steps


Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts launch() on a script, with more for its limits, or arguments for it. Those that are to be ended
    have a quarter of the usual time: here they end at once, or never do."""
    monkeypatch.setattr(FileRoster, "folder", tmp_path, raising=False)
    monkeypatch.setattr(imece.launch.host, "Roster", FileRoster)
    monkeypatch.setattr(imece.launch.job, "AFTER_FAILURE_S", 0.5)
    monkeypatch.setattr(imece.launch.job, "_POLL_S", 0.25)

    def begin(text: str, ranks: int, **more: Any) -> Launcher:
        (tmp_path / "script.py").write_text(HEAD + text)
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
        limits = Limits(
            ranks, **{field.name: more.pop(field.name) for field in fields(Limits) if field.name in more}
        )
        return Launcher(call=lambda: launch(command, limits, **more))

    return begin


def generations(folder: Path) -> list[list[int]]:
    """The members of each one that was published."""
    lines = [list(map(int, line.split())) for line in (folder / "all").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(len(lines)))
    return [line[1:] for line in lines]


def last_line(outcome: Outcome) -> str:
    return outcome.err.splitlines()[-1]


GOES_ON = """
say("resilient")
if joins:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE ROLE_RANK MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    print(*[os.environ[name] for name in names.split()], flush=True)
    say("ready")
elif slot == 1:
    wait_for_all("resilient", 3)
    os.kill(os.getpid(), {number})
last = wait_for(2)
print("done", os.getpid(), last["members"], flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_one_that_is_killed_is_replaced(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    with start(GOES_ON.format(number=int(number)), 3) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert generations(tmp_path) == [[0, 1, 2], [0, 2], [0, 2, 3]]
    done = re.findall(r"^\[rank (\d)\] done (\d+) \[0, 2, 3\]$", outcome.out, re.MULTILINE)
    assert sorted(slot for slot, _ in done) == ["0", "1", "2"]
    environment = next(line for line in outcome.out.splitlines() if "done" not in line).split()[2:]
    assert environment[:5] == ["0", "1", "1", "3", "0"] and environment[6] == "1"
    first, second = [line for line in outcome.err.splitlines() if line.startswith("imece: ")]
    assert first.startswith("imece: rank 1 (pid ") and f"was killed by signal {int(number)}" in first
    assert first.endswith("; 2 ranks go on, a replacement is starting")
    assert second == f"imece: rank 1 (pid {dict(done)['1']}) joined; 3 ranks go on"


def test_one_that_is_stopped_is_evicted_with_what_it_started(start: Start, tmp_path: Path) -> None:
    """The others beat on; of those who wait for it and are silent too, nobody is ended."""
    text = """
import subprocess
say("resilient")
wait_for_all("resilient", 3)
say("beat", "1 0")
if slot == 1 and not joins:
    subprocess.Popen(["sleep", "1000"])
    os.kill(os.getpid(), signal.SIGSTOP)
if joins: say("ready")
while newest()["number"] < 2:
    time.sleep(0.02)
    if slot != 0: say("beat", f"{time.monotonic_ns()} 0")
print("done", flush=True)
"""
    begin = time.monotonic()
    with start(text, 3, silent_s=1.0) as launcher:
        outcome = launcher.wait()
    assert time.monotonic() - begin < 40
    assert outcome.status == 0, outcome.err
    assert generations(tmp_path) == [[0, 1, 2], [0, 2], [0, 2, 3]] and outcome.out.count("done") == 3
    why = "stopped, its host hangs, or C code keeps Python's lock"
    assert f"was silent for 1 s and was ended ({why}); 2 ranks go on" in outcome.err


def test_one_that_is_stopped_before_its_first_beat_is_ended(start: Start, tmp_path: Path) -> None:
    """A script without a loop of imece's does not beat: the others would wait for it until their timeout."""
    text = """
if slot == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(20)
"""
    with start(text, 3, silent_s=1.0, max_restarts=0) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(pid \d+\) was silent for 1 s", last_line(outcome)), outcome.err


def test_a_silent_one_shows_its_stack_first(start: Start, tmp_path: Path) -> None:
    text = """
import faulthandler
signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(0.2), print("calls", flush=True)))
faulthandler.register(signal.SIGUSR1, chain=True)
def hangs(): time.sleep(1000)
say("resilient")
say("beat", "1 0")
wait_for_all("resilient", 2)
if slot == 1: hangs()
while newest()["number"] < 1:
    time.sleep(0.02)
    say("beat", f"{time.monotonic_ns()} 0")
"""
    with start(text, 2, silent_s=1.0, max_restarts=0) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert "[rank 1]   File" in outcome.err and "in hangs" in outcome.err and "[rank 1] calls" in outcome.out
    assert last_line(outcome).endswith("1 rank goes on without a replacement")


def test_one_that_computes_with_pythons_lock_is_left_alone(start: Start, tmp_path: Path) -> None:
    """Its thread that beats has to wait for the lock meanwhile."""
    text = """
say("resilient")
wait_for_all("resilient", 2)
say("beat", "1 0")
end = time.monotonic() + 1.7
while time.monotonic() < end: pass
"""
    with start(text, 2, silent_s=1.0) as launcher:
        outcome = launcher.wait()
    assert (outcome.status, outcome.err) == (0, "")


@pytest.mark.slow
def test_a_launcher_that_was_stopped_evicts_nobody(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
end = time.monotonic() + 5
while time.monotonic() < end:
    time.sleep(0.02)
    say("beat", f"{time.monotonic_ns()} 0")
"""
    with start(text, 2, silent_s=1.0) as launcher:
        while not (tmp_path / "beat-1").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        launcher.signal(signal.SIGSTOP)
        time.sleep(2)
        launcher.signal(signal.SIGCONT)
        outcome = launcher.wait()
    assert (outcome.status, outcome.err) == (0, "")


def test_a_crash_loop_ends_with_its_cause(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
if joins:
    say("ready")
    while member not in newest()["members"]: time.sleep(0.01)
wait_for_all("resilient", 2)
if slot == 1: os.abort()
time.sleep(1000)
"""
    begin = time.monotonic()
    with start(text, 2) as launcher:
        outcome = launcher.wait()
    assert 1.0 < time.monotonic() - begin < 40, "the third process waits for a second"
    assert outcome.status == 128 + signal.SIGABRT
    assert "was killed by signal 6 (SIGABRT), the 3rd time in a row" in last_line(outcome)
    assert last_line(outcome).endswith("; the other rank was ended")
    assert generations(tmp_path) == [[0, 1], [0], [0, 2], [0], [0, 3]]


def test_finished_steps_are_no_crash_loop(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
if joins:
    say("ready")
    while member not in newest()["members"]: time.sleep(0.01)
for step in range(3):
    say("beat", f"{time.monotonic_ns()} {10 * member + step}")
    time.sleep(0.1)
if slot == 1 and member < 5: os.abort()
if slot == 0:
    while 5 not in newest()["members"]: time.sleep(0.01)
"""
    with start(text, 2) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert outcome.err.count("a replacement is starting\n") == 4


def test_an_exception_ends_all(start: Start) -> None:
    text = """
say("resilient")
wait_for_all("resilient", 3)
if slot == 1: raise ValueError("the cause")
time.sleep(1000)
"""
    begin = time.monotonic()
    with start(text, 3, restart=True) as launcher:
        outcome = launcher.wait()
    assert time.monotonic() - begin < 40
    assert outcome.status == 1 and outcome.err.splitlines()[-2] == "[rank 1] ValueError: the cause"
    assert last_line(outcome).endswith("failed with exit status 1; the other 2 ranks were ended")


def test_a_hang_is_ended_with_the_stacks_of_all(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_failure(store: object, member: int) -> Failure | None:
        return Failure(0.0, "CollectiveTimeoutError", "rank 0 did not come", True) if member == 1 else None

    monkeypatch.setattr(status, "read_failure", read_failure)
    text = """
import faulthandler
if slot == 0: faulthandler.register(signal.SIGUSR1)
say("resilient")
def hangs(): time.sleep(1000)
wait_for_all("resilient", 3)
if slot == 1: sys.exit(1)
hangs()
"""
    begin = time.monotonic()
    with start(text, 3) as launcher:
        outcome = launcher.wait()
    assert time.monotonic() - begin < 40
    assert outcome.status == 1 and re.search(r"^\[rank 0\] .* in hangs$", outcome.err, re.MULTILINE)
    assert "CollectiveTimeoutError: rank 0 did not come" in last_line(outcome)
    assert last_line(outcome).endswith("; the other 2 ranks were ended"), (
        "one without a handler lives until then"
    )


@pytest.mark.parametrize("too_few", [True, False])
def test_all_start_again(start: Start, tmp_path: Path, too_few: bool) -> None:
    """Because the others do not go on, or are too few. Nothing is left of those who ignore SIGTERM."""
    text = f"""
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
assert not joins
if {too_few}: say("resilient")
say("here")
if member < 2:
    while not (folder / f"here-{{1 - member}}").exists(): time.sleep(0.01)
    if slot == 1: os.kill(os.getpid(), 9)
    time.sleep(1000)
print("done", member, slot, os.environ["RANK"], os.environ["WORLD_SIZE"],
      os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
    with start(text, 2, restart=True, min_ranks=2 if too_few else 1) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == ["[rank 0] done 2 0 0 2 1", "[rank 1] done 3 1 1 2 1"]
    assert generations(tmp_path) == [[0, 1], [2, 3]]
    assert last_line(outcome).endswith("; all 2 ranks start again now")


def test_fewer_than_min_ranks_end_the_run(start: Start) -> None:
    text = (
        "say('resilient')\nwait_for_all('resilient', 2)\nif slot: os.kill(os.getpid(), 9)\ntime.sleep(1000)"
    )
    with start(text, 2, min_ranks=2) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 137 and last_line(outcome).endswith(
        "; fewer than --min-ranks 2 were left; the other rank was ended"
    )


def test_who_still_joins_when_the_others_have_finished_is_ended(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
if joins:
    say("joins")
    time.sleep(1000)
wait_for_all("resilient", 2)
if slot == 1: os.kill(os.getpid(), 9)
while not (folder / "joins-2").exists(): time.sleep(0.01)
"""
    begin = time.monotonic()
    with start(text, 2) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert time.monotonic() - begin < 40 and generations(tmp_path) == [[0, 1], [0]]


def test_one_that_was_just_taken_in_has_time_to_finish(start: Start, tmp_path: Path) -> None:
    """Beside it there is one that nobody will take in."""
    text = """
say("resilient")
if joins:
    say("joins")
    if member == 4: time.sleep(1000)
    say("ready")
    while 3 not in newest()["members"]: time.sleep(0.01)
    time.sleep(1.5)
    print("done", flush=True)
    sys.exit()
wait_for_all("resilient", 3)
if slot: os.kill(os.getpid(), 9)
while 3 not in newest()["members"] or not (folder / "joins-4").exists(): time.sleep(0.01)
"""
    with start(text, 3) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert "done" in outcome.out


def test_a_signal_reaches_those_who_join(start: Start, tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
say("resilient")
wait_for_all("resilient", 2)
if slot == 1 and not joins: os.kill(os.getpid(), 9)
say("here")
time.sleep(1000)
"""
    with start(text, 2) as launcher:
        while not (tmp_path / "here-2").exists() or not (tmp_path / "here-0").exists():
            time.sleep(0.01)
        launcher.signal(signal.SIGTERM)
        outcome = launcher.wait(20)
    assert outcome.status == 143 and outcome.out.count("saved") == 2
    assert last_line(outcome) == "imece: ended by SIGTERM, passed on to 2 ranks"


def test_ranks_that_are_asked_to_end_need_each_other_and_the_whole_grace_time(
    start: Start, tmp_path: Path
) -> None:
    """One dies of the signal, one exits at once with a status of its own, one has much to save."""
    text = """
def end(*_):
    if slot == 2: os.kill(os.getpid(), 9)
    wait_for(1)
    if slot == 1: sys.exit(143)
    time.sleep(1)
    print("saved", newest()["members"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
say("resilient")
time.sleep(1000)
"""
    with start(text, 3) as launcher:
        while not all((tmp_path / f"resilient-{member}").exists() for member in range(3)):
            time.sleep(0.01)
        launcher.signal(signal.SIGTERM)
        outcome = launcher.wait(20)
    assert outcome.status == 143 and outcome.out == "[rank 0] saved [0, 1]\n"
    assert generations(tmp_path) == [[0, 1, 2], [0, 1]]
    assert outcome.err.splitlines()[0].endswith("; 2 ranks go on without a replacement")


def test_replacements_die_with_the_launcher(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
signal.signal(15, signal.SIG_IGN)
wait_for_all("resilient", 2)
if slot == 1 and not joins: os.kill(os.getpid(), 9)
say("pid", str(os.getpid()))
time.sleep(1000)
"""
    with start(text, 2) as launcher:
        names = [tmp_path / "pid-0", tmp_path / "pid-2"]
        while not all(name.exists() for name in names):
            time.sleep(0.01)
        pids = [int(name.read_text()) for name in names]
        launcher.signal(signal.SIGKILL)
        launcher.wait()
        deadline = time.monotonic() + 30
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.01)


@pytest.mark.slow
def test_many_replacements_leave_no_process_and_no_descriptor(start: Start, tmp_path: Path) -> None:
    """Each has a child in its group, and another outside it that holds its output open for a while."""
    text = """
import subprocess
say("resilient")
def descriptors(): return len(os.listdir(f"/proc/{os.getppid()}/fd"))
if slot == 0:
    while (number := newest()["number"]) < 12:
        say("beat", f"{time.monotonic_ns()} {number}")
        if number == 2: before = descriptors()
        time.sleep(0.01)
    time.sleep(1)  # for those outside the group
    print("more", descriptors() - before)
    print("children", len(Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()))
    sys.exit()
wait_for_all("beat", 1)
if joins: say("ready")
while member not in newest()["members"]: time.sleep(0.01)
if newest()["number"] < 12:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "0.3"], start_new_session=True)
    time.sleep(0.1)
    os.kill(os.getpid(), 9)
time.sleep(2)
"""
    with start(text, 2) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    more = re.search(r"more (-?\d+)$", outcome.out, re.MULTILINE)
    assert more is not None and int(more[1]) <= 4, "a leak of one would be ten"
    assert "children 2" in outcome.out


def test_output_is_kept_by_rank_and_only_the_first_has_the_terminal(start: Start, tmp_path: Path) -> None:
    text = """
say("resilient")
print("I am", member, flush=True)
wait_for_all("resilient", 2)
if slot == 0 and not joins: os.kill(os.getpid(), 9)
if joins: say("ready")
wait_for(2)
print("end", flush=True)
"""
    with start(text, 2, direct=True, logs=tmp_path / "logs") as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    assert "I am 0" in lines and "[rank 0] I am 2" in lines and "[rank 1] I am 1" in lines
    kept = [(tmp_path / "logs" / f"rank-{slot}.log").read_text().splitlines() for slot in (0, 1)]
    assert kept[0][1:] == ["I am 2", "end"] and kept[1][1:] == ["I am 1", "end"]
    assert all(re.match(r"--- rank \d is pid \d+ since 20", each[0]) for each in kept)


WITH_STORE = """
import torch.distributed as dist
from imece.membership.roster import Roster
member = int(os.environ["IMECE_MEMBER"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
roster = Roster(dist.TCPStore(*address, is_master=False, wait_for_workers=False))
roster.say_resilient(member)
roster.say_alive(member, 1, 0)
if os.environ.get("IMECE_JOINING") == "1": roster.say_ready(member)
elif rank == 1:
    while not roster.all_resilient([0, 1]): time.sleep(0.01)
    os.kill(os.getpid(), 9)
while roster.newest() < 2: time.sleep(0.01)
generation = roster.generation(2)
print("generation", *generation.members, generation.lost, flush=True)
"""


def test_through_the_store(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nrank = int(os.environ['RANK'])\n" + WITH_STORE)
    with Launcher("--ranks", "2", "--silent-s", "0", "--log-dir", tmp_path / "logs", script) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == ["[rank 0] generation 0 2 ()", "[rank 1] generation 0 2 ()"]
    assert "generation 0 2 ()" in (tmp_path / "logs" / "rank-1.log").read_text()


PLAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.all_reduce(torch.ones(1))  # leaves addresses in the store, which the next ranks must not find
if os.environ["RANK"] == "1" and attempt < 1: raise ValueError("the cause")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print("sum", tensor.item(), "attempt", attempt)
dist.destroy_process_group()
"""


@pytest.mark.slow  # it imports torch four times
def test_a_plain_torch_script_starts_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    with Launcher("--ranks", "2", "--max-restarts", "1", tmp_path / "script.py") as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == ["[rank 0] sum 2.0 attempt 1", "[rank 1] sum 2.0 attempt 1"]
    assert "[rank 1] ValueError: the cause" in outcome.err.replace("[rank1]: ", "")


LATE = """
import os, time
from datetime import timedelta
import imece
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if os.environ["RANK"] == "1" and attempt < 1: time.sleep(600)
imece.init(timeout=timedelta(seconds=60 if attempt else 1))
print("met in attempt", attempt)
"""


@pytest.mark.slow  # it imports torch four times
def test_ranks_that_never_came_are_started_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LATE)
    with Launcher("--ranks", "2", "--max-restarts", "1", tmp_path / "script.py") as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == [f"[rank {rank}] met in attempt 1" for rank in range(2)]
    assert "rank 0 waited 1 s for 1 of 2 ranks, which never came: rank 1" in outcome.err


@pytest.mark.parametrize(("text", "times"), [("sys.exit(7)", 3), ("sys.exit(2)", 1)])
def test_how_often_a_plain_script_starts(tmp_path: Path, text: str, times: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys; print('here', flush=True); {text}")
    with Launcher("--ranks", "1", "--max-restarts", "2", script) as launcher:
        outcome = launcher.wait()
    assert outcome.out.count("here") == times and outcome.status == int(text[-2])


def test_a_signal_gives_one_that_is_joining_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes it in any more, and it has taken the signal for what its own next step is to look at."""
    host = FakeHost(0)
    host.obstinate = True
    monkeypatch.setattr(host, "ready", lambda members: [])
    job = Job(Limits(2), 120.0, True, {0: host}, 2)
    job.start()
    host.dies(1)
    job.ended({1: host.endings[1]}, time.monotonic())
    job.on_time(time.monotonic())
    assert host.crew.living.keys() == {0, 2} and job.generations.joining == [2]
    before = list(host.said)
    job.signalled(signal.SIGTERM)
    assert (host.ended_by, host.graces_s) == ([signal.SIGTERM] * 2, [120.0, 2.0])
    host.dies(2)
    job.ended({2: host.endings[2]}, time.monotonic())
    host.dies(0, 143)
    job.ended({0: host.endings[0]}, time.monotonic())
    assert job.is_done and host.said == before, "that it was killed is no news"
    assert job.outcome().line == "imece: ended by SIGTERM, passed on to 2 ranks"
