"""This machine as the planner sees it: turns measurements into a file to plan with.

The file is one that `--hardware` reads. Its first line says when and on what it was measured.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.listing import many
from imece.models.presets import preset
from imece.plan.hardware import Cluster, Gpu, Link
from imece.plan.models.model import from_shape
from imece.plan.presets import find_cluster, find_gpu
from imece.plan.setup import Parallel, Precision, Recipe, Setup
from imece.plan.speed.compute import flash_part, product_s, stream_s
from imece.plan.speed.manner import IMECE
from imece.plan.speed.stage import stage_time
from imece.system.control_groups import allowed_bytes
from imece.writing import as_toml, asked_for, write_whole

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_SLOWEST = 0.1  # least share of a copy's rate
_BETWEEN = Link(1.25e9, 50e-6, 0.9)  # between hosts, where nothing was measured


def profile_file() -> Path:
    """The file with this machine's figures: IMECE_HERE, or one in the cache folder under the machine's name,
    because machines may share a home.

    UserError if there is no home, as in containers whose user has no name.
    """
    if named := os.environ.get("IMECE_HERE"):
        return Path(named)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise UserError(
            "no home folder to keep this machine's figures in: set HOME, or IMECE_HERE to a file"
        ) from error
    return cache / "imece" / f"here-{_UNSAFE.sub('_', socket.gethostname())}.toml"


def kept_cluster(ranks: int | None = None, path: Path | None = None) -> Cluster | None:
    """This machine as measured before, divided among `ranks` (None: as many as then), with the memory that
    this process may have if that is less by now, as in a container. None if nothing was measured, or the
    file's folder may not be entered.

    UserError if the file cannot be read, is damaged, or another imece wrote it.
    """
    path = path or profile_file()
    if not os.path.isfile(path):
        return None
    try:
        kept = find_cluster(None, None, 1, None, path)
    except UserError as error:
        raise UserError(f"{error}; imece plan --here --again measures anew") from error
    if kept.gpu.is_cpu:
        memory_bytes = min(kept.gpu.memory_bytes, allowed_bytes() // kept.gpus_per_host)
        kept = replace(kept, gpu=replace(kept.gpu, memory_bytes=memory_bytes))
    return shared_out(kept, kept.gpus_per_host if ranks is None else ranks)


def shared_out(cluster: Cluster, ranks: int) -> Cluster:
    """The same machine with another number of ranks, which together have what the measured ones had.

    CPU ranks get all cores and memory, however few they are. A GPU rank has at most one GPU.
    """
    share = cluster.gpus_per_host / ranks
    if not cluster.gpu.is_cpu:
        share = min(1.0, share)
    gpu, inside = cluster.gpu, cluster.inside
    rates = {name: share * getattr(gpu, name) for name in ("peak", "peak_fp32", "memory_bandwidth")}
    return replace(
        cluster,
        gpu=replace(gpu, memory_bytes=int(share * gpu.memory_bytes), **rates),
        gpus_per_host=ranks,
        inside=replace(inside, bandwidth=min(1.0, share) * inside.bandwidth),
    )


def measured_on(path: Path) -> str:
    """The line that says when and on what it was measured; empty if there is none."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("# ") else ""


def cluster_of(figures: Mapping[str, Any]) -> Cluster:
    """The cluster for which the planner's formulae reproduce what bench/here.py measured."""
    base = find_gpu("CPU" if figures["kind"] == "cpu" else "H100")
    gpu = replace(
        base, name=str(figures["device"]), reachable=1.0, sustained=1.0, peak=1.0, peak_fp32=1.0,
        memory_bandwidth=1e18, multiprocessors=int(figures["multiprocessors"]),
        memory_bytes=int(figures["memory_bytes"]), overhead_bytes=int(figures["overhead_bytes"]),
        price_per_hour=None, bf16=figures["dtype"] == "bfloat16", fp8=0.0,
    )  # fmt: skip
    side = int(figures["side"])
    # With a peak of 1 the formula gives as many times the measured seconds as the real peak.
    took = 2.0 * side**3 / figures["product"]
    gpu = replace(
        gpu,
        peak=product_s(gpu, side, side, side) / took,
        memory_bandwidth=stream_s(replace(gpu, name="unit", memory_bandwidth=1.0), 1.0)
        * figures["moved_per_s"],
    )
    gpu = replace(gpu, flash=_flash(gpu, figures))
    if "model_s" in figures:
        gpu = _as_slow_as_a_model(gpu, figures)
    gpu = replace(gpu, peak_fp32=gpu.peak * figures["product_fp32"] / figures["product"])
    return Cluster(gpu, int(figures["ranks"]), 1, _link(figures), _BETWEEN)


