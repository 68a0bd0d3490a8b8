"""`imece launch --slurm ...`: reads SLURM's options; starts, writes or submits (launch/slurm.py)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tyro

from imece.cli.options import parse
from imece.errors import UserError
from imece.launch import slurm
from imece.launchers import in_job_step
from imece.saying import say
from imece.writing import asked_for, write_whole

PROG = "imece launch --slurm"
DESCRIPTION = (
    "Run a script on SLURM: imece launch --slurm --ranks-per-node 4 [options] script.py [its arguments]. "
    "In an allocation srun starts a launcher on each node at once. Elsewhere a batch file is written: to "
    "stdout, to --sbatch FILE, or straight to sbatch with --submit. Ranks that die are replaced, a node that "
    "fails ends none of the others, and imece launch's own options are taken too. What else your site asks "
    "for: edit the file, or set SBATCH_QOS and the like."
)
WITH_VALUE = (
    "--nodes", "--ranks-per-node", "--cpus-per-rank", "--gpus-per-node", "--time", "--partition", "--account",
    "--job-name", "--signal-s", "--requeues", "--sbatch",
)  # fmt: skip
_FLAGS = ("--submit", "--no-submit")
_SAME = {
    "--ranks": "--ranks-per-node",
    "-n": "--ranks-per-node",
    "--nproc-per-node": "--ranks-per-node",
    "--nnodes": "--nodes",
}
_OF_THE_BATCH = ("gpus_per_node", "time", "partition", "account", "job_name")
_CPUS = 4


@dataclass(frozen=True)
class SlurmOptions:
    """Options for SLURM."""

    nodes: int | None = None
    """Number of nodes. Default: one, or all nodes of the allocation."""
    #: Ranks on each node (--ranks is the same). Default: one for each GPU, or for each of the allocation's
    #: tasks.
    ranks_per_node: int | None = None
    cpus_per_rank: int | None = None
    """CPUs of each rank. Default: 4, or an equal part of the allocation's node."""
    gpus_per_node: str | None = None
    """A number of GPUs, or a kind and a number: a100:4. Default: none are asked for."""
    time: str | None = None
    """The time limit in one of SLURM's formats: 90, 12:00:00, 2-12. Default: the partition's."""
    partition: str | None = None
    """The partition, or several with commas between them."""
    account: str | None = None
    """The account that pays."""
    job_name: str | None = None
    """The job's name. Default: the script's name."""
    signal_s: int = 120
    """Seconds before the time limit at which the job is told to save and end; 0: never."""
    requeues: int = 20
    """How often the job may start itself again, after its time limit, a preemption or a death."""
    sbatch: Path | None = None
    """Write the batch file here."""
    submit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Hand the batch file to sbatch, and print the job's id."""

    @property
    def ranks(self) -> int | None:
        """Ranks on each node, if the options say it. Raises ValueError."""
        given = self.ranks_per_node
        return slurm.gpus(self.gpus_per_node) if given is None and self.gpus_per_node is not None else given


