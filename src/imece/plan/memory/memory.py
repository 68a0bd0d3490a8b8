"""Bytes that one rank needs, by category, on the pipeline stage that needs most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from imece.footprint import DIVIDED, Footprint, Sizes, footprint
from imece.models.dealing import MOST_SENT
from imece.plan.memory.activations import kept_layer, layers_in_flight, of_residual, tokens, working_bytes
from imece.plan.memory.frameworks import IMECE, TORCH_LOSS_BYTES, Framework
from imece.plan.memory.held import Held, expert_sizes, held, sizes, stage_layers, trained_elements
from imece.plan.memory.waiting import waiting_bytes
from imece.plan.setup import Parallel, Recipe, Setup

_BLOCK = 256  # elements of an 8-bit moment that share an fp32 scale (bitsandbytes)
_EIGHT_BIT = 1 + 4 / _BLOCK  # bytes per element
_CODE = 0.5  # bytes per element in 4 bits
_SCALES = 1 / 64 + 4 / (64 * 256)  # NF4: 64 elements share an 8-bit scale, 256 scales share one in fp32
_WORTH_A_NOTE = 0.01  # of the bytes that last
FOUR_BIT = _CODE + _SCALES


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank on its device, without the device's context, which belongs to the hardware."""

    parameters: int
    gradients: int
    optimizer: int
    masters: int
    gathered: int  # units of parameters
    communication: int  # buckets under way, and receive buffers of tensor, context and pipeline parallelism
    activations: int
    logits: int
    overhead: int  # of libraries, and what the allocator reserves beyond use
    notes: tuple[str, ...] = ()
    host: int = 0  # what is offloaded to the host
    received: int = 0  # part of communication: what activations of other ranks, and their gradients, come in
    late: int = 0  # part of the gradients, allocated while equally many activations and logits are freed

    @property
    def states(self) -> int:
        """Bytes after a backward."""
        return (
            self.parameters + self.gradients + self.optimizer + self.masters + self.gathered
            + self.communication
        )  # fmt: skip

    @property
    def total(self) -> int:
        """The peak."""
        return self.states - self.late + self.activations + self.logits + self.overhead

    def by_category(self) -> dict[str, int]:
        """Name -> bytes of the total, in the order of a bar, including categories with 0 bytes."""
        return {
            "parameters": self.parameters, "gradients": self.gradients - self.late,
            "optimizer": self.optimizer, "masters": self.masters, "gathered": self.gathered,
            "communication": self.communication, "activations": self.activations, "logits": self.logits,
            "overhead": self.overhead,
        }  # fmt: skip


@dataclass(frozen=True)
class _States:
    """What lasts from step to step, and buckets."""

    all: Footprint
    gathered: float  # part of communication: units
    masters: float  # part of the optimizer
    sums: float = 0.0  # part of gradients: what the optimizer reads, besides buckets


def memory(setup: Setup, stage: int | None = None, framework: Framework = IMECE) -> Memory:
    """The memory of a rank of pipeline stage `stage`; None: of the one that needs most.

    Bytes per element are the recipe's; `framework` says what else is kept.
    """
    setup = replace(setup, model=setup.model.with_copies(setup.parallel.tensor))
    if stage is not None:
        return _of_stage(setup, stage, framework)
    found = (_of_stage(setup, at, framework) for at in _largest_stages(setup, framework))
    return max(found, key=lambda each: each.total)


def counted_bytes(setup: Setup, stage: int, framework: Framework) -> dict[str, int]:
    """What imece counts on a rank after a step, by the names of data_parallel/footprint.py.

    That is without autocast's copies, without gradients that micro-batches keep whole, and without what
    activations are received in.
    """
    precision = replace(setup.recipe.precision, activations=setup.recipe.precision.parameters)
    recipe = replace(setup.recipe, precision=precision, accumulation=1)
    found = memory(replace(setup, recipe=recipe), stage, framework)
    return {
        "parameters": found.parameters,
        "gradients": found.gradients,
        "optimizer": found.optimizer + found.masters,
        "communication": found.gathered + found.communication - found.received,
        "host": found.host,
    }


