"""Time of one rank's own work: a roofline for each kind of kernel, with efficiency by shape.

The tiles of a matrix product are spread over the device's multiprocessors. A product that does not fill its
last wave of tiles takes as long as one that does; so small shards of tensor parallelism are slow. Kernels
that multiply little (norms, residuals, activations, the loss, the optimizer) cost the bytes that they move.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imece.plan.hardware import Gpu
from imece.plan.models.model import Mlp, Model
from imece.plan.setup import Recipe
from imece.plan.speed.manner import Manner

_STREAM = 0.85  # of memory bandwidth that kernels reach which only move bytes
_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.55))  # rows, columns, of the best
_FILL = 96  # terms of a sum that filling and emptying a tile's pipeline cost
_SPLIT = 1024  # least terms of a part if a tile's sum is split over multiprocessors
_SCORES_FORWARD = 13  # bytes moved per score if attention keeps scores: product, softmax, dropout
_SCORES_BACKWARD = 24
_BATCHED = 0.5  # of the sustained rate, for products of single heads
_HALF_SEQ = 300  # tokens at which causal flash attention reaches half of its rate
# Bytes moved for each element of attention's output and each block of a ring, to merge the block with the
# earlier ones. From zhuzilin/ring-flash-attention with 8 x 8,192 tokens (both ends of the sequence on each
# rank, README.md), compared with flash attention alone: 25 and 36 on H800, 31 and 33 on A100.
_MERGED_FORWARD = 28
_MERGED_BACKWARD = 35
_WIDE = 128  # channels of a head to which Gpu.flash refers
_ONE_BYTE = 1  # per FP8 element; results have two bytes
_FUSED = 0.5  # part of element-wise and loss bytes left after compilation


@dataclass(frozen=True)
class LayerTime:
    """One layer of one rank on one micro-batch, in seconds, without communication."""

    forward: float
    inputs: float  # backward, without the gradients of parameters; with those of adapters
    weights: float  # backward: the gradients of parameters
    core: float  # part of forward: scores, softmax and their product with the values
    core_backward: float  # the same part of inputs
    products: float  # part of forward: matrix products, and casting their inputs
    columns: float  # one backward product of those split by columns, beside which a collective can run


@dataclass(frozen=True)
class HeadTime:
    """The product with the vocabulary, and the loss."""

    forward: float
    inputs: float
    weights: float


@dataclass(frozen=True)
class _Casts:
    """Bytes moved per element that is cast to FP8 with one scale per tensor: it is read for the maximum, read
    again, and written in the order that the next product reads."""

    input: float
    input_again: float  # in backward
    matrix: float
    matrix_again: float
    gradient: float


# As in torchao's own roofline (torchao/testing/training/roofline_utils.py): 2 for the maximum, 2 + 1 to
# write; inputs and gradients at once in both orders, a matrix's second order in backward.
_CASTS = _Casts(input=6, input_again=0, matrix=5, matrix_again=3, gradient=6)
# Not compiled, one kernel per operation (float8_utils.py, float8_training_tensor.py): absolute value 4,
# maximum 2, to fp32 6, scaling 8, clamping 8, to a byte 5; and 2 if the order changes.
_CASTS_ALONE = _Casts(input=33, input_again=35, matrix=33, matrix_again=35, gradient=33 + 35)


@functools.lru_cache(maxsize=65536)
def product_s(gpu: Gpu, rows: int, columns: int, terms: int, element_bytes: int = 2, times: int = 1) -> float:
    """Seconds of `times` products [rows, terms] x [terms, columns] at once, without software overhead.

    element_bytes: of the factors; 1 is FP8, whose results have 2.
    """
    units = gpu.multiprocessors
    rate, fill = gpu.peak * gpu.reachable * gpu.sustained / units, float(_FILL)
    if element_bytes == _ONE_BYTE:  # filling and emptying a pipeline takes as long as with wider elements
        rate, fill = rate * gpu.fp8, fill * gpu.fp8
    best = float("inf")
    for height, width, share in _TILES:
        tiles = times * -(-rows // height) * -(-columns // width)
        split = max(1, min(units // tiles, terms // _SPLIT)) if tiles < units else 1
        waves = -(-tiles * split // units)
        best = min(best, waves * 2 * height * width * (terms / split + fill) / (rate * share))
    read, written = rows * terms + terms * columns, rows * columns
    moved = times * (element_bytes * read + max(element_bytes, 2) * written)
    return max(best, stream_s(gpu, moved))


def stream_s(gpu: Gpu, moved_bytes: float) -> float:
    """Seconds of kernels that only move these bytes, reads and writes together."""
    return moved_bytes / (gpu.memory_bandwidth * _STREAM)


def layer_time(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, tensor: int, sequence: bool
) -> LayerTime:
    """One layer on one micro-batch, of whose tokens this rank has 1/context."""
    tokens, size = recipe.micro_batch * recipe.seq // context, recipe.precision.activations
    heads = part(model.heads, tensor)
    attention, mlps = _attention_products(model, tokens, tensor), _mlp_products(model, tokens, tensor)
    products = (*attention, *mlps)
    read = _ONE_BYTE if recipe.precision.fp8 else size
    forward = sum(p * product_s(gpu, m, n, k, read, times) for m, n, k, times, p, _ in products)
    inputs = [p * product_s(gpu, m, k, n, read, times) for m, n, k, times, p, _ in products]
    weights = sum(p * product_s(gpu, k, n, m, read, times) for m, n, k, times, p, _ in products)
    by_columns = [each for each, product in zip(inputs, products, strict=True) if product.readers]
    cast = _cast_s(gpu, recipe, products) if recipe.precision.fp8 else (0.0, 0.0)
    turned = (heads + part(model.kv_heads, tensor)) * model.head_width
    through = sum(each.part * each.active * part(each.width, tensor) for each in model.mlps)
    moved = _moved_forward(model, tokens, tensor if sequence else 1, turned, tokens * through) * size
    if model.experts:  # inputs are sorted by expert; outputs are read and added
        moved += model.with_experts * 3 * tokens * model.active_experts * model.width * size
    around = stream_s(gpu, moved * manner.elementwise * (_FUSED if recipe.compiled else 1))
    core, core_backward = _core(gpu, model, manner, recipe, context, heads)
    thin = 0.0
    if recipe.adapters != "none":
        thin = _thin_s(gpu, recipe, [(tokens, *each.part(tensor), 1) for each in model.attention])
        for mlp in model.mlps:
            rows, times = _at_work(mlp, tokens)
            beside = [(rows, *each.part(tensor), times) for each in mlp.matrices]
            thin += mlp.part * _thin_s(gpu, recipe, beside)
    return LayerTime(
        forward=forward + around + core + thin + cast[0],
        inputs=sum(inputs) + 2 * around + core_backward + 2 * thin + cast[1],
        weights=weights,
        core=core,
        core_backward=core_backward,
        products=forward + cast[0],
        columns=sum(by_columns) / 2,
    )


class _Product(NamedTuple):
    """[rows, terms] x [terms, columns], `times` at once, in a part of the layers."""

    rows: int
    columns: int
    terms: int
    times: int
    part: float
    readers: int  # matrices that make the columns, all of the same input; 0: split by terms, not by columns


def _attention_products(model: Model, tokens: int, tensor: int) -> list[_Product]:
    """Those of attention's matrices on one of `tensor` ranks."""
    heads = part(model.heads, tensor)
    last = _Product(tokens, model.width, heads * model.value_width, 1, 1, 0)
    if model.latent is None:
        columns = (heads + 2 * part(model.kv_heads, tensor)) * model.head_width
        return [_Product(tokens, columns, model.width, 1, 1, len(model.attention) - 1), last]
    inner = [_Product(tokens, *each.part(tensor), 1, 1, 1) for each in model.attention if each.reads_residual]
    return [*inner, last]


