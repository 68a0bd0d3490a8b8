"""Stand-ins for srun, sbatch and scontrol: they record their arguments, and srun starts its tasks.

Each is a Python program without slow imports. `sbatch` runs the batch file at once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_HEAD = f"""#!{sys.executable} -IS
import json, os, signal, subprocess, sys
folder = os.path.dirname(os.path.abspath(__file__))
def note(**more):
    with open(os.path.join(folder, "calls"), "a") as file:
        print(json.dumps([os.path.basename(__file__), sys.argv[1:], more]), file=file)
"""

# As the real one: a task that ends badly ends all, and the largest status (128 + signal) is srun's.
_SRUN = """
own = {}
for at, word in enumerate(sys.argv[1:], 1):
    if not word.startswith("--"):
        break
    name, _, value = word.partition("=")
    own[name] = value
noted = ("SLURM", "OMP", "IMECE_TOKEN")
note(environ={name: value for name, value in os.environ.items() if name.startswith(noted)})
nodes, tasks, on_node = (int(own["--" + name]) for name in ("nodes", "ntasks", "ntasks-per-node"))
assert tasks == nodes * on_node, own
processes = []
def pass_on(number, frame):
    for process in processes:
        os.kill(process.pid, number)  # send_signal would reap it
ends = (signal.SIGTERM, signal.SIGINT)
for number in ends:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # until all are there to be told
hosts = f"node[1-{nodes}]" if nodes > 1 else "node1"
for task in range(tasks):
    step = {
        "SLURM_STEP_ID": 0, "SLURM_PROCID": task, "SLURM_LOCALID": task % on_node,
        "SLURM_NODEID": task // on_node, "SLURM_NTASKS": tasks, "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_STEP_TASKS_PER_NODE": f"{on_node}(x{nodes})" if nodes > 1 else on_node,
        "SLURM_STEP_NODELIST": hosts, "IMECE_HOST": f"node{task // on_node}",
    }
    environ = {**os.environ, **{name: str(value) for name, value in step.items()}}
    processes.append(
        subprocess.Popen(
            sys.argv[at:], env=environ, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, ends),
        )
    )
signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
worst = 0
while processes:
    pid, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    processes = [process for process in processes if process.pid != pid]
    if code and not worst and own["--kill-on-bad-exit"] == "1":
        pass_on(signal.SIGKILL, None)
    worst = max(worst, 128 - code if code < 0 else code)
sys.exit(worst)
"""

_SBATCH = """
named = [word for word in sys.argv[1:] if not word.startswith("-")]
text = open(named[0]).read() if named else sys.stdin.read()
note(text=text)
if os.environ.get("FAKE_SBATCH_REFUSES"):
    sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
job = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
script = os.path.join(folder, "script")
with open(script, "w") as file:
    file.write(text)
with open(os.path.join(folder, "output"), "a") as output:
    done = subprocess.run(["bash", script], env={**os.environ, **job}, stdout=output, stderr=output)
    print(f"status {done.returncode}", file=output)
print("4711;cluster")
"""


class FakeSlurm:
    """The folder with the three programs, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in (("srun", _SRUN), ("sbatch", _SBATCH), ("scontrol", "note()\n")):
            (folder / name).write_text(_HEAD + text)
            (folder / name).chmod(0o755)

    def calls(self, name: str) -> list[tuple[list[str], dict[str, Any]]]:
        """The arguments and what was noted besides, of each call of one of them."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(argv, more) for who, argv, more in map(json.loads, lines) if who == name]

    @property
    def output(self) -> str:
        """Of the batch files that sbatch has run, with their exit statuses."""
        return (self.folder / "output").read_text()
