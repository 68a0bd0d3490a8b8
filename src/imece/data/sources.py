"""Finds the text files behind a name: a file, a folder, a pattern, a dataset, or Python's own library."""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
import reprlib
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from imece.data import tables
from imece.data.corpus import documents, suffix_of
from imece.data.records import TEXT, Reading
from imece.errors import UserError

SUFFIXES = (".txt", ".md", ".py", ".rst", ".jsonl", ".parquet")  # searched for in folders; capitals count too
# A folder with the first file and one of the others is a run folder, whose files are no text to learn. The
# lock is made first, so that a run's first command finds the same text as later ones; a copy may lack hidden
# files.
_CONFIG_OF_RUN, _ALSO_OF_RUN = "config.toml", (".lock", "metrics.jsonl")
# Left out of the standard library: installed packages, and tests, many of which are not text on purpose.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class GoneError(UserError):
    """There is nothing where the text should be; it may have been there once."""


def sources(
    paths: Sequence[Path | str], reading: Reading = TEXT, run_folders: list[Path] | None = None
) -> list[Path]:
    """The files behind folders, globs, single files and datasets: absolute, sorted, each once.

    A folder is searched for SUFFIXES, also in its subfolders (except hidden ones) and in folders that links
    lead to; a glob gives the files that it matches. Neither looks into run folders: a run on "." is itself in
    the text and grows with each step. "hf:NAME" or "hf:NAME:SPLIT" is a dataset of the Hugging Face Hub,
    which is downloaded, or a folder that `datasets` saved, which is also recognised without "hf:". Without
    paths: the standard library of this Python, without its tests.

    run_folders: receives the run folders that were skipped.

    Names given directly are checked here, so that a mistake shows before any work is done. GoneError if the
    path is missing, or a folder or glob has no such file. UserError if it is empty or not UTF-8 text, if the
    first record is none that `reading` reads, or if the package that reads it is missing. Whether
    files inside a folder are text is found out by `documents`.
    """
    if not paths:
        if reading.whole:
            raise UserError(f"no files of records with {tables.few(reading.fields)}: name some with --data")
        return _standard_library()
    found: dict[str, Path] = {}  # by real path, so that a file and a link to it are one
    passed: set[str] = set()
    for given in paths:
        for path in sorted(_behind(os.path.expanduser(given), reading, passed)):
            found.setdefault(os.path.realpath(path), path)
    if run_folders is not None:
        run_folders += map(Path, sorted(passed))
    files = sorted(found.values())
    if any(suffix_of(path) in tables.SUFFIXES for path in files):
        tables.require()
    return files


def absolute_name(given: str) -> str:
    """The same name made absolute, so that `sources` finds the same from any folder."""
    if _is_address(given):
        return given
    called = given.startswith("hf:")
    name, colon, split = given.removeprefix("hf:").partition(":") if called else (given, "", "")
    name = os.path.expanduser(name)
    if called:
        return f"hf:{os.path.abspath(name)}{colon}{split}" if os.path.isdir(name) else given
    if glob.has_magic(name) and not os.path.lexists(name):  # a pattern; the current folder's name is not
        return os.path.abspath(os.path.join(glob.escape(os.getcwd()), name))
    return os.path.abspath(name)


def _is_address(given: str) -> bool:
    return re.match("[A-Za-z][A-Za-z0-9+.-]*://", given) is not None


def _standard_library() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    files = []
    for folder, folders, names in _walk(root, set()):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]  # os.walk enters what is left
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"{root}: no .py files, so Python's library cannot be the text: name files to read")
    return sorted(files)


def _walk(root: str, run_folders: set[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk that follows links, skips hidden folders, and visits each folder once.

    run_folders: skipped too, and added to this set. UserError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}): check its permissions")

    seen, waiting = set[str](), [root]
    while waiting:
        links: list[str] = []
        for folder, folders, names in os.walk(waiting.pop(0), onerror=refuse):
            real = os.path.realpath(folder)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            if _CONFIG_OF_RUN in names and any(name in names for name in _ALSO_OF_RUN):
                run_folders.add(real)
                folders.clear()
                continue
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield folder, folders, names
            below = (os.path.join(folder, name) for name in folders)
            links += (path for path in below if os.path.islink(path))
        # After everything in the root itself, and sorted: names must not depend on the disk's order.
        waiting += sorted(links)


def _behind(given: str, reading: Reading, run_folders: set[str]) -> Iterator[Path]:
    path = Path(os.path.abspath(given))
    if (dataset := _dataset(given)) is not None:
        if next(documents(dataset, reading), None) is None:
            fields = tables.few(reading.fields)
            raise UserError(f"{given}: no row of it holds any text in {fields}: name another dataset")
        yield from dataset
    elif stat.S_ISDIR(mode := _mode(path)):
        walk = _walk(str(path), run_folders)
        files = [Path(f, name) for f, _, names in walk for name in names if _is_wanted(f, name)]
        if not files:
            raise GoneError(f"{path}: no {', '.join(SUFFIXES)} files in this folder: name another, or files")
        yield from files
    elif stat.S_ISREG(mode):
        _check_named(path, reading)
        yield path
    elif mode:
        raise UserError(f"{path}: neither a file nor a folder: copy its content to a file and name that")
    elif glob.has_magic(given):
        matched = [Path(os.path.abspath(match)) for match in glob.glob(given, recursive=True)]
        files, is_run = list[Path](), functools.cache(_is_run)
        for match in matched:
            if run := next(filter(is_run, match.parents), None):
                run_folders.add(os.path.realpath(run))
            elif stat.S_ISREG(_mode(match)):
                files.append(match)
        if not files:
            raise GoneError(f"{given}: no file matches this pattern: check the folder and the pattern")
        yield from files
    elif _is_address(given):
        raise UserError(
            f"{given}: text is not downloaded: save it as a file and name that (hf:NAME is a dataset of the "
            "Hugging Face Hub)"
        )
    else:
        what = "a link that leads to nothing" if os.path.islink(path) else "no such file or folder"
        raise GoneError(f"{path}: {what}: check the path")


def _dataset(given: str) -> list[Path] | None:
    """The files of a dataset; None if the name is none of a dataset nor of a folder that holds one."""
    called = given.startswith("hf:")
    name, _, split = given.removeprefix("hf:").partition(":") if called else (given, "", "")
    if called and not name:
        raise UserError(f"{given} names no dataset: say hf:NAME or hf:NAME:SPLIT")
    folder = Path(os.path.abspath(os.path.expanduser(name)))
    files = tables.saved(folder, split or None) if os.path.isdir(folder) else None
    return tables.fetched(name, split or None) if called and files is None else files


def _mode(path: Path) -> int:
    """The mode, with the file type, of what is there; 0 if nothing is. UserError without permission to
    look."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        name = reprlib.repr(str(path)) if error.errno == errno.ENAMETOOLONG else path
        raise UserError(f"{name}: cannot be read ({error.strerror}): name files that you may read") from error
    except ValueError:  # a NUL
        return 0


def _is_run(folder: Path) -> bool:
    there = [os.path.isfile(folder / name) for name in (_CONFIG_OF_RUN, *_ALSO_OF_RUN)]
    return there[0] and any(there[1:])


def _is_wanted(folder: str, name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and os.path.isfile(os.path.join(folder, name))


def _check_named(path: Path, reading: Reading) -> None:
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty: name one that holds text")
        if next(documents([path], reading), None) is None:
            fields = tables.few(reading.fields)
            raise UserError(f"{path}: nothing in it holds any text in {fields}: name a file that holds text")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error