def _largest_stages(setup: Setup, framework: Framework) -> Iterator[int]:
    """The last stage, and those with more layers than all before: later ones keep fewer micro-batches."""
    layers = stage_layers(setup, framework.stages)
    for stage, count in enumerate(layers):
        if stage == len(layers) - 1 or count > max(layers[:stage], default=-1):
            yield stage


def more_with_torchs_loss(setup: Setup, framework: Framework = IMECE) -> int:
    """Bytes beyond `memory` that a rank needs if the loss is F.cross_entropy of fp32 logits."""
    logits = _logits(setup)
    return round(logits * TORCH_LOSS_BYTES - framework.of_logits(logits, setup.recipe.precision))


def _of_stage(setup: Setup, stage: int, framework: Framework) -> Memory:
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    part = held(setup, stage, framework.stages)
    notes: tuple[str, ...] = ()
    if recipe.adapters == "none":
        dealt = sizes(model, parallel, recipe, part, framework)
        states = _states(setup, part, dealt, part.dense, framework)
        if model.experts:
            experts = expert_sizes(parallel, part, framework)
            states = _sum(states, _states(setup, part, experts, part.all_experts, framework))
    else:
        states = _with_adapters(setup, part, framework)
        notes = ("adapters on every matrix of the layers; all else is frozen",)
    found, gathered, masters = states.all, states.gathered, states.masters
    optimizer = found.optimizer - masters
    if recipe.offload:
        what = "parts of parameters, " * (recipe.offload == "parameters")
        what += "masters, summed gradients and the optimizer's state"
        notes = (*notes, f"{what} take {found.host / 1e9:,.1f} GB of the host's memory for each rank")
    parameters = found.parameters
    if recipe.precision.autocast:
        parameters += round(_cast_bytes(part, stage, setup))
        notes = (*notes, "autocast keeps a copy of every matrix from forward to backward")
    received = _buffers(setup, stage, part, framework) + waiting_bytes(setup, stage, part, framework)
    communication = found.communication - gathered + received
    activations, logits = _activations(setup, stage, part, framework)
    late = 0.0
    if framework.late_sums and _sums_come_last(setup):
        kept_whole = found.gradients - states.sums if keeps_whole(setup) else 0  # they go, too
        late = min(states.sums, activations + logits + kept_whole)
        if late > _WORTH_A_NOTE * found.total:
            said = f"{late / 1e9:,.1f} GB of summed gradients come as backward lets go of activations"
            notes = (*notes, f"{said}, and count once")
    in_use = (
        parameters + found.gradients - late + optimizer + masters + gathered + communication
        + activations + logits
    )  # fmt: skip
    return Memory(
        parameters, found.gradients, round(optimizer), round(masters), round(gathered),
        round(communication), round(activations), round(logits),
        framework.workspace_bytes + round(framework.slack * in_use), notes, found.host, round(received),
        round(late),
    )  # fmt: skip


def _sums_come_last(setup: Setup) -> bool:
    """Whether sums of gradients appear only in the last micro-batch's backward."""
    recipe = setup.recipe
    in_each = DIVIDED[setup.parallel.strategy].gradients and not recipe.accumulates_whole
    return recipe.accumulation == 1 or not in_each


def keeps_whole(setup: Setup) -> bool:
    """Whether sharded gradients stay whole until the last micro-batch."""
    recipe = setup.recipe
    return DIVIDED[setup.parallel.strategy].gradients and recipe.accumulates_whole and recipe.accumulation > 1


