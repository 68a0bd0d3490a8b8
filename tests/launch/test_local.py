"""`imece launch`: what ranks find, how their ends are reported, and that nothing of them is left."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from imece.cli.main import main
from imece.launch.crew import Crew
from imece.launch.processes import die_with_parent
from imece.store import serve
from imece.system.open_files import LAUNCH
from tests.launch.launcher import LIMIT_S, Launcher, Outcome, run_launch
from tests.train.command import in_fork, launched

Script = Callable[[str], Path]
_NEW_PIDS, _NEW_MOUNTS = 0x20000000, 0x00020000  # of unshare(2)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script, with `rank` at hand, and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text)
        return path

    return write


def test_a_script_that_may_not_be_read_starts_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('began')")
    script.chmod(0)
    may_read_all = "-dac_override,-dac_read_search"
    as_others = ["setpriv", f"--bounding-set={may_read_all}"] if os.geteuid() == 0 else []
    command = [*as_others, sys.executable, "-m", "imece", "launch", "--ranks", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = f"imece: cannot read the script {str(script)!r}: chmod +r it, or start this as its owner\n"
    assert ended.stderr == said


def test_ranks_beyond_the_soft_limit_of_open_files(script: Script) -> None:
    """As shells give it, a launcher of 128 ranks would need more: for pipes, and connections to its store."""
    text = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    path = script(text)

    def launch() -> int:
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 9, hard))
        return main(["launch", "--ranks", "6", str(path)])

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with Launcher(call=launch) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0 and outcome.err == ""
    allowed = {int(line.split()[-1]) for line in outcome.out.splitlines()}
    assert len(allowed) == 1 and min(allowed) == (min(hard, 65_536) if hard != -1 else 65_536)


def test_ranks_beyond_the_hard_limit_of_open_files(script: Script) -> None:
    """They would wait for a store that can take no more of them. As many as it can do start, and meet."""
    path = script("import imece\nimece.init()\nprint('met')")

    def launch() -> int:
        used = len(os.listdir("/proc/self/fd")) - 1
        enough = used + LAUNCH.own + 3 * LAUNCH.each - 1  # some are open for a moment only
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, enough))
        assert main(["launch", "--ranks", "3", str(path)]) == 2
        return main(["launch", "--ranks", "2", str(path)])

    with Launcher(call=launch) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0 and sorted(outcome.out.splitlines()) == ["[rank 0] met", "[rank 1] met"]
    (line,) = outcome.err.splitlines()
    assert line.startswith("imece: 3 ranks need ") and line.endswith(", or start 2 at most")


def test_what_a_rank_finds(script: Script) -> None:
    text = """
import json, psutil
listens = [c.laddr for c in psutil.Process(os.getppid()).net_connections("tcp") if c.status == "LISTEN"]
print(json.dumps([dict(os.environ), sys.argv[1:], sys.stdin.read(), listens]))
"""
    inherited = {each.laddr for each in psutil.Process().net_connections("tcp")}  # the launcher is a fork
    outcome = run_launch("--ranks", "3", script(text), "--ranks", "7", "-m", "--", "x")
    assert outcome.status == 0 and outcome.err == ""
    lines = sorted(outcome.out.splitlines())
    assert [line[:9] for line in lines] == ["[rank 0] ", "[rank 1] ", "[rank 2] "]
    for rank, line in enumerate(lines):
        environ, arguments, stdin, listens = json.loads(line[9:])
        wanted = {
            "RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        assert {name: environ[name] for name in wanted} == {name: str(each) for name, each in wanted.items()}
        assert int(environ["MASTER_PORT"]) > 1023 and int(environ["OMP_NUM_THREADS"]) >= 1
        assert arguments == ["--ranks", "7", "-m", "--", "x"] and stdin == ""
        own = [ip for ip, port in listens if (ip, port) not in inherited]
        assert own == ["127.0.0.1"], "the store must not be reachable from elsewhere"


def forked(path: Path, *options: str) -> Outcome:
    """`imece launch OPTIONS path`, whose ranks need not import torch."""
    return Outcome(*in_fork(launched, str(path.parent), *options, str(path)))


def test_torch_programs_find_each_other(script: Script) -> None:
    """torch's own init_process_group, without imece, by the variables that it reads."""
    text = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.tensor([1 << rank])
