"""Finds hardware: the presets of presets.toml by name, each with its source, or what a file describes.

A file of one's own (`--hardware my.toml`) has up to four tables, whose fields hardware.py explains. --gpus
names the GPU as the file does, or as the preset that it is like:

    [gpu]
    like = "H100"               # a preset that gives what is left out
    name = "H100 at 500 W"
    memory_bandwidth = 2.4e12
    [inside]                    # between the devices of a host; left out: the preset's
    bandwidth = 450e9
    latency = 4e-6
    [between]                   # between hosts, for each device; left out: the preset's, or --network's
    bandwidth = 50e9
    [host]                      # between a device and its host's memory, for --offload; left out: its slot's
    bandwidth = 64e9
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from imece.errors import UserError
from imece.plan.hardware import Cluster, Gpu, Link
from imece.plan.hardware_tables import fields_of, gpu_of, link_of

_FULL_HOST = 8  # GPUs
_MOST = 10**6  # of hosts, and of GPUs per host
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([mgt])(bits?|b)(?:ps|/s)?", re.IGNORECASE)
_BITS = {"m": 1e6, "g": 1e9, "t": 1e12}


@functools.cache
def _presets() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("imece.plan").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def gpu_names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_presets()["gpus"])


def gpus_with_fp8() -> tuple[str, ...]:
    """The names of all presets with FP8."""
    return tuple(name for name in gpu_names() if find_gpu(name).fp8)


def find_gpu(name: str) -> Gpu:
    """The preset of this name, ignoring case, blanks and hyphens. UserError with the nearest name."""
    return gpu_of(_gpu_table(name))


def gpus_of_a_host(name: str) -> int:
    """So many GPUs of this kind a host has at most: 8, or those of a rack that counts as one. For a name that
    only a file may know: 8."""
    found = _FULL_HOST
    with contextlib.suppress(UserError):
        found = max(found, int(_gpu_table(name).get("gpus_per_host", found)))
    return found


def find_network(name: str, gpus_per_host: int, slot: float = math.inf) -> Link:
    """A preset, or a rate such as "400Gb": bits/s for each GPU. UserError with the nearest names, or for
    bytes.

    slot: bytes/s between a GPU and its host, which limits presets: a single GPU lacks what eight share.
    """
    rate = _RATE.fullmatch(name.strip())
    if rate and 0 < (bandwidth := float(rate[1]) * _BITS[rate[2].lower()] / 8) < math.inf:
        if rate[3] == "B":
            as_bytes = f"{8 * float(rate[1]):.12g}{rate[2]}b"
            raise UserError(
                f"network {name!r}: say it in bits, {rate[1]}{rate[2]}b, or {as_bytes} if these are bytes"
            )
        return Link(bandwidth, latency=20e-6)
    presets = _presets()["networks"]
    table = dict(presets[_named(name, presets, "network")])
    if table.pop("per") == "host":
        table["bandwidth"] /= gpus_per_host
    table["bandwidth"] = min(table["bandwidth"], slot)
    return link_of(table)


def find_cluster(
    gpu: str | None = None,
    gpus_per_host: int | None = None,
    hosts: int = 1,
    network: str | None = None,
    hardware: Path | None = None,
) -> Cluster:
    """A cluster of presets by name, or of the file `hardware` (described at the top of this module).

    UserError, in one line, for unknown names, impossible numbers, and a file that cannot be read.
    """
    own: dict[str, dict[str, Any]] = {} if hardware is None else _read_own(hardware)
    table = _asked_for(gpu, own.get("gpu", {}), hardware)
    count = gpus_per_host if gpus_per_host is not None else table.get("gpus_per_host", _FULL_HOST)
    for what, number in (("GPUs of a host", count), ("hosts", hosts)):
        if not 1 <= number <= _MOST:
            raise UserError(f"{number} {what}: at least 1, and at most a million")
    try:
        links = _presets()["links"]
        inside = link_of(links[_named(table.get("inside", "pcie4"), links, "link")])
        inside = replace(inside, **fields_of(Link, own.get("inside", {}), "inside"))
        slot = link_of(links[_named(table.get("slot", "pcie4"), links, "link")])
        host = replace(slot, **fields_of(Link, own.get("host", {}), "host"))
        most = slot.bandwidth if "slot" in table else math.inf
        between = find_network(network or str(table.get("network", "infiniband-ndr")), count, most)
        if network is None:
            between = replace(between, **fields_of(Link, own.get("between", {}), "between"))
        return Cluster(gpu_of(table), count, hosts, inside, between, host)
    except ValueError as error:
        raise UserError(f"{hardware}: {error}") from None


def parse_gpus(text: str) -> tuple[int | None, str]:
    """ "8xH100", "8 H100" -> (8, "H100"); "H100" -> (None, "H100"). UserError. find_cluster checks that there
    is such a GPU."""
    if re.search(r"\d\s*[xX*].*[,+&;]\s*\d+\s*[xX*]", text):
        raise UserError(
            f"--gpus {text!r}: GPUs of one kind are planned for, and all wait for the slowest: ask for each"
        )
    found = re.fullmatch(r"\s*(?:(-?\d{1,18})\s*[xX*]\s*|(\d{1,3})\s+)?([^\s].*?)\s*", text)
    if found is None:
        raise UserError(f"--gpus {text!r}: write it like 8xH100")
    turned = re.fullmatch(r"(.+?)\s*[xX*:]\s*(\d{1,9})", found[3])  # but not "RTX 3090"
    if turned and _plain(turned[1]) in (*map(_plain, gpu_names()), *_OTHER_NAMES):
        raise UserError(f"--gpus {text!r}: the number comes first, {turned[2]}x{turned[1]}")
    number = found[1] or found[2]  # "3090 Ti" is a name: no host has that many GPUs
    if re.fullmatch(r"\d{1,3}|\d*[.,]\d*\s*[xX*].*", found[3]):
        raise UserError(f"--gpus {text!r}: a whole number of them, and which, as in 8xH100")
    count = None if number is None else int(number)
    if count is not None and count < 1:
        raise UserError(f"--gpus {text!r}: at least 1")
    return count, found[3]


def describes_gpu(hardware: Path) -> bool:
    """Whether the file describes a GPU, not only links. UserError if it cannot be read."""
    return "gpu" in _read_own(hardware)


def _asked_for(gpu: str | None, own: Mapping[str, Any], hardware: Path | None) -> dict[str, Any]:
    """The GPU that is asked for, with the file's [gpu] values. UserError if the file describes another
    GPU."""
    name, like = own.get("name"), own.get("like")
    if gpu is None and like is None and name is None:
        where = "" if hardware is None else f", or say in {hardware} which one [gpu] is like"
        raise UserError(f"no GPU is named: choose one of {', '.join(gpu_names())}{where}")
    try:
        table = {} if like is None else _gpu_table(like)
    except UserError as error:
        raise UserError(f"--hardware {hardware}: [gpu] like: {error}") from None
    asked = None if gpu is None else _named(gpu, [*gpu_names(), *([] if name is None else [name])], "GPU")
    if like is not None and asked not in (None, name, table["name"]):
        described = table["name"] if name is None else f"{name}, which is like {table['name']}"
        raise UserError(
            f"--gpus {asked}: {hardware} describes {described}: ask for that one, or leave [gpu] out of the "
            "file"
        )
    if like is None and asked in gpu_names():
        table = _gpu_table(asked)
    if own.get("multiprocessors") == 1 and table.get("multiprocessors", 1) > 1:
        raise UserError(
            f"--hardware {hardware}: [gpu] multiprocessors is 1, which means a CPU: {table['name']} has "
            f"{table['multiprocessors']}"
        )
    return table | {field: value for field, value in own.items() if field != "like"}


def _gpu_table(name: str) -> dict[str, Any]:
    presets = _presets()["gpus"]
    found = _named(name, presets, "GPU")
    table = dict(presets[found])
    like = table.pop("like", None)
    return ({} if like is None else _gpu_table(like)) | table | {"name": found}


_NOT_RATES = (
    *((name, str, "a name") for name in ("like", "name", "inside", "slot", "network")),
    *((name, int, "a whole number") for name in ("gpus_per_host", "multiprocessors")),
    ("bf16", bool, "true or false"),
)


def _read_own(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise UserError(
            f"--hardware {path}: cannot be read ({error.strerror}): name a TOML file with [gpu], [inside], "
            "[between] or [host]; docs/planner.md has one"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number too long, a list too deep
        raise UserError(f"--hardware {path} is no TOML: {' '.join(str(error).split())}") from None
    for name, table in tables.items():
        if name not in ("gpu", "inside", "between", "host") or not isinstance(table, dict):
            raise UserError(
                f"--hardware {path}: [{name}] is unknown; there are [gpu], [inside], [between] and [host]"
            )
    for name, kind, needed in _NOT_RATES:
        value = tables.get("gpu", {}).get(name)
        if value is not None and type(value) is not kind:
            raise UserError(f"--hardware {path}: [gpu] {name} is {value!r}; {needed} is needed")
    try:
        for name in ("inside", "slot"):
            if (value := tables.get("gpu", {}).get(name)) is not None:
                _named(value, _presets()["links"], "link")
        if (value := tables.get("gpu", {}).get(name := "network")) is not None:
            find_network(value, 1)
    except UserError as error:
        raise UserError(f"--hardware {path}: [gpu] {name}: {error}") from None
    return tables


def _named(name: str, presets: Iterable[str], what: Literal["GPU", "network", "link"]) -> Any:
    """The preset that `name` means. UserError with the nearest name."""
    plain = {_plain(preset): preset for preset in presets}
    key = _plain(name)
    short = _plain(_OF_NVIDIA.sub("", name.lower()))  # nvidia-smi says "NVIDIA A100-SXM4-80GB"
    for spelling in (key, short, short.removesuffix("gb")):
        if (found := _OTHER_NAMES.get(spelling, spelling)) in plain:
            return plain[found]
    near = difflib.get_close_matches(short, list(plain), n=3, cutoff=0.65)
    hint = f"did you mean {' or '.join(plain[n] for n in near)}?"
    if not near:
        hint = f"there are {', '.join(plain.values())}" + ";" * (what == "GPU")
    others = " --hardware FILE describes others" * (what == "GPU")
    raise UserError(f"{what} {name!r} is unknown: {hint}{others}")


_OF_NVIDIA = re.compile(
    r"\b(nvidia|tesla|geforce|generation|blackwell|server|workstation|edition|hbm\de?)\b|sxm\d?\b"
)
_OTHER_NAMES = {
    "a100": "a10080", "a10080gbpcie": "a100pcie", "a10080pcie": "a100pcie", "a100pcie80": "a100pcie",
    "a10040gbpcie": "a10040pcie", "a100pcie40": "a10040pcie", "h10080": "h100",
    "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090", "rtxa6000": "a6000", "6000ada": "rtx6000ada",
    "pro6000": "rtxpro6000", "ndr": "infinibandndr", "hdr": "infinibandhdr", "edr": "infinibandedr",
    "v10032": "v100",
}  # fmt: skip


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
