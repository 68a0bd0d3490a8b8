"""`imece launch`: ranks on this host, until all are done or the run is over; then nothing of them is left.

signals, relay, output, crew   processes: what they print, that they end, that none is left
endings                        how ranks end, and which failure was first (pure)
generations, silence           what follows from that (pure)
host                           this host's hands and eyes: all of the above
job                            decides what to do, here or on several hosts (hosts/)
view                           what another thread may see, for drills (drill.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from imece.errors import UserError
from imece.launch.crew import Crew
from imece.launch.environment import MOST_RANKS_PER_HOST, worker_environment
from imece.launch.generations import Limits
from imece.launch.host import Host, Order, Start
from imece.launch.job import Job
from imece.launch.view import View, watched
from imece.world import AGENT_PORT


def launch(
    command: Sequence[str],
    limits: Limits,
    *,
    grace_s: float = 30.0,
    environ: Mapping[str, str] = os.environ,
    direct: bool = False,
    silent_s: float = 10.0,
    logs: Path | None = None,
    watch: Callable[[View], None] | None = None,
) -> int:
    """Run `command` on as many ranks as `limits` says, and return the exit status of the whole.

    The status is 0 if all ranks finished; the first failing rank's status, or 128 + its signal; or 128 + the
    signal that this process got. SIGINT, SIGTERM and, as SIGTERM, SIGHUP are passed on to the ranks, which
    then have `grace_s` seconds; a second signal, a second later or more, kills them at once. direct: the
    ranks are `imece train`'s. Rank 0 then writes to this process' own output, without a prefix, signals wait
    until a rank listens for them (watch/stopping.py), and a rank that ends with status 2, or with 1 and no
    exception, has itself said what is wrong. Call this from the main thread. UserError if the ranks cannot be
    started.

    A rank that dies is replaced if the others go on without it (membership/roster.py); if not, all are ended,
    or started again, as `limits` says. If ranks report their steps, three deaths in a row without a finished
    step in between end the run in any case.
    silent_s: a rank that is stopped for so long is ended, and so is one that has said that it lives and then
    says nothing for so long, or for ten times as long while it computes; 0: never.
    logs: a folder for what each rank prints, except the first rank of `direct`.
    watch: called in a thread of its own once the ranks are started, with a view of them.
    """
    ranks = limits.ranks
    if not 1 <= ranks <= MOST_RANKS_PER_HOST:
        raise UserError(f"--ranks {ranks}: from 1 to {MOST_RANKS_PER_HOST} ranks can run on one host")
    order = Order(command, direct, silent_s, grace_s)

    def environment(start: Start, host: Host) -> Mapping[str, str]:
        inside = worker_environment(
            environ, start.slot, ranks, host.meeting_port, f"imece-{os.getpid()}-{host.port}",
            member=start.member, joining=start.joining, starts=start.starts,
        )  # fmt: skip
        return inside if host.meeting_port == host.port else {**inside, AGENT_PORT: str(host.port)}

    with Crew(logs) as crew:
        host = Host(order, crew, environment)
        job = Job(limits, grace_s, direct, {0: host}, ranks)
        job.start()
        with watched(watch, host.view):
            _watch(job, host)
    outcome = job.outcome()
    host.tell(outcome)
    return outcome.status


def _watch(job: Job, host: Host) -> None:
    """Until every rank has ended: pass on output and signals, and act on their ends."""
    while not job.is_done:
        ended, signals = host.wait(job.next_time())
        for number in signals:
            job.signalled(number)
        now = time.monotonic()
        if ended:
            job.ended(host.ended(ended, now), now)
        now = time.monotonic()
        host.on_time(now)
        job.on_time(now)
