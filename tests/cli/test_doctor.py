"""`imece doctor`: every mistake that it should find is presented to it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import imece
from imece.bench.crew import Crew, CrewError
from imece.cli.doctor import doctor, host
from imece.cli.doctor.host import Finding
from imece.cli.doctor.rank import COLLECTIVES
from imece.cli.main import main
from imece.collectives import ops, recorder
from imece.errors import UserError
from tests.cli.refused import refused
from tests.ranks import start_ranks

INTERFACES = ["eth0", "lo"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def known(name: str, _service: object) -> list[object]:
    if name.endswith(".invalid"):
        raise OSError("Name or service not known")
    return []


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "eth9", "warn"),
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", "warn"),
        ("GLOO_SOCKET_IFNAME", "", "warn"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "warn"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "warn"),
        ("NCCL_SOCKET_IFNAME", "ib,lo", "ok"),
    ],
)
def test_interfaces(name: str, value: str, status: str) -> None:
    finding = only(host.interface({name: value}, name, INTERFACES))
    assert finding.status == status
    if status == "warn":
        assert finding.text == f"{name}={value} names no interface: unset it, or use one of eth0, lo"
    assert not list(host.interface({}, name, INTERFACES))
    assert not list(host.interface({"NCCL_SOCKET_IFNAME": "^docker"}, "NCCL_SOCKET_IFNAME", INTERFACES))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("IMECE_BACKEND", "goo", "IMECE_BACKEND=goo: 'goo' is none of shm, gloo"),
        ("IMECE_SCHEDULE", "rign", "IMECE_SCHEDULE=rign is no schedule: did you mean 'ring'?"),
        ("IMECE_BACKEND", "gloo", None),
        ("IMECE_SCHEDULE", "auto", None),
    ],
)
def test_own_variables(name: str, value: str, said: str | None) -> None:
    finding = only(host.own_variables({name: value}))
    assert finding.status == ("fail" if said else "ok") and finding.text.startswith(said or f"{name}={value}")
    assert not list(host.own_variables({name: ""}))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("IMECE_BACKENDS", "did you mean IMECE_BACKEND?"),
        ("imece_schedule", "did you mean IMECE_SCHEDULE?"),
        ("IMECE_X", "those are IMECE_BACKEND, IMECE_SCHEDULE, IMECE_HOST"),
    ],
)
def test_variables_that_nothing_reads(name: str, hint: str) -> None:
    finding = only(host.own_variables({name: "1"}))
    assert finding.status == "warn" and finding.text.startswith(f"{name} is no variable of imece's")
    assert hint in finding.text


def test_no_variable_that_is_read_is_unknown() -> None:
    source = "".join(file.read_text() for file in Path(doctor.__file__).parents[1].rglob("*.py"))
    names = {*re.findall(r'"(IMECE_[A-Z_]+)"', source)} - {"IMECE_BENCH_", "IMECE_CREW_"}
    quiet = ({"IMECE_BACKEND": "shm", "IMECE_SCHEDULE": "ring"}.get(name, "1") for name in names)
    found = host.own_variables(dict(zip(names, quiet, strict=True)))
    assert names and not [each for each in found if each.status != "ok"]


def test_a_backend_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as imece.init() would say it."""
    (there,) = [each for each in ("mpi", "ucc") if not torch.distributed.is_backend_available(each)][:1]
    finding = only(host.own_variables({"IMECE_BACKEND": there}))
    with pytest.raises(UserError) as caught:
        imece.init(backend=there)
    assert (finding.status, finding.text) == ("fail", f"IMECE_BACKEND={there}: {caught.value}")
    monkeypatch.setattr(host, "check_backend", lambda asked: None)  # torch is one that was built for GPUs
    for gpus, status in ((0, "fail"), (1, "ok")):
        monkeypatch.setattr(host, "usable_gpus", lambda gpus=gpus: gpus)
        finding = only(host.own_variables({"IMECE_BACKEND": "cpu:gloo,cuda:nccl"}))
        assert finding.status == status and (gpus or "torch can use none here: unset it" in finding.text)


def test_a_wrong_schedule_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def crew(*_: object, extra: Any) -> Any:
        asked.append(extra)
        raise CrewError("ranks: rank 0 did not start")

    monkeypatch.setattr(Crew, "of_ranks", crew)
    (*_, last) = doctor.rank_findings(2, {"IMECE_SCHEDULE": "rign"}, {})
    assert last.text == "2 ranks on gloo: ranks: rank 0 did not start"
    assert asked == [[{"IMECE_BACKEND": "", "IMECE_SCHEDULE": ""}] * 2] * 2


def test_what_became_of_a_rank_is_told_beside_what_it_wrote_last() -> None:
    raised = CrewError("x: rank 1 failed in order 'open'\nTraceback\nOSError: no memory\n")
    silent = CrewError("x: no rank came within 60 s\n[WARNING] Setting accelerator to CPU.\n")
    assert raised.brief() == "OSError: no memory"
    last = "the last line of the ranks: [WARNING] Setting accelerator to CPU."
    assert silent.brief() == f"x: no rank came within 60 s; {last}"