def take(own: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """(SLURM's options, or None without --slurm; the options of `imece launch` itself)."""
    wanted = "--slurm" in own
    ours: list[str] = []
    rest: list[str] = []
    words = iter(own)
    for word in words:
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        name = _SAME.get(name, name) if wanted else name
        if name in WITH_VALUE:
            ours += [name, *([value] if equals else islice(words, 1))]
        elif name in _FLAGS or (wanted and name in ("-h", "--help")):
            ours.append(name)
        elif name != "--slurm":
            rest.append(word)
    if ours and not wanted:
        raise UserError(f"{ours[0]}: an option for SLURM, with --slurm alone")
    return (ours if wanted else None), rest


@dataclass(frozen=True)
class Wanted:
    """What the options mean in this environment."""

    options: SlurmOptions
    layout: slurm.Layout
    here: bool
    """Whether the ranks start here and now."""
    task: slurm.Task | None = None
    """The task that this process is, if srun has started it already: the launcher of one node."""

    def words(self, own: Sequence[str]) -> list[str]:
        """The options of `imece launch` for the launcher of one node. own: the options of imece that were
        given."""
        words = [*own, "--ranks", str(self.layout.ranks)]
        if self.layout.nodes == 1:
            return words
        node = self.task or slurm.Task(self.layout.nodes, 0, "node:1", "slurm", None)  # any node
        words += ["--hosts", str(node.nodes), "--host-rank", str(node.node)]
        return [*words, "--rendezvous", node.rendezvous, "--job", node.job]


def read(words: Sequence[str]) -> Wanted:
    """Read SLURM's options. UserError for options that cannot be met."""
    options = parse(SlurmOptions, words, PROG, DESCRIPTION, operands="SCRIPT [its arguments]")
    writes = options.submit or options.sbatch is not None
    task = slurm.task(os.environ) if not writes and in_job_step(os.environ) else None
    try:
        ranks = options.ranks
        here = not writes and (task is not None or slurm.in_allocation(os.environ))
        if here:
            asked = [name for name in _OF_THE_BATCH if getattr(options, name) is not None]
            if asked:
                option = "--" + asked[0].replace("_", "-")
                raise UserError(
                    f"{option}: this allocation is there already; for another one add --submit or --sbatch"
                )
        if task is not None and ranks is None:
            ranks = task.ranks
        if here and task is None:
            layout = slurm.allocated(os.environ, options.nodes, ranks, options.cpus_per_rank)
        elif ranks is None:
            raise UserError(f"how many ranks on a node? For two: {PROG} --ranks-per-node 2 ...")
        else:
            cpus = _CPUS if options.cpus_per_rank is None else options.cpus_per_rank
            nodes = task.nodes if task is not None else options.nodes
            layout = slurm.Layout(1 if nodes is None else nodes, ranks, cpus)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Wanted(options, layout, here, task)


def run(wanted: Wanted, own: Sequence[str], script: Sequence[str]) -> int:
    """Start the ranks, or write or submit the batch file. Returns srun's status if ranks are started, else 0.

    own: options of `imece launch`. script: as typed.
    """
    command = _task(wanted, own, script)
    if wanted.here:
        return slurm.start(wanted.layout, command, os.environ)
    _batch(wanted, command, script)
    return 0


def environment() -> dict[str, str]:
    """The environment for what a launcher starts, without the launcher's own variables."""
    return {name: value for name, value in os.environ.items() if name != slurm.FINISHED}


def finished(status: int) -> None:
    """Called when the launcher of one node is about to end: on success, tell the batch file."""
    if status == 0 and slurm.FINISHED in os.environ:
        try:
            Path(os.environ[slurm.FINISHED]).touch()
        except OSError as error:
            why = f"{error.strerror}: SLURM may start the job again, though it has finished"
            say(f"cannot write {os.environ[slurm.FINISHED]!r} ({why})")


def _task(wanted: Wanted, own: Sequence[str], script: Sequence[str]) -> list[str]:
    """The command that each task runs."""
    layout = wanted.layout
    named = {word.partition("=")[0].replace("_", "-") for word in own}
    has_grace = {"--grace-s", "--shutdown-timeout"} & named
    grace = [] if has_grace else ["--grace-s", str(max(30, wanted.options.signal_s))]
    dashes = ["--"] if script[0].startswith("-") else []
    slurms = ["--slurm"] if layout.nodes > 1 else []  # by which tasks find the other nodes
    ranks = ["--ranks", str(layout.ranks)]
    return [sys.executable, "-m", "imece", "launch", *slurms, *ranks, *grace, *own, *dashes, *script]


def _batch(wanted: Wanted, command: Sequence[str], script: Sequence[str]) -> None:
    options = wanted.options
    try:
        batch = slurm.Batch(
            wanted.layout,
            _name(script) if options.job_name is None else options.job_name,
            options.gpus_per_node,
            options.time,
            options.partition,
            options.account,
            options.signal_s,
            options.requeues,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    text = slurm.batch_file(batch, command, os.getcwd())
    if options.sbatch is not None:
        _write(options.sbatch, text)
    if options.submit:
        print(slurm.submit(text, None if options.sbatch is None else str(options.sbatch)))
    elif options.sbatch is not None:
        say(f"submit it with: sbatch {slurm.quoted(str(options.sbatch))}")
    else:
        print(text, end="")


def _name(script: Sequence[str]) -> str:
    """The script's name, reduced to letters that a job's name may have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script[0]).stem).strip("-.")[:64] or "imece"


def _write(path: Path, text: str) -> None:
    """Write the file. UserError if one is there that imece did not write: it may be the user's script."""
    with asked_for(path):
        if path.exists() and slurm.MARK not in path.read_text(errors="replace")[:200]:
            raise UserError(f"--sbatch {path}: there is a file of another kind; name a new one")
        write_whole(path, text.encode())
