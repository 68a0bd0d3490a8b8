"""How a benchmark is asked for: its plan's fields are its options, some of them lists or sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from tyro.constructors import PrimitiveConstructorSpec

from imece.errors import UserError

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "kib": 2**10, "k": 2**10, "mib": 2**20, "m": 2**20, "gib": 2**30, "g": 2**30}


class Options:
    """The base of every benchmark's plan: a frozen dataclass, whose fields the command line sets."""

    def check(self) -> None:
        """UserError for options that cannot be met."""

    def shortened(self) -> Self:
        """The same with --quick."""
        return self

    def at_least_one(self, *fields: str) -> None:
        """UserError for a field with less."""
        for name in fields:
            if (number := getattr(self, name)) < 1:
                raise UserError(f"--{name.replace('_', '-')} {number}: at least 1 is needed")


def check_ranks(*ranks: int) -> None:
    """UserError for a number of ranks that cannot be measured."""
    for count in ranks:
        if not 2 <= count <= 64:
            raise UserError(f"--ranks {count}: from 2 to 64 ranks can be measured")


def names(
    option: str, allowed: Sequence[str], *, or_none: bool = False, every: str | None = None
) -> PrimitiveConstructorSpec[tuple[str, ...]]:
    """The type of words of `allowed`, with commas between them: "a,b" -> ("a", "b").

    or_none: there may be no word. every: a text that stands for all of them.
    """

    def read(text: str) -> tuple[str, ...]:
        if text == every:
            return tuple(allowed)
        chosen = [word.strip() for word in text.split(",") if word.strip()]
        for word in chosen:
            if word not in allowed:
                raise UserError(f"{option} {word!r} is not one of {', '.join(allowed)}")
        if not chosen and not or_none:
            raise UserError(f"{option} {text!r} names none: name at least one of {', '.join(allowed)}")
        return tuple(dict.fromkeys(chosen))

    return _typed(read, ",".join)


def counts(option: str, *, or_none: bool = False) -> PrimitiveConstructorSpec[tuple[int, ...]]:
    """The type of whole numbers from 1, with commas between them: "128,512" -> (128, 512)."""

    def read(text: str) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for word in text.split(",") if text or not or_none else ():
            try:
                found[int(word)] = None
            except ValueError:
                raise UserError(f"{option} {word!r} is not a whole number") from None
        if wrong := [number for number in found if number < 1]:
            raise UserError(f"{option} {wrong[0]}: at least 1 is needed")
        return tuple(found)

    return _typed(read, lambda numbers: ",".join(map(str, numbers)))


def size(option: str, usual: str) -> PrimitiveConstructorSpec[int]:
    """The type of a number of bytes. usual: how --help shows the default."""
    return _typed(lambda text: _read_size(text, option), lambda _: usual)


def sizes(option: str, usual: str) -> PrimitiveConstructorSpec[tuple[int, ...]]:
    """The same for several, as `read_sizes` has them."""
    return _typed(lambda text: read_sizes(text, option), lambda _: usual)


def _typed(read: Callable[[str], T], show: Callable[[T], str]) -> PrimitiveConstructorSpec[T]:
    return PrimitiveConstructorSpec(
        nargs=1, metavar="STR", instance_from_str=lambda words: read(words[0]), is_instance=lambda _: True,
        str_from_instance=lambda value: [show(value)],
    )  # fmt: skip


def _read_size(text: str, option: str) -> int:
    """ "6MiB" -> 6291456. UserError for anything but a number with B, KiB, MiB or GiB."""
    match = re.fullmatch(r"\s*([0-9]{1,12})\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or int(match[1]) == 0:
        raise UserError(f"{option} {text!r} is not a size like 64KiB or 6MiB")
    return int(match[1]) * _UNITS[match[2].lower()]


def read_sizes(text: str, option: str) -> tuple[int, ...]:
    """ "1KiB..256MiB" (each size four times the one before) or "1KiB,6MiB", or both mixed; ascending.

    UserError for anything else.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = _read_size(first, option)
        if not dots:
            found.add(low)
            continue
        high = _read_size(last, option)
        if high < low:
            raise UserError(f"{option} {part!r}: {last} is less than {first}")
        while low <= high:
            found.add(low)
            low *= 4
    return tuple(sorted(found))