dist.all_reduce(tensor)
import psutil
listens = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
print(tensor.item(), listens - {"127.0.0.1", "::1"} or "loopback")
dist.destroy_process_group()
"""
    outcome = forked(script(text), "--nproc-per-node", "2", "--standalone")
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == ["[rank 0] 3 loopback", "[rank 1] 3 loopback"]


def test_modules_and_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert run_launch("--ranks", "1", "-m", "package", "-m").out == "[rank 0] ['-m']\n"
    assert run_launch("--ranks", "1", "package").out == "[rank 0] []\n"
    assert run_launch("--ranks=1", "--no-python", "--", "echo", "--ranks").out == "[rank 0] --ranks\n"


def test_no_output_is_lost(script: Script) -> None:
    text = """
out, err = sys.stdout.buffer, sys.stderr.buffer
for i in range(3000):
    out.write(b"%d %s\\n" % (i, b"o" * 50)); err.write(b"%d %s\\n" % (i, b"e" * 50))
out.write(b"10 %\\r20 %\\r30 %\\r\\n" + b"x" * 200_000 + b"\\nlast"); err.write(b"\\xff\\xfe last")
"""
    with Launcher("--ranks", "2", script(text)) as launcher:
        outcome = launcher.wait()
    for rank in range(2):
        prefix = f"[rank {rank}] "
        out = [line.removeprefix(prefix) for line in outcome.out.splitlines() if line.startswith(prefix)]
        err = [line.removeprefix(prefix) for line in outcome.err.splitlines() if line.startswith(prefix)]
        assert out[:3000] == [f"{i} " + "o" * 50 for i in range(3000)]
        assert err == [f"{i} " + "e" * 50 for i in range(3000)] + ["\udcff\udcfe last"]
        assert out[3000:3003] == ["10 %", "20 %", "30 %"] and out[-1] == "last"
        assert "".join(out[3003:-1]) == "x" * 200_000
    assert all(line.startswith("[rank ") for line in (outcome.out + outcome.err).splitlines())


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise ValueError('bo\\nom')", 1, ["failed with exit status 1"]),
        ("import imece; imece.init(ranks=2)", 1, ["failed with UserError: this script wants 2 ranks"]),
        ("sys.exit(7)", 7, ["failed with exit status 7"]),
        ("os.kill(os.getpid(), 9)", 137, ["signal 9 (SIGKILL)"]),
        ("import ctypes; ctypes.string_at(0)", 139, ["signal 11 (SIGSEGV)", "segmentation fault"]),
        ("os.kill(os.getpid(), 35)", 163, ["signal 35 (unknown)"]),
    ],
)
def test_how_a_rank_ended(script: Script, text: str, status: int, said: list[str]) -> None:
    begin = time.monotonic()
    outcome = run_launch("--ranks", "3", script(f"if rank == 1: {text}\ntime.sleep(100)"))
    assert time.monotonic() - begin < 60
    assert outcome.status == status
    last = outcome.err.splitlines()[-1]
    assert last.startswith("imece: rank 1 (pid ") and last.endswith("the other 2 ranks were ended")
    assert all(part in last for part in said), last
    assert ("Traceback" in outcome.err) == ("ValueError" in text or "init" in text)
    assert ("Fatal Python error: Segmentation fault" in outcome.err) == ("ctypes" in text)


def test_the_first_traceback_is_shown_last(script: Script) -> None:
    text = """
ready = __file__ + ".ready"
if rank == 0:  # as one that waits for rank 1, and says much when it is ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("\\n".join(["noise"] * 20)))
    open(ready, "w").close()
    while True: time.sleep(0.01)
while not os.path.exists(ready): time.sleep(0.01)
raise ValueError("the cause")
"""
    err = run_launch("--ranks", "2", script(text)).err.splitlines()
    assert "[rank 0] noise" in err
    assert err[-2] == "[rank 1] ValueError: the cause" and err[-1].startswith("imece: rank 1 ")
    assert err.index("[rank 0] noise") < max(i for i, line in enumerate(err) if "Traceback" in line)


WITH_IMECE = """
import imece, torch, torch.distributed as dist
mesh = imece.init()
dist.all_reduce(torch.ones(1))
if rank == 1: {fault}
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("os._exit(0)", 1, "left early with exit status 0"),
        ("raise ValueError('the cause')", 1, "failed with ValueError: the cause (exit status 1)"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9"),
    ],
)
def test_the_survivor_of_a_collective_is_not_blamed(
    script: Script, fault: str, status: int, said: str
) -> None:
    outcome = forked(script(WITH_IMECE.format(fault=fault)), "--ranks", "2")
    last = outcome.err.splitlines()[-1]
    assert outcome.status == status and last.startswith("imece: rank 1 (pid ") and said in last, outcome.err


