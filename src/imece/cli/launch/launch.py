"""`imece launch --ranks 4 script.py ...`: reads the command line and hands it to launch/local.py."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from imece.cli.launch import hosts, slurm
from imece.cli.launch.options import LaunchOptions
from imece.cli.options import parse
from imece.collectives.choice import check_forced
from imece.errors import UserError
from imece.launch.local import launch
from imece.launch.view import Watched
from imece.saying import say
from imece.system.open_files import HOST_0, LAUNCH, OTHER_HOST, check_open_files
from imece.world import BACKEND, BACKENDS, SCHEDULE

PROG = "imece launch"
DESCRIPTION = (
    "Run a script on several ranks of this host: imece launch --ranks 4 [options] script.py [its arguments], "
    "or on each of several hosts with --hosts. "
    "The script finds torchrun's environment variables. What follows it belongs to the script. A rank that "
    "dies is replaced while the others go on, if the script is made for that; of any other script all ranks "
    "start again, if --max-restarts says so. torchrun's options are taken too; the few that ask for what "
    "imece does not do are refused, with the reason. "
    "--slurm: on SLURM's nodes; imece launch --slurm --help tells more."
)
_RANKS = ("--ranks", "-n", "--nproc-per-node")
_WITH_VALUE = (
    *_RANKS, "--grace-s", "--shutdown-timeout", "--min-ranks", "--max-restarts", "--silent-s", "--log-dir",
    *hosts.OURS,
)  # fmt: skip
_DEVICES = ("auto", "gpu", "cpu")

Options = TypeVar("Options", bound=LaunchOptions)


def run(argv: Sequence[str]) -> int:
    """`imece launch ARGV`: the exit status of the ranks (see launch/local.py)."""
    own, command = split(argv, slurm.WITH_VALUE)
    asked, own = slurm.take(own)
    if asked is None:
        options, _, words = read(LaunchOptions, argv, PROG, DESCRIPTION)
        return start(options, words)
    hosts.refuse(own)
    wanted = slurm.read(asked)
    meant = [*wanted.words(own), "--", *command]
    options, command, words = read(LaunchOptions, meant, slurm.PROG, DESCRIPTION)
    if wanted.task is None:
        return slurm.run(wanted, own, command)
    status = start(options, words, slurm.environment())
    slurm.finished(status)
    return status


def read(
    kind: type[Options], argv: Sequence[str], prog: str, description: str, with_value: Sequence[str] = ()
) -> tuple[Options, list[str], list[str]]:
    """Split `argv` into the options, the script with its arguments, and the command that each rank runs.

    UserError if the script or an option is missing or wrong. with_value: options with a value that `kind` has
    and LaunchOptions has not.
    """
    own, command = split(argv, with_value)
    for before, word in zip(["", *own], own, strict=False):
        if not word or (word.startswith("--") and word.endswith("=")):
            raise UserError(f"{word[:-1] or before}: there is nothing after it; is a variable not set?")
    own, needless = hosts.as_ours(_counted(own))
    typed = {word.partition("=")[0].replace("_", "-") for word in own if word.startswith("-")}
    known = {*_WITH_VALUE, *with_value, "-m", "--module", "--no-python", "--standalone"}
    if typed <= known - {*_RANKS}:
        late = [word for word in command[1:] if word.partition("=")[0] in _RANKS]
        order = f" {late[0]} stands behind the script, so it is the script's." if late else ""
        number, *rest = command if command and command[0].isdecimal() else ["2", *command]
        line = command[0] if late else " ".join(rest) or "script.py"
        so_many = "two" if number == "2" else number
        raise UserError(f"how many ranks?{order} For {so_many}: {prog} --ranks {number} {line}")
    options = parse(kind, own, prog, description, operands="SCRIPT [its arguments]")
    if not command:
        raise UserError(f"there is no script to run: {prog} --ranks {options.ranks} script.py")
    words = _program(command, options)
    for why, names in needless.items():  # after all refusals, which must be the only line
        say(f"{', '.join(names)}: not needed, {why}")
    return options, command, words


def start(
    options: LaunchOptions,
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    watch: Callable[[Watched], None] | None = None,
) -> int:
    """Run `words` as the options say. UserError where no rank could begin."""
    check_variables(environ)
    several = OTHER_HOST if options.host_rank else HOST_0
    check_open_files(options.ranks, several if options.hosts > 1 else LAUNCH)
    if options.hosts > 1:
        return hosts.start(options, words, environ, watch)
    return launch(
        words,
        options.limits,
        environ=environ,
        grace_s=options.grace_s,
        silent_s=options.silent_s,
        logs=options.log_dir,
        watch=watch,
    )


def check_variables(environ: Mapping[str, str]) -> None:
    """UserError for a wrong value of one of imece's variables; otherwise every rank would print a
    traceback."""
    asked = environ.get(BACKEND)
    for part in asked.split(",") if asked else ():
        if (name := part.rpartition(":")[2]) not in BACKENDS:
            raise UserError(
                f"{BACKEND}={environ[BACKEND]}: {name!r} is none of {', '.join(BACKENDS)}; one of your own "
                "is named in the script, imece.init(backend=...)"
            )
    if schedule := environ.get(SCHEDULE):
        check_forced(schedule)


def _counted(own: Sequence[str]) -> list[str]:
    """imece's options, with torchrun's ways to count ranks turned into a number. UserError if ranks are
    counted twice."""
    left: list[str] = []
    said: list[tuple[str, str]] = []
    words = iter(own)
    for word in words:
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        if name in _RANKS:
            given = [value] if equals else [*itertools.islice(words, 1)]
            given = [str(_devices(text)) if text in _DEVICES else text for text in given]
            left += [name, *given]
            said.append((name, " ".join(given)))
        else:
            left.append(word)
    if len({number for _, number in said}) > 1:
        both = " and ".join(f"{name} {number}" for name, number in dict.fromkeys(said))
        raise UserError(f"{both}: how many ranks? Say it once")
    return left


def _devices(kind: str) -> int:
    """The number of devices for torchrun's words "gpu", "cpu" and "auto"."""
    from imece.device import usable_gpus  # imports torch, which nothing else here needs

    gpus = usable_gpus() if kind != "cpu" else 0
    if kind == "gpu" and not gpus:
        raise UserError("--nproc-per-node gpu: there is no GPU on this host that torch can use")
    return gpus or os.cpu_count() or 1