@pytest.mark.parametrize(
    ("value", "status"), [("1", "ok"), ("4", "ok"), ("5", "warn"), ("many", "warn"), ("²", "warn")]
)
def test_threads(value: str, status: str) -> None:
    assert only(host.threads({"OMP_NUM_THREADS": value}, cores=4)).status == status
    assert not list(host.threads({}, cores=4))


@pytest.mark.parametrize(
    ("environ", "status", "said"),
    [
        ({"RANK": "1"}, "fail", "but not WORLD_SIZE"),
        (
            {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "fail",
            "WORLD_SIZE=2",
        ),
        ({"MASTER_ADDR": "node.invalid"}, "fail", "MASTER_ADDR=node.invalid has no address"),
        ({"MASTER_ADDR": "node1"}, "ok", "MASTER_ADDR=node1"),
    ],
)
def test_launchers_variables(environ: Mapping[str, str], status: str, said: str) -> None:
    finding = only(host.launcher(environ, known))
    assert finding.status == status and said in finding.text
    assert not list(host.launcher({}, known))


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_what_is_no_hosts_name_has_no_address(name: str) -> None:
    finding = only(host.launcher({"MASTER_ADDR": name}, socket.getaddrinfo))
    assert finding.status == "fail" and finding.text.startswith(f"MASTER_ADDR={name} has no address")


def test_host_name_files_and_locked_memory() -> None:
    for address, said in ((None, "no address"), ("127.0.1.1", "127.0.1.1"), ("::1", "::1")):
        finding = only(host.host_name({}, "me", address))
        assert finding.status == "warn" and finding.text.startswith(f"this host's name me leads to {said}, ")
        assert not list(host.host_name({"GLOO_SOCKET_IFNAME": "lo"}, "me", address))
    assert not list(host.host_name({}, "me", "10.0.0.2"))
    assert not list(host.open_files(4, 65536)) and not list(host.open_files(1024, sys.maxsize))
    few = only(host.open_files(4, 256))
    assert few.status == "warn" and "only 256 open files are allowed (ulimit -Hn), enough for " in few.text
    fewer = only(host.open_files(4, 20))
    assert fewer.status == "fail" and ", and 20 are allowed (ulimit -Hn): raise that limit" in fewer.text
    assert not list(host.processes(4, None)) and not list(host.processes(4, 1000))
    few = only(host.processes(4, 9))
    assert few.status == "warn" and few.text.startswith("only 9 more processes and threads may be started, ")
    assert only(host.locked_memory(8 * 2**20, infiniband=True)).status == "warn"
    assert not list(host.locked_memory(8 * 2**20, infiniband=False))


def test_what_is_found_is_shown_at_once_and_no_rank_starts_that_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def ranks(*_: Any) -> Iterator[Finding]:
        shown.append(capsys.readouterr().out)
        yield Finding("ok", "the ranks")

    monkeypatch.setattr(doctor, "rank_findings", ranks)
    doctor.run([])
    assert "a port on 127.0.0.1" in shown[0] and "the ranks" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "allow_open_files", lambda: 20)
    assert doctor.run([]) == 1
    assert "4 ranks need " in capsys.readouterr().out and len(shown) == 1
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "rank_findings", ranks)
    monkeypatch.setattr(host, "temporary_files", lambda: False)
    assert doctor.run([]) == 1
    said = "fail  no folder takes temporary files: set TMPDIR to one that can be written\n"
    assert capsys.readouterr().out.endswith(said) and len(shown) == 1


def test_a_terminal_shows_what_is_found_within_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "GLOO_SOCKET_IFNAME=eth9 names no interface: unset it, or set it to one of lo, eth0"
    monkeypatch.setenv("COLUMNS", "40")
    assert doctor._shown(Finding("warn", text)) == f"warn  {text}"  # for grep
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = doctor._shown(Finding("warn", text)).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40 and lines[0].startswith("warn  GLOO_")
    assert " ".join(line[6:] for line in lines) == text


def test_memory_port_and_versions() -> None:
    assert [f.status for f in host.memory(2**34, 2**33)] == ["ok", "ok"]
    small = list(host.memory(2**34, 64 * 2**20))
    assert [f.status for f in small] == ["ok", "warn"] and "--shm-size" in small[1].text
    assert [f.status for f in host.memory(2**20, None)] == ["warn", "warn"]
    readable = list(host.memory(2**34, 2**33, host._refusal(Path("/proc"))))  # as a /dev/shm mounted ro
    assert [f.status for f in readable] == ["ok", "warn"] and "cannot be written" in readable[1].text
    assert not host._refusal(Path("/dev/shm"))
    assert host.port().status == "ok"
    assert host.port("203.0.113.7").status == "fail"  # an address that no host has
    assert host.software("2.13.0+cpu").status == "ok"
    assert host.software("2.10.1").status == "warn"
    assert " of " not in host.software("2.13.0").text
    with pytest.MonkeyPatch.context() as contained:
        contained.setattr(host, "allowed_bytes", lambda: 700_000_000)
        assert re.search(r", 0\.7 of \d+ GB; ", host.software("2.13.0").text)