def test_one_that_finishes_while_another_needs_it_is_no_success(script: Script) -> None:
    """Rank 0 has lost its peer as its last act, and nobody else is left whose end could be the cause."""
    outcome = forked(script(WITH_IMECE.format(fault="sys.exit(0)")), "--ranks", "2")
    last = outcome.err.splitlines()[-1]
    assert outcome.status == 1 and "imece: rank 0 (pid " in last and "failed with PeerLostError" in last
    assert last.endswith("; rank 1 had finished before")


def test_one_that_ends_before_it_meets_the_others(script: Script) -> None:
    """As by a condition that holds on one rank alone: the others do not wait for ten minutes."""
    outcome = forked(script("if rank == 1: sys.exit(0)" + WITH_IMECE.format(fault="pass")), "--ranks", "3")
    last = outcome.err.splitlines()[-1]
    assert outcome.status == 1 and "rank 1, which ended with exit status 0 before it had opened its" in last


def test_leaving_in_order_is_no_failure(script: Script) -> None:
    outcome = forked(script(WITH_IMECE.format(fault="pass") + "mesh.close(); os._exit(0)"), "--ranks", "2")
    assert outcome.status == 0, outcome.err


def test_nothing_is_left_of_stubborn_ranks_and_what_they_started(script: Script) -> None:
    """The other ranks ignore SIGTERM, one is stopped, each has a child. conftest.py looks for them."""
    text = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    time.sleep(0.5); sys.exit(3)
time.sleep(1000)
"""
    begin = time.monotonic()
    assert run_launch("--ranks", "3", script(text)).status == 3
    assert time.monotonic() - begin < 10


def test_children_left_by_finished_ranks_are_ended(script: Script) -> None:
    begin = time.monotonic()
    assert (
        run_launch("--ranks", "2", script("import subprocess; subprocess.Popen(['sleep', '1000'])")).status
        == 0
    )
    assert time.monotonic() - begin < 10


def test_nothing_of_killed_ranks_stays_in_dev_shm(script: Script) -> None:
    """Semaphores as of a loader's workers, and shared memory: Python's resource tracker takes them out. Both
    ranks wait until they have one: a process that is ended before leaves what it has made."""
    text = """
import multiprocessing, subprocess
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=4096)
subprocess.Popen(["sleep", "1000"])
tracker = Path(f"/proc/{resource_tracker._resource_tracker._pid}/cmdline")
while "resource_tracker" not in tracker.read_text():
    time.sleep(0.01)
print("there", lock._semlock.name, memory.name, flush=True)
Path(f"{__file__}-{rank}").touch()
while not all(Path(f"{__file__}-{each}").exists() for each in (0, 1)):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""
    outcome = run_launch("--ranks", "2", script(text))
    assert outcome.status == 128 + signal.SIGKILL, outcome.err
    said = re.findall(r"there /(\S+) (\S+)", outcome.out)
    names = {name if number else f"sem.{name}" for each in said for number, name in enumerate(each)}
    assert len(names) == 4, outcome.out
    wait_until_gone(names)


def test_nothing_in_dev_shm_outlives_a_killed_launcher(script: Script, tmp_path: Path) -> None:
    text = f"""
from imece.system import trackers
trackers.outlive_launcher()
import multiprocessing
from multiprocessing import resource_tracker, shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=4096)
assert os.getpgrp() == os.getpid()
with open({str(tmp_path / "names")!r}, "a") as file:
    file.write(f"sem.{{lock._semlock.name[1:]}} {{memory.name}} ")
time.sleep(1000)
"""
    (tmp_path / "names").touch()
    with Launcher("--ranks", "2", script(text)) as launcher:
        while len(names := set((tmp_path / "names").read_text().split())) < 4:
            time.sleep(0.01)
        assert names <= set(os.listdir("/dev/shm"))
        launcher.signal(signal.SIGKILL)
        launcher.wait()
    wait_until_gone(names)