def split(argv: Sequence[str], with_value: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(options of imece, script with its arguments): the script's arguments may look like options of
    imece."""
    valued = (*_WITH_VALUE, *hosts.TORCHRUNS, *with_value)
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        index += 2 if word.replace("_", "-") in valued else 1
    return list(argv[:index]), list(argv[index:])


def _program(command: Sequence[str], options: LaunchOptions) -> list[str]:
    """The command that each rank runs. UserError if the script, module or program does not exist."""
    name, *arguments = command
    if any("\0" in word for word in command):
        raise UserError("a NUL byte among the script's arguments")
    if options.module:
        if name.endswith(".py") and os.path.exists(name):
            raise UserError(f"-m {name}: that is a script and no module; leave -m out")
        if not _module_exists(name):
            raise UserError(f"there is no module {name!r} that Python finds from {os.getcwd()}")
        return [sys.executable, "-m", name, *arguments]
    if not options.python:
        found = shutil.which(name)
        if found is None:
            raise UserError(f"there is no program {name!r} on PATH")
        return [found, *arguments]
    if name and os.path.isdir(name) and not _script_exists(Path(name)):
        raise UserError(f"{name!r} is a folder without a __main__.py: name a script in it")
    if not name or not _script_exists(Path(name)):
        raise UserError(f"there is no script {name!r} in {os.getcwd()}")
    if not os.access(name, os.R_OK):
        raise UserError(f"cannot read the script {name!r}: chmod +r it, or start this as its owner")
    return [sys.executable, name, *arguments]


def _script_exists(path: Path) -> bool:
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except OSError as error:
        raise UserError(f"cannot read the script {str(path)!r}: {error.strerror}") from None


def _module_exists(name: str) -> bool:
    """Whether the outermost package exists: looking further in would run the package's code here."""
    top = name.split(".")[0]
    if top == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        return False  # this command is __main__ here, but not in a rank
    if os.path.exists(os.path.join(os.getcwd(), top)) or os.path.exists(
        os.path.join(os.getcwd(), top + ".py")
    ):
        return True
    return importlib.util.find_spec(top) is not None
