"""`imece drill`: options, how it judges what it sees, and real drills."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from imece.cli.launch import drill
from imece.cli.main import main
from imece.launch import left_over
from imece.launch.drill import Drill
from imece.launch.drill_record import Fault, Plan, Record, hit, lines
from imece.launch.endings import Ending
from imece.launch.left_over import Traces
from imece.launch.view import Place, View
from imece.membership.roster import Generation
from tests.launch.launcher import Launcher, Outcome

SCRIPT = """
import os, sys, time, torch, imece
torch.set_num_threads(1)
mesh = imece.init()
torch.manual_seed(0)
model = imece.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
def came(found):
    {recovered}
for step in imece.steps({steps}, model, optimizer, recovered=came):
    with step:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
print("finished", mesh.rank, flush=True)
"""


def run_drill(tmp_path: Path, text: str, *options: str) -> Outcome:
    """`imece drill OPTIONS` of a script with this text, on 2 ranks."""
    script = tmp_path / "script.py"
    script.write_text(text)
    arguments = ["drill", "--ranks", "2", "--every-s", "1", *options, str(script)]
    with Launcher(call=lambda: main(arguments)) as launcher:
        return launcher.wait(120)


# Real ones.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--signal", "KILL"],
        ["--signal", "STOP", "--silent-s", "1"],
    ],
)
def test_a_drill_that_is_survived(tmp_path: Path, options: list[str]) -> None:
    figures = tmp_path / "drill.json"
    text = SCRIPT.format(recovered="pass", steps=300)
    outcome = run_drill(tmp_path, text, "--kills", "1", "--json", str(figures), *options)
    assert outcome.status == 0, outcome.out + outcome.err
    assert "1 of 1 faults fired, 1 of 1 survived; the script ended with status 0" in outcome.out
    where = r"(in (forward|backward|update) of step \d+|between steps, after step \d+)"
    assert re.search(
        rf"fault    1 of 1, .*\) {where}: went on after \d+\.\d\d s, 0 steps made again", outcome.out
    )
    what = r"was (killed by signal 9 \(SIGKILL\)|silent for 1 s)"
    assert re.search(rf"^imece: rank . \(pid \d+\) {what} {where}", outcome.err, re.MULTILINE), "as it says"
    assert "left     no process, nothing in /dev/shm" in outcome.out
    found = json.loads(figures.read_text())
    assert found["passed"] and found["fired"] == found["survived"] == 1
    (fault,) = found["faults"]
    silence_s = 1.0 if "STOP" in options else 0.0
    assert silence_s / 2 < found["worst_s"] == fault["recovery_s"] < 20
    assert fault["step"] > 0 and found["calm_steps_per_s"] > 1
    # The signal reached a rank of the launcher, and its process is gone.
    assert f"(pid {fault['pids'][0]})" in outcome.err
    assert not Path(f"/proc/{fault['pids'][0]}").exists()


@pytest.mark.slow
def test_a_drill_that_is_not_survived(tmp_path: Path) -> None:
    text = SCRIPT.format(recovered="if found.generation.lost: raise ValueError('it was too much')", steps=400)
    outcome = run_drill(tmp_path, text, "--kills", "1")
    assert outcome.status == 1, outcome.out + outcome.err
    assert "NOT SURVIVED" in outcome.out and "1 of 1 faults fired, 0 of 1 survived" in outcome.out


@pytest.mark.parametrize(
    ("text", "when"),
    [("import time; time.sleep(60)", "after 1 s (--start-s)"), ("print('at once')", "when it ended")],
)
def test_a_script_that_is_not_resilient(tmp_path: Path, text: str, when: str) -> None:
    outcome = run_drill(tmp_path, text, "--start-s", "1")
    assert outcome.status == 2, outcome.out + outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("imece: ") and "script.py: not all of its 2 ranks were resilient " + when in last


def test_a_script_that_fails_before(tmp_path: Path) -> None:
    outcome = run_drill(tmp_path, "raise SystemExit(7)")
    assert outcome.status == 7
    assert "0 of 5 faults fired" in outcome.out


def test_figures_are_written_where_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unread(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    (tmp_path / "s.py").touch()
    figures = tmp_path / "drill.json"
    monkeypatch.setattr("imece.cli.launch.drill.start", lambda *_: 141)
    with contextlib.redirect_stdout(Unread()):
        assert drill.run(["--ranks", "2", "--json", str(figures), str(tmp_path / "s.py")]) == 141
    assert json.loads(figures.read_text())["status"] == 141


def test_what_outlives_a_job_is_found(tmp_path: Path) -> None:
    traces = Traces()
    assert traces.left() == []
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | traces.environ
    )
    file = Path(f"/dev/shm/imece-test-{os.getpid()}")
    try:
        file.write_bytes(b"left")
        until = time.monotonic() + 10
        while len(found := traces.left()) < 2 and time.monotonic() < until:
            time.sleep(0.05)  # the kernel has not told yet what the new program was given
        assert len(found) == 2 and found[1] == str(file)
        assert found[0].startswith(f"process {sleeper.pid} ")
    finally:
        file.unlink()
        sleeper.communicate(b"\n")
    assert traces.left() == []


def test_files_of_other_programs_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces()
    used, gone = (Path(f"/dev/shm/imece-test-{what}-{os.getpid()}") for what in ("used", "gone"))
    has_it_open = "import sys; file = open(sys.argv[1], 'w'); print('open', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", has_it_open, used], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    in_use = left_over._files_in_use

    def meanwhile() -> set[str]:
        gone.unlink(missing_ok=True)
        return in_use()

    monkeypatch.setattr(left_over, "_files_in_use", meanwhile)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        gone.touch()
        assert traces.left() == []
    finally:
        other.communicate(b"\n")
        used.unlink()
        gone.unlink(missing_ok=True)


# What it makes of what it sees.


@dataclass
class FakeRoster:
    generations: list[tuple[int, ...]]
    gone_on: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)

    def newest(self) -> int:
        return len(self.generations) - 1

    def generation(self, number: int) -> Generation:
        return Generation(number, self.generations[number])

    def all_resilient(self, members: Iterable[int]) -> bool:
        return bool(list(members))

    def beat(self, member: int) -> tuple[int, int] | None:
        return (1, 40)

    def went_on(self, member: int, generation: int) -> tuple[float, int] | None:
        return self.gone_on.get((member, generation))


@dataclass
class FakeView:
    """Members 0, 1 and 2 of three ranks; every signal is noted."""

    roster: FakeRoster
    endings: dict[int, Ending] = field(default_factory=dict)
    signals: list[tuple[int, int]] = field(default_factory=list)

    def living(self) -> Mapping[int, Place]:
        return {member: Place(member, 100 + member) for member in range(5) if member not in self.endings}

    def ending(self, member: int) -> Ending | None:
        return self.endings.get(member)

    def signal(self, member: int, number: int) -> bool:
        self.signals.append((member, number))
        return True


def after_a_fault(plan: Plan | None = None) -> tuple[Drill, FakeView, Fault, list[int]]:
    """A drill in which one fault has been injected at second 0, and those that it did not hit."""
    drill = Drill(plan or Plan(3, kills=1), lambda _: None)
    view = FakeView(FakeRoster([(0, 1, 2)]))
    assert drill._inject(cast(View, view))
    (fault,) = drill.record.faults
    fault.time_s, drill._began = 0.0, 0.0
    return drill, view, fault, [member for member in range(3) if member not in fault.members]


def killed(fault: Fault, number: int = 9) -> dict[int, Ending]:
    return {member: Ending(member, 100 + member, -number, 0.0) for member in fault.members}


def test_a_recovery_ends_with_the_last_survivors_step() -> None:
    drill, view, fault, (one, other) = after_a_fault()
    assert view.signals == [(fault.members[0], 9)]
    view.endings = killed(fault)
    view.roster.generations.append((one, other))
    view.roster.gone_on[one, 1] = (0.5, 0)
    drill._observe(cast(View, view))
    assert fault.fired and fault.is_open  # one of them has not made its step
    view.roster.generations.append((one, other, 3))
    view.roster.gone_on[other, 2] = (0.75, 1)  # it was in the next generation already
    view.roster.gone_on[one, 2] = (0.9, 0)  # no longer the first
    drill._observe(cast(View, view))
    assert fault.survived and fault.recovery_s == 0.75 and fault.again == 1


def test_a_step_together_with_the_one_that_was_hit_is_no_recovery() -> None:
    drill, view, fault, (one, other) = after_a_fault()
    view.roster.generations.append((0, 1, 2, 3))  # a replacement had been taken in at that moment
    view.roster.gone_on |= {(one, 1): (0.1, 0), (other, 1): (0.1, 0)}
    view.endings = killed(fault)
    drill._observe(cast(View, view))
    assert fault.fired and fault.is_open and fault.recovery_s is None


def test_a_survivor_that_fails_is_no_survivor() -> None:
    drill, view, fault, (one, other) = after_a_fault()
    view.endings = killed(fault) | {one: Ending(one, 100 + one, 1, 0.0)}
    view.roster.generations.append((one, other))
    view.roster.gone_on[other, 1] = (0.5, 0)
    drill._observe(cast(View, view))
    assert fault.fired and fault.survived is False


def test_another_end_than_by_the_signal_is_no_fault() -> None:
    drill, view, fault, _ = after_a_fault()
    view.endings = killed(fault, 15)
    drill._observe(cast(View, view))
    assert fault.fired is False
    drill, view, fault, _ = after_a_fault(Plan(3, kills=1, signal="STOP"))
    view.endings = killed(fault)  # by somebody else, not for its silence
    drill._observe(cast(View, view))
    assert fault.fired is False


def test_the_last_one_alive_is_never_hit() -> None:
    drill, view = Drill(Plan(3, together=2), lambda _: None), FakeView(FakeRoster([(0, 1, 2)]))
    view.endings = {0: Ending(0, 100, -9, 0.0)}
    assert not drill._inject(cast(View, view)) and not drill.record.faults


def test_a_fault_in_words() -> None:
    _, _, fault, _ = after_a_fault(Plan(3, kills=1, together=2))
    fault.ranks, fault.pids, fault.step = [0, 2], [7, 9], 1040
    assert hit(fault) == "rank 0 (pid 7), rank 2 (pid 9) after step 1,040"
    fault.where, fault.hosts = ["in forward of step 1,041", ""], [0, 1]
    assert hit(fault) == "rank 0 (host 0, pid 7) in forward of step 1,041, rank 2 (host 1, pid 9)"


def fault_at(time_s: float, recovery_s: float, again: int = 0) -> Fault:
    return Fault(time_s, 0, 10, [1], [4711], [1], True, True, recovery_s, again)


def test_the_figures() -> None:
    # 10 steps a second until a fault at 2 s; 1 second without; then again, and so on from 5 s.
    seen = [(0.0, 0), (2.0, 20), (3.0, 20), (5.0, 40), (6.0, 40), (20.0, 180)]
    record = Record(Plan(2, kills=2, every_s=4.0), [fault_at(2.0, 1.0), fault_at(5.0, 1.2, 1)], seen, True, 0)
    assert record.calm_steps_per_s == 10.0
    assert record.goodput == pytest.approx((70 - 20) / (7.0 * 10))  # from 2 s to 4 s after the last one
    found = record.as_json()
    assert found["median_s"] == 1.1 and found["worst_s"] == 1.2 and found["again"] == 1
    assert record.passed and found["fired"] == found["survived"] == 2
    shown = "\n".join(lines(record))
    assert "2 of 2 faults fired, 2 of 2 survived" in shown and "median 1.10 s, worst 1.20 s" in shown
    assert "1 step made again" in shown and "goodput  71 % of the 10 steps/s" in shown
    for spoilt in (
        Record(record.plan, record.faults[:1], seen, True, 0),
        Record(record.plan, record.faults, seen, True, 1),
        Record(record.plan, record.faults, seen, True, 0, ["process 7 (python)"]),
        Record(
            record.plan, [fault_at(2.0, 1.0), Fault(5.0, 0, 10, [1], [1], [1], False, True)], seen, True, 0
        ),
        Record(
            record.plan, [fault_at(2.0, 1.0), Fault(5.0, 0, 10, [1], [1], [1], True, False)], seen, True, 0
        ),
    ):
        assert not spoilt.passed
    shown = "\n".join(lines(Record(record.plan, record.faults[:1], seen, True, 0)))
    assert "it ended before 1 of the faults" in shown


def test_nothing_seen_gives_no_figures() -> None:
    record = Record(Plan(2), [], [], False, 1)
    assert record.goodput is None and record.calm_steps_per_s is None and record.as_json()["median_s"] is None
    assert "5 of the faults" in "\n".join(lines(record))


@pytest.mark.parametrize("status", [130, 143])
def test_who_interrupts_a_drill_is_given_no_advice(status: int) -> None:
    shown = lines(Record(Plan(2, kills=2), [], [(0.0, 0)], True, status))
    assert shown[:2] == [
        f"drill    0 of 2 faults fired, 0 of 0 survived; the script ended with status {status}",
        "         interrupted after 0 of 2 faults",
    ]
    assert "give it more steps" not in "\n".join(shown)


# Options.


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([], "how many ranks? For two: imece drill --ranks 2 script.py"),
        (["--kills", "3", "x.py"], "how many ranks? For two: imece drill --ranks 2 x.py"),
        (["--ranks", "2"], "there is no script to run"),
        (["--ranks", "2", "nowhere.py"], "no script 'nowhere.py'"),
        (["--ranks", "2", "--kills", "0", "x.py"], "--kills 0"),
        (["--ranks", "2", "--every-s", "0", "x.py"], "--every-s 0"),
        (["--ranks", "2", "--start-s", "-1", "x.py"], "--start-s -1"),
        (["--ranks", "2", "--together", "2", "x.py"], "--together 2: at least 1, and fewer than the 2 ranks"),
        (["--ranks", "2", "--signal", "HUP", "x.py"], "HUP"),
        (["--ranks", "2", "--signal", "STOP", "--silent-s", "0", "x.py"], "--silent-s"),
        (["--ranks", "2", "--killz", "3", "x.py"], "did you mean --kills?"),
        (["--ranks", "0", "x.py"], "--ranks 0"),
        (["--ranks", "1", "x.py"], "--ranks 1: a drill needs 2 ranks"),
        (["--ranks", "2", "--log-dir", "", "x.py"], "--log-dir: there is nothing after it"),
        (["--ranks", "2", "--json", "/dev/null/all.json", __file__], "/dev/null"),
    ],
)
def test_wrong_options(options: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", *options]) == 2
    said = capsys.readouterr().err
    assert why in said and len(said.strip().splitlines()) == 1
