"""Time of one rank's own work: a roofline for each kind of kernel, with efficiency by shape.

Matrix products are dealt to the device's multiprocessors in tiles: one that does not fill a whole number of
waves of tiles takes as long as one that does. That is why small shards of tensor parallelism are slow. All
that multiplies little (norms, residuals, activations, the loss, the optimizer) costs the bytes that it
moves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from imece.plan.hardware import Gpu
from imece.plan.models.model import Model
from imece.plan.setup import Recipe
from imece.plan.speed.manner import Manner

_STREAM = 0.85  # of memory bandwidth, what kernels that only move bytes reach
_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.55))  # rows, columns, of the best
_FILL = 96  # terms of a sum that filling and emptying a tile's pipeline costs
_SPLIT = 1024  # terms that a part has at least, where a tile's sum is split over multiprocessors
_SCORES_FORWARD = 13  # bytes moved for each score where attention keeps them: product, softmax, dropout
_SCORES_BACKWARD = 24
_BATCHED = 0.5  # of the sustained rate, products of single heads
_HALF_SEQ = 300  # tokens at which flash attention reaches half of its rate, with a causal mask
# Bytes moved for each element that attention gives out and each block of keys and values that comes round, to
# add what the block gives to what those before gave: what zhuzilin/ring-flash-attention with 8 x 8,192 tokens
# (both ends of the sequence on each rank, README.md) takes longer than flash attention alone, on H800 25 and
# 36, on A100 31 and 33.
_MERGED_FORWARD = 28
_MERGED_BACKWARD = 35
_WIDE = 128  # channels of a head for which Gpu.flash is told
_ONE_BYTE = 1  # of an element that is multiplied in FP8; what comes of it has two
_FUSED = 0.5  # bytes of element-wise work and loss that are left where they are compiled into few kernels


@dataclass(frozen=True)
class LayerTime:
    """One layer of one rank on one micro-batch, in seconds, without communication."""

    forward: float
    inputs: float  # backward, but for the products that make gradients of parameters; those of adapters in it
    weights: float  # these
    core: float  # of forward: scores, softmax and their product with the values
    core_backward: float  # of inputs, likewise
    products: float  # of forward: matrix products, and casting what they read
    columns: float  # one backward product of those split by columns, beside which a collective can run


@dataclass(frozen=True)
class HeadTime:
    """The product with the vocabulary and the loss."""

    forward: float
    inputs: float
    weights: float


@dataclass(frozen=True)
class _Casts:
    """Bytes moved for each element that becomes FP8 with one scale a tensor: it is read for its largest
    number, read again, and written in the order in which the product that comes reads it."""

    input: float
    input_again: float  # in backward
    matrix: float
    matrix_again: float
    gradient: float


# As torchao's own roofline has them (torchao/testing/training/roofline_utils.py): 2 to find the largest,
# 2 + 1 to write; inputs and gradients at once in both orders, a matrix in its second one in backward.
_CASTS = _Casts(input=6, input_again=0, matrix=5, matrix_again=3, gradient=6)
# Not compiled, a kernel an operation (float8_utils.py, float8_training_tensor.py): the absolute value 4, its
# largest 2, to fp32 6, times the scale 8, clamped 8, to a byte 5; and 2 where the order has to change.
_CASTS_ALONE = _Casts(input=33, input_again=35, matrix=33, matrix_again=35, gradient=33 + 35)


@functools.lru_cache(maxsize=65536)
def product_s(gpu: Gpu, rows: int, columns: int, terms: int, element_bytes: int = 2, times: int = 1) -> float:
    """Seconds of `times` products [rows, terms] x [terms, columns] at once, without what software adds.

    element_bytes: of what is multiplied; 1 is FP8, which gives elements of 2.
    """
    units = gpu.multiprocessors
    rate, fill = gpu.peak * gpu.reachable * gpu.sustained / units, float(_FILL)
    if element_bytes == _ONE_BYTE:  # filling and emptying a pipeline takes as long as it does otherwise
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
    """Seconds of kernels that only move so many bytes, read and written."""
    return moved_bytes / (gpu.memory_bandwidth * _STREAM)


def layer_time(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, tensor: int, sequence: bool
) -> LayerTime:
    """Of one micro-batch, 1/context of whose tokens are this rank's."""
    tokens, size = recipe.micro_batch * recipe.seq // context, recipe.precision.activations
    heads, kv_heads = part(model.heads, tensor), part(model.kv_heads, tensor)
    query, both, mlp = (
        heads * model.head_width,
        2 * kv_heads * model.head_width,
        part(model.mlp_width, tensor),
    )
    through = tokens * max(1, model.active_experts)
    at_work = max(1, min(model.experts, through))  # experts, each with matrices of its own to be read
    each = -(-through // at_work)  # rows of an expert
    shapes = (
        (tokens, query + both, model.width, 1),
        (each, (2 if model.gated else 1) * mlp, model.width, at_work),
        (tokens, model.width, query, 1),
        (each, model.width, mlp, at_work),
    )
    read = _ONE_BYTE if recipe.precision.fp8 else size
    forward = sum(product_s(gpu, m, n, k, read, times) for m, n, k, times in shapes) / manner.products
    inputs = [product_s(gpu, m, k, n, read, times) / manner.products for m, n, k, times in shapes]
    weights = sum(product_s(gpu, k, n, m, read, times) for m, n, k, times in shapes) / manner.products
    cast = (0.0, 0.0)
    if recipe.precision.fp8:
        cast = _cast_s(gpu, recipe, shapes, (3, 2 if model.gated else 1, 1, 1))
    moved = _moved_forward(model, tokens, tensor if sequence else 1, query + both / 2, through * mlp) * size
    if (
        model.experts
    ):  # what they read is put in the order of experts; what they give out is read, and added up
        moved += 3 * through * model.width * size
    around = stream_s(gpu, moved * manner.elementwise * (_FUSED if recipe.compiled else 1))
    core, core_backward = _core(gpu, model, manner, recipe, context, heads)
    thin = 0.0
    if recipe.adapters != "none":
        # Queries, keys and values have adapters of their own, and so have gate and up.
        alone = [(tokens, n, model.width, 1) for n in (query, both // 2, both // 2)]
        alone += (2 if model.gated else 1) * [(each, mlp, model.width, at_work)]
        thin = _thin_s(gpu, recipe, [*alone, *shapes[2:]]) / manner.products
    return LayerTime(
        forward=forward + around + core + thin + cast[0],
        inputs=sum(inputs) + 2 * around + core_backward + 2 * thin + cast[1],
        weights=weights,
        core=core,
        core_backward=core_backward,
        products=forward + cast[0],
        columns=(inputs[0] + inputs[1]) / 2,
    )


def _cast_s(
    gpu: Gpu, recipe: Recipe, shapes: Sequence[tuple[int, int, int, int]], readers: Sequence[int]
) -> tuple[float, float]:
    """Forward and backward of making FP8 of all that these products read.

    readers: matrices that read the same input, which a compiler finds to be cast alike.
    """
    of, forward, backward = _CASTS if recipe.compiled else _CASTS_ALONE, 0.0, 0.0
    for (rows, columns, terms, times), alike in zip(shapes, readers, strict=True):
        inputs, matrix, gradient = (times * n for n in (rows * terms, terms * columns, rows * columns))
        inputs *= 1 if recipe.compiled else alike
        forward += of.input * inputs + of.matrix * matrix
        backward += of.input_again * inputs + of.matrix_again * matrix + of.gradient * gradient
    return stream_s(gpu, forward), stream_s(gpu, backward)


def _thin_s(gpu: Gpu, recipe: Recipe, shapes: Sequence[tuple[int, int, int, int]]) -> float:
    """Forward of the adapters beside matrices of these shapes: two products, and their sum with the
    matrix's own. Backward is twice that: gradients of what they read, and of themselves."""
    rank, size = recipe.adapter_rank, recipe.precision.activations
    total = 0.0
    for rows, columns, terms, times in shapes:
        total += product_s(gpu, rows, rank, terms, size, times) + product_s(
            gpu, rows, columns, rank, size, times
        )
        total += stream_s(gpu, 3 * size * times * rows * columns)
    return total


def _moved_forward(model: Model, tokens: int, split: int, turned: float, activated: int) -> float:
    """Elements that a layer's kernels read and write in forward but for products, one kernel an operation."""
    width = tokens * model.width * (2 * model.norms + 2 * 3) / split  # norms, two sums with the residual
    turned *= 2 if model.head_norms else 1  # queries and keys: their norm, as what turns them
    positions = 0 if model.learned_positions else 2 * tokens * turned
    activation = activated * (5 if model.gated else 2)
    biases = 2 * activated if model.biases else 0
    return width + positions + activation + biases


def _core(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, heads: int
) -> tuple[float, float]:
    """Forward and backward of the scores and what is done with them, of all blocks where these go round."""
    forward, backward = _attended(gpu, model, manner, recipe, context, heads)
    if context == 1:
        return forward, backward
    elements = context * (recipe.micro_batch * recipe.seq // context) * heads * model.head_width
    return (
        forward + stream_s(gpu, _MERGED_FORWARD * elements),
        backward + stream_s(gpu, _MERGED_BACKWARD * elements),
    )


def _attended(
    gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, context: int, heads: int
) -> tuple[float, float]:
    """Each token's own and those before: every rank has as many, for its tokens are from both ends."""
    scores = recipe.micro_batch * recipe.seq * recipe.seq // context * heads
    flops: float
    if recipe.attention == "plain":  # computes those that the causal mask hides, too
        rate = gpu.peak * gpu.reachable * gpu.sustained * _BATCHED
        flops = 4 * scores * model.head_width
        forward = flops / rate + stream_s(gpu, _SCORES_FORWARD * scores)
        return forward, 2 * flops / rate + stream_s(gpu, _SCORES_BACKWARD * scores)
    rate = gpu.peak * manner.flash * flash_part(model.head_width, recipe.seq)
    flops = 2 * scores * model.scores_part(recipe.seq) * model.head_width
    return flops / (rate * gpu.flash[0]), 2.5 * flops / (rate * gpu.flash[1])


def flash_part(head_width: int, seq: int) -> float:
    """Of Gpu.flash, what attention reaches with heads of so many channels on so many tokens: tiles of narrow
    heads multiply little between softmaxes, and those of wide ones are small, for all that they must hold."""
    return math.pow(min(head_width / _WIDE, _WIDE / head_width), 0.15) * seq / (seq + _HALF_SEQ)


def head_time(gpu: Gpu, model: Model, manner: Manner, recipe: Recipe, tokens: int, tensor: int) -> HeadTime:
    """The head on `tokens` of this rank, its vocabulary split over `tensor` ranks if it can be."""
    vocabulary, size = model.vocab_size // model.table_parts(tensor), recipe.precision.activations
    loss = stream_s(gpu, manner.loss_bytes * (_FUSED if recipe.compiled else 1) * tokens * vocabulary)
    forward = product_s(gpu, tokens, vocabulary, model.width, size) / manner.products
    inputs = product_s(gpu, tokens, model.width, vocabulary, size) / manner.products
    weights = product_s(gpu, model.width, vocabulary, tokens, size) / manner.products
    return HeadTime(forward + 0.6 * loss, inputs + 0.4 * loss, weights)


def flops_a_token(model: Model, seq: int, frozen: bool = False) -> float:
    """Forward and backward by the usual convention: 6 N + 12 L h s, all parameters, all scores in a window.

    4 N where the model is frozen, for nothing makes gradients of its matrices; adapters are not counted.
    """
    active = model.parameters
    if model.experts:
        one = (3 if model.gated else 2) * model.width * model.mlp_width
        active -= model.layers * (model.experts - model.active_experts) * one
    heads = model.q_width * model.scores_part(seq)
    return (4 if frozen else 6) * active + 12 * model.layers * heads * seq


def part(whole: int, ranks: int) -> int:
    """The largest of `ranks` parts."""
    return -(-whole // ranks)