def to_toml(cluster: Cluster, figures: Mapping[str, Any], now: datetime) -> str:
    """The file, from which find_cluster(hardware=...) reads an equal cluster."""
    gpu = {name: value for name, value in asdict(cluster.gpu).items() if value is not None}
    tables = {
        "gpu": gpu | {"gpus_per_host": cluster.gpus_per_host},
        "inside": asdict(cluster.inside),
        "between": asdict(cluster.between),
    }
    lines = [
        f"# measured {now:%Y-%m-%d %H:%M} on {socket.gethostname()}: "
        f"{many(int(figures['ranks']), 'rank')} "
        f"({figures['device']}, {figures['backend']}), {figures['dtype']}",
        "# imece plan --here --again measures anew; [between] hosts is assumed: 10 Gb/s",
    ]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {as_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def keep(text: str, path: Path) -> None:
    """Write the file, whole or not at all. UserError if that fails."""
    with asked_for(path):
        write_whole(path, text.encode())


def _as_slow_as_a_model(gpu: Gpu, figures: Mapping[str, Any]) -> Gpu:
    """The GPU with the memory rate of a model's small kernels, which is below that of a copy.

    It is the rate at which forward and backward of the measured model take as long as they took.
    """
    name, batch, seq = figures["model"]
    activations = 2 if figures["dtype"] != "float32" else 4
    precision = Precision(parameters=4, gradients=4, masters=0, moments=4, activations=activations)
    setup = Setup(
        from_shape(name, preset(name)), Parallel(), Recipe(seq, micro_batch=batch, precision=precision)
    )
    alone = Cluster(gpu, 1, 1, Link(1e9, 0.0), Link(1e9, 0.0))
    low, high = _SLOWEST * gpu.memory_bandwidth, gpu.memory_bandwidth
    for _ in range(40):
        middle = (low + high) / 2
        # Another name, because caches compare names: see Gpu.
        slower = replace(gpu, name=f"{gpu.name} {middle}", memory_bandwidth=middle)
        if stage_time(setup, replace(alone, gpu=slower), IMECE).compute > figures["model_s"]:
            low = middle
        else:
            high = middle
    return replace(gpu, memory_bandwidth=high)


def _flash(gpu: Gpu, figures: Mapping[str, Any]) -> tuple[float, float]:
    """Attention's rates as parts of the peak, at most 1. They count as compute.py does: the causal half of
    the scores, and 2.5 times the work in backward."""
    batch, heads, seq, width = figures["attention"]
    flops = 2.0 * batch * heads * seq * seq * width
    forward, backward = figures["attention_forward_s"], figures["attention_backward_s"]
    rate = gpu.peak * flash_part(width, seq)
    return min(1.0, flops / (forward * rate)), min(1.0, 2.5 * flops / (backward * rate))


def _link(figures: Mapping[str, Any]) -> Link:
    """The link that an all_reduce measured: each of n ranks sends 2(n - 1)/n of its bytes, in 2(n - 1)
    messages in turn."""
    ranks = int(figures["ranks"])
    if ranks == 1:
        return find_cluster("CPU", 1, 1).inside
    sent = 2 * (ranks - 1) / ranks
    per_byte = max(float(figures["all_reduce_s_per_byte"]), 1e-13)
    return Link(sent / per_byte, float(figures["all_reduce_fixed_s"]) / (2 * (ranks - 1)), efficiency=1.0)
