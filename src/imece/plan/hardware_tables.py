"""Turns tables of TOML, from presets.toml or a file of one's own, into hardware, or says what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from imece.plan.hardware import Gpu, Link


def gpu_of(table: Mapping[str, Any]) -> Gpu:
    """ValueError for what is missing or cannot be."""
    rest = {name: value for name, value in table.items() if name not in _ABOUT_HOSTS}
    found = fields_of(Gpu, rest, "gpu")
    missing = [field.name for field in fields(Gpu) if field.default is MISSING and field.name not in found]
    if missing:
        raise ValueError(
            f"[gpu] is without {', '.join(missing)}: add {'it' if len(missing) == 1 else 'them'}, or like = "
            "the preset that has what is left out"
        )
    gpu = Gpu(**found)
    if not gpu.name.strip():
        raise ValueError(f"[gpu] name is {gpu.name!r}: how --gpus names it, or leave it out")
    return gpu


def link_of(table: Mapping[str, Any]) -> Link:
    """The same for a link."""
    return Link(**fields_of(Link, table, "link"))


_ABOUT_HOSTS = ("inside", "slot", "network", "gpus_per_host")  # keys of a GPU's table that describe its host


def fields_of(kind: type[Gpu] | type[Link], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`table`, with tuples for lists. ValueError unless all names are fields and all numbers are possible."""
    names = [field.name for field in fields(kind)]
    found = {}
    for name, value in table.items():
        if name == "source":  # for people only
            continue
        if name not in names:
            raise ValueError(f"[{where}] {name} is unknown; there are {', '.join(names)}")
        several = name in ("flash", "lanes")
        if isinstance(value, list | tuple) != several or (name == "flash" and len(value) != 2):
            needed = "two numbers are" if name == "flash" else "a list is" if several else "a number is"
            raise ValueError(f"[{where}] {name} is {value!r}; {needed} needed")
        for number in value if isinstance(value, list | tuple) else [value]:
            if name not in ("name", "bf16") and (why := _why_not(name, number)) is not None:
                raise ValueError(f"[{where}] {name} is {why}")
        found[name] = tuple(value) if several else value
    return found


def _why_not(name: str, number: Any) -> str | None:
    """The number and why it is impossible; None if it is possible."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not abs(number) <= sys.float_info.max:  # an int may be larger, and NaN is no number
        return f"{number!r}; a number is needed"
    if name in _PARTS and not 0 < number <= 1:
        return f"{number}; it is a part: more than 0, and at most 1"
    if number < 0 or (number == 0 and name in _POSITIVE):
        return f"{number}; it must be {'more than 0' if name in _POSITIVE else '0 or more'}"
    if name == "fp8" and number > _MOST_FP8:
        return f"{number}: how many times as fast as products in bf16, at most {_MOST_FP8}"
    if name in _LEAST and number < _LEAST[name]:
        return f"{number} {_UNIT[name]}; at least {_LEAST[name]:.0e} is needed"
    if name in ("latency", "hop_s") and number >= 1:
        return f"{number} s; less than 1 is needed"
    return None


_PARTS = ("efficiency", "lanes", "reachable", "sustained", "flash")
_POSITIVE = (
    "bandwidth", "switch", "peak", "peak_fp32", "memory_bytes", "memory_bandwidth", "multiprocessors",
)  # fmt: skip
_MOST_FP8 = 4  # larger: a rate in FLOP/s was meant, or one that counts zeros
# A smaller number was meant in another unit: 400 Gb/s, 989 TFLOP/s, 80 GB.
_LEAST = {"bandwidth": 1e6, "memory_bandwidth": 1e8, "memory_bytes": 1e6, "peak": 1e8, "peak_fp32": 1e8}
_UNIT = dict.fromkeys(_LEAST, "bytes/s") | {"memory_bytes": "bytes", "peak": "FLOP/s", "peak_fp32": "FLOP/s"}
