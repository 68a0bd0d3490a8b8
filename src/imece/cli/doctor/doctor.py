"""`imece doctor`: checks whether this host can train; says what is wrong and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from imece.bench import machine
from imece.bench.crew import Crew, CrewError
from imece.cli.doctor.host import (
    Finding,
    host_findings,
    interface,
    open_files,
    own_variables,
    processes,
    temporary,
)
from imece.cli.doctor.rank import COLLECTIVES
from imece.cli.options import parse
from imece.collectives import recording, who_waits
from imece.errors import UserError
from imece.launch.processes import catches
from imece.system.control_groups import free_threads, usable_cores
from imece.system.open_files import allow_open_files, check_proc
from imece.world import BACKEND, SCHEDULE

BACKENDS = ("shm", "gloo")
_MODULE = "imece.cli.doctor.rank"
_ANSWER_S = 45.0  # longer than the ranks' own time limit, so that their message comes first


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `imece doctor`."""

    ranks: int = 4
    """Number of ranks to start."""
    json: bool = False
    """Print JSON instead of lines."""
    attach: int | None = None
    """Only say who waits for whom: in the job of the rank with this process number; without a number, in all
    jobs that run here."""


def run(argv: Sequence[str]) -> int:
    """`imece doctor`: exit status 0 if nothing failed, 1 otherwise."""
    options = parse(
        DoctorOptions, _attach_to_all(argv), "imece doctor",
        "Look at this host, start ranks on it and run every collective once.",
    )  # fmt: skip
    if not 1 <= options.ranks <= 64:
        raise UserError(f"--ranks {options.ranks}: from 1 to 64 ranks can be started")
    check_proc()
    if options.attach is not None:
        return _attach(options.attach, options.json)
    found: list[Finding] = []
    links: dict[str, Any] = {}
    for finding in findings(options.ranks, os.environ, links):
        found.append(finding)
        if not options.json:
            print(_shown(finding), flush=True)
    if options.json:
        said = [asdict(finding) for finding in found]
        print(json.dumps({"machine": machine.facts(), "findings": said, "links": links}, indent=1))
    return 1 if any(finding.status == "fail" for finding in found) else 0


def _shown(finding: Finding) -> str:
    """In one line, for grep; on a terminal within its width."""
    label = f"{finding.status:<5} "
    if not sys.stdout.isatty():
        return label + finding.text
    return textwrap.fill(
        finding.text, shutil.get_terminal_size().columns, initial_indent=label,
        subsequent_indent=" " * len(label), break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def findings(ranks: int, environ: Mapping[str, str], links: dict[str, Any]) -> Iterator[Finding]:
    """All of them, each as soon as it is there. links: see `rank_findings`."""
    yield from host_findings(environ)
    yield from processes(ranks, free_threads())
    needed = [*open_files(ranks, allow_open_files()), *temporary()]
    yield from needed
    if all(finding.status != "fail" for finding in needed):
        yield from rank_findings(ranks, environ, links)


def rank_findings(ranks: int, environ: Mapping[str, str], links: dict[str, Any]) -> Iterator[Finding]:
    """Start ranks, run every collective once on each backend, and compare with a reference.

    links: filled with the latency (s) and bandwidth (bytes/s) of each backend. They are measured with at most
    as many ranks as there are cores: more ranks would measure how long a rank waits for a core.
    """
    talking = max(2, min(ranks, usable_cores()))
    load = machine.load()  # before ranks add to it
    # Wrong variables have been reported already; here they would hide every other finding.
    names = sorted(psutil.net_if_addrs())
    instead: dict[str, str] = {}
    if any(f.status == "warn" for f in interface(environ, "GLOO_SOCKET_IFNAME", names)):
        instead["GLOO_SOCKET_IFNAME"] = _loopback(names)
    if any(f.status == "fail" for f in own_variables(environ)):
        instead |= {BACKEND: "", SCHEDULE: ""}
    extra = [instead] * ranks if instead else None
    all_of_them = f"{ranks} ranks" if ranks > 1 else "1 rank"
    good: list[str] = []
    lines: list[str] = []
    crew: Crew | None = None
    try:
        for backend in BACKENDS if hasattr(os, "memfd_create") else BACKENDS[1:]:
            try:
                crew = crew or Crew.of_ranks("ranks", _MODULE, ranks, extra=extra)
                bad = _bad_collectives(crew, backend)
                if ranks > 1 and not bad:
                    answer = crew.ask("links", ranks=talking, timeout_s=_ANSWER_S)[0]
                    lines.append(str(answer.pop("line")))
                    links[backend] = answer
            except CrewError as error:
                yield Finding("fail", f"{all_of_them} on {backend}: {error.brief()}")
                if crew is not None:
                    crew.close()
                crew = None
                continue
            if bad:
                yield Finding("fail", f"{all_of_them} on {backend}: wrong results of {', '.join(bad)}")
            else:
                good.append(backend)
    finally:
        if crew is not None:
            crew.close()
    if good:
        yield Finding("ok", f"{all_of_them}: {', '.join(COLLECTIVES)} agree on {' and '.join(good)}")
    if lines:
        told = "    ".join(line.removeprefix("link").strip() for line in lines)
        busy = f"; {load}" if "busy" in load else ""
        yield Finding("link", f"{told}    between {talking} ranks{busy}")


def _bad_collectives(crew: Crew, backend: str) -> list[str]:
    """The collectives whose result differs from the reference on some rank."""
    crew.ask("open", backend=backend, timeout_s=_ANSWER_S)
    return [
        collective
        for collective in COLLECTIVES
        if (collective != "send/recv" or crew.size > 1)
        and not all(a["right"] for a in crew.ask("run", collective=collective, timeout_s=_ANSWER_S))
    ]


def _attach_to_all(argv: Sequence[str]) -> list[str]:
    """`--attach` without a number means every job: the parser gets a 0 for it."""
    words = list(argv)
    for at, word in enumerate(words):
        if word == "--attach" and (at + 1 == len(words) or words[at + 1].startswith("-")):
            words[at] = "--attach=0"
    return words


def _attach(pid: int, as_json: bool) -> int:
    """Say who waits for whom, from the recorders of live ranks."""
    if pid < 0:
        raise UserError(f"--attach {pid}: a process number is wanted")
    found = recording.find(recording.attach(pid).job if pid else None)
    lines = who_waits.explain(found)
    if as_json:
        print(json.dumps({"ranks": [each.pid for each in found], "lines": lines}, indent=1))
    elif not found:
        print("no rank of this user has made a collective on this host")
    else:
        for line in lines:
            print(line.replace("; ", "\n  "))  # a line each for what is said of a rank
        if any(catches(each.pid, signal.SIGUSR1) for each in found):  # it would end one that does not
            print("kill -USR1 PID: that rank prints its stacks among its output, and goes on")
    return 0


def _loopback(interfaces: Sequence[str]) -> str:
    return next((name for name in interfaces if name.startswith("lo")), interfaces[0])
