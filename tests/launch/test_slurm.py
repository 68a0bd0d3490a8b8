"""`imece launch --slurm`: what SLURM is asked for, and ranks under an srun that is not the real one."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from imece.launch.slurm import Batch, Layout, allocated, batch_file, quoted, seconds, srun
from imece.world import read_world
from tests.cli.test_main import refused, run
from tests.launch.fake_slurm import FakeSlurm
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
    """On one node a single task has all of the CPUs; on several each rank is a task."""
    assert srun(Layout(1, 4, 2)) == [
        "srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    assert srun(Layout(3, 4, 2)) == [
        "srun", "--nodes=3", "--ntasks=12", "--ntasks-per-node=4", "--cpus-per-task=2",
        "--kill-on-bad-exit=1", "--label",
    ]  # fmt: skip


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
        "job-name": "train", "nodes": "2", "ntasks-per-node": "4", "cpus-per-task": "6",
        "gpus-per-node": "a100:4", "time": "1-12", "partition": "gpu,long", "account": "lab",
        "output": "%x-%j.out", "open-mode": "append", "signal": "TERM@90", "requeue": "",
    }  # fmt: skip
    code = [line for line in out.splitlines() if not line.startswith("#")]
    assert out.index("\ncd ") > out.rindex("\n#SBATCH"), "SLURM reads no options after the first command"
    assert f"    {sys.executable} train.py --time 3" in code
    assert 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-6}"' in code


def test_another_batch_file(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script that looks like an option, from within an allocation."""
    allocate(monkeypatch, 1)
    Path("-s.py").touch()
    words = ["launch", "--slurm", "--ranks", "1", "--requeues=0", "--signal-s=0", "--sbatch", "job.sh"]
    assert run(*words, "--", "-s.py") == (0, "", "imece: submit it with: sbatch job.sh\n")
    text = Path("job.sh").read_text()
    assert "launch --ranks 1 --grace-s 30 -- -s.py\n" in text and "--job-name=s\n" in text
    assert "--no-requeue" in text and "--signal" not in text and "scontrol" not in text


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
        ("--slurm --ranks 2 --nodes 2 --min-ranks 1 train.py", "--min-ranks: on several nodes"),
        ("--slurm --ranks 2 --sbatch train.py train.py", "there is a file of another kind"),
        ("--slurm --ranks 2 --sbatch no/x train.py", "cannot write 'no/x'"),
        ("--ranks 2 --time 3 train.py", "--time: an option for SLURM"),
        ("--ranks 2 --submit train.py", "--submit: an option for SLURM"),
    ],
)
def test_mistakes(words: str, said: str, fake: FakeSlurm) -> None:
    script("")
    assert said in refused("launch", *words.split(" ")).encode().decode("unicode_escape").replace("\\n", "\n")
    assert not fake.calls("sbatch") and Path("train.py").read_text() == ""


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
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert "without srun" in refused(*words)


def test_ranks_on_several_nodes(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate(monkeypatch, 2, SLURM_NTASKS="4", SLURM_CPUS_PER_TASK="3", SLURM_TRES_PER_TASK="cpu=3")
    outcome = run_launch("--slurm", script(SAY), "--ranks", "9", "a b")
    assert outcome.status == 0, outcome.err
    assert outcome.err.startswith("imece: on several nodes a rank that dies ends the job")
    assert outcome.err.count("\n") == 1
    said = [json.loads(line) for line in outcome.out.splitlines()]
    assert [arguments for _, arguments in said] == [["--ranks", "9", "a b"]] * 4
    worlds = sorted((read_world(environ) for environ, _ in said), key=lambda world: world.rank)
    assert [(world.rank, world.world_size, world.local_rank, world.local_world_size) for world in worlds] == [
        (0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2),
    ]  # fmt: skip
    assert {world.master_addr for world in worlds} == {"node1"} and len({w.master_port for w in worlds}) == 1
    ((words, noted),) = fake.calls("srun")
    assert words[:5] == [
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=4",
        "--kill-on-bad-exit=1",
    ]
    assert noted["environ"]["OMP_NUM_THREADS"] == "4"
    assert not noted["environ"].keys() & {"SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"}


def test_signals_and_statuses(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes to every rank, and they save together; a rank that dies ends the others."""
    allocate(monkeypatch, 2)
    text = """
import os, signal, sys, time
def save(number, frame):
    os.write(1, b"saved\\n")
    open("saved-" + os.environ["SLURM_PROCID"], "x").close()
    while len([name for name in os.listdir() if name.startswith("saved")]) < 2: time.sleep(0.01)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
if sys.argv[1] == "die" and os.environ["SLURM_PROCID"] == "1": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    with Launcher("--slurm", "--ranks-per-node", "1", script(text), "stay") as launcher:
        launcher.wait_for("ready\nready\n")
        launcher.signal(signal.SIGTERM)
        outcome = launcher.wait()
    assert (outcome.status, outcome.out) == (143, "ready\nready\nsaved\nsaved\n")
    outcome = run_launch("--slurm", "--ranks-per-node", "1", script(text), "die")
    assert outcome.status == 137 and "saved" not in outcome.out


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


def test_submit(fake: FakeSlurm) -> None:
    """All the way: imece launch, sbatch, the batch file, srun, the ranks."""
    words = ("--slurm", "--nodes", "2", "--ranks=1", "--submit")
    outcome = run_launch(*words, script(SAY), *NASTY[:6])
    assert (outcome.status, outcome.out, outcome.err) == (0, "4711\n", "")
    *lines, status = fake.output.splitlines()
    assert status == "status 0" and [json.loads(line)[1] for line in lines] == [NASTY[:6]] * 2
    ((words_of_sbatch, _),) = fake.calls("sbatch")
    assert words_of_sbatch == ["--parsable"] and not fake.calls("scontrol")
    outcome = run_launch(*words, "--sbatch", "job.sh", "train.py")
    assert fake.calls("sbatch")[1] == (["--parsable", "job.sh"], {"text": Path("job.sh").read_text()})
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
