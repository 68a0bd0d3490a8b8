"""Published step times as cases: what was trained, on what, by which software, and how long a step took."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from imece.plan.accuracy import nanotron
from imece.plan.accuracy.published import Table, read
from imece.plan.accuracy.statistics import Row
from imece.plan.hardware import Cluster, Gpu
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster, find_gpu
from imece.plan.setup import Parallel, Precision, Recipe, Setup, Strategy
from imece.plan.speed.compute import flops_a_token
from imece.plan.speed.manner import (
    LLM_FOUNDRY,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED,
    TORCHTITAN,
    Manner,
)
from imece.plan.speed.step_time import step_time

_FP32_GRADIENTS = Precision(parameters=2, gradients=2, main_gradients=4, masters=4, moments=4)


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    name: str
    measured_s: float
    setups: tuple[Setup, ...]  # if the table leaves something open, every possibility; the fastest counts
    cluster: Cluster
    manner: Manner
    cell: str = ""
    held_out: bool = False
    sequences: int = 0  # compare the time for this many, if rows of a cell take different numbers per step

    @property
    def part(self) -> float:
        """The part of a step that is compared."""
        return self.sequences / self.setups[0].global_batch if self.sequences else 1.0


def row(case: Case) -> Row:
    """The case with its prediction."""
    setup = case.setups[0]
    predicted = min(step_time(setup, case.cluster, case.manner).total for setup in case.setups)
    flops = flops_a_token(setup.model, setup.recipe.seq) * setup.tokens_a_step
    work = flops / (case.cluster.gpu.peak * setup.parallel.ranks)
    measured, predicted, work = (case.part * seconds for seconds in (case.measured_s, predicted, work))
    return Row(case.name, measured, predicted, work, case.cell, case.held_out, setup.parallel.ranks)


def ultrascale(table: Table) -> Iterator[Case]:
    """The successful runs. Fitted on 1B; 3B is held out.

    They were made with two versions of nanotron, on two networks.
    """
    for r in table.rows:
        if r["status"] != "ok":
            continue
        setup = ultrascale_setup(r)
        ranks = setup.parallel.ranks
        yield Case(
            ultrascale_name(r),
            setup.tokens_a_step / (float(r["tokens_per_s_per_gpu"]) * ranks),
            (setup,),
            find_cluster("H100", 8, r["nodes"], "efa"),
            nanotron.of_row(r),
            cell=f"{r['model']}, {r['nodes']} hosts",
            held_out=r["model"] != "1B",
            sequences=r["global_batch"],
        )


def ultrascale_name(r: Mapping[str, Any]) -> str:
    """One row of ultrascale in words."""
    return f"{r['model']} dp{r['dp']} tp{r['tp']} pp{r['pp']} mb{r['micro_batch']} zero{r['zero']}"


def ultrascale_setup(r: Mapping[str, Any]) -> Setup:
    """The setup of one row of ultrascale."""
    width, heads = r["width"], r["heads"]
    model = Model(
        r["model"], r["layers"], width, heads, r["kv_heads"], width // heads,
        r["mlp_width"], gated=True, vocab_size=r["vocab"], tied_head=r["tied"] == 1,
    )  # fmt: skip
    data = r["dp"]
    strategy: Strategy = "zero1" if r["zero"] == 1 else "replicate"
    parallel = Parallel(strategy, data, data, r["tp"], pipeline=r["pp"])
    recipe = Recipe(r["seq"], r["micro_batch"], r["accumulation"], precision=_FP32_GRADIENTS)
    return Setup(model, parallel, recipe)


def llm_foundry(table: Table) -> Iterator[Case]:
    """Fitted on runs of one host; runs on several hosts are held out."""
    for r in table.rows:
        model, gpus = gpt(r, 50368, r["seq"], biases=False), r["gpus"]
        wide = r["mode"] == "amp_bf16"
        precision = Precision() if wide else Precision(masters=0, moments=2)
        recipe = Recipe(
            r["seq"], r["micro_batch"], r["accumulation"],
            recompute="full" if r["checkpoint"] == 1 else "none", precision=precision,
        )  # fmt: skip
        setup = Setup(model, Parallel("zero3", data=gpus, shard=gpus), recipe)
        yield Case(
            f"{r['model']} {r['gpu']} x{gpus} seq {r['seq']} mb{r['micro_batch']}",
            setup.tokens_a_step / float(r["tokens_per_s"]),
            (setup,),
            find_cluster("A100-80" if "80" in r["gpu"] else "A100-40", 8, gpus // 8, "roce-1600"),
            LLM_FOUNDRY,
            cell=r["gpu"],
            held_out=gpus > 8,
        )


def _h100_at_500_w() -> Gpu:
    """An H100 at 500 W: everything that multiplies is slower, attention too."""
    gpu = find_gpu("H100")
    return replace(
        gpu,
        name="H100 500 W, HBM2e",
        memory_bandwidth=2.4e12,
        sustained=gpu.sustained * _AT_500_W,
        flash=(gpu.flash[0] * _AT_500_W, gpu.flash[1] * _AT_500_W),
    )


def torchtitan(table: Table, gpu: Gpu | None = None) -> Iterator[Case]:
    """Nothing is fitted on them. gpu: by default an H100 at 500 W."""
    gpu = gpu or _h100_at_500_w()
    for r in table.rows:
        gpus, model = r["gpus"], _LLAMAS[r["model"]]
        cluster = find_cluster("H100", 8, -(-gpus // 8), "infiniband-ndr")
        batch, data, tensor, context = (r[name] for name in ("local_batch", "fsdp", "tp", "cp"))
        recipe = Recipe(
            r["seq"], batch, r["global_batch"] // (batch * data),
            recompute="full" if r["checkpoint"] == "full" else "selective", compiled=r["compiled"] == 1,
            precision=Precision(fp8=r["float8"] == 1),
        )  # fmt: skip
        setup = Setup(model, Parallel("zero3", data, data * context, tensor, context=context), recipe)
        name = f"{r['model']} x{gpus}"
        name += "".join(f" {axis}{r[axis]}" for axis in ("tp", "cp") if r[axis] != 1)
        yield Case(
            name + (" compiled" if r["compiled"] == 1 else ""),
            setup.tokens_a_step / (float(r["tokens_per_s_per_gpu"]) * gpus),
            (setup,),
            replace(cluster, gpu=gpu),
            TORCHTITAN,
            cell=f"{model.name}, {gpus} GPUs, {r['seq']}",
            held_out=True,
        )


_LLAMAS = {
    "Llama3.1-8B": Model("8B", 32, 4096, 32, 8, 128, 14336, True, 128256, tied_head=False),
    "Llama3.1-70B": Model("70B", 80, 8192, 64, 8, 128, 28672, True, 128256, tied_head=False),
}
_AT_500_W = (500 / 700) ** (1 / 3)  # clocks scale with the cube root of power


def vtrain(table: Table) -> Iterator[Case]:
    """Fitted on models of width 1024; those of width 2048 are held out."""
    for r in table.rows:
        model, shape = gpt(r, 51200, r["seq"]), f"{r['layers']} x {r['width']}"
        data, micro = r["dp"], r["micro_batch"]
        recipe = Recipe(
            r["seq"], micro, r["global_batch"] // (micro * data), recompute="full",
            attention="plain",
        )  # fmt: skip
        parallel = Parallel("replicate", data=data, tensor=r["tp"], sequence=False, pipeline=r["pp"])
        setup = Setup(model, parallel, recipe)
        if recipe.accumulation < 1 or parallel.ranks != r["gpus"]:
            continue
        yield Case(
            f"{shape} dp{data} tp{r['tp']} pp{r['pp']} mb{micro} batch {r['global_batch']}",
            float(r["step_ms"]) / 1e3,
            (setup,),
            find_cluster("A100-80", 8, 1),
            MEGATRON_DEEPSPEED,
            cell=f"{shape}, {r['gpus']} GPUs, batch {r['global_batch']}",
            held_out=r["width"] != 1024,
        )


def gpt(r: Mapping[str, Any], vocab: int, seq: int, *, biases: bool = True) -> Model:
    """A model like GPT-2, of the layers, width and heads of a row."""
    width, heads = r["width"], r["heads"]
    return Model(
        f"GPT {r['layers']} x {width}", r["layers"], width, heads, heads, width // heads, 4 * width,
        gated=False, vocab_size=vocab, learned_positions=seq, biases=biases, norm="layer",
    )  # fmt: skip


def sc21(table: Table) -> Iterator[Case]:
    """The table lacks micro-batch and chunks: its authors took the fastest, and so does this."""
    for r in table.rows:
        model = gpt(r, r["vocab"], r["seq"])
        data, pipeline = r["dp"], r["pp"]
        share = r["global_batch"] // data
        setups = []
        for micro, chunks in itertools.product((1, 2, 4, 8), (1, 2, 3, 4) if pipeline > 1 else (1,)):
            steps = share // micro
            if share % micro or model.layers % (pipeline * chunks) or (chunks > 1 and steps % pipeline):
                continue
            recipe = Recipe(r["seq"], micro, steps, recompute="full", attention="plain")
            parallel = Parallel(
                "replicate", data, tensor=r["tp"], sequence=False, pipeline=pipeline, interleave=chunks
            )
            setups.append(Setup(model, parallel, recipe))
        yield Case(
            f"{r['params_b']}B x{r['gpus']}",
            float(r["step_s"]),
            tuple(setups),
            find_cluster("A100-80", 8, r["gpus"] // 8, "infiniband-hdr"),
            MEGATRON_2021,
            cell="weak scaling",
            held_out=True,
        )


def korthikanti(table: Table) -> Iterator[Case]:
    """Steps of table 5."""
    for r in table.rows:
        data = r["dp"]
        selective = r["mode"] == "selective"
        recipe = Recipe(
            r["seq"], r["micro_batch"], r["global_batch"] // (r["micro_batch"] * data),
            recompute="selective" if selective else "full", attention="plain",
        )  # fmt: skip
        parallel = Parallel(
            "replicate", data=data, tensor=r["tp"], sequence=selective, pipeline=r["pp"],
            interleave=r["interleave"],
        )  # fmt: skip
        yield Case(
            f"{r['model']} {r['mode']}",
            float(r["step_s"]),
            (Setup(gpt(r, r["vocab"], r["seq"]), parallel, recipe),),
            find_cluster("A100-80", 8, r["gpus"] // 8 or 1, "infiniband-hdr"),
            MEGATRON,
            cell=r["model"],
            held_out=True,
        )


TABLES: dict[str, Callable[[Table], Iterator[Case]]] = {
    "ultrascale": ultrascale,
    "llm_foundry": llm_foundry,
    "torchtitan": torchtitan,  # in bf16
    "torchtitan_float8": torchtitan,  # layers multiplied in FP8
    "torchtitan_h200": lambda table: torchtitan(table, find_gpu("H200")),  # the same, half a year later
    "vtrain": vtrain,
    "sc21": sc21,
    "korthikanti_iteration": korthikanti,
}


def cases_of(table: str, own: Path | None = None) -> Iterator[Case]:
    """All cases of a table, or of the rows in the file `own`, which has the same columns."""
    return TABLES[table](read(table, own))


def rows(table: str, own: Path | None = None) -> list[Row]:
    """The same with their predictions."""
    return [row(case) for case in cases_of(table, own)]
