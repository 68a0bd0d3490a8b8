"""Reads the values of `imece bench`'s options: sizes, lists of words and of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from imece.errors import UserError

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


def check_ranks(ranks: Iterable[int]) -> None:
    """UserError for a number of ranks that cannot be measured."""
    for count in ranks:
        if not 2 <= count <= 64:
            raise UserError(f"--ranks {count}: from 2 to 64 ranks can be measured")


def counts(text: str, option: str) -> tuple[int, ...]:
    """ "128,512" -> (128, 512); UserError for anything but whole numbers from 1."""
    counts = tuple(dict.fromkeys(whole(word, option) for word in text.split(",")))
    for count in counts:
        at_least_one(count, option)
    return counts


def at_least_one(number: int, option: str) -> None:
    """UserError for less."""
    if number < 1:
        raise UserError(f"{option} {number}: at least 1 is needed")


def whole(text: str, option: str) -> int:
    """ "2" -> 2; UserError for anything but a whole number."""
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{option} {text!r} is not a whole number") from None
