"""SLURM: the srun that starts launchers in an allocation, and the batch file that asks for one.

Each node has one task, `imece launch`, which starts the ranks there and replaces those that die. On several
nodes the launchers meet (hosts/): a node that fails does not end the others.

Everything here only makes texts and words, except `start` and `submit` at the end.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imece.errors import UserError
from imece.launch.hosts.token import TOKEN, VARIABLES
from imece.launchers import read_world
from imece.world import LOOPBACK

MARK = "# Written by imece launch --slurm"
"""The beginning of imece's batch files, after the line that names the shell."""
FINISHED = "IMECE_FINISHED"
"""Names a file that launchers on several nodes make once the job has ended well. srun's status is that of the
worst node, and would report one that was lost though the others went on to the end."""
_MOST = 100_000
_MOST_SIGNAL_S = 65_535  # SLURM's own limit
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+@:/-]{0,199}")
_GPUS = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}:)?([1-9][0-9]{0,3})")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,6})(?::([0-9]{2}))?(?::([0-9]{2}))?")
# Requests of the allocation, which would contradict our srun's if they differ.
_OF_THE_ALLOCATION = (
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_ALONE = ("--kill-on-bad-exit=1",)
# A node that is lost, or leaves in order, must not end the others.
_ON_THEIR_OWN = ("--kill-on-bad-exit=0", "--no-kill", "--wait=0")
_SEVERAL = (
    "",
    "# What the launchers prove to each other that they know. It is in no command line.",
    f'[ -n "$IMECE_TOKEN$IMECE_TOKEN_FILE" ] || {TOKEN}=$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")',
    f"export {TOKEN}",
    "# This file is made when the job has ended well, though a node may have been lost on the way.",
    f'export {FINISHED}="$PWD/.imece-finished-$SLURM_JOB_ID"',
    f'rm -f -- "${FINISHED}"',
)


@dataclass(frozen=True)
class Layout:
    """How ranks are placed on nodes."""

    nodes: int
    ranks: int
    """On each node."""
    cpus: int | None
    """CPUs of each rank; None: as SLURM divides them."""

    def __post_init__(self) -> None:
        for name, value in (
            ("--nodes", self.nodes),
            ("--ranks-per-node", self.ranks),
            ("--cpus-per-rank", self.cpus),
        ):
            if value is not None and not 1 <= value <= _MOST:
                raise ValueError(f"{name} {value}: from 1 to {_MOST} are possible")

    @property
    def cpus_per_node(self) -> int | None:
        return None if self.cpus is None else self.cpus * self.ranks


@dataclass(frozen=True)
class Task:
    """What a task of srun's knows about the other launchers."""

    nodes: int
    node: int
    """The number of this launcher."""
    rendezvous: str
    """HOST:PORT, on the first node."""
    job: str
    ranks: int | None
    """On this node: one for each GPU that SLURM gives it, if any."""


@dataclass(frozen=True)
class Batch:
    """What a batch file asks for."""

    layout: Layout
    name: str
    gpus_per_node: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    signal_s: int = 120
    requeues: int = 20

    def __post_init__(self) -> None:
        for name, value in (
            ("--job-name", self.name),
            ("--partition", self.partition),
            ("--account", self.account),
        ):
            if value is not None and not _NAME.fullmatch(value):
                raise ValueError(f"{name} {value!r}: letters, digits and _ . , + @ : / - are possible")
        if self.gpus_per_node is not None:
            gpus(self.gpus_per_node)
        if not 0 <= self.signal_s <= _MOST_SIGNAL_S:
            raise ValueError(
                f"--signal-s {self.signal_s}: from 1 to {_MOST_SIGNAL_S} seconds, or 0 for never"
            )
        if not 0 <= self.requeues <= _MOST:
            raise ValueError(f"--requeues {self.requeues}: from 0 to {_MOST} are possible")
        if self.time is not None and seconds(self.time) <= self.signal_s:
            raise ValueError(
                f"--time {self.time} is {seconds(self.time)} s, and the signal to save comes "
                f"{self.signal_s} s before its end: ask for more time, or for a smaller --signal-s"
            )


def gpus(text: str) -> int:
    """The number of GPUs in "4" or "a100:4". Raises ValueError."""
    match = _GPUS.fullmatch(text)
    if match is None:
        raise ValueError(f"--gpus-per-node {text!r}: a number is possible, or a kind and a number, a100:4")
    return int(match[1])


def seconds(time: str) -> int:
    """The seconds in one of SLURM's time formats. Raises ValueError."""
    match = _TIME.fullmatch(time)
    if match is not None:
        days, first, second, third = (int(part or 0) for part in match.groups())
        if match[1] is None and match[4] is None:
            hours, minutes, rest = 0, first, second
            in_range = rest < 60
        else:
            hours, minutes, rest = first, second, third
            in_range = minutes < 60 and rest < 60 and (match[1] is None or hours < 24)
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
        if in_range and total:
            return total
    raise ValueError(
        f"--time {time!r}: minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes or days-hours:minutes:seconds are possible"
    )


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an allocation of SLURM's."""
    return "SLURM_JOB_ID" in environ


def allocated(environ: Mapping[str, str], nodes: int | None, ranks: int | None, cpus: int | None) -> Layout:
    """The layout in this allocation: all of it, unless arguments say less. UserError, ValueError."""
    there = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or 1
    if nodes is not None and nodes > there:
        raise UserError(f"--nodes {nodes}: this allocation has {there}")
    nodes = nodes if nodes is not None else there
    if ranks is None:
        ranks = _number(environ, "SLURM_GPUS_ON_NODE") or _number(environ, "SLURM_NTASKS_PER_NODE")
    if ranks is None:
        tasks = _number(environ, "SLURM_NTASKS")
        if tasks is None or tasks % there:
            raise UserError("how many ranks on a node? For two: imece launch --slurm --ranks-per-node 2 ...")
        ranks = tasks // there
    if cpus is None and ranks > 0:
        cpus = _fewest_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) // ranks or None
    return Layout(nodes, ranks, cpus)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) and int(text) else None