def _keeps_apart(setup: Setup, framework: Framework) -> bool:
    """Whether the sums of earlier micro-batches lie beside those of the next one, to which they are added:
    the device lets go of them bucket by bucket, the host's memory of offload after the backward."""
    recipe, in_parts = setup.recipe, DIVIDED[setup.parallel.strategy].gradients
    several = recipe.accumulation > 1 and in_parts and not recipe.accumulates_whole
    return several and framework.sums_apart and recipe.offload is not None


def _states(setup: Setup, part: Held, dealt: Sizes, whole: float, framework: Framework) -> _States:
    """The states of `whole` trained elements of `part`."""
    recipe, divides = setup.recipe, DIVIDED[setup.parallel.strategy]
    precision = recipe.precision
    owned = whole
    if divides.optimizer:  # where matrices stay whole, no rank's shard is full
        owned = whole / setup.parallel.shard if recipe.optimizer == "muon" else min(dealt.shard, whole)
    casts = precision.masters not in (0, precision.parameters)
    reduce_bytes = precision.gradients + precision.main_gradients
    as_masters = framework.sums_as_masters and (divides.optimizer or recipe.offload is not None)
    found = footprint(
        dealt,
        divides,
        parameter_bytes=precision.parameters,
        reduce_bytes=reduce_bytes,
        master_bytes=precision.masters,
        state_bytes=owned * _moment_bytes(recipe, part),
        sum_bytes=None if as_masters else reduce_bytes,
        own_bytes=0 if framework.masters_are_shards and casts and recipe.offload is None else None,
        offload=recipe.offload,
    )
    sums = found.gradients - (0 if divides.gradients else round(reduce_bytes * dealt.whole))
    if keeps_whole(setup):
        found = replace(found, gradients=found.gradients + round(precision.gradients * whole))
    if _keeps_apart(setup, framework):
        apart = round((precision.masters or precision.parameters) * dealt.shard)
        where = "host" if recipe.offload else "gradients"
        found = replace(found, **{where: getattr(found, where) + apart})
    same = precision.masters == precision.parameters
    masters = 0.0 if same or recipe.offload else precision.masters
    masters *= dealt.shard if divides.optimizer else dealt.whole
    return _States(found, precision.parameters * dealt.gathered, masters, sums)


def _moment_bytes(recipe: Recipe, part: Held) -> float:
    """Bytes of optimizer state per element, on average."""
    match recipe.optimizer:
        case "adamw":
            return 2.0 * recipe.precision.moments
        case "adamw-8bit":
            return 2 * _EIGHT_BIT
        case "muon":  # one moment for matrices; tables and vectors are AdamW's
            return (2 - part.layers * part.products / part.total) * recipe.precision.moments
        case "sgd":
            return float(recipe.precision.moments)


def _with_adapters(setup: Setup, part: Held, framework: Framework) -> _States:
    """The states of a frozen model and its trained adapters. Both are sharded where parameters are, except
    the scales of 4-bit matrices, which are whole on each rank."""
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    divides, size = DIVIDED[parallel.strategy], recipe.precision.parameters
    scales, in_codes = scale_bytes(setup, part), part.products * (recipe.adapters == "qlora")
    plain = (part.total - part.layers * in_codes) * size + part.layers * in_codes * _CODE
    trained, gathered, units = trained_elements(setup, part), 0.0, 0
    of_layer = trained / max(1, part.layers)
    if divides.parameters:
        if framework.gathers:
            units = min(framework.units_at_once, part.layers)
            layer = part.layer + part.experts - in_codes
            gathered = (part.tables + part.rest + units * layer) * size + units * in_codes * _CODE
        plain /= parallel.shard
    hosted = plain if divides.parameters and recipe.offload == "parameters" else 0.0
    if recipe.adapters == "qlora":  # the largest matrix, unpacked while it is used
        gathered += size * model.largest_matrix / parallel.tensor
    base = Footprint(round(scales + plain - hosted), 0, 0, round(gathered), round(hosted))
    filling = 0.0
    if divides.gradients:
        bucket = recipe.bucket_bytes / (recipe.precision.masters or size)
        filling = min(trained, max(1, framework.grown_units) * (of_layer if units else bucket))
    dealt = Sizes(trained, trained / parallel.shard, filling, units * of_layer)
    adapters = _states(setup, part, dealt, trained, framework)
    return _sum(_States(base, gathered, 0.0), adapters)


