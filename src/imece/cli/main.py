"""The command `imece`: runs the command's file, and turns a user's mistake into one line and exit status 2.

Slow imports happen inside `main`, where Ctrl-C gives an exit status instead of a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from imece import __version__
from imece.errors import UserError
from imece.saying import say

COMMANDS = {
    "train": "train a language model on text, or go on with a run",
    "sample": "let a trained model write, or one in Hugging Face's format",
    "eval": "the loss of either, on the run's own held-out text or on other",
    "export": "write a model in Hugging Face's format, or its adapters in peft's",
    "plan": "what fits on which GPUs and how fast, before anything is rented",
    "convert": "read a configuration of DeepSpeed's or Accelerate's",
    "launch": "run a script on ranks of one host or more; replace those that die",
    "drill": "the same, and hit random ranks with a signal: does it go on?",
    "bench": "measure steps, memory, recovery, collectives, beside torch and others",
    "doctor": "check this host, and every collective on it",
}

# Commands whose file has another name (eval is Python's), or lies in a folder.
_MODULES = {"eval": "evaluate", "drill": "launch.drill"} | {
    name: f"{name}.{name}" for name in ("doctor", "export", "launch", "plan")
}
_RANKS = {"train"}  # commands that a launcher may start as a rank: `run_as_rank(argv, stop)`
_NO_ADDRESSES = re.compile("failed to map segment|annot allocate memory")  # the dynamic loader's words
_LETTERS_LOST = re.compile("[\udc80-\udcff]")  # bytes that Python could not decode


def main(argv: Sequence[str] | None = None) -> int:
    """Run `imece ARGV` and return its exit status: 1 if its output cannot be written, that of a death by
    SIGPIPE if nobody reads it."""
    try:
        try:
            _take_all()
            if _is_nowhere():  # libraries would end the process while they are imported
                return _refuse("the current folder has been removed: go to one that is there")
            arguments = list(sys.argv[1:] if argv is None else argv)
            if sys.getfilesystemencoding() != "utf-8" and any(map(_LETTERS_LOST.search, arguments)):
                return _refuse("an argument has letters that this locale lacks: set PYTHONUTF8=1")
            return _run(arguments)
        except UserError as mistake:
            return _refuse(mistake)
        finally:
            sys.stdout.flush()  # here, because at the interpreter's end nobody could catch an error
    except BrokenPipeError:
        if not _drop_unread_output():
            raise  # some other pipe, so a mistake of ours
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None:
            raise  # some file, so a mistake of ours
        from imece.writing import NO_TEMPORARY, temporary_files

        if not temporary_files():
            return _refuse(NO_TEMPORARY)
        if not _output_fails():
            raise
        say(f"standard output cannot be written ({error.strerror}): make room, or send it elsewhere")
        return 1
    except KeyboardInterrupt as interrupted:
        say(str(interrupted) or "interrupted")
        return 130


def _refuse(mistake: object) -> int:
    """Print the mistake in one line and return the exit status."""
    from imece.cli.options import one_line

    say(one_line(str(mistake)))
    return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("-V", "--version"):
        print(f"imece {__version__}")
        return 0
    if name not in (*COMMANDS, "completion"):
        from imece.cli.options import nearest

        meant = nearest(name, [*COMMANDS, "--help", "--version"])
        hint = f"did you mean {meant}?" if meant else f"the commands are {', '.join(COMMANDS)}"
        raise UserError(f"there is no command {name!r}; {hint}")
    return _run_module(_MODULES.get(name, name), rest)


def _run_module(name: str, arguments: list[str]) -> int:
    """Run a command's file. A rank that was launched handles a signal that comes amid its imports later,
    together with other ranks."""
    from imece.launch.signals import signals_as_exit
    from imece.launchers import read_world
    from imece.train.watch.stopping import Stop

    if name in _RANKS and read_world().launcher != "single":
        stop = Stop()
        with stop.listening():
            return int(importlib.import_module(f"imece.cli.{name}").run_as_rank(arguments, stop))
    with _limits_named():
        with _leaving_at_once():
            module = importlib.import_module(f"imece.cli.{name}")
        with signals_as_exit():  # what lies in a temporary folder, or half written, goes as after Ctrl-C
            return int(module.run(arguments))


@contextlib.contextmanager
def _limits_named() -> Iterator[None]:
    """While open, a thread or a library that this process may not have is a UserError that names the limit.

    Not around a rank: its traceback says where it was, and its launcher names the limit."""
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        from imece.store import NO_MORE

        raise UserError(NO_MORE) from None
    except ImportError as error:
        if not _NO_ADDRESSES.search(str(error)):
            raise
        raise UserError(f"{error}: that is more memory than this process may have: raise ulimit -v") from None


@contextlib.contextmanager
def _leaving_at_once() -> Iterator[None]:
    """While open, Ctrl-C ends the process where it is. Nothing was begun that would have to be cleared up,
    and a KeyboardInterrupt would leave half a module, or abort in C++."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        os.write(2, b"imece: interrupted\n")
        os._exit(128 + number)

    before, thread = signal.getsignal(signal.SIGINT), threading.current_thread()
    if before is not signal.default_int_handler or thread is not threading.main_thread():
        yield  # it was started to ignore Ctrl-C, or somebody else handles it
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _usage() -> str:
    lines = [f"  {name:<8} {text}" for name, text in COMMANDS.items()]
    more = "imece COMMAND --help tells more, imece --version which one this is."
    bash = "imece completion prints a script by which bash completes commands and options."
    return "\n".join(["usage: imece COMMAND ...", "", *lines, "", more, bash])


def _take_all() -> None:
    """Make printing never fail: a closed stdout or stderr drops what is printed, and stdout escapes what its
    encoding lacks (a name that is not UTF-8, say), as stderr does.

    A closed descriptor is opened: a file or a pipe that got its number would be what ranks print into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # a stream on a pipe, which has no position
            sys.stdout.reconfigure(errors="backslashreplace")


def _output_fails() -> bool:
    """Whether stdout cannot be written, as on a full disk; if so, drop the rest of the output."""
    try:
        print(flush=True)
    except OSError:
        _drop([1])
        return True
    return False


def _is_nowhere() -> bool:
    """Whether the current folder is gone, so that no relative path can be made absolute."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _drop_unread_output() -> bool:
    """Whether stdout or stderr is a pipe whose reader is gone; if so, drop the rest of the output."""
    poll = select.poll()
    for fd in (1, 2):
        poll.register(fd, 0)  # no event asked for, so only errors
    unread = [fd for fd, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    _drop(unread)
    return bool(unread)


def _drop(fds: Iterable[int]) -> None:
    """Send whatever is written there from now on to nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)