def _fewest_cpus(text: str) -> int:
    """The smallest number in such a list: 8 for "16(x2),8". 0 if it is no such list."""
    counts = [re.fullmatch(r"([0-9]{1,7})(?:\(x[0-9]{1,7}\))?", part) for part in text.split(",")]
    return min((int(count[1]) if count else 0 for count in counts), default=0)


def task(environ: Mapping[str, str]) -> Task:
    """The launcher that this process, a task of srun's, should be. UserError unless it is alone on its node.

    The launchers meet on the first node, at a port derived from the job, or where MASTER_ADDR and MASTER_PORT
    say.
    """
    world = read_world(environ)
    if world.local_world_size != 1:
        raise UserError(
            f"srun started {world.local_world_size} tasks on this node, and imece launch --slurm starts the "
            "ranks itself: srun --ntasks-per-node=1"
        )
    address = world.master_addr or LOOPBACK
    rendezvous = f"[{address}]:{world.master_port}" if ":" in address else f"{address}:{world.master_port}"
    job = f"slurm-{environ.get('SLURM_JOB_ID', '')}"
    return Task(world.world_size, world.rank, rendezvous, job, _number(environ, "SLURM_GPUS_ON_NODE"))


def srun(layout: Layout) -> list[str]:
    """The words that start the launchers of a layout; the command follows."""
    cpus = [] if layout.cpus_per_node is None else [f"--cpus-per-task={layout.cpus_per_node}"]
    return [
        "srun",
        f"--nodes={layout.nodes}",
        f"--ntasks={layout.nodes}",
        "--ntasks-per-node=1",
        *cpus,
        *(_ON_THEIR_OWN if layout.nodes > 1 else _ALONE),
    ]


def batch_file(batch: Batch, command: Sequence[str], folder: str) -> str:
    """A whole batch file that runs `command` in `folder` as the task of each node."""
    layout = batch.layout
    asked = {
        "job-name": batch.name,
        "nodes": layout.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": layout.cpus_per_node,
        "gpus-per-node": batch.gpus_per_node,
        "time": batch.time,
        "partition": batch.partition,
        "account": batch.account,
        "output": "%x-%j.out",
    }
    lines = [
        "#!/bin/bash",
        f"{MARK}. To change it, edit it; to run it: sbatch FILE",
        *(f"#SBATCH --{name}={value}" for name, value in asked.items() if value is not None),
        "# A job that starts again writes on in the same file.",
        "#SBATCH --open-mode=append",
    ]
    if batch.signal_s:
        lines += [
            f"# {batch.signal_s} s before the time is over the ranks are told to save and end.",
            "# (With B: only this shell would be told.)",
            f"#SBATCH --signal=TERM@{batch.signal_s}",
        ]
    if layout.nodes > 1:
        lines += ["# When a node fails, the others go on.", "#SBATCH --no-kill"]
    lines += [
        "# After a preemption, or when the first node fails, SLURM starts the job again.",
        f"#SBATCH --{'requeue' if batch.requeues else 'no-requeue'}",
        "",
        f"cd -- {quoted(folder)} || exit 2",
        *(_SEVERAL if layout.nodes > 1 else ()),
        "",
        "# One task on each node, which starts the ranks there and replaces those that die.",
        f"{' '.join(map(quoted, srun(layout)))} \\",
        f"    {' '.join(map(quoted, command))}",
        "status=$?",
    ]
    if layout.nodes > 1:
        lines += [f'[ ! -e "${FINISHED}" ] || {{ status=0; rm -f -- "${FINISHED}"; }}']
    if batch.requeues:
        lines += [
            "",
            "# Ended by a signal: the time was over, or a rank was killed. Other failures would come again.",
            f'if [ "$status" -ge 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {batch.requeues} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$status"', ""])


def quoted(word: str) -> str:
    """The word quoted for bash, always on one line."""
    if word.isprintable():
        return shlex.quote(word)
    plain = set(range(32, 127)) - set(b"\\'")
    escaped = (
        chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in word.encode(errors="surrogateescape")
    )
    return f"$'{''.join(escaped)}'"


def start(layout: Layout, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Become the srun that runs `command` on each node: signals go to it, and its exit status is ours."""
    path = shutil.which("srun")
    if path is None:
        raise UserError("there is no program 'srun' on PATH, though SLURM_JOB_ID is set")
    inherited = {name: value for name, value in environ.items() if name not in _OF_THE_ALLOCATION}
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would srun's tasks
        signal.signal(number, signal.SIG_DFL)
    # --disable-status: the first Ctrl-C goes to the ranks, which save, and not into a report of srun's.
    words = [*srun(layout), "--disable-status", "--input=none", *command]
    if layout.nodes > 1 and not any(environ.get(name) for name in VARIABLES):
        inherited[TOKEN] = secrets.token_hex(32)  # for this job only; srun passes its environment on
    os.execve(path, words, inherited)


def submit(text: str, file: str | None) -> str:
    """Submit a batch file, written to `file` if given; returns the id of the job."""
    path = shutil.which("sbatch")
    if path is None:
        raise UserError("there is no program 'sbatch' on PATH: submit the job where SLURM is installed")
    done = subprocess.run(
        [path, "--parsable", *([] if file is None else [file])],
        input=text if file is None else "",
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise UserError(f"sbatch did not take the job: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout.strip().split(";")[0]
