"""The planner's prediction for a run, and plan.json, which has it beside what was measured."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from imece.errors import UserError
from imece.footprint import DIVIDED, Footprint
from imece.mesh import Mesh
from imece.models.experts import experts_of
from imece.models.foreign import ForeignConfig
from imece.models.language_model import LanguageConfig
from imece.models.matrices import matrices_of
from imece.observe.metrics import read_metrics
from imece.observe.run_files import write_json
from imece.observe.units import gigabytes, milliseconds
from imece.plan.answer.explain import parts
from imece.plan.answer.search import Candidate, framework_on, judge, with_usual_buckets
from imece.plan.answer.words import title
from imece.plan.check import PLAN_FILE, VERSION
from imece.plan.hardware import Cluster
from imece.plan.here import kept_cluster
from imece.plan.memory.held import held
from imece.plan.memory.memory import counted_bytes, keeps_whole, scale_bytes
from imece.plan.models.from_code import of_module
from imece.plan.models.model import Model, from_shape
from imece.plan.presets import find_cluster
from imece.plan.setup import Adapters, Parallel, Recipe, Setup, Strategy
from imece.plan.setup import Precision as Bytes
from imece.system.control_groups import allowed_bytes
from imece.train.batch import BatchPlan
from imece.train.config import LoraSection, TrainConfig
from imece.train.dividing import train_units
from imece.train.model.adapters import targets_of
from imece.train.model.precision import Precision

_WARM = 3  # slower steps at the beginning, not counted
FIRST_STEP_BYTES = 70 << 20
"""On a CPU, memory of libraries: code that only a step runs, oneDNN's buffers, gaps in the allocator.
Measured with torch 2.13: what a process of the preset "small" has beyond its tensors after some steps."""
_UNMEASURED = "speed unknown until imece plan --here has measured this machine"


@dataclass(frozen=True)
class Machine:
    """What is known of the machine that a run is on."""

    cluster: Cluster
    is_measured: bool  # if not, only its memory is known
    shares_memory: bool = False  # CPU ranks of one host: each maps what the others share


@dataclass(frozen=True)
class Given:
    """What a prediction depends on, besides the strategy."""

    config: TrainConfig
    shape: LanguageConfig
    plan: BatchPlan
    precision: Precision
    machine: Machine


@dataclass(frozen=True)
class Prediction:
    """The prediction for one strategy on this machine."""

    candidate: Candidate
    machine: Machine
    mapped: int = 0
    """Bytes of shared memory that is counted for each CPU rank of a host: the other ranks' parts in it, and
    copies for recovery."""

    @property
    def needed(self) -> int:
        """Bytes of a rank's whole process as the system counts them; on a GPU, those on the card."""
        return self.candidate.needed + self.mapped

    @property
    def step_s(self) -> float | None:
        """None if the machine was not measured."""
        return self.candidate.seconds if self.machine.is_measured else None

    @property
    def lacks(self) -> str:
        """A line if that is more than a rank may have, else ""."""
        has = self.machine.cluster.gpu.memory_bytes
        if self.candidate.needed <= has:  # what is mapped lies there once for all ranks of a host
            return ""
        setup, needs = self.candidate.setup, gigabytes(self.candidate.needed)
        less = "--accumulate sharded, " * (keeps_whole(setup) and setup.parallel.pipeline == 1)
        return (
            f"warning: a rank is expected to need {needs} and has {gigabytes(has)}: {less}fewer --ranks on a "
            "CPU, a smaller --batch.micro or --compute.recompute help"
        )

    def describe(self) -> str:
        """For the run's header."""
        size = f"{gigabytes(self.needed)} a rank"
        if self.candidate.memory.host:
            size += f" and {gigabytes(self.candidate.memory.host)} of the host's memory"
        if self.step_s is None:
            return f"{size}; {_UNMEASURED}"
        tokens_per_s = self.candidate.setup.tokens_a_step / self.step_s
        return f"{size}, {milliseconds(self.step_s)} a step, {tokens_per_s:,.0f} tokens/s"

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        candidate, step_s = self.candidate, self.step_s
        return {
            "plan": title(candidate.setup),
            "strategy": candidate.setup.parallel.strategy,
            "ranks": candidate.setup.parallel.ranks,
            "hardware": self.machine.cluster.gpu.name if self.machine.is_measured else None,
            "memory_bytes": candidate.memory.by_category(),
            "counted_bytes": _counted(candidate.setup, self.machine.cluster),
            "outside_bytes": self.machine.cluster.gpu.overhead_bytes,
            "mapped_bytes": self.mapped,
            "needed_bytes": self.needed,
            "step_s": step_s,
            "parts_s": parts(candidate.time) if candidate.time is not None and step_s is not None else {},
            **({} if step_s is not None else {"why": _UNMEASURED}),
        }


