"""`imece launch` on several hosts: translates torchrun's options and starts this host's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from imece.cli.launch.options import LaunchOptions
from imece.errors import UserError
from imece.launch.view import Watched
from imece.system.addresses import parse_endpoint

OURS = ("--hosts", "--host-rank", "--rendezvous", "--job")
_THEIRS = {
    "--nnodes": "--hosts", "--node-rank": "--host-rank", "--rdzv-endpoint": "--rendezvous",
    "--rdzv-id": "--job",
}  # fmt: skip
_MASTER = ("--master-addr", "--master-port")
_MEETING = ("--rdzv-backend", "--rdzv-conf", "--local-addr")
_ONE_WAY = "launchers of several hosts have one way to meet, and find their own addresses"
_ONE_HOST = "the ranks of one host meet at a free port"
_SHOWN = "each rank's lines are shown with the rank in front, and --log-dir keeps them in files"
_NEEDLESS = {
    **dict.fromkeys(_MEETING, _ONE_WAY),
    "--monitor-interval": "the end of a rank is seen at once",
    "--start-method": "each rank is a new process of its own",
    "--role": "ranks have no roles here",
    "--event-log-handler": "what happens to ranks is told on standard error",
    "--run-path": "a script is run by Python anyway",
    **dict.fromkeys(
        (
            "--redirects", "-r", "--tee", "-t", "--logs-specs", "--local-ranks-filter",
            "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--log-line-prefix-template",
        ),
        _SHOWN,
    ),
}  # fmt: skip
"""torchrun's options that change nothing here, and why."""
_REFUSED = {
    "--numa-binding": "ranks are bound to no cores here: leave it out, or bind in a wrapper (--no-python)",
    "--signals-to-handle": "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 reach ranks anyway: leave it out",
    "--virtual-local-rank": "each rank sees all GPUs here, and takes the one of its local rank: leave it out",
}
"""torchrun's options that would not get what they ask for, and why."""
_FLAGS = ("--run-path", "--virtual-local-rank")
TORCHRUNS = tuple({*_THEIRS, *_MASTER, *_NEEDLESS, *_REFUSED} - {*_FLAGS})
"""torchrun's options that take a value."""
_SILENT_S = 10.0  # of a host with --silent-s 0: a host, unlike a rank, may not be silent for ever


def refuse(own: Sequence[str]) -> None:
    """UserError if an option for several hosts is given with --slurm: SLURM's nodes are the hosts."""
    for word in own:
        name = word.partition("=")[0].replace("_", "-")
        if name in (*OURS, *_THEIRS, *_MASTER):
            raise UserError(f"{name}: with --slurm the hosts are SLURM's nodes, --nodes says how many")


def as_ours(own: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Options with imece's names, and those of torchrun that change nothing, by the reason. UserError for
    options that cannot be met."""
    left: list[str] = []
    needless: dict[str, list[str]] = {}
    theirs: dict[str, str] = {}
    words = iter(own)
    for word in words:
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        if name in _REFUSED:
            raise UserError(f"{name}: {_REFUSED[name]}")
        if name in TORCHRUNS or name in OURS or name in _FLAGS:
            value = value if equals or name in _FLAGS else next(words, "")
            theirs[name] = _number(value) if name == "--nnodes" else value
        else:
            left.append(word)
    several = theirs.get("--hosts", theirs.get("--nnodes", "1")) != "1"
    for name, value in theirs.items():
        ours = _THEIRS.get(name, name)
        alone = not several and ours in ("--rendezvous", "--job", *_MASTER, *_MEETING)
        if why := _ONE_HOST if alone else _NEEDLESS.get(name):
            needless.setdefault(why, []).append(name)
        elif name not in _MASTER:
            left += [ours, value]
    if several and theirs.keys() & set(_MASTER) and not theirs.keys() & {"--rendezvous", "--rdzv-endpoint"}:
        address, port = (theirs.get(name, "") for name in _MASTER)
        left += ["--rendezvous", f"[{address}]:{port}" if ":" in address else f"{address}:{port}"]
    return left, needless


def start(
    options: LaunchOptions,
    words: Sequence[str],
    environ: Mapping[str, str],
    watch: Callable[[Watched], None] | None = None,
) -> int:
    """Run `words` on this host's ranks, together with the other hosts."""
    from imece.launch.hosts.agent import launch_here
    from imece.launch.hosts.here import Plan

    assert options.host_rank is not None and options.rendezvous is not None
    plan = Plan(
        options.hosts,
        options.host_rank,
        parse_endpoint(options.rendezvous),
        options.limits,
        options.grace_s,
        options.silent_s or _SILENT_S,
    )
    return launch_here(
        words, plan, job=options.job, environ=environ, logs=options.log_dir, rank_silent_s=options.silent_s,
        watch=watch,
    )  # fmt: skip


def _number(hosts: str) -> str:
    """The number of hosts in torchrun's N or N:N."""
    least, colon, most = hosts.partition(":")
    if colon and least != most:
        raise UserError(f"--nnodes {hosts}: how many hosts are there? --min-ranks says with how few to go on")
    return least
