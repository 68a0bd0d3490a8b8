"""What a benchmark found; writes it to files, and finds out beforehand whether it can."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from imece.errors import UserError
from imece.writing import asked_for, write_whole

PICTURES = (".png", ".svg", ".pdf")


class Results:
    """The base of what every benchmark finds: a dataclass with its plan, and often with rows."""

    rows: Sequence[Any] = ()

    @property
    def wrong(self) -> Sequence[str]:
        """What should not be, a line each: shown, and makes the exit status 1."""
        return ()

    def as_json(self) -> dict[str, Any]:
        """All fields, and of each row the properties too."""
        fields = asdict(cast(Any, self))
        return fields | ({"rows": [_with_properties(row) for row in self.rows]} if "rows" in fields else {})


def _with_properties(row: Any) -> dict[str, Any]:
    names = (name for name, each in vars(type(row)).items() if isinstance(each, property))
    return asdict(row) | {name: getattr(row, name) for name in names}


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
    """UserError before minutes of measuring, not after them, if a result cannot be written. Leaves nothing
    behind, no new folder either."""
    if path is None:
        return
    made = [folder for folder in path.parents if not os.path.exists(folder)]
    with asked_for(path):
        new = not path.exists()
        path.open("ab").close()  # permissions alone do not tell: root may write, but not on a read-only disk
        if new:
            path.unlink()
    with suppress(OSError):  # another process may have written there
        for folder in made:
            folder.rmdir()
