"""`imece launch --slurm ...`: which words are SLURM's, and what is done with them (launch/slurm.py)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from imece.cli.options import parse
from imece.errors import UserError
from imece.launch import slurm

PROG = "imece launch --slurm"
DESCRIPTION = (
    "Run a script on SLURM: imece launch --slurm --ranks-per-node 4 [options] script.py [its arguments]. "
    "In an allocation the ranks start at once, with srun. Elsewhere a batch file is written: to stdout, to "
    "--sbatch FILE, or straight to sbatch with --submit. On one node ranks that die are replaced, and imece "
    "launch's own options are taken too; on several nodes the job starts again from its checkpoint. What "
    "else your site asks for: edit the file, or set SBATCH_QOS and the like."
)
WITH_VALUE = (
    "--nodes", "--ranks-per-node", "--cpus-per-rank", "--gpus-per-node", "--time", "--partition", "--account",
    "--job-name", "--signal-s", "--requeues", "--sbatch",
)  # fmt: skip
_FLAGS = ("--submit", "--no-submit")
_SAME = {"--ranks": "--ranks-per-node", "--nproc-per-node": "--ranks-per-node", "--nnodes": "--nodes"}
_OF_THE_BATCH = ("gpus_per_node", "time", "partition", "account", "job_name")
_OF_A_SCRIPT = ("-m", "--module", "--no-module", "--python", "--no-python", "--standalone")
_CPUS = 4


@dataclass(frozen=True)
class SlurmOptions:
    """What is asked of SLURM."""

    nodes: int | None = None
    """How many nodes. None: one, or all of an allocation."""
    ranks_per_node: int | None = None
    """How many ranks on each node (--ranks is the same). None: one for each GPU, or each of an allocation's
    tasks."""
    cpus_per_rank: int | None = None
    """None: 4, or an equal part of an allocation's node."""
    gpus_per_node: str | None = None
    """A number, or a kind and a number: a100:4."""
    time: str | None = None
    """The time limit, in SLURM's formats: 90, 12:00:00, 2-12. None: the partition's."""
    partition: str | None = None
    """The partition, or several with commas between them."""
    account: str | None = None
    """Who pays."""
    job_name: str | None = None
    """None: the script's name."""
    signal_s: int = 120
    """How many seconds before its time is over the job is told to save and end; 0: never."""
    requeues: int = 20
    """How many times the job may start again by itself, after its time was over, a preemption or a death."""
    sbatch: Path | None = None
    """Write the batch file here."""
    submit: tyro.conf.FlagCreatePairsOff[bool] = False
    """Hand the batch file to sbatch, and print the job's id."""

    @property
    def ranks(self) -> int | None:
        """On each node, as far as the options say it. Raises ValueError."""
        given = self.ranks_per_node
        return slurm.gpus(self.gpus_per_node) if given is None and self.gpus_per_node is not None else given


def take(own: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """SLURM's options (None without --slurm), and those of `imece launch` itself."""
    wanted = "--slurm" in own
    ours: list[str] = []
    rest: list[str] = []
    words = iter(own)
    for word in words:
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        name = _SAME.get(name, name) if wanted else name
        if name in WITH_VALUE:
            ours += [
                name,
                *([value] if equals else [each for each in [next(words, None)] if each is not None]),
            ]
        elif name in _FLAGS or (wanted and name in ("-h", "--help")):
            ours.append(name)
        elif name != "--slurm":
            rest.append(word)
    if ours and not wanted:
        raise UserError(f"{ours[0]}: an option for SLURM, with --slurm alone")
    return (ours if wanted else None), rest


@dataclass(frozen=True)
class Wanted:
    """What the options come to, in this environment."""

    options: SlurmOptions
    layout: slurm.Layout
    here: bool
    """Whether the ranks start here and now."""


def read(words: Sequence[str]) -> Wanted:
    """UserError for anything that cannot be."""
    options = parse(SlurmOptions, words, PROG, DESCRIPTION)
    try:
        ranks = options.ranks
        here = not options.submit and options.sbatch is None and slurm.in_allocation(os.environ)
        if here:
            asked = [name for name in _OF_THE_BATCH if getattr(options, name) is not None]
            if asked:
                option = "--" + asked[0].replace("_", "-")
                raise UserError(
                    f"{option}: this allocation is there already; for another one add --submit or --sbatch"
                )
            layout = slurm.allocated(os.environ, options.nodes, ranks, options.cpus_per_rank)
        elif ranks is None:
            raise UserError(f"how many ranks on a node? For two: {PROG} --ranks-per-node 2 ...")
        else:
            cpus = _CPUS if options.cpus_per_rank is None else options.cpus_per_rank
            layout = slurm.Layout(1 if options.nodes is None else options.nodes, ranks, cpus)
    except ValueError as error:
        raise UserError(str(error)) from None
    return Wanted(options, layout, here)


def run(wanted: Wanted, own: Sequence[str], script: Sequence[str], program: Sequence[str]) -> int:
    """Start it, write it or submit it: 0, or with the first, srun's status.

    own: options of `imece launch`. script: as typed. program: the command of a rank.
    """
    layout = wanted.layout
    command = _task(wanted, own, script, program)
    if not wanted.here:
        _batch(wanted, command, script)
        return 0
    if layout.nodes > 1:
        print(
            "imece: on several nodes a rank that dies ends the job there; it goes on from its checkpoint "
            "when it is started again, as imece train does (a job made by --submit starts again by itself)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return slurm.start(layout, command, os.environ)


def _task(wanted: Wanted, own: Sequence[str], script: Sequence[str], program: Sequence[str]) -> list[str]:
    """What each task runs."""
    layout = wanted.layout
    if layout.nodes > 1:
        stray = [word for word in own if word.startswith("-") and word not in _OF_A_SCRIPT]
        if stray:
            name = stray[0].partition("=")[0]
            raise UserError(f"{name}: on several nodes SLURM starts the ranks, and none is replaced")
        return list(program)
    grace = [] if _has(own, "--grace-s") else ["--grace-s", str(max(30, wanted.options.signal_s))]
    dashes = ["--"] if script[0].startswith("-") else []
    ranks = ["--ranks", str(layout.ranks)]
    return [sys.executable, "-m", "imece", "launch", *ranks, *grace, *own, *dashes, *script]


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
        print(f"imece: submit it with: sbatch {slurm.quoted(str(options.sbatch))}", file=sys.stderr)
    else:
        print(text, end="")


def _has(own: Sequence[str], name: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == name for word in own)


def _name(script: Sequence[str]) -> str:
    """The script's name, of letters that a job's name may have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(script[0]).stem).strip("-.")[:64] or "imece"


def _write(path: Path, text: str) -> None:
    """UserError for a file that is there already and was not written by us: perhaps it is the script."""
    try:
        if path.exists() and slurm.MARK not in path.read_text(errors="replace")[:200]:
            raise UserError(f"--sbatch {str(path)!r}: there is a file of another kind; name a new one")
        path.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from None
