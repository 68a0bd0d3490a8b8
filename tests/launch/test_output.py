"""However output is cut into pieces, the same lines come out."""

from __future__ import annotations

import io
import itertools
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.launch.crew import Crew
from imece.launch.output import LogFile, Outlet, Printed, RankOutput
from tests.launch.launcher import Launcher

_TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff"]), max_size=30).map(b"".join)


@given(_TEXT, st.lists(st.integers(0, 60), max_size=6))
def test_it_does_not_matter_where_reads_cut(text: bytes, cuts: list[int]) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    target = io.BytesIO()
    output = RankOutput(3, Outlet(target), Printed())
    for start, stop in itertools.pairwise(at):
        output.feed(text[start:stop])
    output.finish()
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removesuffix(b"\n").split(b"\n")
    assert target.getvalue() == (b"".join(b"[rank 3] %s\n" % line for line in lines) if text else b"")


def test_long_lines_come_in_pieces(tmp_path: Path) -> None:
    target, log = io.BytesIO(), LogFile(tmp_path / "log")
    output = RankOutput(0, Outlet(target), Printed(), log)
    output.feed(b"x" * 200_000)
    assert 130_000 < target.getvalue().count(b"x") < 200_000
    output.feed(b"y\n")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"x" * 200_000 + b"y\n", "there it is one line"


def test_tracebacks_are_repeated_only_if_others_said_much_since() -> None:
    printed = Printed()
    one, other = (RankOutput(rank, Outlet(io.BytesIO()), printed) for rank in range(2))
    one.feed(b"hello\n[rank0]: Traceback (most recent call last):\n  File\nValueError\n")
    assert one.failure_lines() == []
    other.feed(b"noise\n" * 10)
    assert one.failure_lines() == [], "it is near"
    other.feed(b"noise\n")
    assert one.failure_lines() == [b"Traceback (most recent call last):", b"  File", b"ValueError"]
    assert other.failure_lines() == []


def test_a_full_disk_takes_nothing_and_the_log_all(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    with open("/dev/full", "wb", buffering=0) as full:
        RankOutput(0, Outlet(full), Printed(), log).feed(b"one\ntwo\n")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_terminal_that_is_gone_ends_nothing_and_a_pipe_that_nobody_reads_is_told() -> None:
    parent, child = os.openpty()
    os.close(parent)
    with open(child, "wb", buffering=0) as gone:
        RankOutput(0, Outlet(gone), Printed()).feed(b"one\n")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as gone, pytest.raises(BrokenPipeError):
        RankOutput(0, Outlet(gone), Printed()).feed(b"one\n")


def test_a_pipe_that_does_not_wait_gets_all() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    got: list[bytes] = []
    with open(reader, "rb") as file:
        reading = threading.Thread(target=lambda: got.append(file.read()))
        reading.start()
        with open(writer, "wb", buffering=0) as target:
            outlet = Outlet(target)
            RankOutput(0, outlet, Printed()).feed(b"x" * 300_000 + b"\n")
            outlet.finish()
            assert outlet.waiting_bytes == 0
        reading.join()
    assert got[0].count(b"x") == 300_000


def test_a_full_disk_behind_the_log_and_behind_its_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(Path("/dev/full"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        log.write(b"one")
        monkeypatch.undo()
    log.write(b"two")
    assert log._file is None, "it is not tried again"


def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    reader, writer = os.pipe()
    lines = [b"%05d %s\n" % (number, b"x" * 90) for number in range(3000)]
    with open(reader, "rb", buffering=0) as read, open(writer, "wb", buffering=0) as target:
        outlet = Outlet(target)
        for line in lines:
            outlet.write(line)
        waiting = outlet.waiting_bytes
        got = read.read(1 << 20)
        assert got and len(got) + waiting == sum(map(len, lines)), "what is not in the pipe waits"
        while outlet.waiting_bytes:
            outlet.pass_on()
            got += read.read(1 << 20)
        assert got == b"".join(lines)


def test_it_is_said_once_that_output_is_lost(capfd: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        outlet = Outlet(full)
        for _ in range(3):
            outlet.write(b"one\n")
        assert outlet.waiting_bytes == 0
    assert capfd.readouterr().err == (
        "imece: output cannot be written (No space left on device), so what ranks print is lost\n"
    )


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_a_terminal_that_knows_no_colours_gets_none(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    master, terminal = os.openpty()
    with open(master, "rb", buffering=0) as shown, open(terminal, "wb", buffering=0) as file:
        output = RankOutput(0, Outlet(file), Printed())
        output.feed(b"a line\n")
        assert (b"\x1b[" in shown.read(100)) is coloured


def test_a_line_below_the_live_line_of_a_killed_rank() -> None:
    terminal, end = os.openpty()

    def launch() -> int:
        for number in (1, 2):
            os.dup2(end, number)
        with Crew(None) as crew:
            command = ["sh", "-c", "printf 'step 3'; kill -9 $$"]
            crew.start(0, 0, command, dict(os.environ), direct=True)
            while not crew.ended:
                crew.wait(time.monotonic() + 1)
            crew.reap(0)
            crew.say("imece: rank 0 was killed")
        return 0

    with Launcher(call=launch) as launcher:
        assert launcher.wait().status == 0
    assert os.read(terminal, 1000) == b"step 3\r\nimece: rank 0 was killed\r\n"
    os.close(terminal)
    os.close(end)
