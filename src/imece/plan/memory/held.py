"""Which parameters of a pipeline stage a rank has, and how they lie in buckets.

Buckets are laid by buckets.py, as the engine lays them: the prediction uses the real layout. Of experts, and
where that would take long and matter little, they are sums.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from imece import layout
from imece.buckets import filling, gathered, lay
from imece.footprint import DIVIDED, Sizes
from imece.models.dealing import deal, layer_cost
from imece.plan.memory.frameworks import Framework
from imece.plan.models.model import Model
from imece.plan.setup import Parallel, Recipe, Setup, Stages

_MOST_LAID = 4000  # items: with more, a layout takes long, and its padding is negligible
# Bytes of a part of a model, as buckets count them: of larger ones there are too many to lay them all, and a
# bucket more or less is little.
_LARGE_PART = 2**30
_MATRICES, _OTHERS = 0, 1  # numbers of Muon's optimizers, as imece train makes them


@dataclass(frozen=True)
class Held:
    """Elements on one tensor-parallel rank of one stage, before data parallelism shards anything."""

    layers: int
    layer: float  # of the average layer without its experts
    experts: float  # of one layer that has any, on this rank
    with_experts: float  # part of the layers that have them
    tables: float  # embedding and head
    rest: float  # the last norm, positions
    products: float  # of the average layer: in matrices, including experts
    embeds: bool = True  # whether the stage has the embedding
    heads: bool = True  # whether it has the last norm and the head

    @property
    def dense(self) -> float:
        return self.layers * self.layer + self.tables + self.rest

    @property
    def all_experts(self) -> float:
        return self.layers * self.with_experts * self.experts

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
    layer = model.layer_parameters - model.whole_vectors
    share = (model.layers + model.table_parameters / layer) / pipeline  # in units of layers
    ends = [min(math.ceil(stage * share - 1e-9), model.layers) for stage in range(pipeline + 1)]
    return tuple(after - before for before, after in itertools.pairwise(ends))


def _dealt_layers(model: Model, tensor: int, pipeline: int, chunks: int, seq: int) -> tuple[int, ...]:
    """As imece.Pipeline deals them, which has its pieces' costs from model_parallel/cutting.py. All layers
    cost the same here, also where some have a window."""
    parameters = (model.layer_parameters - model.whole_vectors) / tensor + model.whole_vectors
    seen = seq - model.windowed * max(0, seq - model.window)
    layer = layer_cost(parameters, model.q_width / tensor, seen)
    head = model.table_parameters / model.table_parts(tensor)
    dealt = deal([*[layer] * model.layers, head], pipeline * chunks)
    counts = [len(pieces) - (model.layers in pieces) for pieces in dealt]
    return tuple(sum(counts[rank::pipeline]) for rank in range(pipeline))


def held(setup: Setup, stage: int, stages: Stages) -> Held:
    """What `stage` holds. The embedding is on the first stage and a separate head on the last, even if they
    are tied."""
    parallel = setup.parallel
    layers = stage_layers(setup, stages)[stage]
    return _held(setup.model, parallel.tensor, parallel.pipeline, parallel.expert, layers, stage)


@functools.lru_cache(maxsize=4096)
def _held(model: Model, tensor: int, pipeline: int, expert: int, layers: int, stage: int) -> Held:
    experts, with_experts = model.experts * model.expert_parameters, model.with_experts
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
        layer=(model.products - with_experts * experts) / tensor
        + model.whole_vectors
        + with_experts * model.router_parameters,
        experts=experts / tensor / expert,
        with_experts=with_experts,
        tables=tables,
        rest=rest,
        products=model.products / tensor,
        embeds=first,
        heads=last,
    )


def trained_elements(setup: Setup, part: Held) -> float:
    """The elements of `part` that are trained: all, or its adapters'."""
    recipe = setup.recipe
    if recipe.adapters == "none":
        return part.total
    of_layer = recipe.adapter_rank * setup.model.adapter_parameters
    return part.layers * of_layer / setup.parallel.tensor


def sizes(model: Model, parallel: Parallel, recipe: Recipe, part: Held, framework: Framework) -> Sizes:
    """Sizes of the dense parameters, sharded by the strategy over `parallel.shard` ranks; its buckets contain
    experts too."""
    divides = DIVIDED[parallel.strategy]
    by_unit = divides.parameters and framework.gathers
    itemsize = recipe.precision.masters or recipe.precision.parameters  # by which a bucket's cap counts
    divided = parallel.tensor * parallel.pipeline > 1
    is_large = divided and part.total * itemsize > _LARGE_PART
    if not (model.experts or is_large or part.layers * 9 >= _MOST_LAID):
        laid = _Laid(
            model, part, parallel.tensor, by_unit, recipe.table_units, recipe.optimizer == "muon"
        )  # fmt: skip
        return _laid(
            laid, parallel.strategy, parallel.shard, recipe.bucket_bytes, itemsize, framework.units_at_once,
            max(0, framework.grown_units - 1),
        )  # fmt: skip
    root, largest = part.tables + part.rest, part.layer
    if recipe.table_units and not model.tied_head and part.tables:
        root = part.rest
        largest = max(largest, model.table_parameters / model.table_parts(parallel.tensor))
    grown = 0.0
    if by_unit:
        grown = root + largest * framework.grown_units
    elif divides.gradients:
        largest = max(model.largest_matrix, model.table_parameters if part.tables else 0)
        bucket = max(recipe.bucket_bytes / itemsize, largest / parallel.tensor)
        grown = min(part.total, max(1, framework.grown_units) * bucket)
    whole = root + framework.units_at_once * largest if by_unit else 0.0
    return Sizes(part.dense, part.dense / parallel.shard, grown, whole)


