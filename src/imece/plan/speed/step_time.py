"""Predicts the time of a step, which is the sum of:

    micro-batches x slowest stage   products, other kernels, and messages within layers
    bubble                          the first micro-batch goes through the other stages
    gathers and reductions          their exposed part
    optimizer
    data                            and whatever else is done once per step

All times are in seconds.
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

    compute: float  # forward and backward of all micro-batches on the slowest stage, with recomputation
    recompute: float  # part of compute
    waiting: float  # the device waits for the CPU to start its kernels
    exposed: dict[str, float]  # exposed communication: gradients, parameters, tensor, context, pipeline
    hidden: float  # communication beside computation
    bubble: float
    optimizer: float
    data: float  # and everything else that happens once per step
    total: float
    tokens_per_s: float  # of all ranks
    mfu: float  # flops_a_token over the peak of all ranks in the recipe's precision; of FP8 over that in bf16


def step_time(setup: Setup, cluster: Cluster, manner: Manner = IMECE) -> StepTime:
    """The time of `setup` on `cluster`, run by the software `manner`."""
    parallel, recipe = setup.parallel, setup.recipe
    cluster = cluster.multiplying(recipe.precision.activations)
    flops = flops_a_token(setup.model, recipe.seq, frozen=recipe.adapters != "none")  # no copies of heads
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
    optimizer = optimizer_s(setup, cluster, manner)
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
