"""Ranks started by other launchers: torchrun, and MPICH's mpiexec if it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imece.membership import unwatched
from tests.launch.hosts.two import free_port
from tests.launch.launcher import torchrun
from tests.meshes import FakeMesh

# What these launchers start goes when its launcher does, which a test may have to kill.
ENDS_WITH_IT = """
import os
from imece.launch.processes import die_with_parent
die_with_parent(os.getppid())
"""

SCRIPT = r"""
import imece, os, psutil, torch, torch.distributed as dist
def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
before = listening()  # what mpiexec has handed down
mesh = imece.init(backend="gloo")
model = imece.DistributedDataParallel(torch.nn.Linear(1, 1))
for _ in range(2):  # and yet one line
    tensor = torch.tensor([1 << mesh.rank])
    for step in imece.steps(1, model, torch.optim.SGD(model.parameters(), lr=1.0)):
        with step:
            dist.all_reduce(tensor)
addresses = sorted(address.ip for address in listening() - before)
words = [mesh.world.launcher, mesh.rank, mesh.world_size, tensor.item(), *addresses, mesh.world.master_port]
os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece
"""


@pytest.mark.parametrize(
    ("launcher", "ranks", "hosts", "environ", "said"),
    [
        ("torchrun", 2, 1, {"TORCHELASTIC_RUN_ID": "none"}, "torchrun: {dies}; {instead}"),
        ("torchrun", 2, 1, {"TORCHELASTIC_RUN_ID": "imece-1-2"}, "imece.spawn: {dies}; {instead}"),
        ("torchrun", 2, 2, {}, "RANK and WORLD_SIZE: {dies}"),
        ("slurm", 2, 2, {}, "srun: {dies}"),
        ("openmpi", 2, 1, {}, "Open MPI: {dies}; {instead}"),
        ("single", 1, 1, {}, None),
    ],
)
def test_who_replaces_nobody(
    launcher: str, ranks: int, hosts: int, environ: dict[str, str], said: str | None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for rank in range(ranks):
        monkeypatch.setattr(unwatched, "_said", False)
        on_hosts = tuple(zip(*[iter(range(ranks))] * (ranks // hosts), strict=True))
        mesh = FakeMesh(hosts=on_hosts, rank=rank, launcher=launcher)
        unwatched.say_unwatched(mesh, environ)
        expected = said and said.format(
            dies="a rank that dies ends the run", instead="imece launch would replace it"
        )
        wanted = f"imece: started by {expected}\n" if expected and rank == 0 else ""
        assert capsys.readouterr().err == wanted


def checked(name: str, out: str, err: str) -> list[list[str]]:
    """The sorted lines of `out`, in words. `err` must say, once, that `name` replaces nobody."""
    said = f"imece: started by {name}: a rank that dies ends the run; imece launch would replace it"
    assert err.count(said + "\n") == 1 and err.count("a rank that dies") == 1, err
    return sorted(line.split() for line in out.splitlines())


def run(tmp_path: Path, name: str, *launcher: str, jobs: int) -> list[list[list[str]]]:
    """What `jobs` runs of SCRIPT print at the same time."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH_IT + SCRIPT)
    command = [*launcher, str(script)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(jobs)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
            found.append(checked(name, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS_WITH_IT + SCRIPT)
    outcome = torchrun("--standalone", "--nproc-per-node", "2", tmp_path / "script.py")
    assert outcome.status == 0, outcome.err
    lines = checked("torchrun", outcome.out, outcome.err)
    assert [line[:4] for line in lines] == [["torchrun", "0", "2", "3"], ["torchrun", "1", "2", "3"]]


AGAIN = r"""
import imece, os, pathlib, signal, sys, time, torch, torch.distributed as dist
if sys.argv[2] == "adopted": dist.init_process_group("gloo")
mesh = imece.init(backend=None if sys.argv[2] == "adopted" else "gloo")
ranks, died = torch.ones(1), pathlib.Path(sys.argv[1])
first = not died.exists()
dist.all_reduce(ranks)
if first and mesh.rank == 1:
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if first:
    time.sleep(1000)  # its agent ends it
os.write(1, f"{int(ranks)} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n".encode())
if sys.argv[2] == "adopted": dist.destroy_process_group()  # or torch's Gloo now and then aborts at exit
"""


@pytest.mark.slow
@pytest.mark.parametrize(("opened", "shared"), [("ours", True), ("ours", False), ("adopted", False)])
def test_torchrun_starts_the_ranks_of_two_hosts_again(tmp_path: Path, opened: str, shared: bool) -> None:
    """Only the agent whose rank died counts that; and one store may serve all starts, in which torch's own
    groups do not always meet again."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_WITH_IT + AGAIN)
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job", str(script)]
    command = [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path / "died"), opened]
    environ = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if shared else "1"}
    agents = [
        subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(out for out, _ in outputs) == ["2 0\n", "2 1\n"]


def test_two_jobs_of_mpiexec(tmp_path: Path) -> None:
    """mpiexec gives neither address nor port: each job finds its own, on loopback alone."""
    mpiexec = shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if mpiexec is None:
        pytest.skip("no mpiexec: pip install mpich")
    jobs = run(tmp_path, "MPICH", mpiexec, "-n", "2", sys.executable, jobs=2)
    ports = set()
    for lines in jobs:
        assert [line[:4] for line in lines] == [["mpich", "0", "2", "3"], ["mpich", "1", "2", "3"]]
        assert {address for line in lines for address in line[4:-1]} <= {
            "127.0.0.1",
            "::1",
            "::ffff:127.0.0.1",
        }
        ports |= {line[-1] for line in lines}
    assert len(ports) == 2
