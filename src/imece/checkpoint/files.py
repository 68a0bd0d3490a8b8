"""Names of folders and files; writing and removing them so that a kill at any instant does no harm."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from imece.errors import UserError

PARTIAL, OLD = ".partial", ".old"

_FOLDER = re.compile(r"step-(\d{8,})(\.old)?")
_LEFTOVER = re.compile(r"step-\d{8,}(\..*)?\.partial")
_CHUNK = 4 << 20  # bytes between two checks of whether to go on


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def partial_folder(folder: Path, step: int, attempt: str) -> Path:
    return folder / f"{step_folder(folder, step).name}.{attempt}{PARTIAL}"


def folders_of(folder: Path, attempt: str) -> list[Path]:
    """The folders in which ranks write an attempt: one, unless they save different steps. OSError."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(f".{attempt}{PARTIAL}"))


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None if it is not a checkpoint's name."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """What may be checkpoints, the newest first; of one step the `.old` one last. A file of such a name, or a
    link to nowhere (a disk that is not mounted), is a damaged one.

    Empty if there is no such folder. UserError if it cannot be read.
    """
    try:
        found = [
            (step, path)
            for path in folder.iterdir()
            if (step := step_of(path)) is not None and _is_there(path)  # OSError if one may not look
        ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be read ({error.strerror}): check the path and its permissions"
        ) from error
    return sorted(found, key=lambda entry: (-entry[0], entry[1].name))


def write(path: Path, chunks: Iterable[bytes | memoryview], go_on: Callable[[], None]) -> tuple[int, str]:
    """Write a new file, and return when it is on the disk: its bytes, and their SHA-256 in hex.

    Nothing is copied. `go_on` is called now and then, and may raise to end it. OSError, with the file's name.
    """
    digest, total = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                for start in range(0, len(view), _CHUNK):
                    go_on()
                    part = view[start : start + _CHUNK]
                    digest.update(part)
                    total += len(part)
                    while part:
                        part = part[os.write(file.fileno(), part) :]
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    return total, digest.hexdigest()


def taken(folder: Path) -> int:
    """The bytes that its files take on the disk; 0 if there is no such folder. OSError."""
    blocks = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            blocks += path.stat().st_blocks
    return 512 * blocks


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a finished partial folder to `final`, replacing what is there; one of the two always exists.

    A folder that is not empty cannot be renamed over. So the old one steps aside first, under a name that
    readers know. OSError: then `final` is unchanged.
    """
    old = final.with_name(final.name + OLD)
    if not _is_there(final):
        os.replace(partial, final)
        return
    os.replace(final, old)
    try:
        os.replace(partial, final)
    except OSError:
        os.replace(old, final)
        raise


def drop_old(final: Path) -> None:
    """Remove what `final` has replaced, if anything. OSError if that is impossible."""
    old = final.with_name(final.name + OLD)
    if _is_there(old):
        remove(old)


def remove(path: Path) -> None:
    """Remove a folder, renaming it first: half a checkpoint must not look like one. Of a link only the link.
    OSError if that is impossible."""
    beside = path.with_name(f"{path.name.removesuffix(PARTIAL)}.{secrets.token_hex(4)}{PARTIAL}")
    os.replace(path, beside)
    _delete(beside)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_there(path: Path) -> bool:
    """Whether there is something of this name, a link to nowhere too. OSError if one may not look."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def set_aside(folder: Path, paths: Iterable[Path]) -> Path:
    """Move folders into a new one beside, left-1, left-2, ..., where nobody looks for the newest. OSError."""
    for number in count(1):
        aside = folder / f"left-{number}"
        with contextlib.suppress(FileExistsError):
            aside.mkdir()
            break
    for path in paths:
        os.replace(path, aside / path.name)
    return aside


def is_passing(path: Path) -> bool:
    """Whether it goes away by itself: partial folders, and the files that ranks tell each other things by."""
    return path.name.startswith(".") or path.name.endswith(PARTIAL)


def withdraw(partial: Path) -> bool:
    """Remove a partial folder so that nobody can put it in place; False if it is already gone."""
    try:
        remove(partial)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # the rest goes away with the next save
    return True


def clean(folder: Path, but: str) -> None:
    """Remove what killed processes left in the middle of writing, replacing and removing.

    Rank 0 calls this, only while no other rank can write into a folder except those of the attempt `but`.
    What cannot be removed is skipped: it does no harm, and the next save tries again. OSError if `folder`
    cannot be read.
    """
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and not path.name.endswith(f".{but}{PARTIAL}"):
            with contextlib.suppress(OSError):
                _delete(path)
    for _, path in step_folders(folder):
        if path.name.endswith(OLD):
            final = path.with_name(path.name.removesuffix(OLD))
            try:
                if not _is_there(final):
                    os.replace(path, final)
                drop_old(final)
            except OSError:
                continue
