"""Under the launchers of others: torchrun, and MPICH's mpiexec where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import imece, os, psutil, torch, torch.distributed as dist
def listening():
    return {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
before = listening()  # what mpiexec has handed down
mesh = imece.init(backend="gloo")
tensor = torch.tensor([1 << mesh.rank])
dist.all_reduce(tensor)
addresses = sorted(address.ip for address in listening() - before)
words = [mesh.world.launcher, mesh.rank, mesh.world_size, tensor.item(), *addresses, mesh.world.master_port]
os.write(1, (" ".join(map(str, words)) + "\n").encode())  # in one piece
"""


def run(tmp_path: Path, *launcher: str, jobs: int = 1) -> list[list[list[str]]]:
    """The sorted output lines, in words, of `jobs` runs of SCRIPT at the same time."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*launcher, str(script)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(jobs)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=90)
            assert process.returncode == 0, err
            found.append(sorted(line.split() for line in out.splitlines()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_torchrun(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (lines,) = run(tmp_path, *torchrun)
    assert [line[:4] for line in lines] == [["torchrun", "0", "2", "3"], ["torchrun", "1", "2", "3"]]


def test_two_jobs_of_mpiexec(tmp_path: Path) -> None:
    """mpiexec gives neither address nor port: each job finds its own, on loopback alone."""
    mpiexec = shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if mpiexec is None:
        pytest.skip("no mpiexec: pip install mpich")
    jobs = run(tmp_path, mpiexec, "-n", "2", sys.executable, jobs=2)
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
