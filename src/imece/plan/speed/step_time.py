"""Time of a step: what ranks compute, what of their communication is in sight, and the pipeline's bubble.

step = micro-batches x slowest stage products, what lies between them, messages within layers + bubble
the first micro-batch goes through the other stages + gathers and reductions as much of them as is in sight
+ optimizer + what a step costs besides
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from imece.plan.hardware import Cluster
from imece.plan.setup import Setup
from imece.plan.speed.compute import flops_a_token
from imece.plan.speed.manner import IMECE, Manner
from imece.plan.speed.stage import stage_time
from imece.plan.speed.synchronise import optimizer_s, synchronise


@dataclass(frozen=True)
class StepTime:
    """One step, in seconds. compute + waiting + all of exposed + bubble + optimizer + data = total."""

    compute: float  # forward and backward of all micro-batches on the slowest stage, recomputation in it
    recompute: float  # of it
    waiting: float  # the device waits for the CPU to start its kernels
    exposed: dict[str, float]  # communication in sight: gradients, parameters, tensor, context, pipeline
    hidden: float  # communication beside computation
    bubble: float
    optimizer: float
    data: float  # and whatever else is done once a step
    total: float
    tokens_per_s: float  # of all ranks
    mfu: float  # flops_a_token over the peak of all ranks in the recipe's precision; of FP8 over that in bf16


def step_time(setup: Setup, cluster: Cluster, manner: Manner = IMECE) -> StepTime:
    """Of `setup` on `cluster`, as the software `manner` goes about it."""
    parallel, recipe = setup.parallel, setup.recipe
    cluster = cluster.multiplying(recipe.precision.activations)
    flops = flops_a_token(setup.model, recipe.seq, frozen=recipe.adapters != "none")  # without copies
    setup = replace(setup, model=setup.model.with_copies(parallel.tensor))
    stage = stage_time(setup, cluster, manner)
    steps = recipe.accumulation
    across_data = synchronise(setup, cluster, manner, stage)
    exposed = {
        "gradients": across_data.gradients,
        "parameters": across_data.parameters,
        "tensor": steps * stage.tensor,
        "context": steps * stage.context,
        "pipeline": steps * stage.sends,
    }
    bubble = (stage.all_stages - stage.total) / parallel.interleave if parallel.pipeline > 1 else 0.0
    bubble = max(0.0, bubble)
    optimizer = optimizer_s(setup, cluster, manner, stage)
    working = steps * (stage.compute + stage.waiting)
    total = working + sum(exposed.values()) + bubble + optimizer + manner.step_s
    per_s = setup.tokens_a_step / total
    return StepTime(
        compute=steps * stage.compute,
        recompute=steps * stage.recompute,
        waiting=steps * stage.waiting,
        exposed=exposed,
        hidden=across_data.hidden + steps * (stage.tensor_hidden + stage.context_hidden),
        bubble=bubble,
        optimizer=optimizer,
        data=manner.step_s,
        total=total,
        tokens_per_s=per_s,
        mfu=flops * per_s / (cluster.gpu.peak * parallel.ranks),
    )
