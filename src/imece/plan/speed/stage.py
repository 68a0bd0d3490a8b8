"""One micro-batch on a pipeline's stages: products, other kernels, and messages within layers.

A stage takes as long as the device needs, or as long as the CPU needs to start its kernels, if that is
longer. Without a pipeline a single stage has everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from imece.plan.hardware import Cluster
from imece.plan.memory.held import stage_layers
from imece.plan.models.model import Model
from imece.plan.setup import Recipe, Setup
from imece.plan.speed.communication import along, collective_s, send_s
from imece.plan.speed.compute import LayerTime, head_time, layer_time, stream_s
from imece.plan.speed.manner import Manner

_UNPACKED = 2.5  # bytes moved to unpack a parameter of 4 bits, for forward, backward and recomputation alike
_FUSED_HOST = 0.5  # part of the CPU's work that is left if layers are compiled


@dataclass(frozen=True)
class StageTime:
    """The slowest stage on one micro-batch, forward and backward; seconds."""

    forward: float
    backward: float  # without recomputation
    recompute: float
    tensor: float  # exposed tensor-parallel collectives
    tensor_hidden: float
    context: float  # exposed ring of keys and values
    context_hidden: float
    waiting: float  # the device waits for the CPU
    sends: float  # to the neighbours, exposed
    all_stages: float  # sum of all this over all stages: one micro-batch from end to end
    layers: int

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.recompute

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.waiting + self.sends

    @property
    def forward_lasts(self) -> float:
        """Forward with its share of waiting: the time beside which something else can run."""
        return self.forward * (1 + (self.tensor + self.context + self.waiting) / self.compute)

    @property
    def backward_lasts(self) -> float:
        """The same for backward, with recomputation."""
        return self.total - self.sends - self.forward_lasts


def stage_time(setup: Setup, cluster: Cluster, manner: Manner) -> StageTime:
    """The stage's times. Cached, because they do not depend on how data-parallel ranks divide the batch."""
    parallel, recipe = setup.parallel, setup.recipe
    key = (
        parallel.tensor, parallel.sequence and parallel.tensor > 1, parallel.context, parallel.pipeline,
        parallel.interleave, parallel.ranks // parallel.pipeline,
    )  # fmt: skip
    return _stage_time(setup.model, cluster, manner, recipe, key, stages(setup, manner))


@functools.lru_cache(maxsize=32768)
def _stage_time(
    model: Model,
    cluster: Cluster,
    manner: Manner,
    recipe: Recipe,
    key: tuple[int, bool, int, int, int, int],
    layers: tuple[int, int],
) -> StageTime:
    tensor, sequence, context, pipeline, interleave, stride = key
    several_hosts = stride * pipeline > cluster.gpus_per_host
    gpu = cluster.gpu
    tokens = recipe.micro_batch * recipe.seq // context
    layer = layer_time(gpu, model, manner, recipe, context, tensor, sequence)
    head = head_time(gpu, model, manner, recipe, tokens, tensor)
    unpacking = (
        stream_s(gpu, _UNPACKED * model.layer_parameters / tensor) if recipe.adapters == "qlora" else 0.0
    )
    again = _again(manner, recipe, layer) + (unpacking if recipe.recompute == "full" else 0.0)
    if recipe.adapters == "none":
        adding = stream_s(gpu, 0.0 if manner.adds_in_products else added_bytes(recipe) / tensor)
        layer_work = layer.forward + layer.inputs + layer.weights + adding * model.layer_parameters
        head_work = head.forward + head.inputs + head.weights + adding * model.table_parameters
    else:
        layer_work, head_work = layer.forward + layer.inputs + 2 * unpacking, head.forward + head.inputs
    hidden_bytes = model.width * tokens * recipe.precision.activations
    talk = _tensor_talk(cluster, manner, recipe, hidden_bytes, tensor, sequence, layer.columns)
    host = _layer_host_s(manner, recipe, talk.calls)
    if manner.spread_host_s and several_hosts and tensor > 1:
        host += manner.spread_host_s * tensor * along(cluster, tensor, 1).hosts ** 0.5
    (most, last), rest = layers, model.layers - layers[-1]
    ring = _ring(cluster, model, manner, recipe, context, tensor, layer)
    device = layer_work + again + talk.exposed + ring.exposed
    waits = max(0.0, host - device)  # of a layer
    waits_last = max(0.0, last * host - last * device - head_work)
    sends, sends_inside = (
        _sends_s(cluster, manner, hidden_bytes, tensor, sequence, between)
        for between in (several_hosts, False)
    )
    crossing = _crossing(cluster.gpus_per_host, pipeline, stride)
    all_sends = crossing * sends + (pipeline - 1 - crossing) * sends_inside
    late = manner.message_s * messages(pipeline)
    middle, end = most * (device + waits), last * device + head_work + waits_last
    slowest = end >= middle
    count = last if slowest else most
    own = head_work if slowest else 0.0
    return StageTime(
        forward=count * layer.forward + (head.forward if slowest else 0.0),
        backward=count * (layer_work - layer.forward) + own - (head.forward if slowest else 0.0),
        recompute=count * again,
        tensor=count * talk.exposed,
        tensor_hidden=count * talk.hidden,
        context=count * ring.exposed,
        context_hidden=count * ring.hidden,
        waiting=waits_last if slowest else most * waits,
        sends=sends * interleave + late if pipeline > 1 else 0.0,
        all_stages=rest * (device + waits) + end + all_sends + late * (pipeline + 1) / 2,
        layers=count,
    )


