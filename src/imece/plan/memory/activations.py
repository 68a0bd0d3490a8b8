"""Bytes of activations: what the forward of one layer keeps for backward, and for how many layers at a time.

    T        tokens of a micro-batch on one rank: its sequences, divided by context parallelism
    sharded  by sequence parallelism, over the ranks that share a layer's matrices
    kept     until the micro-batch's backward; `working` exists while one layer's backward runs

With the papers' switches these are table 2 of Korthikanti et al. 2022 to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from imece.plan.memory.frameworks import Framework
from imece.plan.models.model import Model
from imece.plan.setup import Parallel, Recipe

_MASK = 1  # bytes per element of a dropout mask
_STATISTIC = 4  # bytes of the one fp32 number per row
_PLAIN_COPIES = 2  # of an ungated MLP's width: before and after its activation
_COMPILED_COPIES = 3  # at most, of any MLP's width, if a compiler recomputes what is cheap


@dataclass(frozen=True)
class Layer:
    """Bytes of one layer and one micro-batch, on one rank."""

    norms: float = 0.0  # inputs of norms: the residual, in most models twice
    inputs: float = 0.0  # outputs of norms, which the first products of attention and MLP read
    attention: float = 0.0  # queries, keys, values, and attention's output
    scores: float = 0.0  # T x T, or one number per row with flash attention
    mlp: float = 0.0
    dropout: float = 0.0  # masks on what is added to the residual
    adapters: float = 0.0  # between the adapters' two matrices

    @property
    def total(self) -> float:
        return (
            self.norms + self.inputs + self.attention + self.scores + self.mlp + self.dropout + self.adapters
        )


def tokens(recipe: Recipe, parallel: Parallel) -> float:
    """Tokens of a micro-batch on one rank."""
    return recipe.micro_batch * recipe.seq / parallel.context


def whole_layer(model: Model, parallel: Parallel, recipe: Recipe, framework: Framework) -> Layer:
    """A layer without recomputation."""
    count, tensor, size = tokens(recipe, parallel), parallel.tensor, recipe.precision.activations
    sharded = parallel.token_parts
    residual = 2 * count * model.width
    norms = framework.norm_copies * count * model.norms * model.width * of_residual(recipe) / sharded
    read = min(model.norms, 2)
    if recipe.precision.autocast:  # a copy for each product: queries, keys, values; gate, up
        read = 5 if model.gated else 4
    inputs = count * read * model.width * size / (1 if framework.gathered_inputs else sharded)
    query, key = model.q_width, model.kv_width
    widths = (1 + framework.query_copies) * query + (1 + framework.key_copies) * key
    widths += (model.heads + model.kv_heads) * model.value_width  # the output, and values
    widths += (query + key) if model.head_norms else 0
    attention = count * widths * size / tensor
    if model.latent is not None:  # before its norm and after it
        attention += 2 * count * model.latent.kept * size
    heads = recipe.micro_batch * model.heads * recipe.seq / parallel.context / tensor
    if recipe.attention == "flash":
        scores = heads * _STATISTIC
    else:
        of_each = 2 * size + _MASK if recipe.dropout else size
        scores = heads * recipe.seq * of_each
    dropout = residual * _MASK / sharded if recipe.dropout else 0.0
    mlp = _mlp(model, count, recipe, framework) / tensor
    adapters = 0.0
    if recipe.adapters != "none":
        matrices = len(model.attention) + sum(
            each.part * each.active * len(each.matrices) for each in model.mlps
        )
        adapters = count * matrices * recipe.adapter_rank * size
    return Layer(norms, inputs, attention, scores, mlp, dropout, adapters)


def of_residual(recipe: Recipe) -> int:
    """Bytes per element of the residual: under autocast norms and sums are in the parameters' dtype."""
    precision = recipe.precision
    return precision.parameters if precision.autocast else precision.activations


def _mlp(model: Model, count: float, recipe: Recipe, framework: Framework) -> float:
    size = recipe.precision.activations
    copies = framework.gated_copies if model.gated else _PLAIN_COPIES
    if recipe.compiled:
        copies = min(copies, _COMPILED_COPIES)
    kept = count * copies * _through(model) * size
    if model.experts:  # each token's inputs and outputs of experts are reordered: a copy of each
        of_token = model.active_experts * 2 * model.width * size + model.experts * _STATISTIC
        kept += model.with_experts * count * of_token
    return kept


def _through(model: Model) -> float:
    """Width of all MLPs that a token goes through in the average layer."""
    return sum(each.part * each.active * each.width for each in model.mlps)


def kept_layer(model: Model, parallel: Parallel, recipe: Recipe, framework: Framework) -> Layer:
    """What recomputation keeps of a layer."""
    if recipe.recompute == "full":
        kept = tokens(recipe, parallel) * model.width * of_residual(recipe)
        return Layer(norms=kept / parallel.token_parts)
    whole = whole_layer(model, parallel, recipe, framework)
    if recipe.recompute == "none":
        return whole
    if framework.selective == "matrices":
        return _half_of_products(model, parallel, recipe)
    return replace(whole, scores=0.0)


def working_bytes(model: Model, parallel: Parallel, recipe: Recipe, framework: Framework) -> float:
    """Bytes of a layer while its backward runs: all that its forward keeps, and gradients, two as wide as the
    MLP and two as wide as the residual."""
    size, sharded = recipe.precision.activations, parallel.token_parts
    inner = _through(model) / parallel.tensor
    gradients = tokens(recipe, parallel) * size * 2 * (inner + model.width / sharded)
    return whole_layer(model, parallel, recipe, framework).total + gradients


def _half_of_products(model: Model, parallel: Parallel, recipe: Recipe) -> Layer:
    """The results of every second product (queries, values, gate, the MLP's output), attention's output, and
    the layer's input. A compiler leaves out the MLP's output, which backward does not read."""
    count, tensor, size = tokens(recipe, parallel), parallel.tensor, recipe.precision.activations
    sharded = parallel.token_parts
    query, key = model.q_width, model.kv_width
    return Layer(
        norms=(1 if recipe.compiled else 2) * count * model.width * size / sharded,
        attention=count * (2 * query + key) * size / tensor,
        scores=recipe.micro_batch * model.heads * recipe.seq / parallel.context * _STATISTIC / tensor,
        mlp=count * _through(model) * size / tensor,
    )


def layers_in_flight(layers: int, parallel: Parallel, recipe: Recipe, stage: int) -> float:
    """Layers times micro-batches whose activations a stage of this many layers keeps at a time."""
    pipeline, count = parallel.pipeline, recipe.accumulation
    if pipeline == 1:
        return float(layers)
    if parallel.schedule == "gpipe":
        return float(layers * count)
    if parallel.interleave == 1:
        return float(layers * min(pipeline - stage, count))
    chunks = parallel.interleave
    # Warm-up of the interleaved schedule, 2 (p - stage - 1) + (v - 1) p chunks, and the one that runs.
    most = 2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1
    return layers / chunks * min(most, count * chunks)
