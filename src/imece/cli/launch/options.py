"""Options of `imece launch`, without SLURM's; `imece drill` adds to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from imece.launch.environment import MOST_RANKS_PER_HOST
from imece.launch.generations import Limits
from imece.system.addresses import parse_endpoint

MOST_SECONDS = 86_400.0
MOST_HOSTS = 1024
MOST_RANKS = 16_384  # on all hosts: messages about them must fit in a frame (hosts/frames.py)


@dataclass(frozen=True)
class LaunchOptions:
    """The options that stand before the script."""

    ranks: Annotated[int, tyro.conf.arg(name="nproc-per-node", aliases=["-n", "--ranks"])]
    """Number of ranks to start on this host."""
    module: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(aliases=["-m"])] = False
    """The script is the name of a module, as for python -m."""
    python: bool = True
    """Run the script with Python. --no-python: the script is itself a program."""
    min_ranks: int = 1
    """End the run (or start it again, with --max-restarts) once fewer ranks than these are left, of all
    hosts."""
    #: How often in all a dead rank is replaced, or all ranks are started again if the others cannot go on.
    #: Default: a dead rank is replaced as long as steps are finished, and all ranks are never started again.
    max_restarts: int | None = None
    #: Seconds without a sign of life after which a rank is ended, as if it had died; ten times as many for a
    #: rank that computes. 0: never.
    silent_s: float = 10.0
    log_dir: Path | None = None
    """Also write what each rank prints into this folder: rank-0.log, rank-1.log, ..."""
    grace_s: Annotated[float, tyro.conf.arg(name="shutdown-timeout", aliases=["--grace-s"])] = 30.0
    """Seconds that ranks have to end after a signal was passed on to them; then they get SIGKILL."""
    hosts: int = 1
    """Number of hosts on which this command is given, with the same --ranks on each."""
    host_rank: int | None = None
    """The number of this host: 0, 1, ..."""
    rendezvous: str | None = None
    """HOST:PORT at which the hosts meet: an address of host 0 and a free port there."""
    job: str = "imece"
    """A name that the launchers of all hosts give, so that none joins another job."""
    standalone: tyro.conf.FlagCreatePairsOff[bool] = False
    """Changes nothing; accepted because torchrun has it."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS_PER_HOST:
            raise ValueError(
                f"--ranks {self.ranks}: from 1 to {MOST_RANKS_PER_HOST} ranks can run on one host"
            )
        self._check_hosts()
        if not 1 <= self.min_ranks <= self.all_ranks:
            raise ValueError(f"--min-ranks {self.min_ranks}: from 1 to {self.all_ranks}, the ranks to start")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"--max-restarts {self.max_restarts}: 0 or more are possible")
        if self.silent_s and not 1 <= self.silent_s <= MOST_SECONDS:
            raise ValueError(
                f"--silent-s {self.silent_s}: from 1 to {MOST_SECONDS:.0f} seconds, or 0 for never"
            )
        if not 0 <= self.grace_s <= MOST_SECONDS:
            raise ValueError(f"--grace-s {self.grace_s}: from 0 to {MOST_SECONDS:.0f} seconds are possible")
        if self.module and not self.python:
            raise ValueError("--module and --no-python exclude each other")

    @property
    def all_ranks(self) -> int:
        """Ranks on all hosts."""
        return self.ranks * self.hosts

    @property
    def limits(self) -> Limits:
        """The limits of all hosts together."""
        restarts = self.max_restarts
        return Limits(self.all_ranks, self.min_ranks, restarts, restart=bool(restarts), exceptions=True)

    def _check_hosts(self) -> None:
        hosts, me = self.hosts, self.host_rank
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"--hosts {hosts}: from 1 to {MOST_HOSTS} hosts are possible")
        if self.all_ranks > MOST_RANKS:
            raise ValueError(
                f"--hosts {hosts} --ranks {self.ranks}: up to {MOST_RANKS} ranks in all are possible"
            )
        if hosts > 1 and me is None:
            raise ValueError(
                f"which of the {hosts} hosts is this? --host-rank 0 on the first, 1 on the next, ..."
            )
        if me is not None and not 0 <= me < hosts:
            of = "there is one host" if hosts == 1 else f"{hosts} hosts have the numbers 0 to {hosts - 1}"
            raise ValueError(f"--host-rank {me}: {of}")
        if hosts > 1:
            if self.rendezvous is None:
                raise ValueError(
                    f"where do the {hosts} hosts meet? --rendezvous HOST:PORT, an address of host 0"
                )
            parse_endpoint(self.rendezvous)
