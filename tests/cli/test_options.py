"""From dataclass to command line, and mistakes reported in one line."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
from hypothesis import given
from hypothesis import strategies as st

from imece.cli.options import nearest, one_line, parse
from imece.errors import UserError


@dataclass(frozen=True)
class Options:
    """What to bake."""

    what: tyro.conf.Positional[str] = "bread"
    """The thing."""
    oven_count: int = 2
    """How many ovens. Each is a
    round one."""
    shape: Literal["round", "long"] = "round"
    sizes: tuple[int, ...] = (1, 2)
    json: Path | None = None
    salt: bool = True
    heat: float = 200.0
    glaze: Literal["milk"] | None = None
    crumbs: int | None = None
    cups: Annotated[int, tyro.conf.arg(aliases=["-c", "--bowls"])] = 1

    def __post_init__(self) -> None:
        if self.oven_count < 1:
            raise ValueError(f"--oven-count {self.oven_count}: at least one is needed")


@dataclass(frozen=True)
class Oven:
    heat: float = 200.0


@dataclass(frozen=True)
class Kitchen:
    oven: Oven = Oven()
    """Where it is baked."""


def read(*argv: str) -> Options:
    return parse(Options, argv, "imece bake", "Bakes.")


def test_values() -> None:
    assert read() == Options()
    assert read("cake", "--oven-count", "3", "--sizes", "4", "5", "--json", "x", "--no-salt") == Options(
        "cake", 3, "round", (4, 5), Path("x"), False
    )
    assert read("--oven_count=4").oven_count == 4
    some = read("--glaze", "milk", "--crumbs", "3")
    assert (some.glaze, some.crumbs) == ("milk", 3)
    none = parse(
        Options, ["--glaze", "None", "--crumbs=None", "--json", "None"], "imece bake", "Bakes.", some
    )
    assert (none.glaze, none.crumbs, none.json) == (None, None, None)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        read("--help")
    assert leaving.value.code == 0
    out = capsys.readouterr().out
    assert "imece bake" in out and "Bakes." in out and "How many ovens." in out
    assert "--crumbs INT" in out and "--glaze {milk}" in out and "--json PATH" in out and "{None" not in out
    with pytest.raises(SystemExit):
        parse(Options, ["--help"], "imece bake", "Bakes bread in as many ovens as" + " --oven-count" * 9)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80 and page.count("--oven-count") == 10
    assert "None" not in out, "what is not set has no default to show"
    assert "(default: round)" in out and "(default: 2)" in out
    assert "How many ovens. Each is a round one." in out, "a line of the source is none of the page"


def test_sources_are_read_for_help_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be half the time of each parse, and every rank has one."""

    def read_source(of: object) -> str:
        raise AssertionError(f"the source of {of} is read")

    with monkeypatch.context() as patch:
        patch.setattr("inspect.getsource", read_source)
        assert parse(Kitchen, ["--oven.heat=3"], "imece bake", "Bakes.").oven.heat == 3
    with pytest.raises(SystemExit):
        parse(Kitchen, ["--help"], "imece bake", "Bakes.")
    assert "Where it is baked." in capsys.readouterr().out