def machine_of(mesh: Mesh, model_bytes: int = 0) -> Machine:
    """What `imece plan --here` has measured of this machine; otherwise a preset with this machine's memory.

    model_bytes: what this process, on a CPU, already has of the model; all its other memory counts as taken.
    """
    found = _machine_of(mesh)
    if mesh.device.type != "cpu":
        return found
    gpu = replace(found.cluster.gpu, overhead_bytes=_outside(model_bytes))
    return replace(found, cluster=replace(found.cluster, gpu=gpu), shares_memory=True)


def _outside(model_bytes: int) -> int:
    return int(psutil.Process().memory_info().rss) - model_bytes + FIRST_STEP_BYTES


def _machine_of(mesh: Mesh) -> Machine:
    hosts = len(mesh.hosts)
    each = max(len(host) for host in mesh.hosts)
    with contextlib.suppress(UserError):  # a damaged file counts as none
        kept = kept_cluster(each)
        if kept is not None and (kept.gpu.multiprocessors == 1) == (mesh.device.type == "cpu"):
            return Machine(replace(kept, hosts=hosts), hosts == 1)
    if mesh.device.type == "cpu":
        base, memory = find_cluster("CPU", each, hosts), allowed_bytes() // each
    else:
        base, memory = find_cluster("H100", each, hosts), torch.cuda.mem_get_info(mesh.device)[1]
    return Machine(replace(base, gpu=replace(base.gpu, memory_bytes=memory)), False)


def predict(strategy: str, given: Given, *, copies: bool = False) -> Prediction:
    """The prediction for the run with that strategy. copies: whether each rank keeps copies of its part for
    recovery."""
    config, shape, plan, machine = given.config, given.shape, given.plan, given.machine
    cluster = machine.cluster
    ranks = plan.ranks * plan.mesh.context  # data-parallel ranks, which shard states
    shard = {"replicate": 1, "hybrid": cluster.gpus_per_host, "hybrid_zero2": cluster.gpus_per_host}
    itemsize = 4 if given.precision.name == "fp32" else 2
    model = planned(config.model.name, shape)
    recipe = Recipe(
        plan.seq,
        micro_batch=plan.micro,
        accumulation=plan.accumulation,
        accumulates_whole=plan.whole,
        table_units=train_units(config, shape) is not None,
        recompute="full" if config.compute.recompute else "none",
        optimizer=config.optimizer.kind,
        compiled=config.compute.compile,
        offload=config.offload,
        adapters=_adapters(config.lora),
        adapter_rank=_rank_on_all(config.lora, shape, model),
        wire=config.wire,
        precision=Bytes(parameters=4, gradients=4, masters=0, moments=4, activations=itemsize),
    )
    name = cast(Strategy, strategy)  # same names as in data_parallel/strategy.py
    parallel = Parallel(
        strategy=name, data=plan.ranks, shard=shard.get(strategy, ranks), context=plan.mesh.context,
        tensor=plan.mesh.tensor, sequence=plan.mesh.sequence, pipeline=plan.mesh.pipeline,
        interleave=plan.mesh.chunks, schedule="gpipe" if plan.mesh.schedule == "gpipe" else "1f1b",
    )  # fmt: skip
    setup = with_usual_buckets(Setup(model, parallel, recipe), cluster)
    mapped = _mapped(setup, cluster, copies and strategy != "replicate") if machine.shares_memory else 0
    return Prediction(judge(setup, cluster), machine, mapped)


def _adapters(lora: LoraSection) -> Adapters:
    if not lora.rank:
        return "none"
    return "lora" if lora.quantize == "none" else "qlora"