def _mlp_products(model: Model, tokens: int, tensor: int) -> list[_Product]:
    """Those of the MLPs."""
    found = []
    for mlp in model.mlps:
        rows, times = _at_work(mlp, tokens)
        inner, made = part(mlp.width, tensor), 2 if model.gated else 1
        found += [
            _Product(rows, made * inner, model.width, times, mlp.part, len(mlp.matrices) - 1),
            _Product(rows, model.width, inner, times, mlp.part, 0),
        ]
    return found


def _at_work(mlp: Mlp, tokens: int) -> tuple[int, int]:
    """(rows per MLP, MLPs with rows, each with matrices to be read)."""
    through = tokens * mlp.active
    at_work = max(1, min(mlp.experts, through))
    return -(-through // at_work), at_work


def _cast_s(gpu: Gpu, recipe: Recipe, products: Sequence[_Product]) -> tuple[float, float]:
    """Forward and backward seconds of casting everything that these products read to FP8. A compiler casts
    what several matrices read only once."""
    of, forward, backward = _CASTS if recipe.compiled else _CASTS_ALONE, 0.0, 0.0
    for rows, columns, terms, times, share, readers in products:
        inputs, matrix, gradient = (
            share * times * n for n in (rows * terms, terms * columns, rows * columns)
        )
        inputs *= 1 if recipe.compiled else max(1, readers)
        forward += of.input * inputs + of.matrix * matrix
        backward += of.input_again * inputs + of.matrix_again * matrix + of.gradient * gradient
    return stream_s(gpu, forward), stream_s(gpu, backward)


def _thin_s(gpu: Gpu, recipe: Recipe, shapes: Sequence[tuple[int, int, int, int]]) -> float:
    """Forward seconds of the adapters beside matrices of these shapes: two products, and their sum with the
    matrix's own. Backward takes twice that: gradients of inputs and of the adapters."""
    rank, size = max(1, round(recipe.adapter_rank)), recipe.precision.activations
    total = 0.0
    for rows, columns, terms, times in shapes:
        total += product_s(gpu, rows, rank, terms, size, times) + product_s(
            gpu, rows, columns, rank, size, times
        )
        total += stream_s(gpu, 3 * size * times * rows * columns)
    return total


def _moved_forward(model: Model, tokens: int, split: int, turned: float, activated: float) -> float:
    """Elements that a layer's forward reads and writes without products, one kernel per operation."""
    width = tokens * model.width * (2 * model.norms + 2 * 3) / split  # norms, two sums with the residual
    turned *= 2 if model.head_norms else 1  # queries and keys: their norms move as much as their rotation
    positions = 0 if model.learned_positions else 2 * tokens * turned
    activation = activated * (5 if model.gated else 2)
    biases = 2 * activated if model.biases else 0
    return width + positions + activation + biases


def _core(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, heads: int
) -> tuple[float, float]:
    """Forward and backward seconds of attention's core, over all blocks of a ring."""
    forward, backward = _attended(gpu, model, manner, recipe, context, heads)
    if context == 1:
        return forward, backward
    elements = context * (recipe.micro_batch * recipe.seq // context) * heads * model.value_width
    return (
        forward + stream_s(gpu, _MERGED_FORWARD * elements),
        backward + stream_s(gpu, _MERGED_BACKWARD * elements),
    )


def _attended(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, heads: int
) -> tuple[float, float]:
    """The same without merging the blocks. Scores are equally many on all ranks, because each has both ends
    of the sequence."""
    scores = recipe.micro_batch * recipe.seq * recipe.seq // context * heads
    flops: float
    if recipe.attention == "plain":  # also computes scores that the causal mask hides
        rate = gpu.peak * gpu.reachable * gpu.sustained * _BATCHED
        flops = 4 * scores * model.core_width
        forward = flops / rate + stream_s(gpu, _SCORES_FORWARD * scores)
        return forward, 2 * flops / rate + stream_s(gpu, _SCORES_BACKWARD * scores)
    rate = gpu.peak * manner.flash * flash_part(model.core_width, recipe.seq)
    flops = 2 * scores * model.scores_part(recipe.seq) * model.core_width
    return flops / (rate * gpu.flash[0]), 2.5 * flops / (rate * gpu.flash[1])


def flash_part(head_width: float, seq: int) -> float:
    """Share of Gpu.flash that attention reaches with this head width and length: tiles of narrow heads
    multiply little between softmaxes, and tiles of wide heads are small, because they hold much."""
    return math.pow(min(head_width / _WIDE, _WIDE / head_width), 0.15) * seq / (seq + _HALF_SEQ)


def head_time(gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, tokens: int, tensor: int) -> HeadTime:
    """The head on this rank's `tokens`, with the vocabulary split over `tensor` ranks if possible."""
    vocabulary, size = model.vocab_size // model.table_parts(tensor), recipe.precision.activations
    loss = stream_s(gpu, manner.loss_bytes * (_FUSED if recipe.compiled else 1) * tokens * vocabulary)
    forward = product_s(gpu, tokens, vocabulary, model.width, size)
    inputs = product_s(gpu, tokens, model.width, vocabulary, size)
    weights = product_s(gpu, model.width, vocabulary, tokens, size)
    return HeadTime(forward + 0.6 * loss, inputs + 0.4 * loss, weights)


def flops_a_token(model: Model, seq: int, frozen: bool = False) -> float:
    """FLOPs of forward and backward by the usual convention: 6 N + 12 L h s, all parameters, all scores in a
    window.

    4 N if the model is frozen, because its matrices need no gradients; adapters are not counted.
    """
    active = model.parameters
    if model.experts:
        idle = (model.experts - model.active_experts) * model.expert_parameters
        active -= round(model.layers * model.with_experts * idle)
    return (4 if frozen else 6) * active + _scores_flops_a_token(model, seq)


def hidden_part(model: Model, seq: int, frozen: bool) -> float:
    """The part of `flops_a_token` that flash attention leaves out: scores that the causal mask hides."""
    return _scores_flops_a_token(model, seq) / 2 / flops_a_token(model, seq, frozen)


def _scores_flops_a_token(model: Model, seq: int) -> float:
    return 12 * model.layers * model.heads * model.core_width * model.scores_part(seq) * seq


def part(whole: int, ranks: int) -> int:
    """The largest of `ranks` parts."""
    return -(-whole // ranks)