def scores_again(manner: Manner, recipe: Recipe) -> bool:
    """Whether attention's scores are recomputed in backward."""
    return recipe.recompute == "full" or (recipe.recompute == "selective" and not manner.selective_products)


def _again(manner: Manner, recipe: Recipe, layer: LayerTime) -> float:
    """Seconds of recomputation in backward."""
    if recipe.recompute == "selective":
        if not manner.selective_products:
            return layer.core
        return layer.forward - layer.core - (1 - manner.selective_products) * layer.products
    return layer.forward if recipe.recompute == "full" else 0.0


def added_bytes(recipe: Recipe) -> float:
    """Bytes per parameter that adding a micro-batch's gradient to the earlier ones moves."""
    precision = recipe.precision
    if precision.main_gradients:
        return precision.gradients + 2 * precision.main_gradients
    return 3 * precision.gradients if recipe.accumulation > 1 else 0.0


def stages(setup: Setup, manner: Manner) -> tuple[int, int]:
    """Layers of the largest stage but the last, and of the last, which has the head."""
    dealt = stage_layers(setup, manner.stages)
    return max(dealt[:-1], default=0), dealt[-1]


def messages(pipeline: int) -> int:
    """Messages between stages that a stage waits for with each micro-batch: in and out, forward and
    backward."""
    return 0 if pipeline == 1 else 2 if pipeline == 2 else 4  # with two stages, each has one neighbour


@dataclass(frozen=True)
class _Talk:
    """Messages within one layer: forward, recomputation and backward."""

    exposed: float
    hidden: float
    calls: int  # each costs CPU time


def _tensor_talk(
    cluster: Cluster,
    manner: Manner,
    recipe: Recipe,
    size_bytes: int,
    tensor: int,
    sequence: bool,
    beside: float,
) -> _Talk:
    """`size_bytes`: of an activation, all tokens; `beside`: seconds of a product that hides a collective."""
    if tensor == 1:
        return _Talk(0.0, 0.0, 0)
    group = along(cluster, tensor, 1)
    forwards = 2 if recipe.recompute == "full" else 1
    if not sequence:
        one = collective_s(cluster, "all_reduce", size_bytes, group)
        hidden = min(one, beside) if manner.overlap_tensor else 0.0
        calls = 2 * forwards + 2
        return _Talk(calls * one - 2 * hidden, 2 * hidden, calls)
    in_fp8 = recipe.precision.fp8 and manner.gathers_fp8
    gathered = size_bytes / recipe.precision.activations if in_fp8 else size_bytes
    gather = collective_s(cluster, "all_gather", gathered, group)
    scatter = collective_s(cluster, "reduce_scatter", size_bytes, group)
    again = 2 if manner.gathers_again else 0
    hidden = 0.0
    if manner.overlap_tensor:
        hidden = again * min(gather, beside) + 2 * min(scatter, beside)
    whole = (2 * forwards + 2) * (gather + scatter) + again * gather
    return _Talk(whole - hidden, hidden, 4 * forwards + 4 + again)


def _ring(
    cluster: Cluster,
    model: Model,
    manner: Manner,
    recipe: Recipe,
    context: int,
    tensor: int,
    layer: LayerTime,
) -> _Talk:
    """Ring attention: keys and values travel beside the computation of scores; in backward with their
    gradients."""
    if context == 1:
        return _Talk(0.0, 0.0, 0)
    tokens = recipe.micro_batch * recipe.seq // context
    sent = 2 * recipe.precision.activations * tokens * model.kv_width / tensor
    hop = send_s(cluster, sent, along(cluster, context, tensor).hosts > 1)
    forwards = 2 if scores_again(manner, recipe) else 1
    exposed = forwards * max(0.0, hop - layer.core / context)
    exposed += max(0.0, 2 * hop - layer.core_backward / context)
    hops = context - 1
    return _Talk(hops * exposed, hops * ((forwards + 2) * hop - exposed), 0)


def _layer_host_s(manner: Manner, recipe: Recipe, calls: int) -> float:
    host = manner.layer_host_s * (4 / 3 if recipe.recompute == "full" else 1)
    return host * (_FUSED_HOST if recipe.compiled else 1) + calls * manner.collective_host_s


def _crossing(gpus_per_host: int, pipeline: int, stride: int) -> int:
    """How many neighbouring stages, of `stride` ranks each, are on different hosts."""
    firsts = range(0, (pipeline - 1) * stride, stride)
    return sum(first // gpus_per_host != (first + 2 * stride - 1) // gpus_per_host for first in firsts)


def _sends_s(
    cluster: Cluster, manner: Manner, size_bytes: int, tensor: int, sequence: bool, between: bool
) -> float:
    """Seconds for an activation to the next stage, and its gradient back. between: the next stage is on
    another host."""
    if sequence or manner.scatters_pieces:
        size_bytes //= tensor
    once = send_s(cluster, size_bytes, between)
    if manner.scatters_pieces and not sequence:
        once += collective_s(cluster, "all_gather", size_bytes * tensor, along(cluster, tensor, 1))
    return 2 * once
