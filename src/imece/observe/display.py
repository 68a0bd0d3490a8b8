"""What a run prints: a header before it starts, one live line, and the results.

On a terminal the line is redrawn in place; elsewhere a plain line is printed now and then. No thread draws:
the caller of `step` does, a few times a second, so that drawing costs no training time unseen.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from imece.observe.progress import Progress
from imece.observe.visible import visible
from imece.saying import say

_DRAW_S = 0.125  # between two drawings of the line on a terminal
_PLAIN_S = 10.0  # between two plain lines, unless a tenth of the run lies between them
_PLAIN_WIDTH = 100  # columns of a sample without a terminal
_LEAST_TEXT = 20  # columns beside a label, even on a narrow terminal


class Display:
    """A context manager that leaves the terminal as it was.

    Text is printed as it is, never as markup, with control characters made visible. If the output fails (a
    closed pipe, a full disk, a terminal that is gone), training goes on.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """console: where to print; None is stdout. clock: seconds since any instant."""
        self._console = console or _Stdout()
        self._clock = clock
        self._total_steps = total_steps
        self._draws = self._console.is_interactive  # false for a dumb terminal
        self._blocks = "#-" if self._console.options.ascii_only else "█░"
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._told = False  # that the output fails
        self._next_s = 0.0  # when the line is due again
        self._next_step = 0  # the step from which the line is due again without a terminal

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print what is about to happen, a label and its text in each row; a label alone is a heading."""
        self._print_rows(rows, _indent(rows))
        self._print("")

    def start(self, step: int) -> None:
        """Training begins, or goes on, with `step` steps done."""
        now = self._clock()
        self._progress = Progress(self._total_steps, step)
        self._next_step = step
        self._next_s = now
        if self._draws:
            self._draw(self._progress)

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done. record: as in metrics.jsonl. Costs microseconds unless the line is due."""
        assert self._progress is not None, "step() before start()"
        self._progress.add(record, self._clock())
        if self._draws:
            if self._is_due():
                self._draw(self._progress)
        elif self._is_due() or self._progress.step >= min(self._next_step, self._total_steps):
            tenth = max(1, self._total_steps // 10)
            self._next_step = (self._progress.step // tenth + 1) * tenth
            self._next_s = self._clock() + _PLAIN_S
            self._print(self._progress.line())

    def under_way(self, text: str) -> None:
        """Say that something slow has begun that is not a step; only where no terminal shows progress."""
        if not self._draws:
            self._print(text)

    def note(self, text: str) -> None:
        """Print a message above the live line, which stays."""
        self._print(text)

    def done(
        self,
        rows: Sequence[tuple[str, str]],
        sample: str | None,
        next_commands: Sequence[tuple[str, str]],
    ) -> None:
        """Print the results: labelled rows, a text that the model wrote, and (label, command)s to go on with.

        Rows are wrapped and lines of the sample are cut, but commands stay whole so that they can be copied.
        """
        self.close()
        self._print("")
        indent = _indent([*rows, ("sample", "text"), *next_commands])
        self._print_rows(rows, indent)
        if sample is not None:
            self._print(Text("sample", "bold"))
            for line in visible(sample, self._console.encoding).rstrip().split("\n"):
                self._print(self._cut((" " * indent + line.expandtabs()).rstrip()))
        for label, command in next_commands:
            self._print(Text.assemble((f"{label:<{indent}}", "bold"), self._text(command)))

    def close(self) -> None:
        """Leave the live line as the last step drew it; later output comes below."""
        if self._live is not None:
            if self._progress is not None:
                self._draw(self._progress)
            with self._whatever_the_output_says():
                self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _width(self) -> int:
        # Some terminals already wrap a line that is exactly as wide as they are.
        return self._console.width - 1 if self._console.is_terminal else _PLAIN_WIDTH

    def _is_due(self) -> bool:
        return self._clock() >= self._next_s

    def _draw(self, progress: Progress) -> None:
        line = progress.drawn(self._width, self._blocks)
        self._next_s = self._clock() + _DRAW_S
        with self._whatever_the_output_says():
            if self._live is None:
                # Rich prints others' output above the line, if it goes to the same terminal.
                self._live = Live(
                    line,
                    console=self._console,
                    auto_refresh=False,
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
                self._console.show_cursor(True)  # a killed process could not show it again
            self._live.update(line, refresh=True)

    def _print_rows(self, rows: Sequence[tuple[str, str]], indent: int) -> None:
        for label, text in rows:
            lines = [self._text(text)]
            if self._draws:
                lines = list(lines[0].wrap(self._console, max(self._width - indent, _LEAST_TEXT)))
            for number, line in enumerate(lines or [Text()]):
                line.rstrip()
                self._print(Text.assemble((f"{'' if number else label:<{indent}}", "bold"), line))

    def _text(self, text: str) -> Text:
        return Text(visible(text, self._console.encoding))

    def _cut(self, line: str) -> Text:
        text = Text(line)
        text.truncate(self._width, overflow="crop" if self._console.options.ascii_only else "ellipsis")
        return text

    def _print(self, text: str | Text) -> None:
        """Print above the live line, if there is one; never wrapped, so that the text can be copied."""
        with self._whatever_the_output_says():
            self._console.print(self._text(text) if isinstance(text, str) else text, soft_wrap=True)

    @contextlib.contextmanager
    def _whatever_the_output_says(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the terminal may take the next line; training matters more than this one
            if not self._told:
                self._told = True
                with contextlib.suppress(OSError):
                    say(f"standard output cannot be written ({error.strerror}): training goes on")


def _indent(rows: Sequence[tuple[str, str]]) -> int:
    """The column where texts begin; a label without text may be longer."""
    return 2 + max((len(label) for label, text in rows if text), default=0)


class _Stdout(Console):
    def __init__(self) -> None:
        # FORCE_COLOR asks for colours in a file, but a line redrawn in place is of no use there.
        super().__init__(force_interactive=None if sys.stdout.isatty() else False)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # from now on nothing is printed, not even at the interpreter's end
        except SystemExit:
            return  # nobody reads, but training goes on
