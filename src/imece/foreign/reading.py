"""Takes the values of a configuration one by one, so that none is ignored in silence."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imece.errors import UserError

AUTO = "auto"  # Hugging Face's Trainer fills in such a value
_OFF: tuple[Any, ...] = (False, 0, "", "none", "None", "no", "NO", "false", [])
_STRING = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|(?://|#)[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)
_WORDS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


@dataclass(frozen=True)
class Value:
    """One value of the file, and what becomes of it."""

    name: str
    """Its name with its sections: "zero_optimization.stage"."""
    value: Any
    fate: Literal["taken", "needless", "left out"]
    """needless: imece does so anyway, or nothing depends on it here."""
    text: str
    """What the value is in imece, or why it is left out."""


class Reading:
    """The values of a nested mapping by dotted names. Each is asked for, and its fate told, exactly once.

    A value that is absent, null or "auto" is None. UserError, with the names of file and value, for a value
    of the wrong kind.
    """

    def __init__(self, content: Mapping[str, Any], file: str) -> None:
        self.file = file
        self.values: list[Value] = []
        try:
            self._open = _flat(content)
        except RecursionError:
            raise UserError(f"{file}: a section holds itself, or lies too deep") from None
        self._order = list(self._open)
        self._known: list[str] = []
        self._autos = {name for name, value in self._open.items() if value == AUTO}
        for name in self._autos:
            self._tell(name, "needless", "what its Trainer says counts")

    def has(self, name: str) -> bool:
        """Whether the file names the value, if only as "auto"; if not, its program's default counts."""
        return name in self._order

    def is_auto(self, name: str) -> bool:
        """Whether the Trainer fills in the value."""
        return name in self._autos

    def flag(self, name: str) -> bool | None:
        """True or false, also as words or as 1 and 0."""
        value = self._get(name)
        if value is None:
            return None
        if str(value).lower() in _WORDS:
            return _WORDS[str(value).lower()]
        raise self.wrong(name, "true or false")

    def number(self, name: str) -> float | None:
        """A finite number, also as text: YAML reads 1e-5 as text."""
        value = self._get(name)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(name, "a number")
        return number

    def whole(self, name: str, least: int = 0) -> int | None:
        """A whole number of at least `least`, also written as 5e8."""
        number = self.number(name)
        if number is None:
            return None
        if number != int(number) or number < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return int(number)

    def word(self, name: str) -> str | None:
        """Text; numbers, true and false count as text."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, list):
            raise self.wrong(name, "a word")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...] | None:
        """A list of `count` numbers."""
        value = self._get(name)
        if value is None:
            return None
        good = isinstance(value, list) and len(value) == count
        if not good or not all(type(each) in (int, float) and math.isfinite(each) for each in value):
            raise self.wrong(name, f"a list of {count} numbers")
        return tuple(float(each) for each in value)

    def take(self, name: str, text: str) -> None:
        """Record that the value becomes `text` in imece."""
        self._tell(name, "taken", text)

    def needless(self, names: str | Sequence[str], text: str) -> None:
        """Record why these values (or all values of these sections), if present, change nothing."""
        for each in self._below(names):
            self._tell(each, "needless", text)

    def leave(self, names: str | Sequence[str], text: str) -> None:
        """Record why these values (or all values of these sections), if present, are left out.

        Values that are off or 0 ask for nothing and are skipped.
        """
        for each in self._below(names):
            if self._open[each] in _OFF:
                self._tell(each, "needless", "not asked for")
            else:
                self._tell(each, "left out", text)

    def wrong(self, name: str, wanted: str) -> UserError:
        """The error for a wrong value."""
        return UserError(f"{self.file}: {name} is {self._open.get(name)!r}: {wanted}")

    def finish(self, known: Collection[str]) -> tuple[Value, ...]:
        """All values with their fates. Values that nobody asked for are unknown; the nearest known name is
        suggested."""
        for name in [*self._open]:
            near = difflib.get_close_matches(name, [*self._known, *known], n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            self._tell(name, "left out", f"not known{hint}")
        return tuple(sorted(self.values, key=lambda each: self._order.index(each.name)))

    def _below(self, names: str | Sequence[str]) -> list[str]:
        names = (names,) if isinstance(names, str) else tuple(names)
        self._known += names
        sections = tuple(f"{name}." for name in names)
        return [each for each in self._open if each in names or each.startswith(sections)]

    def _get(self, name: str) -> Any:
        self._known.append(name)
        parts = name.split(".")
        for section in (".".join(parts[:count]) for count in range(1, len(parts))):
            if self._open.get(section) in _OFF:
                self._tell(section, "needless", "not asked for")
            elif section in self._open:
                raise self.wrong(section, "a section with values of its own is wanted")
        if inner := [each for each in self._open if each.startswith(f"{name}.")]:
            raise UserError(f"{self.file}: {name} has {inner[0]}: a value is wanted, not a section")
        return self._open.get(name)

    def _tell(self, name: str, fate: Literal["taken", "needless", "left out"], text: str) -> None:
        if name in self._open:
            self.values.append(Value(name, self._open.pop(name), fate, text))


def text_of(path: Path, where: str) -> str:
    """The text of a file. UserError, with `where` it is from, if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{where}: cannot be read ({error.strerror}): name a file of DeepSpeed's or Accelerate's"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: not a text file") from None


def from_json(text: str, where: str, hint: str = "") -> Any:
    """The content of a JSON text, which may have comments, and commas after last values, as DeepSpeed allows.

    UserError, with `where` it is from, if it is not JSON, or has a key twice: which value counts? hint: what
    else may be wrong if it is not JSON.
    """
    try:
        return json.loads(_LAST_COMMA.sub(_blank, _COMMENT.sub(_blank, text)), object_pairs_hook=_each_once)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}){hint}") from None


def _blank(found: re.Match[str]) -> str:
    """A string as it is; spaces for all else, so that places in messages are those of the file."""
    return found[1] or re.sub(r"[^\n]", " ", found[0])


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UserError(f"{name} is there twice, as {found[name]!r} and as {value!r}: take one out")
        found[name] = value
    return found


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; nulls are dropped."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        elif value is not None:
            flat[name] = value
    return flat
