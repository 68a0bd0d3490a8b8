"""Helpers for tests of the data: mistakes as they are printed, parts without files, full disks."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imece.data.tokens import Part
from imece.errors import UserError


def mistake(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The UserError that the call raises; it is one line."""
    with pytest.raises(UserError) as raised:
        function(*args, **options)
    message = str(raised.value)
    assert message and len(message.splitlines()) == 1, message
    return message


def write(path: Path, content: str | bytes) -> Path:
    """A file of this content, with the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def part_of(documents: Sequence[Sequence[int]], end: int = 0, name: str = "train") -> Part:
    """These documents, each of which gets its end."""
    tokens = np.array([token for document in documents for token in (*document, end)], np.uint16)
    offsets = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return Part(name, tokens, offsets, end, text_bytes=len(tokens))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A full disk, as far as a process can tell: what is written beyond `size` bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def part_of_sources(sources: Sequence[Part]) -> Part:
    """All of them together, which is divided into them."""
    tokens, ends = (
        np.concatenate(each) for each in zip(*((s.tokens, s.offsets[1:]) for s in sources), strict=True)
    )
    begins = np.repeat(np.cumsum([0, *(len(s.tokens) for s in sources[:-1])]), [s.documents for s in sources])
    learned = [s.learned for s in sources if s.learned is not None]
    return Part(
        sources[0].name,
        tokens,
        np.concatenate([[0], ends + begins]),
        sources[0].end,
        sum(s.text_bytes for s in sources),
        np.concatenate(learned) if learned else None,
        sum(s.learned_tokens for s in sources),
        divided=tuple(replace(s, source=str(number)) for number, s in enumerate(sources)),
    )


def write_functions(folder: Path, count: int = 40) -> list[Path]:
    """Files of a few lines of Python each, no two alike."""
    files = []
    for number in range(count):
        files.append(folder / f"{number:02}.py")
        files[-1].write_text(f"def function_{number}(argument):\n    return argument + {number}\n" * 5)
    return files
