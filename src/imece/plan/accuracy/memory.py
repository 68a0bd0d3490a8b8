"""Published memory beside its prediction: tables of papers, measured peaks, and runs that fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from imece.buckets import default_cap_bytes
from imece.footprint import DIVIDED, Sizes, footprint
from imece.plan.accuracy.published import Table, read
from imece.plan.accuracy.statistics import Row
from imece.plan.accuracy.steps import cases_of, gpt, torchtitan, ultrascale_name, ultrascale_setup
from imece.plan.hardware import GIB, Gpu
from imece.plan.memory.activations import kept_layer, layers_in_flight
from imece.plan.memory.frameworks import IMECE_CPU, LLM_FOUNDRY, MEGATRON, NANOTRON, PAPER, TORCHTITAN
from imece.plan.memory.held import held
from imece.plan.memory.memory import memory
from imece.plan.models.model import Model
from imece.plan.presets import find_gpu
from imece.plan.setup import Parallel, Precision, Recipe, Recomputation, Setup, Strategy

_OTHERS = ("frozen", "distill", "offloading", "deepseek")
_DEFAULT_VOCABULARY = 50257  # in Megatron's CI: of GPT-2, and of BERT
_BERT_VOCABULARY = 30524
_MIXTRAL_VOCABULARY = 32000


@dataclass(frozen=True)
class Fits:
    """Whether predictions tell which runs fit. All are counts of runs."""

    ran: int
    ran_passed: int  # of those that ran, predicted to fit
    failed: int
    too_large: int  # those that failed and can only have failed for memory
    too_large_flagged: int


def zero_states(table: Table) -> list[Row]:
    """Table 1 of ZeRO, in GB; the paper rounds, and truncates numbers shown without decimals. Nothing is
    fitted."""
    rows = []
    for r in table.rows:
        whole, ranks = float(r["billions"]) * 1e9, r["ranks"]
        divides = DIVIDED[f"zero{r['stage']}"]
        found = footprint(
            Sizes(whole, whole / ranks), divides, parameter_bytes=2, reduce_bytes=2, master_bytes=4,
            state_bytes=8 * whole / ranks, sum_bytes=2,
        )  # fmt: skip
        name = f"{r['billions']}B x{ranks} ZeRO-{r['stage']}"
        rows.append(Row(name, float(r["gb"]), found.total / 1e9, held_out=True))
    return rows


def korthikanti(table: Table) -> list[Row]:
    """Figures 1 (GiB) and 7 (per cent of tensor parallelism alone). Nothing is fitted."""
    rows = []
    for r in table.rows:
        setup = _of_paper(r)
        held_ = held(setup, 0, PAPER.stages)
        states = 18 * held_.layers * held_.products / GIB  # the paper's 18 bytes, for matrices only
        of = {key: _activations(setup, *how) for key, how in _WAYS.items()}
        found = {
            "states_gib": states, "none_gib": of["none"] / GIB,
            "sequence_selective_gib": of["both"] / GIB,
            **{f"{key}_pct": 100 * of[key] / of["none"] for key in ("sequence", "selective", "both", "full")},
        }  # fmt: skip
        rows += [
            Row(f"{r['model']} {key}", float(r[key]), value, held_out=True) for key, value in found.items()
        ]
    return rows


_WAYS: dict[str, tuple[bool, Recomputation]] = {  # (sequence parallelism, recomputation)
    "none": (False, "none"), "sequence": (True, "none"), "selective": (False, "selective"),
    "both": (True, "selective"), "full": (False, "full"),
}  # fmt: skip


def _of_paper(r: Mapping[str, Any]) -> Setup:
    pipeline = r["pp"]
    parallel = Parallel(tensor=r["tp"], pipeline=pipeline, interleave=r["chunks"])
    recipe = Recipe(2048, r["micro_batch"], 8 * pipeline, attention="plain", dropout=True)
    return Setup(gpt(r, 51200, 2048, biases=False), parallel, recipe)


def _activations(setup: Setup, sequence: bool, recompute: Recomputation) -> float:
    parallel = replace(setup.parallel, sequence=sequence)
    recipe = replace(setup.recipe, recompute=recompute)
    layers = held(setup, 0, PAPER.stages).layers
    kept = kept_layer(setup.model, parallel, recipe, PAPER)
    return kept.total * layers_in_flight(layers, parallel, recipe, 0)


def ultrascale_memory(table: Table) -> list[Row]:
    """GiB that rank 0 reserved, in runs that succeeded. 1B was fitted; 3B is held out."""
    rows = []
    for r in table.rows:
        if r["status"] == "ok":
            found = memory(ultrascale_setup(r), 0, NANOTRON).total / GIB
            cell = f"{r['model']}, {r['nodes']} hosts"
            measured, held_out = float(r["memory_gb"]), r["model"] != "1B"
            rows.append(Row(ultrascale_name(r), measured, found, cell=cell, held_out=held_out))
    return rows


def ultrascale_fits(model: str | None = None, own: Path | None = None) -> Fits:
    """Counts over all its runs. A failure counts as memory's if the pipeline's schedule and stages were
    possible, no other run of the same configuration succeeded, and the prediction is more than half of the
    device."""
    table = [r for r in read("ultrascale", own).rows if model in (None, r["model"])]
    gpu = find_gpu("H100")
    ran = {_configuration(r) for r in table if r["status"] == "ok"}
    passed: list[bool] = []  # for each run that ran: whether it is predicted to fit
    failed: list[tuple[bool, bool]] = []  # for each other: predicted not to fit, can only be too large
    for r in table:
        setup = ultrascale_setup(r)
        needed = memory(setup, 0, NANOTRON).total
        has_room = _has_room(needed, gpu)
        if r["status"] == "ok":
            passed.append(has_room)
            continue
        too_large = (
            setup.recipe.accumulation >= setup.parallel.pipeline - 1
            and setup.parallel.pipeline < setup.model.layers
            and _configuration(r) not in ran
            and needed > gpu.memory_bytes / 2
        )
        failed.append((not has_room, too_large))
    return Fits(
        ran=len(passed),
        ran_passed=sum(passed),
        failed=len(failed),
        too_large=sum(too_large for _, too_large in failed),
        too_large_flagged=sum(flagged and too_large for flagged, too_large in failed),
    )


def _configuration(r: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(r[key] for key in ("model", "dp", "tp", "pp", "zero", "micro_batch", "accumulation"))


def _has_room(needed: int, gpu: Gpu) -> bool:
    return needed + gpu.overhead_bytes <= gpu.memory_bytes


def llm_foundry_fits() -> Fits:
    """All these runs succeeded. Nothing is fitted."""
    passed = ran = 0
    for case in cases_of("llm_foundry"):
        needed = min(memory(setup, None, LLM_FOUNDRY).total for setup in case.setups)
        ran += 1
        passed += _has_room(needed, case.cluster.gpu)
    return Fits(ran, passed, failed=0, too_large=0, too_large_flagged=0)


def torchtitan_memory(table: Table, fitted_gpus: int = 0) -> list[Row]:
    """GiB reserved. Slack, a single number, is fitted on rows with up to `fitted_gpus` GPUs."""
    rows = []
    for case, r in zip(torchtitan(table), table.rows, strict=True):
        predicted = memory(case.setups[0], None, TORCHTITAN).total / GIB
        rows.append(Row(case.name, float(r["memory_gib"]), predicted, held_out=r["gpus"] > fitted_gpus))
    return rows


def megatron_ci(table: Table, family: str) -> list[Row]:
    """GiB at the peak of the last stage, for one family (gpt, moe, bert, mixtral)."""
    rows = []
    for r in table.rows:
        if r["family"] == family and (setup := _of_ci(r)) is not None:
            found = memory(setup, setup.parallel.pipeline - 1, MEGATRON).total / GIB
            name = f"{r['case']} {r['golden'].removesuffix('.json').removeprefix('golden_values_')}"
            rows.append(Row(name, float(r["peak_gib"]), found, cell=r["platform"]))
    return rows


def _of_ci(r: Mapping[str, Any]) -> Setup | None:
    """The setup of a row; None if the table lacks what decides it: a frozen model, distillation, fp8,
    activations in the host's memory, or DeepSeek's attention and experts."""
    if r["fp8"] or any(word in r["case"] for word in _OTHERS):
        return None
    width, heads, tensor = r["width"], r["heads"], r["tp"] or 1
    layers, pipeline, context = r["layers"], r["pp"] or 1, r["cp"] or 1
    experts, gated = r["experts"] or 0, r["gated"] == "True"
    usual = {"bert": _BERT_VOCABULARY, "mixtral": _MIXTRAL_VOCABULARY}.get(r["family"], _DEFAULT_VOCABULARY)
    multiple = (r["vocab_multiple"] or 128) * tensor
    model = Model(
        r["case"], layers, width, heads, r["groups"] or heads, r["head_width"] or width // heads,
        r["mlp_width"] or (8 * width // 3 if gated else 4 * width), gated,
        vocab_size=-(-(r["vocab"] or usual) // multiple) * multiple,
        tied_head=r["untied"] != "True",
        learned_positions=0 if r["positions"] == "rope" else r["seq"],
        biases=r["no_biases"] != "True", norm="rms" if r["norm"] == "RMSNorm" else "layer",
        experts=experts, active_experts=2 if experts else 0,
    )  # fmt: skip
    gpus = r["gpus"] or 8
    data = max(1, gpus // (tensor * pipeline * context))
    chunks = r["chunks"] or 1
    if r["layers_a_chunk"]:
        chunks = max(1, layers // pipeline // r["layers_a_chunk"])
    divided: Strategy = (
        "zero3" if r["fsdp"] else "zero1" if r["distributed_optimizer"] == "True" else "replicate"
    )
    shard = data * context if divided != "replicate" else 1
    parallel = Parallel(
        divided, data, shard, tensor, r["sequence"] == "True", context, pipeline, chunks,
        expert=r["ep"] or 1,
    )  # fmt: skip
    micro_batch = r["micro_batch"]
    accumulation = max(1, (r["global_batch"] or 32) // (micro_batch * data))
    # The meaning of "auto" came with the container: older ones take no flash attention, to be deterministic.
    flash = r["attention"] == "flash" or r["flash"] == "True" or (not r["attention"] and _is_new(r))
    recipe = Recipe(
        r["seq"], micro_batch, accumulation, recompute="full" if r["recompute"] == "full" else "none",
        attention="flash" if flash else "plain", precision=MEGATRON.precision, dropout=r["dropout"] != "0.0",
    )  # fmt: skip
    return Setup(model, parallel, recipe)


def _is_new(r: Mapping[str, Any]) -> bool:
    return "dracooci" not in r["golden"] and r["implementation"] != "local"


def own_engine(table: Table) -> list[Row]:
    """MB that a rank of imece holds, without activations. Nothing is fitted."""
    rows = []
    for r in table.rows:
        model, ranks = gpt(r, r["vocab"], r["length"]), r["ranks"]
        name, _, gathers = r["strategy"].partition("-")
        shard = ranks if DIVIDED[name].optimizer else 1
        precision = Precision() if r["bf16"] == 1 else IMECE_CPU.precision
        cap_bytes = default_cap_bytes(on_cpu=True, borrows=DIVIDED[name].gradients)
        recipe = Recipe(128, precision=precision, bucket_bytes=cap_bytes)
        framework = replace(IMECE_CPU, name=r["strategy"], gathers=True) if gathers else IMECE_CPU
        parallel = Parallel(cast(Strategy, name), ranks, shard)
        predicted = memory(Setup(model, parallel, recipe), framework=framework).states
        counted = sum(r[key] for key in ("parameters", "gradients", "optimizer", "communication"))
        kind = "bf16" if r["bf16"] == 1 else "fp32"
        title = f"{model.parameters / 1e6:.1f}M x{ranks} {r['strategy']} {kind}"
        rows.append(
            Row(title, counted / 1e6, predicted / 1e6, cell=r["strategy"], held_out=True, ranks=ranks)
        )
    return rows


TABLES: dict[str, tuple[str, Callable[[Table], list[Row]]]] = {
    "zero_states": ("zero_states", zero_states),
    "korthikanti_memory": ("korthikanti_memory", korthikanti),
    "own_engine": ("own_engine", own_engine),
    "ultrascale_memory": ("ultrascale", ultrascale_memory),
    "torchtitan_memory": ("torchtitan", partial(torchtitan_memory, fitted_gpus=8)),
    "torchtitan_float8_memory": ("torchtitan_float8", torchtitan_memory),
    **{
        f"megatron_ci_{family}": ("megatron_ci", partial(megatron_ci, family=family))
        for family in ("gpt", "moe", "mixtral", "bert")
    },
}
"""Name -> (its file, function that gives its rows with their predictions)."""


def rows(table: str, own: Path | None = None) -> list[Row]:
    """All rows of a table, or of the file `own`, which has the same columns."""
    file, predicted = TABLES[table]
    return predicted(read(file, own))