def scale_bytes(setup: Setup, part: Held) -> float:
    """Bytes of 4-bit matrices that are whole on each rank."""
    return part.layers * part.products * _SCALES if setup.recipe.adapters == "qlora" else 0.0


def _sum(one: _States, other: _States) -> _States:
    a, b = one.all, other.all
    both = Footprint(
        a.parameters + b.parameters, a.gradients + b.gradients, a.optimizer + b.optimizer,
        a.communication + b.communication, a.host + b.host,
    )  # fmt: skip
    return _States(both, one.gathered + other.gathered, one.masters + other.masters, one.sums + other.sums)


def _cast_bytes(part: Held, stage: int, setup: Setup) -> float:
    """Bytes of autocast's copies of matrices, including the head."""
    head = setup.model.table_parameters / setup.model.table_parts(setup.parallel.tensor)
    last = stage == setup.parallel.pipeline - 1
    return setup.recipe.precision.activations * (part.layers * part.products + head * last)


def _buffers(setup: Setup, stage: int, part: Held, framework: Framework) -> float:
    """Bytes of a gathered hidden state, a neighbour's keys and values, and what goes from stage to stage."""
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    hidden = tokens(recipe, parallel) * recipe.precision.activations
    total = 0.0
    if parallel.tensor > 1:
        total += 2 * hidden * model.width
    if parallel.context > 1:
        total += 2 * 2 * hidden * model.kv_width / parallel.tensor
    if parallel.pipeline > 1:
        each = tokens(recipe, parallel) * of_residual(recipe) * model.width
        number = _between_stages(parallel, recipe, stage, part) if framework.outputs_stay else 2
        total += number * each / parallel.token_parts
    return total


def _between_stages(parallel: Parallel, recipe: Recipe, stage: int, part: Held) -> float:
    """Hidden states and gradients of them that a rank has, besides inputs among the activations: outputs of
    micro-batches in flight; a gradient that came or, interleaved, three messages that came early, and what
    was sent."""
    chunks = parallel.interleave
    in_flight = layers_in_flight(part.layers, parallel, recipe, stage) * chunks / max(1, part.layers)
    outputs = in_flight * (1 - (stage == parallel.pipeline - 1) / chunks)  # the last chunk's are logits
    return outputs + (1 if chunks == 1 else 3 + MOST_SENT / 2)


def _activations(setup: Setup, stage: int, part: Held, framework: Framework) -> tuple[float, float]:
    """(bytes of layers and the last norm, bytes of logits)."""
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    kept = kept_layer(model, parallel, recipe, framework).total
    activations = kept * layers_in_flight(part.layers, parallel, recipe, stage)
    working = working_bytes(model, parallel, recipe, framework) - kept
    if stage < parallel.pipeline - 1:
        return activations + working, 0.0
    # Logits are gone when the last layer's backward runs: the larger counts.
    norm = 2 * tokens(recipe, parallel) * model.width * recipe.precision.activations / parallel.token_parts
    parts = model.table_parts(parallel.tensor)
    logits = framework.of_logits(_logits(setup), recipe.precision, parts=parts)
    beside = max(working, norm + logits)
    return activations + beside - min(logits, beside), min(logits, beside)


def _logits(setup: Setup) -> float:
    """Bytes of logits on a rank of the last stage."""
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    at_once = recipe.accumulation if parallel.schedule == "gpipe" and parallel.pipeline > 1 else 1
    return at_once * tokens(recipe, parallel) * model.vocab_size / model.table_parts(parallel.tensor)
