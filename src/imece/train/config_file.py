"""Reads and writes a run's config as a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from imece.errors import UserError
from imece.train.config import MOST, TrainConfig, defaults, flat
from imece.train.other_names import OURS
from imece.writing import as_toml

Section = TypeVar("Section")


def to_toml(config: TrainConfig) -> str:
    """The whole file, which `read_toml` reads back to an equal config. Values that are None are left out."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    sections = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
    lines = [f"{name} = {as_toml(value)}" for name, value in values.items() if name not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {as_toml(value)}" for key, value in flat(section).items() if value is not None]
    return "\n".join(lines) + "\n"


def read_toml(path: Path, weights: str = "", rank: int | None = None) -> TrainConfig:
    """The config in a file. Missing values are the `defaults` for the folder that it begins from (or for
    `weights`, if that is given) and for its rank of adapters (or `rank`).

    UserError, with the file's name, if it cannot be read, is not TOML, or has a wrong value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a TOML file, or none") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number too long, a list too deep
        raise UserError(
            f"{path}: not TOML ({error}); imece train --print-config shows a whole one"
        ) from error
    try:
        named = _said(content, "model", "weights")
        of = _said(content, "lora", "rank") if rank is None else rank
        start = defaults(weights or str(named or ""), of if type(of) is int else 0)
        return _section(start, content, "")
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _said(content: Mapping[str, Any], section: str, name: str) -> Any:
    table = content.get(section)
    return table.get(name) if isinstance(table, dict) else None


def _section(start: Section, content: Mapping[str, Any], prefix: str) -> Section:
    """`start` changed by a table. ValueError for an unknown key, with the nearest one, and for a wrong
    type."""
    hints = get_type_hints(type(start))
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in hints:
            meant = [name for name in flat(TrainConfig()) if name.rpartition(".")[2] == key]
            if ours := OURS.get(key.replace("_", "-")):
                meant = [ours.replace("-", "_")]
            meant = meant or [prefix + near for near in difflib.get_close_matches(key, hints, n=1)]
            hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(hints)}"
            raise ValueError(f"there is no {prefix}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{key} is a section, [{prefix}{key}], not a value")
            values[key] = _section(getattr(start, key), value, f"{prefix}{key}.")
        else:
            values[key] = _value(hints[key], value, prefix + key)
    changed: Section = dataclasses.replace(cast(Any, start), **values)
    return changed


def _value(kind: Any, value: Any, name: str) -> Any:
    """`value` if a field of this type can hold it, else ValueError."""
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
    if choices:
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: one of {', '.join(choices)}")
        return value
    if kind == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} is {value!r}: a list of strings")
        for item in items:
            _check_text(item, name)
        return tuple(items)
    if kind == tuple[float, ...]:
        return tuple(_value(float, item, name) for item in (value if isinstance(value, list) else [value]))
    allowed = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    wanted = allowed[0]
    if wanted is float and type(value) is int and abs(value) <= MOST:
        return float(value)
    if type(value) is not wanted:
        words = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
        raise ValueError(f"{name} is {value!r}: {words[wanted]}")
    if wanted is str:
        _check_text(value, name)
    return value


def _check_text(value: str, name: str) -> None:
    if "\0" in value:  # neither an option nor a file's name can have one
        raise ValueError(f"{name} is {value!r}: take the NUL out")