def test_help_on_the_narrowest_of_screens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = []
    for columns in ("5", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            read("-h")
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and max(map(len, pages[0].splitlines())) == 40


@pytest.mark.parametrize("columns", ["30", "80", "85", "500"])
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-oven-count", "3"], "there is no option -oven-count; did you mean --oven-count?"),
        (["--oven-coun", "3"], "there is no option --oven-coun; did you mean --oven-count?"),
        (["--oven-count", "x"], "--oven-count: not a whole number: 'x' (see imece bake --help)"),
        (["--oven-count", "0"], "--oven-count 0: at least one is needed"),
        (["a", "b"], "not expected here: b (see imece bake --help)"),
        (["a", "--salt", "yes"], "--salt takes no value: leave yes out"),
        (["--salt="], "--salt takes no value: leave = out"),
        (["a", "--salt", "False"], "--salt takes no value: say --no-salt instead"),
        (["--salt=false"], "--salt takes no value: say --no-salt instead"),
        (["--no-salt=false"], "--no-salt takes no value: say --salt instead"),
        (["a", ""], "not expected here: '' (see imece bake --help)"),
        (["--what", "bread"], "there is no option --what: WHAT stands without one, imece bake WHAT"),
        (["--whta", "bread"], "there is no option --whta (see imece bake --help)"),
        (
            ["a", "--json", "my", "big file"],
            "not expected here: big file; a value of several words stands in quotes: --json '...'",
        ),
        (["--shape", "Rond"], "--shape 'Rond': one of round, long; did you mean round?"),
        (["--no-sald"], "there is no option --no-sald; did you mean --salt?"),
        (["--zzz"], "there is no option --zzz (see imece bake --help)"),
        (["--jam", "1"], "there is no option --jam (see imece bake --help)"),
        (["--ovens-count", "1"], "there is no option --ovens-count; did you mean --oven-count?"),
        (["--oven", "1"], "there is no option --oven; did you mean --oven-count?"),
        (["--heat", "hot"], "--heat: not a number: 'hot' (see imece bake --help)"),
        (["--heat"], "--heat has no value: say one after it"),
        (["--heat", "-x"], "--heat has no value: one that begins with - stands behind =, --heat=-x"),
        (["--shape", "rond"], "--shape 'rond': one of round, long; did you mean round?"),
        (["--glaze", "egg"], "--glaze 'egg': one of milk"),
        (
            ["--sizes", "4", "x"],
            "--sizes: not numbers with spaces between them: '4', 'x' (see imece bake --help)",
        ),
        (["--crumbs", "x"], "--crumbs: not a whole number: 'x' (see imece bake --help)"),
        (["-c", "x"], "-c: not a whole number: 'x' (see imece bake --help)"),
        (["-cx", "2"], "there is no option -cx; did you mean -c?"),
        (["-cup=2"], "there is no option -cup; did you mean -c?"),
        (["--bowls=x"], "--bowls: not a whole number: 'x' (see imece bake --help)"),
        (["--cups"], "--cups has no value: say one after it"),
    ],
)
def test_mistakes(argv: list[str], message: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UserError) as caught:
        read(*argv)
    assert str(caught.value) == message


def test_a_signal_amid_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_args: object, **_options: object) -> None:
        raise SystemExit(143)  # what the handler of SIGTERM does (launch/signals.py)

    monkeypatch.setattr("tyro.cli", leave)
    with pytest.raises(SystemExit, match="143"):
        read("--salt")


def test_a_number_that_a_check_cannot_hold() -> None:
    @dataclass(frozen=True)
    class Heat:
        degrees: int = 200

        def __post_init__(self) -> None:
            assert float(self.degrees) > 0

    with pytest.raises(UserError, match=r"^int too large to convert to float"):
        parse(Heat, ["--degrees", str(10**310)], "imece bake", "Bakes.")


def test_choices_are_listed() -> None:
    with pytest.raises(UserError, match=r"'square': one of round, long$"):
        read("--shape", "square")


@given(
    st.lists(
        st.sampled_from(["--oven-count", "--sizes", "--json", "--", "-x", "1", "a", "\n", "\0", "=", "é"])
    )
)
def test_options_or_one_line(argv: list[str]) -> None:
    try:
        read(*argv)
    except UserError as error:
        assert str(error).isprintable() and str(error)


@given(st.text())
def test_one_line_is_printable(text: str) -> None:
    assert one_line(text).isprintable()
    assert one_line(one_line(text)) == one_line(text)


@dataclass(frozen=True)
class Both:
    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A folder."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Another one, of which a lot can be said, more than fits into a single line of eighty columns."""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "RUN and DIR are missing (see imece bake --help)"),
        (["a"], "DIR is missing (see imece bake --help)"),
        (["--run", "a", "b"], "there is no option --run: RUN stands without one, imece bake RUN"),
    ],
)
def test_what_is_missing_is_named(argv: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Both, argv, "imece bake", "Bakes.")
    assert str(caught.value) == said


@dataclass(frozen=True)
class Asked:
    ranks: Annotated[int, tyro.conf.arg(aliases=["--nproc-per-node"])]
    """It has no default."""


@pytest.mark.parametrize(
    ("typed", "meant"), [("--nproc", "--nproc-per-node"), ("--rank", "--ranks"), ("--rank=2", "--ranks")]
)
def test_an_option_mistyped_is_not_called_missing(typed: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(Asked, [typed, "2"], "imece bake", "Bakes.")
    name = typed.partition("=")[0]
    assert str(caught.value) == f"there is no option {name}; did you mean {meant}?"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_help_has_colours_unless_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        out = Terminal()
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(SystemExit):
            parse(Options, ["--help"], "imece bake", "Bakes.")
        shown.append(out.getvalue())
    coloured, plain = shown
    assert "\x1b[" in coloured and "\x1b" not in plain and "╭─" in plain and "How many ovens." in plain


def test_nearest() -> None:
    with pytest.raises(UserError, match=r"^there is no option --slise; did you mean --slice\?"):
        parse(Options, ["--slise"], "imece bake", "Bakes.", others=["--slice"])
    assert nearest("--rank", ["--ranks", "--json"]) == "--ranks"
    assert nearest("zzz", ["--ranks"]) is None
