"""The command `imece`: finds the command's file, and makes of a user's mistake one line and exit status 2."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

from imece import __version__
from imece.cli.options import nearest, one_line
from imece.errors import UserError

COMMANDS = {
    "train": "train a language model on text, or go on with a run",
    "sample": "let a trained model write",
    "eval": "the loss of a trained model, on its own held-out text or on other",
    "export": "a trained model in Hugging Face's format",
    "plan": "what fits on which GPUs, how fast it is, and why, before anything is rented",
    "launch": "run a script on several ranks of this host, or with SLURM",
    "drill": "the same, and hit random ranks with a signal: does it go on?",
    "bench": "measure collectives beside Gloo and others",
    "doctor": "check this host, and every collective on it",
}

_MODULES = {"eval": "evaluate"}  # whose file has another name: eval is Python's


def main(argv: Sequence[str] | None = None) -> int:
    """Run `imece ARGV` and return its exit status; that of a death by SIGPIPE if nobody reads the output."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
        except UserError as mistake:
            print(f"imece: {one_line(str(mistake))}", file=sys.stderr)
            return 2
        finally:
            print(end="", flush=True)  # here: at the interpreter's end nobody could catch what it raises
    except BrokenPipeError:
        if not _drop_unread_output():
            raise  # another pipe, so a mistake of ours
        return 128 + signal.SIGPIPE
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
    module = _MODULES.get(name, name)
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"imece.cli.{module}").run
    return run(rest)


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: imece COMMAND ...", "", *lines, "", "imece COMMAND --help tells more."])


def _drop_unread_output() -> bool:
    """Whether stdout or stderr is a pipe whose reader has gone; what is still to come there goes nowhere."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)  # for no event, so for errors alone
    unread = [fd for fd, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in unread:
        os.dup2(null, fd)
    os.close(null)
    return bool(unread)
