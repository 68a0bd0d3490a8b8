"""Formats figures for people, reads options, and writes files for programs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.writing import asked_for, write_whole

PICTURES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "b": 1, "kib": 2**10, "k": 2**10, "mib": 2**20, "m": 2**20, "gib": 2**30, "g": 2**30}


def read_size(text: str) -> int:
    """ "6MiB" -> 6291456. UserError for anything but a number with B, KiB, MiB or GiB."""
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or int(match[1]) == 0:
        raise UserError(f"{text!r} is not a size like 64KiB or 6MiB")
    return int(match[1]) * _UNITS[match[2].lower()]


def read_sizes(text: str) -> list[int]:
    """ "1KiB..256MiB" (each size four times the one before) or "1KiB,6MiB", or both mixed; ascending.

    UserError for anything else.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = read_size(first)
        if not dots:
            sizes.add(low)
            continue
        high = read_size(last)
        if high < low:
            raise UserError(f"sizes {part!r}: {last} is less than {first}")
        while low <= high:
            sizes.add(low)
            low *= 4
    return sorted(sizes)


def read_choices(text: str, allowed: tuple[str, ...], what: str, *, or_none: bool = False) -> list[str]:
    """ "a,b" -> ["a", "b"]. UserError for a word that is not in `allowed`, which it names, and, unless
    or_none, for no word."""
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    for word in chosen:
        if word not in allowed:
            raise UserError(f"{what} {word!r} is not one of {', '.join(allowed)}")
    if not chosen and not or_none:
        raise UserError(f"{what} {text!r} names none: name at least one of {', '.join(allowed)}")
    return list(dict.fromkeys(chosen))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path`, and make its folder; numbers that are not finite, which JSON lacks, as null,
    and paths as text.

    UserError if that fails.
    """
    with asked_for(path):
        write_whole(path, (json.dumps(_plain(content), indent=1, allow_nan=False) + "\n").encode())


def _plain(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return str(content) if isinstance(content, Path) else content


def check_ending(option: str, path: Path | None, endings: Sequence[str]) -> None:
    """UserError for a folder, or another ending: a picture's format follows its name."""
    if path is not None and (os.path.isdir(path) or path.suffix.lower() not in endings):
        raise UserError(f"{option} {path}: name a file that ends in {' or '.join(endings)}")


def check_writable(path: Path | None) -> None:
    """UserError before minutes of measuring, not after them, if a result cannot be written."""
    if path is None:
        return
    with asked_for(path):
        new = not path.exists()
        path.open("ab").close()  # permissions alone do not tell: root may write, but not on a read-only disk
        if new:
            path.unlink()