def test_a_rank_that_leads_a_session_starts_its_tracker() -> None:
    """As under setsid: it cannot leave its process group."""
    text = """
from multiprocessing import resource_tracker
from imece.system import trackers
trackers.outlive_launcher()
resource_tracker.ensure_running()
"""
    subprocess.run([sys.executable, "-c", text], start_new_session=True, check=True, timeout=100)


def wait_until_gone(names: set[str]) -> None:
    """Nothing in /dev/shm has these names any more."""
    deadline = time.monotonic() + 20
    while left := names.intersection(os.listdir("/dev/shm")):
        assert time.monotonic() < deadline, f"left in /dev/shm: {left}"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(script: Script, number: signal.Signals) -> None:
    heard = signal.SIGTERM if number == signal.SIGHUP else number  # for which a program is prepared to save
    text = f"""
signal.signal({int(heard)}, lambda *_: (time.sleep(0.3), print("saved"), sys.exit(0)))
print("ready", flush=True)
time.sleep(1000)
"""
    with Launcher("--ranks", "2", script(text)) as launcher:
        launcher.wait_for("[rank 0] ready")
        launcher.wait_for("[rank 1] ready")
        launcher.signal(number)
        time.sleep(0.05)
        launcher.signal(number)  # as `timeout` does, which signals its child and then the child's group
        outcome = launcher.wait(20)
    assert outcome.status == 128 + number
    assert outcome.out.count("saved") == 2
    assert outcome.err == f"imece: ended by {number.name}, passed on to 2 ranks\n"


def test_notices_of_a_batch_system_go_to_ranks_that_have_a_handler(script: Script) -> None:
    """Without one they would end a rank, as they would have ended the launcher."""
    text = """
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR1, lambda *_: (print("noticed", flush=True), sys.exit(0)))
print("ready", flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print("done")
"""
    path = script(text)
    with Launcher("--ranks", "2", path, path.with_name("go")) as launcher:
        launcher.wait_for("[rank 0] ready")
        launcher.wait_for("[rank 1] ready")
        launcher.signal(signal.SIGUSR2)
        time.sleep(0.1)
        launcher.signal(signal.SIGUSR1)
        launcher.wait_for("[rank 0] noticed")
        path.with_name("go").touch()
        outcome = launcher.wait(20)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.endswith("[rank 1] done\n")


def test_signals_that_it_was_started_to_ignore_end_nothing(script: Script) -> None:
    """As nohup does it. Its ranks ignore none: it may pass on what another host has got."""
    text = """
print([signal.getsignal(number) is not signal.SIG_IGN for number in (1, 2, 15)], flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
"""
    path = script(text)

    def call() -> int:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return main(["launch", "--ranks", "1", str(path), str(path.with_name("go"))])

    with Launcher(call=call) as launcher:
        launcher.wait_for("[rank 0] [True, True, True]")
        for number in (signal.SIGHUP, signal.SIGINT):
            launcher.signal(number)
        time.sleep(0.1)
        path.with_name("go").touch()
        outcome = launcher.wait(20)
    assert outcome.status == 0 and outcome.err == "", outcome.err


@pytest.mark.parametrize("number", [signal.SIGCHLD, signal.SIGUSR2])
def test_other_signals_end_nothing(script: Script, number: signal.Signals) -> None:
    """Whoever calls launch() may have handlers of its own: a DataLoader's workers leave one for SIGCHLD."""
    text = (
        "print('ready', flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nprint('done')"
    )
    path = script(text)
    before = signal.signal(number, lambda *_: None)
    try:
        with Launcher("--ranks", "2", path, path.with_name("go")) as launcher:
            launcher.wait_for("[rank 0] ready")
            launcher.wait_for("[rank 1] ready")
            launcher.signal(number)
            time.sleep(0.2)
            path.with_name("go").touch()
            outcome = launcher.wait(20)
    finally:
        signal.signal(number, before)
    assert outcome.status == 0 and outcome.err == "", outcome.err
    assert outcome.out.count("done") == 2


