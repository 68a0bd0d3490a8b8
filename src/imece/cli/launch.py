"""`imece launch --ranks 4 script.py ...`: the command line of launch/local.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from imece.cli.options import parse
from imece.errors import UserError
from imece.launch.local import launch
from imece.launch.processes import MAX_RANKS

PROG = "imece launch"
DESCRIPTION = (
    "Run a script on several ranks of this host: imece launch --ranks 4 [options] script.py [its arguments]. "
    "The script finds torchrun's environment variables. What follows it belongs to the script."
)
_MAX_GRACE_S = 86_400.0
_WITH_VALUE = ("--ranks", "--nproc-per-node", "--grace-s")


@dataclass(frozen=True)
class LaunchOptions:
    """What stands before the script."""

    ranks: Annotated[int, tyro.conf.arg(aliases=["--nproc-per-node"])]
    """How many ranks to start."""
    module: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(aliases=["-m"])] = False
    """The script is a module's name, as for python -m."""
    python: bool = True
    """Run the script with Python; --no-python: it is a program of its own."""
    standalone: tyro.conf.FlagCreatePairsOff[bool] = False
    """Changes nothing: taken for torchrun's sake."""
    grace_s: float = 30.0
    """Seconds between a signal that is passed on to the ranks and SIGKILL."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"--ranks {self.ranks}: from 1 to {MAX_RANKS} ranks can run on one host")
        if not 0 <= self.grace_s <= _MAX_GRACE_S:
            raise ValueError(f"--grace-s {self.grace_s}: from 0 to {_MAX_GRACE_S:.0f} seconds are possible")
        if self.module and not self.python:
            raise ValueError("--module and --no-python exclude each other")


def run(argv: Sequence[str]) -> int:
    """`imece launch ARGV`: the exit status of the ranks (see launch/local.py)."""
    own, command = split(argv)
    if all(word.startswith(("-m", "--module", "--no-python", "--standalone")) for word in own):
        raise UserError(f"how many ranks? For two: {PROG} --ranks 2 {' '.join(command) or 'script.py'}")
    options = parse(LaunchOptions, own, PROG, DESCRIPTION)
    if not command:
        raise UserError(f"there is no script to run: {PROG} --ranks {options.ranks} script.py")
    return launch(program(command, options), options.ranks, grace_s=options.grace_s)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the script with its own arguments, which may look like ours."""
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        index += 2 if word.replace("_", "-") in _WITH_VALUE else 1
    return list(argv[:index]), list(argv[index:])


def program(command: Sequence[str], options: LaunchOptions) -> list[str]:
    """The command of each rank; UserError if there is no such script, module or program."""
    name, *arguments = command
    if any("\0" in word for word in command):
        raise UserError("a NUL byte among the script's arguments")
    if options.module:
        if not _module_exists(name):
            raise UserError(f"there is no module {name!r} that Python finds from {os.getcwd()}")
        return [sys.executable, "-m", name, *arguments]
    if not options.python:
        found = shutil.which(name)
        if found is None:
            raise UserError(f"there is no program {name!r} on PATH")
        return [found, *arguments]
    if not name or not _script_exists(Path(name)):
        raise UserError(f"there is no script {name!r} in {os.getcwd()}")
    return [sys.executable, name, *arguments]


def _script_exists(path: Path) -> bool:
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except OSError as error:
        raise UserError(f"cannot read the script {str(path)!r}: {error.strerror}") from None


def _module_exists(name: str) -> bool:
    """Looks for the outermost package only: looking further in would run its code here."""
    top = name.split(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    if os.path.exists(os.path.join(os.getcwd(), top)) or os.path.exists(
        os.path.join(os.getcwd(), top + ".py")
    ):
        return True
    return importlib.util.find_spec(top) is not None
