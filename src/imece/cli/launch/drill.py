"""`imece drill --ranks 4 script.py ...`: runs a script under `imece launch` and kills its ranks at random."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imece.bench import report
from imece.cli.launch.launch import read, start
from imece.cli.launch.options import MOST_SECONDS, LaunchOptions
from imece.errors import UserError
from imece.launch.drill import Drill
from imece.launch.drill_record import Plan, lines
from imece.launch.left_over import Traces

PROG = "imece drill"
DESCRIPTION = (
    "A fault drill: run a script as imece launch does, hit random ranks with a signal at random instants, "
    "and tell what became of each fault: imece drill --ranks 4 [options] script.py [its arguments]. The "
    "script has to be resilient (imece.steps), as imece train is. What follows it belongs to the script. On "
    "several hosts: this on host 0, with --hosts, imece launch on the others; ranks of all of them are hit."
)
_WITH_VALUE = ("--kills", "--every-s", "--signal", "--together", "--seed", "--start-s", "--json")


@dataclass(frozen=True)
class DrillOptions(LaunchOptions):
    """Options of `imece drill`: those of `imece launch`, and which faults."""

    kills: int = 5
    """Number of faults."""
    every_s: float = 5.0
    """Seconds between two faults, give or take half of it. Each fault also waits until all ranks are there
    again."""
    signal: Literal["KILL", "STOP", "SEGV"] = "KILL"
    """KILL, SEGV: the process ends. STOP: it falls silent, and is ended after --silent-s."""
    together: int = 1
    """Number of ranks that each fault hits."""
    seed: int = 0
    """The seed of the faults: another one hits other ranks at other instants."""
    start_s: float = 120.0
    """Seconds within which all ranks must have begun their first step."""
    json: Path | None = None
    """Write all figures to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_rank:
            raise ValueError(
                f"--host-rank {self.host_rank}: give imece drill on host 0, and imece launch on the others"
            )
        if self.kills < 1:
            raise ValueError(f"--kills {self.kills}: at least 1 is needed")
        for name, seconds in (("--every-s", self.every_s), ("--start-s", self.start_s)):
            if not 0 < seconds <= MOST_SECONDS:
                raise ValueError(f"{name} {seconds}: more than 0 and up to {MOST_SECONDS:.0f} seconds")
        if self.all_ranks < 2:
            raise ValueError(f"--ranks {self.ranks}: a drill needs 2 ranks, so that one survives")
        if not 1 <= self.together < self.all_ranks:
            raise ValueError(
                f"--together {self.together}: at least 1, and fewer than the {self.all_ranks} ranks, "
                "so that one survives"
            )
        if self.signal == "STOP" and not self.silent_s:
            raise ValueError("--signal STOP needs a --silent-s, after which a silent rank is ended")

    def plan(self) -> Plan:
        """The faults that the options ask for."""
        return Plan(
            self.all_ranks, self.kills, self.every_s, self.signal, self.together, self.seed, self.start_s
        )


def run(argv: Sequence[str]) -> int:
    """`imece drill ARGV`: 0 if all faults came and were survived, the script ended well, and nothing is left
    over."""
    options, command, words = read(DrillOptions, argv, PROG, DESCRIPTION, _WITH_VALUE)
    report.check_writable(options.json)
    drill, traces = Drill(options.plan(), _say), Traces()
    record = drill.record
    record.status = start(options, words, os.environ | traces.environ, drill.watch)
    record.left = traces.left()
    if drill.gave_up or (record.status == 0 and not record.resilient):
        when = f"after {options.start_s:g} s (--start-s)" if drill.gave_up else "when it ended"
        raise UserError(
            f"{command[0]}: not all of its {options.all_ranks} ranks were resilient {when}; "
            "does it loop over imece.steps?"
        )
    for line in lines(record):
        _say(line)
    if options.json is not None:
        report.write_json(options.json, {"drill": words, **record.as_json()})
        _say(f"figures  {options.json}")
    return 0 if record.passed else record.status or 1


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader, or the terminal, is gone: the drill's record is not
        print(f"{line}\n", end="", flush=True)  # in one write, because ranks print too
