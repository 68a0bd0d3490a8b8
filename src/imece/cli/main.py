"""The command `imece`: finds the command's file, and makes of a user's mistake one line and exit status 2."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from imece import __version__
from imece.cli.options import nearest, one_line
from imece.errors import UserError

COMMANDS = {
    "launch": "run a script on several ranks of this host",
    "bench": "measure collectives beside Gloo and others",
    "doctor": "check this host, and every collective on it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `imece ARGV` and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except UserError as mistake:
        print(f"imece: {one_line(str(mistake))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"imece {__version__}")
        return 0
    if name not in COMMANDS:
        meant = nearest(name, [*COMMANDS, "--help", "--version"])
        hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}; {hint}")
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"imece.cli.{name}").run
    return run(rest)


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: imece COMMAND ...", "", *lines, "", "imece COMMAND --help tells more."])