def expert_sizes(parallel: Parallel, part: Held, framework: Framework) -> Sizes:
    """Sizes of the experts, which fewer ranks share if they are distributed; a layer's experts are one unit
    with it."""
    whole, shard = part.all_experts, max(1, parallel.shard // parallel.expert)
    if not (DIVIDED[parallel.strategy].parameters and framework.gathers):
        return Sizes(whole, whole / shard)
    return Sizes(
        whole, whole / shard, part.experts * framework.grown_units, part.experts * framework.units_at_once
    )


@dataclass(frozen=True)
class _Laid:
    """Which tensors are laid, and what keeps them apart."""

    model: Model
    part: Held
    tensor: int
    by_unit: bool
    table_units: bool
    matrices_apart: bool  # another optimizer steps them, whole

    def items(self, itemsize: int) -> tuple[list[layout.Item], list[tuple[int, int]]]:
        """The tensors in the order in which modules are registered, and the pairs that their groups are
        indices into. Units are numbered from 1 on, layers first; everything else is unit 0."""
        model, part = self.model, self.part
        apart = self.by_unit and self.table_units and not model.tied_head
        embed, head = (part.layers + 1, part.layers + 2) if apart else (0, 0)
        table = (model.vocab_size // model.table_parts(self.tensor), model.width)
        found: list[tuple[str, tuple[int, ...], int]] = []
        if part.embeds or (part.heads and model.tied_head):
            found.append(("embed.weight", table, embed))
        if part.embeds and model.learned_positions:
            found.append(("positions.weight", (model.learned_positions, model.width), 0))
        of_layer = _layer_items(model, self.tensor)
        for at in range(part.layers):
            found += [(f"blocks.{at}.{name}", shape, (at + 1) * self.by_unit) for name, shape in of_layer]
        if part.heads and model.others is None:
            found += [(f"norm.{name}", (model.width,), 0) for name in _norm_names(model)]
        elif part.heads and model.others:
            found.append(("norm", (model.others,), 0))
        if part.heads and not model.tied_head:
            found.append(("head.weight", table, head))
        pair_of = [(unit, self._kind(name, shape)) for name, shape, unit in found]
        pairs = sorted(set(pair_of))
        at_group = {pair: group for group, pair in enumerate(pairs)}
        dtype = f"bytes{itemsize}"
        items = [
            layout.Item(name, shape, dtype, itemsize, group=at_group[pair])
            for (name, shape, _), pair in zip(found, pair_of, strict=True)
        ]
        return items, pairs

    def _kind(self, name: str, shape: tuple[int, ...]) -> int:
        if not self.matrices_apart:
            return 0
        return _MATRICES if name.startswith("blocks.") and len(shape) == 2 else _OTHERS


@functools.lru_cache(maxsize=1024)
def _laid(
    what: _Laid,
    strategy: str,
    shards: int,
    cap_bytes: int,
    itemsize: int,
    units_at_once: int,
    under_way: int,
) -> Sizes:
    """Sizes from the engine's layout. under_way: sums of buckets besides the one that fills."""
    divides = DIVIDED[strategy]
    shards = shards if divides.optimizer else 1
    items, pairs = what.items(itemsize)
    laid = lay(
        items, pairs, shards=shards, cap_bytes=None if what.by_unit else cap_bytes,
        whole=[_MATRICES] if what.matrices_apart and divides.optimizer else (),
    )  # fmt: skip
    numbered = [(*pairs[bucket.group], bucket) for bucket in laid.buckets]
    whole = sum(bucket.numel for bucket in laid.buckets)
    grown = filling(numbered, gathers=what.by_unit, most_under_way=under_way) if divides.gradients else ()
    units = [(unit, bucket.numel) for unit, _, bucket in numbered] if what.by_unit else []
    return Sizes(
        whole, whole / shards, sum(laid.buckets[at].numel for at in grown), gathered(units, units_at_once)
    )


def _layer_items(model: Model, tensor: int) -> list[tuple[str, tuple[int, ...]]]:
    plain = model.vectors is None
    found: list[tuple[str, tuple[int, ...]]] = [] if not model.vectors else [("vectors", (model.vectors,))]
    for part, matrices in (("attention", model.attention), ("mlp", model.mlp)):
        found += [(f"{part}.norm.{name}", (model.width,)) for name in _norm_names(model) if plain]
        for each in matrices:
            rows, columns = each.part(tensor)
            found.append((f"{each.name}.weight", (rows, columns)))
            if plain and model.biases:
                found.append((f"{each.name}.bias", (rows,)))
    return found


def _norm_names(model: Model) -> list[str]:
    return ["weight", "bias"] if model.norm == "layer" and model.biases else ["weight"]
