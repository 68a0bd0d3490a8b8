"""For all tests: which of them can run here, and whether one left something behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import torch

_SHM = Path("/dev/shm")
_LIST_SHM = (
    "tests/launch/hosts/",
    "tests/test_ranks.py",
    "tests/cli/test_drill.py",
    "tests/collectives/shared_memory/test_faults.py",
)
_GRACE_S = 20.0  # a process that was just killed needs a moment to go, on a busy machine a long one
# Children carry this mark, and so do theirs: it finds processes whose parent has died as well.
_MARK = "IMECE_TEST_RUN"
os.environ[_MARK] = uuid.uuid4().hex
# What this machine was measured with is no test's business. The folder is this session's own and never made:
# root can make any, and has then figures in it for the next session.
os.environ["IMECE_HERE"] = f"{tempfile.gettempdir()}/imece-tests-{os.environ[_MARK]}/here.toml"
_STARTED = 17  # where /proc/PID/stat says when, counted after the parent
_strangers: set[tuple[str, bytes]] = set()  # processes without the mark, by number and when they were started
_seen: tuple[bytes, set[psutil.Process]] = b"", set()  # the newest process of the machine, and ours by then
_GPUS = "CUDA_VISIBLE_DEVICES"
_SEEN_GPUS = os.environ.get(_GPUS)

# A second thread delays products as small as those of tests, most of all beside other processes. Ranks
# have one each as well.
torch.set_num_threads(1)

# A shell has what it starts in the background ignore SIGINT, nohup SIGHUP: what tests start hears them.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Two cores that others use too: a deadline for a single example would only measure their load.
hypothesis.settings.register_profile("imece", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("imece")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: the tests of a file run in one process, for what its fixtures make, and so do those of all
    files that share a start of ranks (tests/data_parallel/checks.py), or that list /dev/shm.
    """
    from xdist.scheduler import LoadScopeScheduling

    scheduling = LoadScopeScheduling(config, log)
    scheduling._split_scope = _together
    return scheduling


def _together(nodeid: str) -> str:
    """What this test shares with all that are to run in the same process."""
    if nodeid.startswith(_LIST_SHM):
        return "/dev/shm"
    start = re.search(r"-(\d+ (shm|gloo))\]$", nodeid)
    return start[1] if start else nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` or `hosts` are skipped, with the reason, where they cannot run; from all others, and
    from what they start, GPUs are hidden: `imece.init()` would take one.
    """
    reasons = {"gpu": _why_no_gpu, "hosts": _why_no_hosts}
    for name, why in reasons.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        reason = why() if marked else None
        for item in marked if reason else []:
            item.add_marker(pytest.mark.skip(reason=reason or ""))
    os.environ[_GPUS] = ""  # this process has looked for them by now, if it has a test for them


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports make a million objects that stay: the garbage collector would take a third of their time, and
    then look through all of them whenever it runs in a test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _why_no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


def _why_no_hosts() -> str | None:
    """Network namespaces and rate-limited links need root, iproute2 and a kernel that allows them."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (package iproute2 or util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False, timeout=30
    )
    return None if probe.returncode == 0 else f"no network namespaces: {probe.stderr.strip()}"


@pytest.fixture(autouse=True)
def gpus_where_they_are_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what tests marked `gpu` start: as it was before they were hidden."""
    if request.node.get_closest_marker("gpu") is not None:
        _show_gpus(monkeypatch)


def _show_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    if _SEEN_GPUS is None:
        monkeypatch.delenv(_GPUS)
    else:
        monkeypatch.setenv(_GPUS, _SEEN_GPUS)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After each test: no process that it started lives or waits to be reaped, no new name in /dev/shm."""
    processes, names = _processes_so_far(), _shm_names()
    yield
    deadline = time.monotonic() + _GRACE_S
    left = _processes_so_far() - processes
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _processes() - processes
    assert not left, "processes left behind: " + "; ".join(map(_describe, left))
    # A semaphore of multiprocessing's, in a test that another process runs, has its name for a moment.
    while (shm_left := _names_left(names)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not shm_left, f"left in /dev/shm: {', '.join(sorted(shm_left))}"


def _processes_so_far() -> set[psutil.Process]:
    """`_processes()`, and maybe some that have ended: most tests start none, and need not look at all."""
    global _seen
    newest = _read_proc("loadavg").split()[-1]  # of processes and threads, whoever started it
    if newest != _seen[0]:
        _seen = newest, _processes()
    return _seen[1]


def _processes() -> set[psutil.Process]:
    """Living processes of this test run, zombie children included; this process itself is not.

    It reads /proc itself, twice for each of thousands of tests: psutil takes three times as long.
    """
    me, mark = os.getpid(), f"{_MARK}={os.environ[_MARK]}".encode()
    parents: dict[int, int] = {}
    pids: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # pid (command) state parent ...: and the command may have blanks and parentheses
            _, parent, *others = _read_proc(f"{name}/stat").rpartition(b")")[2].split()
            parents[int(name)] = int(parent)
            if (one := (name, others[_STARTED])) in _strangers:
                continue
            if mark in _read_proc(f"{name}/environ").split(b"\0"):
                pids.add(int(name))
            else:
                _strangers.add(one)
        except OSError:
            continue  # ended meanwhile, or another user's
    for pid in parents:
        above = parents[pid]
        while above != me and above in parents:
            above = parents[above]
        if above == me:
            pids.add(pid)
    found = set()
    for pid in pids - {me}:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return {process for process in found if not _is_helper(process)}


def _read_proc(name: str) -> bytes:
    """The whole of /proc/NAME."""
    fd = os.open(f"/proc/{name}", os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    finally:
        os.close(fd)


def _is_helper(process: psutil.Process) -> bool:
    """What is kept for as long as this process lives: two zygotes by tests/zygote.py, of which ranks have the
    command and not the name, and one tracker and one fork server by multiprocessing.
    """
    try:
        if process.name() == "imece-zygote":
            return True
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.status()}) {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"pid {process.pid}"


def _shm_names() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _names_left(before: set[str]) -> set[str]:
    return {name for name in _shm_names() - before if not _used_by_others(name)}


def _used_by_others(name: str) -> bool:
    """Whether a process outside this test run has it mapped or open: then it is that one's, not ours. So is
    what a living test's process has named after itself; and a semaphore that a package has made for itself.
    """
    named = re.fullmatch(r"imece-test-(\d+)", name)
    if named and int(named[1]) != os.getpid() and psutil.pid_exists(int(named[1])):
        return True
    path = str(_SHM / name)
    try:
        # A semaphore is mapped under another name, that it had while it was made.
        semaphore = re.compile(rf" {os.stat(path).st_ino} +{_SHM}/sem\.")
    except FileNotFoundError:
        return True  # gone meanwhile
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = (process / "maps").read_text(errors="replace")
            if semaphore.search(mapped):
                return True
            if int(process.name) == os.getpid():
                continue
            if path in mapped:
                return True
            if any(os.readlink(fd) == path for fd in (process / "fd").iterdir()):
                return True
        except OSError:
            continue  # ended meanwhile, or another user's
    return False