@pytest.mark.parametrize("grace", [True, False])
def test_ranks_that_ignore_signals(script: Script, grace: bool) -> None:
    """A second signal ends them at once, or else the end of the grace time does."""
    text = "signal.signal(2, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(1000)"
    with Launcher("--ranks", "1", "--grace-s", "0.3" if grace else "1000", script(text)) as launcher:
        launcher.wait_for("ready")
        launcher.signal(signal.SIGINT)
        if not grace:
            time.sleep(1.2)
            launcher.signal(signal.SIGINT)
        outcome = launcher.wait(20)
    killed = "imece: ended by SIGINT, passed on to 1 rank, of which 1 had to be killed"
    assert outcome.status == 130 and outcome.err.splitlines()[-1] == killed


def test_signals_and_output_do_not_wait_for_torch(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the launcher imports beside the ranks: from a cold disk that takes long."""

    def late(listener: socket.socket) -> object:
        time.sleep(8)
        return serve(listener)

    monkeypatch.setattr("imece.launch.host.serve", late)
    text = "signal.signal(15, lambda *_: sys.exit('saved')); print('ready', flush=True); time.sleep(1000)"
    begin = time.monotonic()
    with Launcher("--ranks", "1", script(text)) as launcher:
        time.sleep(1.2)  # by now it looks how far ranks are
        launcher.wait_for("ready", 4)
        launcher.signal(signal.SIGTERM)
        outcome = launcher.wait(20)
    assert outcome.status == 143 and "saved" in outcome.err and time.monotonic() - begin < 7


@pytest.fixture
def wrapped(script: Script) -> Callable[[str], tuple[str | Path, ...]]:
    """As `script`: what is to be launched is a shell that starts it."""

    def write(text: str) -> tuple[str | Path, ...]:
        path = script(text)
        path.with_suffix(".sh").write_text('"$@"; echo "ended with $?"')
        return "--no-python", "sh", path.with_suffix(".sh"), sys.executable, path

    return write


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_what_a_wrapper_has_started(
    wrapped: Callable[[str], tuple[str | Path, ...]], number: signal.Signals
) -> None:
    """The shell dies at once, or when its child has ended; what it has started has the whole grace time."""
    text = f"""
signal.signal({int(number)}, lambda *_: (time.sleep(0.5), print("saved"), sys.exit(0)))
print("ready", flush=True)
time.sleep(1000)
"""
    with Launcher("--ranks", "2", *wrapped(text)) as launcher:
        launcher.wait_for("[rank 0] ready")
        launcher.wait_for("[rank 1] ready")
        launcher.signal(number)
        outcome = launcher.wait(20)
    assert outcome.status == 128 + number and outcome.out.count("saved") == 2


def test_what_a_wrapper_has_started_is_killed_in_the_end(
    wrapped: Callable[[str], tuple[str | Path, ...]],
) -> None:
    text = "signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
    with Launcher("--ranks", "1", "--grace-s", "0.3", *wrapped(text)) as launcher:
        launcher.wait_for("ready")
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(20).status == 143


@pytest.mark.parametrize("wraps", [False, True])
def test_killing_the_launcher_ends_all(
    script: Script, wrapped: Callable[[str], tuple[str | Path, ...]], wraps: bool
) -> None:
    text = "signal.signal(15, signal.SIG_IGN); print(os.getpid(), os.environ['MASTER_PORT'], flush=True)"
    text += "; time.sleep(1000)"
    with Launcher("--ranks", "3", *(wrapped(text) if wraps else (script(text),))) as launcher:
        for rank in range(3):
            launcher.wait_for(f"[rank {rank}] ")
        words = [line.split() for line in launcher.out().splitlines()]
        pids = [int(each[2]) for each in words]
        port = int(words[0][3])
        assert all(psutil.pid_exists(pid) for pid in pids)
        launcher.signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "ranks outlived their launcher"
            time.sleep(0.01)
        launcher.wait()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ten_jobs_at_once_never_meet(script: Script) -> None:
    text = "print(os.environ['MASTER_PORT'], os.environ['TORCHELASTIC_RUN_ID'], flush=True); time.sleep(1)"
    path = script(text)
    with ExitStack() as stack:
        jobs = [stack.enter_context(Launcher("--ranks", "2", path)) for _ in range(10)]
        outcomes = [job.wait() for job in jobs]
    assert [outcome.status for outcome in outcomes] == [0] * 10
    said = [{line.split(" ", 2)[2] for line in outcome.out.splitlines()} for outcome in outcomes]
    assert all(len(each) == 1 for each in said), "two ranks of one job were told different things"
    assert len(set.union(*said)) == len({line.split()[0] for each in said for line in each}) == 10


def test_a_reader_that_goes_away_ends_the_job(script: Script) -> None:
    path = script("while True: print('x', flush=True); time.sleep(0.01)")
    command = [sys.executable, "-m", "imece", "launch", "--ranks", "2", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.read(1) == b"["
        launcher.stdout.close()
        assert launcher.wait(LIMIT_S) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("ends", ["a signal", "a death", "the rank"])
def test_a_reader_that_does_not_read(script: Script, ends: str) -> None:
    """As `| less`: the launcher hears signals and sees deaths all the same, and no line is lost."""
    lines, then = (20_000, "pass") if ends == "the rank" else (60_000, "time.sleep(100)")
    path = script(f"for number in range({lines}): print(number, 'x' * 100, flush=True)\n{then}")
    ranks = "2" if ends == "a death" else "1"
    command = [sys.executable, "-m", "imece", "launch", "--ranks", ranks, "--grace-s", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.read(1) == b"["
        time.sleep(1.0)
        if ends == "a signal":
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(60) == 128 + signal.SIGTERM
        elif ends == "a death":
            dies, other = psutil.Process(launcher.pid).children()
            dies.kill()
            other.wait(60)
            launcher.stdout.read()
            assert launcher.wait(60) == 128 + signal.SIGKILL
        else:
            printed = (b"[" + launcher.stdout.read()).splitlines()
            assert [int(line.split()[2]) for line in printed] == list(range(lines))
            assert launcher.wait(60) == 0


def test_a_reader_of_a_rank_that_writes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `imece train ... 2>&1 | head`: nobody but the rank would ever see that head has gone."""
    reader, writer = os.pipe()
    streams = [os.fdopen(fd, "w") for fd in (writer, os.dup(writer))]
    with Crew(None) as crew, monkeypatch.context() as patched, streams[0], streams[1]:
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            patched.setattr(sys, name, stream)
        crew.start(0, 0, ["sleep", "1000"], os.environ, direct=True)
        assert crew.wait(time.monotonic() + 0.05) == ([], [])
        os.close(reader)
        signals = [number for _ in range(3) for number in crew.wait(time.monotonic() + 0.05)[1]]
        assert signals == [signal.SIGPIPE], "once: a second signal kills the ranks before they have saved"
        print("to nobody", flush=True)


def test_a_reader_that_went_by_the_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `imece train | tee log` and Ctrl-C: tee has gone, which is seen when a rank has saved."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        with Crew(None) as crew:
            patched.setattr("imece.launch.crew._SAME_SIGNAL_S", 0.0)
            signal.raise_signal(signal.SIGTERM)
            assert crew.wait(time.monotonic() + 10)[1] == [signal.SIGTERM]
            os.close(reader)
            crew.start(0, 0, ["echo", "saved"], os.environ, direct=False)
            while not crew.ended:
                assert crew.wait(time.monotonic() + 10)[1] == []
            crew.reap(0)
            assert crew.wait(time.monotonic())[1] == []
            signal.raise_signal(signal.SIGTERM)
            assert crew.wait(time.monotonic() + 10)[1] == [signal.SIGTERM]


def test_a_reader_that_has_gone_ends_the_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `imece launch ... 2> >(less) | head`: nobody waits for less then."""
    (gone, out), (stalled, err) = os.pipe(), os.pipe()
    late = threading.Timer(20, lambda: os.read(stalled, 1 << 20))  # or a failure would be a hang
    late.start()
    with os.fdopen(out, "w") as stdout, os.fdopen(err, "w") as stderr, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        patched.setattr(sys, "stderr", stderr)
        with Crew(None) as crew:
            os.close(gone)
            crew.say("y" * 100_000)
            crew.start(0, 0, ["echo", "x"], os.environ, direct=False)
            signals: list[int] = []
            while not signals:
                signals = crew.wait(time.monotonic() + 1)[1]
        assert signals == [signal.SIGPIPE] and late.is_alive()
    late.cancel()
    os.close(stalled)


@pytest.mark.parametrize("closed", [True, False])
def test_an_output_that_takes_nothing_ends_no_rank(script: Script, tmp_path: Path, closed: bool) -> None:
    """It was closed with >&-, of which Python makes None, or its disk is full."""
    path = script("for _ in range(50): print('x', flush=True); print('y', file=sys.stderr, flush=True)")

    def call() -> int:
        if closed:
            os.close(1)
            sys.stdout = None
        else:
            for fd in (1, 2):
                os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
        return main(["launch", "--ranks", "2", "--log-dir", str(tmp_path / "new" / "logs"), str(path)])

    with Launcher(call=call) as launcher:
        outcome = launcher.wait(20)
    assert outcome.status == 0 and outcome.out == ""
    for rank in range(2):
        lines = (tmp_path / "new" / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert (lines.count("x"), lines.count("y")) == (50, 50)


def test_a_log_that_cannot_be_opened_starts_no_rank(tmp_path: Path) -> None:
    (tmp_path / "new" / "rank-0.log").mkdir(parents=True)
    with Crew(tmp_path / "new") as crew, pytest.raises(IsADirectoryError):
        crew.start(0, 0, ["sleep", "1000"], os.environ, direct=False)
    assert not any("sleep" in child.name() for child in psutil.Process().children())


def test_a_process_that_goes_on_writing_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter(range(100))
    with Crew(None) as crew:
        crew.start(0, 0, ["sh", "-c", "sleep 1000 &"], os.environ, direct=False)  # it holds both pipes open
        while not crew.wait(time.monotonic() + 10)[0]:
            pass
        with monkeypatch.context() as patched:
            patched.setattr(crew._relay, "_read", lambda fd: next(reads) >= 0)
            crew.reap(0)
    assert 0 < next(reads) < 100


def test_a_real_process(script: Script) -> None:
    """Not a copy of pytest: the command as a person types it."""
    command = [sys.executable, "-m", "imece", "launch", "--ranks", "2"]
    text = """
from pathlib import Path
print("hi", flush=True)
said = Path(__file__).with_name("said")  # or rank 0 might be ended before it has
if rank == 0: said.touch()
while not said.exists(): time.sleep(0.01)
sys.exit(rank)
"""
    command.append(str(script(text)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "[rank 0] hi" in done.stdout and "[rank 1] hi" in done.stdout
    assert done.stderr.startswith("imece: rank 1 (pid ")


@pytest.mark.parametrize("listens", [False, True])
def test_signals_wait_for_a_rank_that_is_to_listen(listens: bool) -> None:
    with Crew(None) as crew:
        command = ["sh", "-c", "kill -INT $$; kill -TERM $$; exit 7"]
        rank = crew.start(0, 0, command, os.environ, direct=True, listens=listens)
        assert rank.popen.wait(20) == (7 if listens else -signal.SIGINT)


ORPHANS = """
import os, subprocess, sys, time
ended = subprocess.run(["sh", "-c", "sh -c 'echo $$' &"], stdout=subprocess.PIPE, check=True).stdout
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{int(ended)}") and time.monotonic() < deadline:
    print("ended", flush=True)  # the launcher wakes to pass it on
    time.sleep(0.1)
print("left" if os.path.exists(f"/proc/{int(ended)}") else "reaped", "by", os.getppid())
"""


def as_process_1(argv: list[str]) -> int:
    """`main(argv)` in namespaces of processes and mounts, as in a container."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_NEW_PIDS | _NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    if (child := os.fork()) > 0:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        die_with_parent(0)  # the parent's number out there
        for mount in ("--make-rprivate /", "-t proc proc /proc"):
            subprocess.run(["mount", *mount.split()], check=True)
        os._exit(main(argv))
    finally:
        os._exit(70)


def test_process_1_reaps_what_ranks_leave(tmp_path: Path) -> None:
    """In a container, all that loses its parent becomes the launcher's child."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--pid", "--mount", "true"], check=False).returncode:
        pytest.skip("namespaces need root and unshare")
    (tmp_path / "orphans.py").write_text(ORPHANS)
    argv = ["launch", "--ranks", "1", str(tmp_path / "orphans.py")]
    with Launcher(call=lambda: as_process_1(argv)) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 0 and "reaped by 1" in outcome.out, outcome
