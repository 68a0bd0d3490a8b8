"""What a person sees of a run: what is about to happen, one live line, and what came of it.

On a terminal the line is drawn over itself; elsewhere it becomes a plain line now and then. No thread draws:
who calls `step` does, a few times a second, so that nothing takes time from the training unseen.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from imece.observe.progress import Progress
from imece.observe.units import duration, gigabytes, si
from imece.observe.visible import visible

__all__ = ["Display", "duration", "gigabytes", "si"]

_DRAW_S = 0.125  # between two drawings of the line on a terminal
_PLAIN_S = 10.0  # between two plain lines, if no tenth of the run lies between them
_PLAIN_WIDTH = 100  # of a sample, where no terminal says how wide it is
_LEAST_TEXT = 20  # columns beside a label, on however narrow a terminal


class Display:
    """A context manager; leaving it gives the terminal back as it was.

    Text is printed as it is, never as markup; control characters in it become visible. An output that takes
    nothing any more, a closed pipe, a full disk or a terminal that is gone, ends nothing.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """console: where to; None is stdout. clock: seconds from any start."""
        self._console = console or _Stdout()
        self._clock = clock
        self._total_steps = total_steps
        self._draws = self._console.is_interactive  # a terminal, and not a dumb one
        self._blocks = "#-" if self._console.options.ascii_only else "█░"
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._next_s = 0.0  # when the line is due again
        self._next_step = 0  # and from which step on, if there is no terminal

    def header(self, rows: Sequence[tuple[str, str]]) -> None:
        """What is about to happen: a label and its text a row; a label alone is a heading."""
        self._print_rows(rows, _indent(rows))
        self._print("")

    def start(self, step: int) -> None:
        """Training begins, or goes on, with so many steps done."""
        now = self._clock()
        self._progress = Progress(self._total_steps, step)
        self._next_step = step
        self._next_s = now
        if self._draws:
            self._draw(self._progress)

    def step(self, record: Mapping[str, Any]) -> None:
        """A step is done: its record, as metrics.jsonl has it. Costs microseconds unless the line is due."""
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
        """What takes a while and is no step: said where no terminal shows that something goes on."""
        if not self._draws:
            self._print(text)

    def note(self, text: str) -> None:
        """Something to be told in between: above the live line, which stays as it is."""
        self._print(text)

    def done(
        self,
        rows: Sequence[tuple[str, str]],
        sample: str | None,
        next_commands: Sequence[tuple[str, str]],
    ) -> None:
        """What came of it: labelled rows, a text of the model's own, and (label, command)s to go on with.

        Rows are wrapped, lines of the sample are cut, and commands are left whole so that they can be copied.
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
        """The live line stays as the last step left it; what is printed from now on comes below."""
        if self._live is not None:
            if self._progress is not None:
                self._draw(self._progress)
            with self._whatever_the_output_says():
                self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _width(self) -> int:
        # Some terminals wrap a line that is exactly as wide as they are.
        return self._console.width - 1 if self._console.is_terminal else _PLAIN_WIDTH

    def _is_due(self) -> bool:
        return self._clock() >= self._next_s

    def _draw(self, progress: Progress) -> None:
        line = progress.drawn(self._width, self._blocks)
        self._next_s = self._clock() + _DRAW_S
        with self._whatever_the_output_says():
            if self._live is None:
                # What others print meanwhile comes above the line, if it is meant for the same terminal.
                self._live = Live(
                    line,
                    console=self._console,
                    auto_refresh=False,
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
                self._console.show_cursor(True)  # a killed process could not give it back
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
        """Above the live line, if there is one; never wrapped, or it could not be copied."""
        with self._whatever_the_output_says():
            self._console.print(self._text(text) if isinstance(text, str) else text, soft_wrap=True)

    @contextlib.contextmanager
    def _whatever_the_output_says(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # it may take the next line again; the training is worth more than this one
            return


def _indent(rows: Sequence[tuple[str, str]]) -> int:
    """Where the texts begin; a label without one may be as long as it likes."""
    return 2 + max((len(label) for label, text in rows if text), default=0)


class _Stdout(Console):
    def __init__(self) -> None:
        # FORCE_COLOR asks for colours in a file; a line drawn over itself would be of no use there.
        super().__init__(force_interactive=None if sys.stdout.isatty() else False)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()  # nothing is printed from now on, not even by the interpreter's end
        except SystemExit:
            return  # the reader has gone, which is no reason for the training to go too
