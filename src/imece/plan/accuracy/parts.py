"""Published measurements of parts of a step: collectives, one layer, and data parallelism alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from imece.plan.accuracy.published import read
from imece.plan.accuracy.statistics import Row
from imece.plan.hardware import Cluster
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster, find_gpu, find_network
from imece.plan.setup import Parallel, Recipe, Recomputation, Setup
from imece.plan.speed.communication import Op, along, collective_s, sent_bytes
from imece.plan.speed.compute import layer_time
from imece.plan.speed.manner import IMECE, MEGATRON
from imece.plan.speed.stage import stage_time
from imece.plan.speed.timeline import exposed_after

_BACKWARD = 2 / 3  # of the time of a step on one GPU


def nccl() -> list[Row]:
    """Seconds of one collective. Links were fitted on these rows; those with 3 to 7 V100 have fewer lanes."""
    rows = []
    for r in read("nccl").rows:
        gpu = {"H": "H100", "A": "A100-80", "V": "V100"}[r["hardware"][0]]
        cluster = find_cluster(gpu, 8, r["nodes"], "efa")
        op, ranks, size = cast(Op, r["collective"]), r["ranks"], r["bytes"]
        measured = sent_bytes(op, size, ranks) / (float(r["busbw_gbps"]) * 1e9)
        predicted = collective_s(cluster, op, size, along(cluster, ranks, 1))
        name = f"{r['hardware']} {op} x{ranks} {size / 2**20:.0f} MiB {r['algorithm']}".strip()
        rows.append(Row(name, measured, predicted, cell=r["hardware"], ranks=ranks))
    return rows


def korthikanti_layer() -> list[Row]:
    """Forward and backward of one layer, with its tensor-parallel collectives. Nothing is fitted on it."""
    model = Model(
        "22B", 1, 6144, 64, 64, 96, 4 * 6144, gated=False, vocab_size=8, learned_positions=2048, biases=True,
        norm="layer",
    )  # fmt: skip
    cluster = find_cluster("A100-80", 8, 1, "infiniband-hdr")
    rows = []
    for r in read("korthikanti_layer").rows:
        recipe = Recipe(2048, 4, recompute=cast(Recomputation, r["recompute"]), attention="plain")
        setup = Setup(model, Parallel("replicate", tensor=8, sequence=r["sequence"] == 1), recipe)
        measured = (float(r["forward_ms"]) + float(r["backward_ms"])) / 1e3
        rows.append(Row(r["experiment"], measured, stage_time(setup, cluster, MEGATRON).total, held_out=True))
    return rows


def attention() -> list[Row]:
    """Attention, alone and as a ring. Chosen on these rows: Gpu.flash of H100 and A100, and the bytes of
    merging blocks."""
    rows = []
    for r in read("attention").rows:
        heads, width, seq, batch, ranks = (
            r[name] for name in ("heads", "head_width", "seq", "batch", "ranks")
        )
        model = Model("attention", 1, heads * width, heads, r["kv_heads"], width, 8, True, vocab_size=8)
        found = layer_time(find_gpu(r["gpu"]), model, IMECE, Recipe(seq, batch), ranks, 1, False)
        both = r["pass"] == "both"
        flops = 2.0 * batch * seq * seq * width * heads
        measured = 1 / float(r["per_s"]) if r["per_s"] else flops / (float(r["tflops"]) * 1e12)
        predicted = found.core + (found.core_backward if both else 0.0)
        name = f"{r['gpu']} {r['pass']} heads of {width} seq {seq} x{ranks}"
        rows.append(Row(name, measured, predicted, cell=r["gpu"], ranks=ranks))
    return rows


def ddp_v100() -> list[Row]:
    """A step on several GPUs, computed from that measured on one: what DDP adds. Nothing is fitted on it."""
    table = read("ddp_v100").rows
    alone = {r["model"]: float(r["step_s"]) for r in table if r["gpus"] == 1}
    rows = []
    for r in table:
        gpus = r["gpus"]
        if gpus < 2:
            continue
        cluster = replace(find_cluster("V100", 8, -(-gpus // 8)), between=find_network("50Gb", 8))
        size, bucket = 4.0 * r["parameters"], float(r["bucket_mb"]) * 2**20
        rows.append(_scaled(f"{r['model']} x{gpus}", r, alone[r["model"]], cluster, gpus, size, bucket))
    return rows


def bert() -> list[Row]:
    """BERT-Large on 8 GPUs, computed from its step measured on one. Nothing is fitted on it."""
    table = [r | {"step_s": str(_bert_step_s(r))} for r in read("bert").rows]
    alone = {(r["task"], r["seq"]): float(r["step_s"]) for r in table if r["gpus"] == 1}
    cluster = find_cluster("A100-80", 8, 1)
    return [
        _scaled(
            f"{r['task']} seq {r['seq']} x{r['gpus']}{' again' if r['note'] else ''}", r,
            alone[r["task"], r["seq"]], cluster, r["gpus"], 2.0 * 335e6, 25 * 2**20,
            max(1, r["accumulation"]),
        )
        for r in table if r["gpus"] != 1
    ]  # fmt: skip


def _bert_step_s(r: Mapping[str, Any]) -> float:
    sequences: int = r["batch"] * max(1, r["accumulation"]) * r["gpus"]
    return sequences / float(r["sequences_per_s"])


def _scaled(
    name: str,
    r: Mapping[str, Any],
    alone_s: float,
    cluster: Cluster,
    gpus: int,
    size: float,
    bucket: float,
    steps: int = 1,
) -> Row:
    pieces = max(1, round(size / bucket))
    one = collective_s(cluster, "all_reduce", size / pieces, along(cluster, gpus, 1))
    added = exposed_after(alone_s * _BACKWARD / steps, pieces, one)
    return Row(name, float(r["step_s"]), alone_s + added, alone_s, r.get("model", ""), True, gpus)


TABLES: dict[str, Callable[[], list[Row]]] = {
    "nccl": nccl,
    "attention": attention,
    "korthikanti_layer": korthikanti_layer,
    "ddp_v100": ddp_v100,
    "bert": bert,
}
