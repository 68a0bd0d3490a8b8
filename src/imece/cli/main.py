"""The command `imece`: finds the command's file, and makes of a user's mistake one line and exit status 2.

What takes time to import is imported inside of `main`, where Ctrl-C is an exit status and no traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence

from imece import __version__
from imece.errors import UserError

COMMANDS = {
    "train": "train a language model on text, or go on with a run",
    "sample": "let a trained model write",
    "eval": "the loss of a trained model, on its own held-out text or on other",
    "export": "a trained model in Hugging Face's format",
    "plan": "what fits on which GPUs, how fast it is, and why, before anything is rented",
    "convert": "read a configuration of DeepSpeed's or Accelerate's",
    "launch": "run a script on several ranks, of this host or of several; replace those that die",
    "drill": "the same, and hit random ranks with a signal: does it go on?",
    "bench": "measure steps, memory, saves, recovery, collectives, beside torch and others",
    "doctor": "check this host, and every collective on it",
}

_MODULES = {"eval": "evaluate"}  # whose file has another name: eval is Python's
_RANKS = {"train"}  # what a launcher may start as a rank: `run_as_rank(argv, stop)`


def main(argv: Sequence[str] | None = None) -> int:
    """Run `imece ARGV` and return its exit status; that of a death by SIGPIPE if nobody reads the output, and
    1 if it cannot be written.
    """
    try:
        try:
            _take_all()
            if _is_nowhere():  # where libraries end the process when they are loaded
                return _refuse("the current folder has been removed: go to one that is there")
            return _run(list(sys.argv[1:] if argv is None else argv))
        except UserError as mistake:
            return _refuse(mistake)
        finally:
            sys.stdout.flush()  # here: at the interpreter's end nobody could catch what it raises
    except BrokenPipeError:
        if not _drop_unread_output():
            raise  # another pipe, so a mistake of ours
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or not _output_fails():
            raise  # of a file, so a mistake of ours
        said = f"standard output cannot be written ({error.strerror}): make room, or send it elsewhere"
        print(f"imece: {said}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupted:
        print(f"imece: {str(interrupted) or 'interrupted'}", file=sys.stderr)
        return 130


def _refuse(mistake: object) -> int:
    """Say it in one line; the exit status."""
    from imece.cli.options import one_line

    print(f"imece: {one_line(str(mistake))}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"imece {__version__}")
        return 0
    if name not in COMMANDS:
        from imece.cli.options import nearest

        meant = nearest(name, [*COMMANDS, "--help", "--version"])
        hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}; {hint}")
    return _run_module(_MODULES.get(name, name), rest)


def _run_module(name: str, arguments: list[str]) -> int:
    """A KeyboardInterrupt in the midst of an import leaves half a module behind, or aborts in C++: signals
    wait until all is there. A rank that was launched takes one up as it does later ones, with the others.
    """
    from imece.train.stopping import Stop
    from imece.world import read_world

    launched = name in _RANKS and read_world().launcher != "single"
    stop = Stop(launched)
    with stop.listening():
        try:
            module = importlib.import_module(f"imece.cli.{name}")
        except Exception:
            if stop.signal and not launched:  # a second one, of which a library made this
                raise KeyboardInterrupt from None
            raise
        if launched:
            return int(module.run_as_rank(arguments, stop))
    if stop.signal:
        signal.raise_signal(stop.signal)
    return int(module.run(arguments))


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: imece COMMAND ...", "", *lines, "", "imece COMMAND --help tells more."])


def _take_all() -> None:
    """What is printed to a closed stdout or stderr goes nowhere; what stdout's encoding has not, such as a
    name that is no UTF-8, is escaped there as it is on stderr.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # of a stream on a pipe that does not know where it is
            sys.stdout.reconfigure(errors="backslashreplace")


def _output_fails() -> bool:
    """Whether stdout takes nothing, as on a full disk; then what is still to come there goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        _drop([1])
        return True
    return False


def _is_nowhere() -> bool:
    """Whether the current folder is gone, so that no relative path can be made an absolute one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _drop_unread_output() -> bool:
    """Whether stdout or stderr is a pipe whose reader has gone; what is still to come there goes nowhere."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)  # for no event, so for errors alone
    unread = [fd for fd, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    _drop(unread)
    return bool(unread)


def _drop(fds: Iterable[int]) -> None:
    """Whatever is written there from now on goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)
