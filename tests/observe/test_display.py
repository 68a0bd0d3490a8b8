"""The live line on terminals of any width, plain lines elsewhere, and text that could break either."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from imece.observe.display import Display
from imece.observe.units import duration, gigabytes, megabytes, milliseconds, si
from imece.observe.visible import visible
from tests.clock import Clock

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def console(
    width: int = 120, terminal: bool = True, term: str = "xterm-256color", no_color: str = ""
) -> Console:
    """One that writes to a string, whatever the environment of the tests is like."""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=terminal,
        color_system="256" if terminal and term != "dumb" else None,
        _environ={"TERM": term, "NO_COLOR": no_color},
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`, colours left out."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.", output, re.DOTALL):
        if token == "\n":
            lines.append("")
            column = 0
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            lines[-1] = ""
        elif not token.startswith("\x1b"):
            lines[-1] = lines[-1][:column].ljust(column) + token + lines[-1][column + 1 :]
            column += 1
        else:
            assert re.fullmatch(r"\x1b\[([0-9;]*m|\?25[lh])", token), f"{token!r}: not known to this test"
    return [line.rstrip() for line in lines]


def record(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0,
        "tokens": 4096,
        "step_s": 0.25,
        "exposed_s": 0.005,
        "memory_bytes": 304_000_000,
        **more,
    }


def run(display: Display, clock: Clock, steps: range, step_s: float = 0.25, **more: Any) -> None:
    for step in steps:
        clock.sleep(step_s)
        display.step(record(step, step_s=step_s, **more))


@pytest.mark.parametrize(
    ("function", "number", "text"),
    [
        (si, 812, "812"),
        (si, 999.6, "1.0k"),
        (si, 12_437, "12.4k"),
        (si, 99_950, "100k"),
        (si, 999_500, "1.0M"),
        (si, 6.8e6, "6.8M"),
        (si, 8.03e9, "8.0B"),
        (si, 0, "0"),
        (duration, 0.4, "0:00"),
        (duration, 91, "1:31"),
        (duration, 3599.6, "1:00:00"),
        (duration, 200_000, "2 d 7:33 h"),
        (duration, float("inf"), "?"),
        (gigabytes, 304_000_000, "0.30 GB"),
        (gigabytes, 9.996e9, "10.0 GB"),
        (gigabytes, 139e9, "139 GB"),
        (megabytes, 11_349_123, "11.3 MB"),
        (megabytes, 999_950, "1.0 MB"),
        (megabytes, 999_949, "999.9 kB"),
        (megabytes, 37_412, "37.4 kB"),
        (megabytes, 999, "999 bytes"),
        (megabytes, 1, "1 byte"),
        (milliseconds, 0.1234, "123 ms"),
        (milliseconds, 0.00123, "1.23 ms"),
        (milliseconds, 12.34, "12.3 s"),
    ],
)
def test_figures_have_units(function: Callable[[float], str], number: float, text: str) -> None:
    assert function(number) == text


def test_nothing_invisible_is_left() -> None:
    assert visible("a\tb\n\x1b[2Jc\rd\x00\u202e\ue000é \ud800") == (
        "a\tb\n\\x1b[2Jc\\rd\\x00\\u202e\\ue000é \\ud800"
    )
    assert visible("a\u00a0b\u3000c") == "a\u00a0b\u3000c", "spaces of other scripts are to be seen"
    assert visible("é█\x85", "ascii") == "\\xe9\\u2588\\x85"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, "step   3/800  BAR  loss 3.000  val 3.500  16.4k tokens/s  exposed 2.0 %  0.30 GB  3:19 left"),
        (100, "step   3/800  BAR  loss 3.000  val 3.500  16.4k tokens/s  exposed 2.0 %  0.30 GB  3:19 left"),
        (80, "step   3/800  BAR  loss 3.000  val 3.500  16.4k tokens/s  0.30 GB  3:19 left"),
        (60, "step   3/800  BAR  loss 3.000  16.4k tokens/s  3:19 left"),
        (40, "step   3/800  loss 3.000  3:19 left"),
        (9, "step   3"),
    ],
)
def test_a_narrow_terminal_has_fewer_fields_on_one_line(width: int, shown: str) -> None:
    out, clock = console(width), Clock()
    with Display(800, console=out, clock=clock.monotonic) as display:
        display.start(0)
        run(display, clock, range(1, 4), val_loss=3.5)
    *_, line, empty = screen(written(out))
    assert empty == ""
    assert len(line) < width
    assert re.sub(r"[█░]{5,24}", "BAR", line) == shown


@pytest.mark.parametrize("width", range(40, 121, 8))
def test_fields_do_not_come_and_go_with_a_digit(width: int) -> None:
    out, clock = console(width), Clock()
    display = Display(800, console=out, clock=clock.monotonic)
    display.start(0)
    run(display, clock, range(1, 3), mfu=0.1, val_loss=3.0)
    shown = set()
    for step, exposed_s in enumerate((0.02, 0.1, 0.02, 0.001), start=3):
        run(display, clock, range(step, step + 1), exposed_s=exposed_s, step_s=0.5, mfu=0.1)
        shown.add(re.sub(r"[\d. ]+", " ", screen(written(out))[-1].replace("█", "░")))
    assert len(shown) == 1
    display.close()


def test_steps_between_two_drawings_write_nothing() -> None:
    out, clock = console(), Clock()
    display = Display(800, console=out, clock=clock.monotonic)
    display.start(0)
    before = written(out)
    run(display, clock, range(1, 100), step_s=0.001)
    assert written(out) == before
    run(display, clock, range(100, 150), step_s=0.001)
    assert written(out).count("step") == before.count("step") + 1
    display.close()


def test_the_line_shows_recent_means_and_the_time_that_is_left() -> None:
    out, clock = console(), Clock()
    display = Display(1000, console=out, clock=clock.monotonic)
    display.start(0)
    run(display, clock, range(1, 2), step_s=50.0, loss=9.0)  # the first step: compiled, not like the others
    run(display, clock, range(2, 61), step_s=0.5, loss=2.0)
    run(display, clock, range(61, 101), step_s=0.5, loss=4.0)
    display.step(record(101, loss=None, skipped="a NaN on rank 1", mfu=0.41))
    line = screen(written(out))[-1]
    assert "loss 3.99" in line or "loss 4.00" in line
    assert "7:30 left" in line or "7:29 left" in line
    assert "8.2k tokens/s" in line
    display.close()
    last = screen(written(out))[-2]
    assert "1 skipped" in last and "mfu 41 %" in last


def test_a_line_of_one_rank_says_nothing_of_communication() -> None:
    out, clock = console(), Clock()
    with Display(10, console=out, clock=clock.monotonic) as display:
        display.start(0)
        run(display, clock, range(1, 3), exposed_s=0.0)
    assert "exposed" not in written(out)


def test_notes_come_above_the_line() -> None:
    out, clock = console(), Clock()
    with Display(800, console=out, clock=clock.monotonic) as display:
        display.note("before the start")
        display.start(0)
        run(display, clock, range(1, 3))
        display.note("saved [bold]step[/bold] 2 :smile:")
        run(display, clock, range(3, 5))
        display.note("a name with\x1b[2J an escape\nand\ta second line")
        run(display, clock, range(5, 6))
    *notes, line, empty = screen(written(out))
    assert notes == [
        "before the start",
        "saved [bold]step[/bold] 2 :smile:",
        "a name with\\x1b[2J an escape",
        "and     a second line",
    ]
    assert line.startswith("step   5/800")
    assert empty == ""


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    out, clock = console(40, terminal=False), Clock()
    with Display(100, console=out, clock=clock.monotonic) as display:
        display.header([("imece train", ""), ("run", "runs/small " + 20 * "and so on "), ("data", "text")])
        display.start(0)
        run(display, clock, range(1, 51), step_s=0.2)
        run(display, clock, range(51, 61), step_s=6.0)
        run(display, clock, range(61, 101), step_s=0.2)
    text = written(out)
    assert not re.search(r"[^\n -~]", text)
    lines = text.splitlines()
    assert lines[:3] == ["imece train", "run   runs/small " + "and so on " * 19 + "and so on", "data  text"]
    assert lines[3] == ""
    steps = [int(re.match(r"step (\d+)/100  loss 3\.000 ", line)[1]) for line in lines[4:]]  # type: ignore[index]
    assert steps == [1, 10, 20, 30, 40, 50, 52, 54, 56, 58, 60, 70, 80, 90, 100]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_under_way_is_said_where_nothing_shows_it(terminal: bool) -> None:
    out = console(terminal=terminal)
    Display(10, console=out).under_way("starting 2 ranks")
    assert written(out) == ("" if terminal else "starting 2 ranks\n")


def test_a_run_that_goes_on_counts_from_where_it_is() -> None:
    out, clock = console(terminal=False), Clock()
    with Display(105, console=out, clock=clock.monotonic) as display:
        display.start(95)
        run(display, clock, range(96, 106))
    assert [line.split()[1] for line in written(out).splitlines()] == ["96/105", "100/105", "105/105"]


def test_no_color_and_dumb_terminals_are_respected() -> None:
    for term, no_color in (("xterm-256color", "1"), ("dumb", "")):
        out, clock = console(term=term, no_color=no_color), Clock()
        with Display(10, console=out, clock=clock.monotonic) as display:
            display.start(0)
            run(display, clock, range(1, 11), val_loss=3.0, skipped="")
            display.done([("done", "10 steps")], None, [])
        codes = set(ESCAPES.findall(written(out)))
        assert not {code for code in codes if re.search(r"\[(\d;)?[349]\d", code)}, "a colour"
        assert bool(codes) == (term != "dumb")
        assert "step 10/10" in written(out)
        assert ("█" in written(out)) == (term != "dumb")


def test_the_end_says_what_came_of_it() -> None:
    out = console(40)
    command = 'imece sample runs/2026-11-21-small --prompt "class Queue"'
    sample = "def f():\n\tx = '\x1b[31m'\n    " + "long " * 20 + "\n\n[red]end"
    with Display(10, console=out) as display:
        display.done(
            [("done", "10 steps"), ("", "validation 2.61 nats a token = 1.08 bits a byte")],
            sample,
            [("next", command), ("open", "runs/report.html")],
        )
    lines = screen(written(out))
    assert lines == [
        "",
        "done    10 steps",
        "        validation 2.61 nats a token =",
        "        1.08 bits a byte",
        "sample",
        "        def f():",
        "                x = '\\x1b[31m'",
        "            long long long long long l…",
        "",
        "        [red]end",
        f"next    {command}",  # a terminal breaks it, and it can still be copied whole
        "open    runs/report.html",
        "",
    ]


def test_an_output_without_these_characters_gets_others() -> None:
    raw = io.BytesIO()
    out = Console(
        file=io.TextIOWrapper(raw, "ascii"), force_terminal=True, width=60, _environ={"TERM": "xterm"}
    )
    with Display(10, console=out) as display:
        display.start(5)
        display.note("é")
        display.done([], "█" * 30, [])
    text = raw.getvalue().decode("ascii")
    assert "#" in text and "-" in text and "\\xe9" in text and "\\u2588\\u25" in text


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_full_disk_ends_nothing(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """And is said once."""
    out = Console(file=Full(), force_terminal=terminal, _environ={"TERM": "xterm"})
    with pytest.raises(OSError):
        out.print("this is what the display meets")
    with Display(10, console=out) as display:
        run_all(display)
    said = "imece: standard output cannot be written (No space left on device): training goes on\n"
    assert capsys.readouterr().err.count(said) == 1


def run_all(display: Display) -> None:
    """A short run, with what others print in the middle of it."""
    display.header([("run", "x")])
    display.start(0)
    for step in range(1, 1001):
        display.step(record(step, exposed_s=0.0, memory_bytes=0))
        if step == 500:
            print("printed")
            print("to stderr", file=sys.stderr)
    display.done([("done", "all")], None, [])


def test_on_a_real_terminal_what_others_print_comes_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = os.openpty()
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("TERM", "xterm-256color")
    with open(child, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        with Display(1000) as display:
            run_all(display)
        print("after")
        assert sys.stdout is terminal and sys.stderr is terminal
    output = b""
    try:
        while piece := os.read(parent, 65536):
            output += piece
    except OSError:  # so Linux says that the other side is closed
        os.close(parent)
    lines = screen(output.decode())
    assert lines[:4] == ["run  x", "", "printed", "to stderr"]
    assert re.fullmatch(r"step 1000/1000  █+  loss 3\.000  16\.4k tokens/s", lines[4])
    assert max(map(len, lines)) < 70
    assert lines[5:] == ["", "done    all", "after", ""]
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is seen again"


def test_a_reader_that_leaves_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with Display(1000) as display:
            display.note("read")
            assert os.read(reading, 100) == b"read\n"
            os.close(reading)
            run_all(display)
