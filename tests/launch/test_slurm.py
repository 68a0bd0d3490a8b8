"""`imece launch --slurm`: what it asks SLURM for, and ranks under a stand-in for srun."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from imece.errors import UserError
from imece.launch.slurm import Batch, Layout, allocated, batch_file, quoted, seconds, srun, task
from imece.launchers import read_world
from tests.cli.test_main import refused, run
from tests.data.helpers import files_of_at_most
from tests.launch.fake_slurm import FakeSlurm
from tests.launch.hosts.two import RESILIENT, Agent, free_port
from tests.launch.launcher import Launcher, run_launch

SAY = "import json, os, sys; os.write(1, (json.dumps([dict(os.environ), sys.argv[1:]]) + '\\n').encode())\n"
NASTY = [
    "a b",
    "'",
    '"$HOME" `ls`',
    "",
    "\\",
    "x\n#SBATCH --account=evil",
    "\t\r",
    "ü\udcff",
    "#",
    "$'\\n'",
    "-",
]
ROOT = Path(__file__).parents[2]
DOCS = [ROOT / name for name in ("README.md", "docs/launching.md", "docs/training.md")]
IN_AN_ALLOCATION = ["imece", "launch", "--slurm", "train.py"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """SLURM's programs on PATH, outside of any allocation, in an empty folder."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMP_"))]:
        monkeypatch.delenv(name)
    slurm = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{slurm.folder}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    become, here = os.execve, os.getpid()

    def only_in_a_fork(*what: Any) -> None:
        assert os.getpid() != here, "the tests themselves must not become srun"
        become(*what)

    monkeypatch.setattr(os, "execve", only_in_a_fork)
    return slurm


def script(text: str) -> str:
    Path("train.py").write_text(text)
    return "train.py"


def allocate(monkeypatch: pytest.MonkeyPatch, nodes: int, cpus: int = 8, **more: str) -> None:
    """As salloc does."""
    each = f"{cpus}(x{nodes})" if nodes > 1 else str(cpus)
    given = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_CPUS_PER_NODE": each, **more}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("90", 5400), ("90:30", 5430), ("2:00", 120), ("100:00:01", 360_001), ("1-0", 86_400),
        ("1-2", 93_600), ("2-03:04", 183_840), ("0-00:00:05", 5),
    ],
)  # fmt: skip
def test_times(text: str, meant: int) -> None:
    assert seconds(text) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0:00",
        "x",
        "1:60",
        "1:99:00",
        "1-24",
        "1-2:60",
        "1-2:3",
        "1:2:3:04",
        "-1",
        "1\n",
        "1-",
        "1.5",
        "٣",
    ],
)
def test_no_times(text: str) -> None:
    with pytest.raises(ValueError, match="hours:minutes:seconds"):
        seconds(text)


def test_words_of_srun() -> None:
    """One task on each node, which has all of the CPUs; a node that is lost ends none of the others."""
    assert srun(Layout(1, 4, 2)) == [
        "srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    assert srun(Layout(3, 4, 2)) == [
        "srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=0",
        "--no-kill", "--wait=0",
    ]  # fmt: skip


def test_what_a_task_finds_out() -> None:
    environ = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_STEP_NODELIST": "gpu[07-09],cpu1",
    }  # fmt: skip
    found = task(environ)
    assert (found.nodes, found.node, found.job, found.ranks) == (4, 2, "slurm-17", None)
    name, _, port = found.rendezvous.partition(":")
    assert name == "gpu07" and 15_000 <= int(port) < 32_000
    assert task(environ | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).rendezvous == found.rendezvous
    assert task(environ | {"SLURM_STEP_ID": "4"}).rendezvous != found.rendezvous
    assert task(environ | {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "9"}).rendezvous == "[fe80::1]:9"
    assert task(environ | {"SLURM_GPUS_ON_NODE": "8"}).ranks == 8
    with pytest.raises(UserError, match="srun --ntasks-per-node=1"):
        task(environ | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"})


def test_an_allocation_says_what_is_not_given() -> None:
    environ = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "16,12"}
    assert allocated(environ | {"SLURM_NTASKS": "6"}, None, None, None) == Layout(2, 3, 4)
    assert allocated(environ | {"SLURM_NTASKS_PER_NODE": "4"}, 1, None, 1) == Layout(1, 4, 1)
    assert allocated(
        environ | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "4"}, None, None, None
    ) == (Layout(2, 4, 3))
    assert allocated(environ, None, 24, None) == Layout(2, 24, None)