def test_a_whole_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an interface that does not exist: told, and the collectives are tried all the same.

    In a folder for temporary files whose name is longer than that of a socket may be.
    """
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    assert main(["doctor", "--ranks", "2", "--json"]) == 0
    assert not list(folder.iterdir())
    content = json.loads(capsys.readouterr().out)
    by_status: dict[str, list[str]] = {}
    for finding in content["findings"]:
        by_status.setdefault(finding["status"], []).append(finding["text"])
    assert any("GLOO_SOCKET_IFNAME=eth9" in text for text in by_status["warn"])
    assert f"2 ranks: {', '.join(COLLECTIVES)} agree on shm and gloo" in by_status["ok"]
    (link,) = by_status["link"]
    assert link.startswith("shm ") and "gloo" in link and "GB/s" in link and "    between 2 ranks" in link
    assert content["links"].keys() == {"shm", "gloo"}
    for each in content["links"].values():
        assert (
            each.keys() == {"bytes_per_s", "latency_s"} and each["bytes_per_s"] > 1e6 > each["latency_s"] > 0
        )


class _Fake:
    """A crew whose gloo sums wrongly, or whose shm does not open."""

    size = 2

    def __init__(self, *_: object, **__: object) -> None:
        self._backend = ""

    def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
        if do == "open":
            self._backend = details["backend"]
            if self._backend == "shm":
                raise CrewError("ranks: rank 1 failed in order 'open'\nTraceback\nOSError: no memory")
        return [{"right": details.get("collective") != "all_reduce", "line": "link  x"}] * 2

    def close(self) -> None:
        """Nothing was started."""


def test_what_fails_is_named_and_the_rest_is_still_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crew, "of_ranks", _Fake)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--ranks", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fail  2 ranks on shm: OSError: no memory" in lines
    assert "fail  2 ranks on gloo: wrong results of all_reduce" in lines
    assert not any("agree" in line for line in lines)


class _Linked:
    """A crew in which all is well; who asks for links of more ranks than 3 is told so."""

    def __init__(self, *_: object, **__: object) -> None:
        self.size = 4

    def ask(self, do: str, **details: Any) -> list[dict[str, Any]]:
        if do == "links":
            assert details["ranks"] == 3
            return [{"line": "link  x 1.0 GB/s, 5 us", "bytes_per_s": 1e9, "latency_s": 5e-6}, {}, {}, {}]
        return [{"right": True}] * 4

    def close(self) -> None:
        """Nothing was started."""


def test_links_are_measured_between_no_more_ranks_than_cores(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crew, "of_ranks", _Linked)
    for asked in ("imece.cli.doctor.doctor.usable_cores", "imece.bench.machine.usable_cores"):
        monkeypatch.setattr(asked, lambda: 3)
    monkeypatch.setattr("os.getloadavg", lambda: (3.3, 0.0, 0.0))
    assert main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    link = {"bytes_per_s": 1e9, "latency_s": 5e-6}
    assert content["links"] == {"shm": link, "gloo": link}
    both = "x 1.0 GB/s, 5 us    x 1.0 GB/s, 5 us    between 3 ranks"
    assert content["findings"][-1]["text"] == (
        f"{both}; load 3.3 (busy: figures will be worse than they could be)"
    )
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0.0, 0.0))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"link  {both}"


def reduced(folder: str) -> None:
    """One all_reduce, told by a file; then it waits for its end."""
    recorder.install_signal()
    ops.all_reduce(torch.ones(1))
    Path(folder, os.environ["RANK"]).touch()
    time.sleep(1000)


def test_attach_tells_who_is_in_what(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with start_ranks(reduced, 2, args=[str(tmp_path)], backend="gloo") as ranks:
        while len(os.listdir(tmp_path)) < 2:
            assert ranks.alive() == [0, 1]
            time.sleep(0.01)
        assert main(["doctor", "--attach", str(ranks.pids[0]), "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert sorted(content["ranks"]) == sorted(ranks.pids)
        assert any("all_reduce" in line for line in content["lines"])
        assert main(["doctor", "--attach"]) == 0
        said = capsys.readouterr().out
        assert "all_reduce" in said and f"\n  rank 1 (pid {ranks.pids[1]}): " in said, (
            "each rank has a line of its own"
        )
        assert "\nkill -USR1 PID: that rank prints its stacks" in said
    assert main(["doctor", "--attach", "1"]) == 2
    assert capsys.readouterr().err.startswith("imece: ")


@pytest.mark.parametrize(
    "argv", [["--ranks", "0"], ["--ranks", "x"], ["--attach=-5"], ["--attach", "9" * 300], ["--nonsense"]]
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "doctor", *argv)