def planned(name: str, shape: LanguageConfig) -> Model:
    """The model as the planner sees it; one that it does not know has an MLP, or experts, that make up for
    the rest."""
    if not isinstance(shape, ForeignConfig):
        return from_shape(name, shape)
    built = shape.built()
    with contextlib.suppress(ValueError):
        return replace(of_module(built, name), max_seq=shape.max_seq)
    experts, active = experts_of(built.config)
    heads, kv_heads = shape.heads, shape.kv_heads if shape.heads % shape.kv_heads == 0 else shape.heads
    model = Model(
        name, shape.layers, shape.width, heads, kv_heads, shape.head_width, 1, gated=True,
        vocab_size=shape.vocab_size, tied_head=shape.tied_head, max_seq=shape.max_seq, ours=False,
        experts=experts, active_experts=active,
    ).with_vectors(0, 0)  # fmt: skip
    layer, more = divmod(shape.parameter_count - model.parameters, shape.layers)
    mlp, vectors = divmod(max(0, layer), 3 * shape.width * max(1, experts))
    return replace(model, mlp_width=1 + mlp, vectors=vectors, others=more)


def _rank_on_all(lora: LoraSection, shape: LanguageConfig, model: Model) -> float:
    """The rank of adapters beside all matrices of `model` that have as many parameters as those beside the
    chosen ones, which may be fused."""
    if not lora.rank:
        return 1
    chosen = (matrices_of(shape)[name] for name in targets_of(lora, shape))
    sides = sum(matrix.rows + matrix.columns for matrix in chosen)
    return lora.rank * sides / (model.layers * model.adapter_parameters)


def _mapped(setup: Setup, cluster: Cluster, copies: bool) -> int:
    """Bytes for the ranks of one host: shared memory, and copies of a rank's last two states in it."""
    counted: dict[str, float] = {**_counted(setup, cluster)}
    ranks = min(setup.parallel.ranks, cluster.gpus_per_host)
    shared = counted["gradients"] + counted["communication"]
    part = counted["optimizer"]
    still = 0.0  # of a copy, which is written once
    if setup.parallel.strategy != "replicate":
        model, parallel = setup.model, setup.parallel
        framework = framework_on(cluster, parallel)
        parameters, numbers = counted["parameters"], float(model.parameters)
        if setup.recipe.adapters != "none":
            numbers = model.layers * setup.recipe.adapter_rank * model.adapter_parameters
            scales = scale_bytes(setup, held(setup, 0, framework.stages))
            divides = DIVIDED[parallel.strategy].parameters
            parameters = parameters - scales if divides else 4.0 * numbers
            still = parameters - 4 * numbers / parallel.shard if divides and framework.gathers else 0.0
        shared += parameters
        part += 4 * numbers / ranks
    return int((ranks - 1) * shared + (ranks * (2 * part + still) if copies else 0))


def _counted(setup: Setup, cluster: Cluster) -> dict[str, int]:
    """Of the first stage, as rank 0 counts its own."""
    return counted_bytes(setup, 0, framework_on(cluster, setup.parallel))


def keep(folder: Path, prediction: Prediction, measured: dict[str, Any] | None = None) -> None:
    """Write plan.json into the run folder."""
    content = {"version": VERSION, "predicted": prediction.as_json(), "measured": measured}
    write_json(folder / PLAN_FILE, content)


def measured(folder: Path, counted: Footprint, since: int) -> dict[str, Any]:
    """Measurements from the records of steps after `since`, none if they cannot be read: whoever writes them
    has reported that."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        records = [record for record in read_metrics(folder) if record["step"] > since + _WARM]
    steps_s = [float(record["step_s"]) for record in records if "step_s" in record]
    step_s = statistics.median(steps_s) if steps_s else None
    peaks = [int(record["memory_bytes"]) for record in records if "memory_bytes" in record]
    return {"memory_bytes": asdict(counted), "rank_bytes": max(peaks, default=None), "step_s": step_s}


def compared(prediction: Prediction, came: dict[str, Any]) -> str:
    """ "predicted 0.62 GB a rank, 550 ms a step; measured 0.70 GB, 562 ms": a line for the end."""
    said, was = [f"{gigabytes(prediction.needed)} a rank"], []
    if came["rank_bytes"]:
        was.append(gigabytes(came["rank_bytes"]))
    if prediction.step_s is not None:
        said.append(f"{milliseconds(prediction.step_s)} a step")
    if came["step_s"]:
        was.append(f"{milliseconds(came['step_s'])}{'' if prediction.step_s is not None else ' a step'}")
    if not was:
        return f"predicted {', '.join(said)}; too few steps to compare"
    return f"predicted {', '.join(said)}; measured {', '.join(was)}"