def test_a_batch_file(fake: FakeSlurm) -> None:
    status, out, err = run(
        "launch", "--slurm", "--nodes=2", "--gpus-per-node", "a100:4", "--time", "1-12", "--account", "lab",
        "--partition=gpu,long", "--signal-s", "90", "--cpus-per-rank", "6", script(""), "--time", "3",
    )  # fmt: skip
    assert (status, err) == (0, "") and out.startswith("#!/bin/bash\n")
    assert dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", out, re.MULTILINE)) == {
        "job-name": "train", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "24",
        "gpus-per-node": "a100:4", "time": "1-12", "partition": "gpu,long", "account": "lab",
        "output": "%x-%j.out", "open-mode": "append", "signal": "TERM@90", "no-kill": "", "requeue": "",
    }  # fmt: skip
    code = [line for line in out.splitlines() if not line.startswith("#")]
    assert out.index("\ncd ") > out.rindex("\n#SBATCH"), "SLURM reads no options after the first command"
    launch = f"    {sys.executable} -m imece launch --slurm --ranks 4 --grace-s 90 train.py --time 3"
    assert launch in code


def test_another_batch_file(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script that looks like an option, from within an allocation."""
    allocate(monkeypatch, 1)
    Path("-s.py").touch()
    words = ["launch", "--slurm", "--ranks", "1", "--requeues=0", "--signal-s=0", "--sbatch", "job.sh"]
    assert run(*words, "--", "-s.py") == (0, "", "imece: submit it with: sbatch job.sh\n")
    text = Path("job.sh").read_text()
    assert "launch --ranks 1 --grace-s 30 -- -s.py\n" in text and "--job-name=s\n" in text
    assert "--no-requeue" in text and "--signal" not in text and "scontrol" not in text
    assert "TOKEN" not in text and "no-kill" not in text
    assert run(*words[:-1], "other.sh", "--shutdown_timeout", "9", "--", "-s.py")[0] == 0
    assert "launch --ranks 1 --shutdown_timeout 9 -- -s.py\n" in Path("other.sh").read_text()


def test_docs_show_what_works(fake: FakeSlurm) -> None:
    script("")
    Path("hello.py").touch()
    (fake.folder / "sbatch").write_text("#!/bin/sh\necho 1\n")
    shown = [
        line
        for page in DOCS
        for line in re.findall(r"^    (imece launch --slurm .*)", page.read_text(), re.M)
    ]
    words = [
        line for line in (shlex.split(line, comments=True) for line in shown) if line != IN_AN_ALLOCATION
    ]
    assert len(shown) == 6 and len(words) == 5
    for line in words:
        status, _, err = run(*line[1:])
        assert status == 0, (line, err)
    assert "--gpus-per-node=8" in Path("job.sh").read_text()


def test_words_are_quoted_on_one_line() -> None:
    for word in NASTY:
        line = quoted(word)
        assert "\n" not in line
        shown = subprocess.run(["bash", "-c", f"printf %s {line}"], capture_output=True, check=True).stdout
        assert shown == os.fsencode(word), line


def test_nothing_is_injected(tmp_path: Path, fake: FakeSlurm) -> None:
    folder = tmp_path / "a\n#SBATCH --account=evil"
    folder.mkdir()
    text = batch_file(Batch(Layout(2, 1, 1), "x"), ["printf", "<%s>", *NASTY], str(folder))
    assert not re.search(r"^\s*#SBATCH --account", text, re.MULTILINE)
    said = subprocess.run(["bash"], input=os.fsencode(text), capture_output=True, check=True)
    assert said.stdout == os.fsencode("".join(f"<{word}>" for word in NASTY)) * 2, said.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--slurm train.py", "how many ranks on a node?"),
        ("--slurm --ranks 2", "there is no script"),
        ("--slurm --ranks 2 no.py", "there is no script 'no.py'"),
        ("--slurm --ranks 0 train.py", "--ranks-per-node 0"),
        ("--slurm --ranks 2 --nodes 0 train.py", "--nodes 0"),
        ("--slurm --ranks 2 --cpus-per-rank 0 train.py", "--cpus-per-rank 0"),
        ("--slurm --ranks 2 --time 1:2:3:4 train.py", "--time '1:2:3:4'"),
        ("--slurm --ranks 2 --time 2 train.py", "--signal-s"),
        ("--slurm --ranks 2 --signal-s 65536 train.py", "--signal-s 65536"),
        ("--slurm --ranks 2 --requeues -1 train.py", "--requeues -1"),
        ("--slurm --ranks 2 --partition a\n#SBATCH train.py", "--partition 'a"),
        ("--slurm --ranks 2 --partition -x train.py", "--partition"),
        ("--slurm --ranks 2 --account= train.py", "--account ''"),
        ("--slurm --ranks 2 --job-name a\nb train.py", "--job-name 'a"),
        ("--slurm --gpus-per-node 4;x train.py", "--gpus-per-node '4;x'"),
        ("--slurm --gpus-per-node train.py", "--gpus-per-node"),
        ("--slurm --ranks 2 --nodes 2 --min-ranks 5 train.py", "--min-ranks 5: from 1 to 4"),
        ("--slurm --ranks 2 --nodes 2 --hosts 2 train.py", "--hosts: with --slurm"),
        ("--slurm --ranks 2 --sbatch train.py train.py", "there is a file of another kind"),
        ("--slurm --ranks 2 --sbatch train.py/x train.py", "cannot write train.py/x: Not a directory"),
        ("--ranks 2 --time 3 train.py", "--time: an option for SLURM"),
        ("--ranks 2 --submit train.py", "--submit: an option for SLURM"),
    ],
)
def test_mistakes(words: str, said: str, fake: FakeSlurm) -> None:
    script("")
    assert said in refused("launch", *words.split(" ")).encode().decode("unicode_escape").replace("\\n", "\n")
    assert not fake.calls("sbatch") and Path("train.py").read_text() == ""


def test_a_full_disk_leaves_the_batch_file_that_was_there(fake: FakeSlurm) -> None:
    words, last = ["launch", "--slurm", "--sbatch", "job.sh", "--ranks"], script("")
    with files_of_at_most(9):
        assert "cannot write job.sh: File too large" in refused(*words, "1", last)
    assert not Path("job.sh").exists()
    assert run(*words, "1", last)[0] == 0
    before = Path("job.sh").read_text()
    with files_of_at_most(9):
        assert "cannot write job.sh: File too large" in refused(*words, "2", last)
    assert Path("job.sh").read_text() == before


def test_mistakes_in_an_allocation(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate(monkeypatch, 2)
    words = ["launch", "--slurm", script("")]
    assert "how many ranks on a node?" in refused(*words)
    monkeypatch.setenv("SLURM_NTASKS", "5")
    assert "how many ranks on a node?" in refused(*words)
    assert "--nodes 3: this allocation has 2" in refused(
        "launch", "--slurm", "--nodes", "3", "--ranks=1", "train.py"
    )
    assert "--time: this allocation" in refused("launch", "--slurm", "--time", "9", "--ranks=1", "train.py")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert "no program 'srun'" in run(*words)[2]


def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launchers meet that take themselves for nodes, all on this host."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def test_ranks_on_several_nodes(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher on each node, which has found the others."""
    allocate(monkeypatch, 2, SLURM_NTASKS="4", SLURM_CPUS_PER_TASK="3", SLURM_TRES_PER_TASK="cpu=3")
    free(monkeypatch)
    outcome = run_launch("--slurm", "--min-ranks", "3", script(SAY), "--ranks", "9", "a b")
    assert outcome.status == 0, outcome.err
    lines = sorted(outcome.out.splitlines())
    assert [line[:9] for line in lines] == [f"[rank {rank}] " for rank in range(4)]
    said = [json.loads(line[9:]) for line in lines]
    assert [arguments for _, arguments in said] == [["--ranks", "9", "a b"]] * 4
    worlds = [read_world(environ) for environ, _ in said]
    assert [(world.rank, world.world_size, world.local_rank, world.member) for world in worlds] == [
        (0, 4, 0, 0), (1, 4, 1, 1), (2, 4, 0, 2), (3, 4, 1, 3),
    ]  # fmt: skip
    assert [world.host for world in worlds] == ["node0", "node0", "node1", "node1"]
    assert not [name for environ, _ in said for name in environ if "TOKEN" in name]
    ((words, noted),) = fake.calls("srun")
    assert words[:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"]
    assert not noted["environ"].keys() & {"SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"}
    secret = noted["environ"]["IMECE_TOKEN"]
    assert len(secret) == 64 and secret not in " ".join(words) + outcome.out + outcome.err


@pytest.mark.slow
def test_a_signal_to_all_nodes(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to every rank once, and leaves time to save."""
    allocate(monkeypatch, 2)
    free(monkeypatch)
    text = """
import os, signal, sys, time
def save(number, frame):
    time.sleep(1)
    os.write(1, b"saved\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
time.sleep(60)
"""
    with Launcher("--slurm", "--ranks-per-node", "1", script(text)) as launcher:
        launcher.wait_for("[rank 0] ready")
        launcher.wait_for("[rank 1] ready")
        launcher.signal(signal.SIGTERM)
        outcome = launcher.wait()
    assert outcome.status == 143 and outcome.out.count("saved") == 2, outcome
    assert outcome.err.count("ended by SIGTERM") == 2


def test_a_node_that_is_lost_ends_no_other(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun tells of the worst node; the batch file knows that the others have finished."""
    (fake.folder / "node").write_text(
        '#!/bin/bash\n[ "$SLURM_NODEID" = 1 ] && kill -KILL $$\ntouch "$IMECE_FINISHED"\n'
    )
    (fake.folder / "node").chmod(0o755)
    text = batch_file(Batch(Layout(2, 1, 1), "x"), [str(fake.folder / "node")], os.getcwd())
    environ = {**os.environ, "SLURM_JOB_ID": "5"}
    for token in ({}, {"IMECE_TOKEN": "mine"}, {"IMECE_TOKEN_FILE": "file"}):
        done = subprocess.run(["bash"], input=text, text=True, env=environ | token, check=False)
        assert done.returncode == 0 and not fake.calls("scontrol") and os.listdir() == []
        found = fake.calls("srun")[-1][1]["environ"]
        if token:
            assert {name: found[name] for name in found if "TOKEN" in name} == token
        else:
            assert re.fullmatch("[0-9a-f]{64}", found["IMECE_TOKEN"])
    text = batch_file(Batch(Layout(2, 1, 1), "x"), ["bash", "-c", "kill -KILL $$"], os.getcwd())
    assert subprocess.run(["bash"], input=text, text=True, env=environ, check=False).returncode == 137
    assert [words for words, _ in fake.calls("scontrol")] == [["requeue", "5"]]


@pytest.mark.faults
def test_a_rank_dies_on_one_of_several_nodes(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced; then all nodes get SLURM's signal, and the job would start again."""
    free(monkeypatch)
    hurry = Path("hurry")
    text = batch_file(
        Batch(Layout(2, 2, 1), "x", signal_s=30),
        [sys.executable, "-m", "imece", "launch", "--slurm", "--ranks", "2", "--grace-s", "30",
         script(RESILIENT), "100000", "replicate", str(hurry)],
        os.getcwd(),
    )  # fmt: skip
    environ = {**os.environ, "SLURM_JOB_ID": "5"}
    with Path("out").open("wb") as output:
        batch = subprocess.Popen(["bash", "-c", text], env=environ, stdout=output, stderr=output)
    whole = psutil.Process(batch.pid)
    started: list[psutil.Process] = []
    try:
        agent = Agent(batch, Path("out"))
        agent.wait_for_step(20, 4)
        (victim,) = {line.pid for line in agent.steps() if line.slot == 3}
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL)

        def again() -> list[float]:
            return [line.time_s for line in agent.steps() if line.ranks == 4 and line.time_s > since + 0.5]

        agent.wait_for(lambda _: again(), "4 ranks")
        started = whole.children(recursive=True)
        whole.children()[0].send_signal(signal.SIGTERM)  # srun, as by scancel
        assert agent.end(60) == 143, agent.text
        assert not [process for process in started if process.is_running()]
    finally:
        for process in [*started, whole]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        batch.wait()
    assert f"rank 3 (host 1, pid {victim}) was killed by signal 9" in agent.text
    assert [words for words, _ in fake.calls("scontrol")] == [["requeue", "5"]]
    print(f"\nunder srun, a rank of node 1 killed: 4 ranks again after {again()[0] - since:.1f} s")


def test_one_node_replaces_its_ranks_itself(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate(monkeypatch, 1, SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2")
    outcome = run_launch("--slurm", "--min-ranks", "2", script(SAY), "x", "--ranks")
    assert outcome.status == 0 and outcome.err == "", outcome.err
    ((words, _),) = fake.calls("srun")
    assert words[:4] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8"]
    launch = [sys.executable, "-m", "imece", "launch", "--ranks", "2", "--grace-s", "120", "--min-ranks", "2"]
    assert words[-13:] == [*launch, "train.py", "x", "--ranks"]
    lines = sorted(outcome.out.splitlines())
    assert [line[:9] for line in lines] == ["[rank 0] ", "[rank 1] "]
    for rank, line in enumerate(lines):
        world = read_world(json.loads(line[9:])[0])
        assert (world.rank, world.world_size, world.member) == (rank, 2, rank)


@pytest.mark.slow
def test_submit(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the way: imece launch, sbatch, the batch file, srun, the launchers, the ranks."""
    free(monkeypatch)
    words = ("--slurm", "--nodes", "2", "--ranks=1", "--submit")
    outcome = run_launch(*words, script(SAY), *NASTY[:6])
    assert (outcome.status, outcome.out, outcome.err) == (0, "4711\n", "")
    *told, status = fake.output.splitlines()
    lines = [line for line in told if line.startswith("[rank ")]  # a launcher may say for whom it waits
    assert status == "status 0" and [json.loads(line[9:])[1] for line in lines] == [NASTY[:6]] * 2
    ((words_of_sbatch, _),) = fake.calls("sbatch")
    assert words_of_sbatch == ["--parsable"] and not fake.calls("scontrol")
    run_launch("--slurm", "--ranks=1", "--submit", "--sbatch", "job.sh", "train.py")
    assert fake.calls("sbatch")[1] == (["--parsable", "job.sh"], {"text": Path("job.sh").read_text()})
    assert sorted(os.listdir()) == ["job.sh", "train.py"], "nothing tells of the job's end any more"
    run_launch("--slurm", "--ranks=1", "--sbatch", "job.sh", "train.py")
    assert len(fake.calls("sbatch")) == 2 and "--nodes=1" in Path("job.sh").read_text()


def test_sbatch_refuses(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SBATCH_REFUSES", "1")
    assert "Invalid partition" in refused("launch", "--slurm", "--ranks=1", "--submit", script(""))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no program 'sbatch'" in refused("launch", "--slurm", "--ranks=1", "--submit", "train.py")


@pytest.mark.parametrize(
    ("command", "restarts", "status", "again"),
    [
        ("kill -TERM $$", "", 143, True),
        ("kill -KILL $$", "2", 137, True),
        ("kill -TERM $$", "3", 143, False),
        ("exit 2", "", 2, False),
        ("exit 1", "", 1, False),
        ("exit 0", "", 0, False),
    ],
)
def test_a_job_starts_again(command: str, restarts: str, status: int, again: bool, fake: FakeSlurm) -> None:
    """After a signal, and only so many times."""
    text = batch_file(Batch(Layout(1, 1, 1), "x", requeues=3), ["bash", "-c", command], "/")
    environ = {**os.environ, "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": restarts}
    assert subprocess.run(["bash"], input=text, text=True, env=environ, check=False).returncode == status
    assert [words for words, _ in fake.calls("scontrol")] == ([["requeue", "5"]] if again else [])
