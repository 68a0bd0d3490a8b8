"""Which parameters of a pipeline stage a rank has, and how they lie in buckets.

Without tensor and pipeline parallelism buckets come from layout.py, as in the engine: the prediction uses the
real layout. Otherwise they are sums.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from imece import layout
from imece.footprint import DIVIDED, Sizes
from imece.models.dealing import deal, layer_cost
from imece.plan.memory.frameworks import Framework
from imece.plan.models.model import Model
from imece.plan.setup import Parallel, Recipe, Setup, Stages

_ALIGN_BYTES, _ITEM_ALIGN_BYTES = 128, 32  # of a shard and in it, as data_parallel/sharding/parts.py has it
_MOST_LAID = 4000  # items: with more, a layout takes long, and its padding is negligible


@dataclass(frozen=True)
class Held:
    """Elements on one tensor-parallel rank of one stage, before data parallelism shards anything."""

    layers: int
    layer: float  # of one layer without experts
    experts: float  # of one layer, on this rank
    tables: float  # embedding and head
    rest: float  # the last norm, positions
    products: float  # of one layer: in matrices, including experts

    @property
    def dense(self) -> float:
        return self.layers * self.layer + self.tables + self.rest

    @property
    def all_experts(self) -> float:
        return self.layers * self.experts

    @property
    def total(self) -> float:
        return self.dense + self.all_experts


def stage_layers(setup: Setup, stages: Stages) -> tuple[int, ...]:
    """Layers of each rank of the pipeline; if stages are "even", of the largest instead."""
    parallel = setup.parallel
    return _stage_layers(
        setup.model, parallel.tensor, parallel.pipeline, parallel.interleave, setup.recipe.seq, stages
    )


@functools.lru_cache(maxsize=4096)
def _stage_layers(
    model: Model, tensor: int, pipeline: int, chunks: int, seq: int, stages: Stages
) -> tuple[int, ...]:
    if pipeline == 1:
        return (model.layers,)
    if stages == "even":
        return (math.ceil(model.layers / (pipeline * chunks)) * chunks,) * pipeline
    if stages == "dealt":
        return _dealt_layers(model, tensor, pipeline, chunks, seq)
    share = (model.layers + model.table_parameters / _products(model)) / pipeline  # in units of layers
    ends = [min(math.ceil(stage * share - 1e-9), model.layers) for stage in range(pipeline + 1)]
    return tuple(after - before for before, after in itertools.pairwise(ends))


def _dealt_layers(model: Model, tensor: int, pipeline: int, chunks: int, seq: int) -> tuple[int, ...]:
    """As imece.Pipeline deals them, which has its pieces' costs from model_parallel/cutting.py. All layers
    cost the same here, also where some have a window."""
    vectors = _vectors(model)
    parameters = (model.layer_parameters - vectors) / tensor + vectors
    seen = seq - model.windowed * max(0, seq - model.window)
    layer = layer_cost(parameters, model.q_width / tensor, seen)
    head = model.table_parameters / model.table_parts(tensor)
    dealt = deal([*[layer] * model.layers, head], pipeline * chunks)
    counts = [len(pieces) - (model.layers in pieces) for pieces in dealt]
    return tuple(sum(counts[rank::pipeline]) for rank in range(pipeline))


def held(setup: Setup, stage: int, framework: Framework) -> Held:
    """What `stage` holds. The embedding is on the first stage and a separate head on the last, even if they
    are tied."""
    parallel = setup.parallel
    layers = stage_layers(setup, framework.stages)[stage]
    return _held(setup.model, parallel.tensor, parallel.pipeline, parallel.expert, layers, stage)


@functools.lru_cache(maxsize=4096)
def _held(model: Model, tensor: int, pipeline: int, expert: int, layers: int, stage: int) -> Held:
    vectors = _vectors(model)
    one = _expert(model)
    experts = model.experts * one
    router = model.experts * model.width
    matrices = model.layer_parameters - vectors - experts - router
    table = model.table_parameters / model.table_parts(tensor)
    first, last = stage == 0, stage == pipeline - 1
    if pipeline == 1:
        tables = table * (1 if model.tied_head else 2)
    else:
        tables = table * (first + last)
    positions = model.learned_positions * model.width
    rest = (model.other_parameters - positions) * last + positions * first
    return Held(
        layers=layers,
        layer=matrices / tensor + vectors + router,
        experts=experts / tensor / expert,
        tables=tables,
        rest=rest,
        products=(matrices + experts) / tensor,
    )


def adapter_parameters(model: Model, rank: float) -> float:
    """Parameters of low-rank adapters on every matrix of a layer."""
    query, key = model.q_width, model.kv_width
    sides = 2 * (model.width + query) + 2 * (model.width + key)
    mlp = (3 if model.gated else 2) * (model.width + model.mlp_width)
    return rank * (sides + mlp * max(1, model.experts))


def trained_elements(setup: Setup, stage: int, framework: Framework) -> float:
    """Trained elements on one rank of `stage`, before data parallelism shards anything."""
    part, recipe = held(setup, stage, framework), setup.recipe
    if recipe.adapters == "none":
        return part.total
    return part.layers * adapter_parameters(setup.model, recipe.adapter_rank) / setup.parallel.tensor


def sizes(model: Model, parallel: Parallel, recipe: Recipe, part: Held, framework: Framework) -> Sizes:
    """Sizes of the dense parameters, sharded by the strategy over `parallel.shard` ranks; its buckets contain
    experts too."""
    divides = DIVIDED[parallel.strategy]
    by_unit = divides.parameters and framework.gathers
    itemsize = recipe.precision.masters or recipe.precision.parameters  # by which a bucket's cap counts
    if parallel.tensor == parallel.pipeline == 1 and not model.experts and model.layers * 9 < _MOST_LAID:
        return _laid(
            model, parallel.strategy, parallel.shard, recipe.bucket_bytes, itemsize, by_unit,
            framework.units_at_once, max(1, framework.grown_units), recipe.table_units,
        )  # fmt: skip
    root, largest = part.tables + part.rest, part.layer
    if recipe.table_units and not model.tied_head and part.tables:
        root = part.rest
        largest = max(largest, model.table_parameters / model.table_parts(parallel.tensor))
    filling = 0.0
    if by_unit:
        filling = root + largest * framework.grown_units
    elif divides.gradients:
        bucket = max(recipe.bucket_bytes / itemsize, _largest(model, part) / parallel.tensor)
        filling = min(part.total, max(1, framework.grown_units) * bucket)
    gathered = root + framework.units_at_once * largest if by_unit else 0.0
    return Sizes(part.dense, part.dense / parallel.shard, filling, gathered)


def expert_sizes(parallel: Parallel, part: Held, framework: Framework) -> Sizes:
    """Sizes of the experts, which fewer ranks share if they are distributed; a layer's experts are one unit
    with it."""
    whole, shard = part.all_experts, max(1, parallel.shard // parallel.expert)
    if not (DIVIDED[parallel.strategy].parameters and framework.gathers):
        return Sizes(whole, whole / shard)
    return Sizes(
        whole, whole / shard, part.experts * framework.grown_units, part.experts * framework.units_at_once
    )


def _largest(model: Model, part: Held) -> int:
    """Elements of the largest tensor: no bucket is smaller."""
    layer = model.width * max(model.mlp_width, model.q_width)
    return max(layer, model.table_parameters if part.tables else 0)


@functools.lru_cache(maxsize=1024)
def _laid(
    model: Model,
    strategy: str,
    shards: int,
    cap_bytes: int,
    itemsize: int,
    by_unit: bool,
    units_at_once: int,
    grown_units: int,
    table_units: bool,
) -> Sizes:
    """Sizes from layout.py, with the arguments that data_parallel/sharding/trained.py uses."""
    divides = DIVIDED[strategy]
    shards = shards if divides.optimizer else 1
    laid = layout.build(
        items(model, itemsize, by_unit, table_units),
        cap_bytes=2**62 if by_unit else cap_bytes,
        shards=shards,
        align_bytes=_ALIGN_BYTES,
        item_align_bytes=_ITEM_ALIGN_BYTES,
        modules_whole=True,
    )
    whole = sum(bucket.numel for bucket in laid.buckets)
    filling = gathered = 0
    if by_unit:
        root = sum(bucket.numel for bucket in laid.buckets if bucket.group == 0)
        units = sorted((bucket.numel for bucket in laid.buckets if bucket.group), reverse=True)
        filling = root + min(grown_units, len(units)) * units[0]
        gathered = root + sum(units[:units_at_once])
    elif divides.gradients:  # each has memory for the largest, passed on: data_parallel/shard.py
        filling = min(grown_units, len(laid.buckets)) * max(bucket.numel for bucket in laid.buckets)
    return Sizes(whole, whole / shards, filling, gathered)


def items(model: Model, itemsize: int, by_unit: bool, table_units: bool = False) -> list[layout.Item]:
    """The model's tensors in module order. group: the layer, from 1 on, then tables that are units; or 0 for
    all."""
    apart = by_unit and table_units and not model.tied_head
    embed, head = (model.layers + 1, model.layers + 2) if apart else (0, 0)
    found: list[tuple[str, tuple[int, ...], int]] = [("embed.weight", (model.vocab_size, model.width), embed)]
    if model.learned_positions:
        found.append(("positions.weight", (model.learned_positions, model.width), 0))
    for at in range(model.layers):
        group = at + 1 if by_unit else 0
        found += [(f"blocks.{at}.{name}", shape, group) for name, shape in _layer_items(model)]
    if model.others is None:
        found += [(f"norm.{name}", (model.width,), 0) for name in _norm_names(model)]
    elif model.others:
        found.append(("norm", (model.others,), 0))
    if not model.tied_head:
        found.append(("head.weight", (model.vocab_size, model.width), head))
    dtype = f"bytes{itemsize}"
    return [layout.Item(name, shape, dtype, itemsize, group=group) for name, shape, group in found]


def _layer_items(model: Model) -> list[tuple[str, tuple[int, ...]]]:
    query, key = model.q_width, model.kv_width
    matrices = [
        ("attention.q", query, model.width), ("attention.k", key, model.width),
        ("attention.v", key, model.width), ("attention.out", model.width, query),
    ]  # fmt: skip
    mlp = [("mlp.gate", model.mlp_width, model.width)] if model.gated else []
    mlp += [("mlp.up", model.mlp_width, model.width), ("mlp.down", model.width, model.mlp_width)]
    found: list[tuple[str, tuple[int, ...]]] = []
    if model.vectors is not None:
        vectors = [("vectors", (model.vectors,))] if model.vectors else []
        return [*vectors, *((f"{name}.weight", (rows, columns)) for name, rows, columns in matrices + mlp)]
    for norm, group in (("attention.norm", matrices), ("mlp.norm", mlp)):
        found += [(f"{norm}.{name}", (model.width,)) for name in _norm_names(model)]
        for name, rows, columns in group:
            found.append((f"{name}.weight", (rows, columns)))
            if model.biases:
                found.append((f"{name}.bias", (rows,)))
    return found


def _norm_names(model: Model) -> list[str]:
    return ["weight", "bias"] if model.norm == "layer" and model.biases else ["weight"]


def _vectors(model: Model) -> int:
    """Elements of one layer's norms and residual biases, which every rank has whole."""
    if model.vectors is not None:
        return model.vectors
    norms = model.norms * model.norm_parameters
    return norms + (model.width * (1 if model.experts else 2) if model.biases else 0)


def _expert(model: Model) -> int:
    """Elements of one expert; 0 without experts."""
    if not model.experts:
        return 0
    biases = (2 if model.gated else 1) * model.mlp_width + model.width if model.biases else 0
    return (3 if model.gated else 2) * model.width * model.mlp_width + biases


def _products(model: Model) -> int:
    """Elements of a layer's matrices."""
    return model.layer_parameters - _vectors(model)
