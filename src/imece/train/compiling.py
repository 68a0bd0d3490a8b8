"""torch.compile in `imece train`: the blocks, before the first step, for the shape of its micro-batches.

Whatever comes in another shape is computed as if nothing was compiled: validation, sampling, micro-batches
that are smaller because a rank has died. So nobody waits for a compiler in the middle of a run, and a run
that is gone on with computes each micro-batch as the undisturbed one does.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from imece.data_parallel.compiled import compile_blocks
from imece.errors import UserError
from imece.models.transformer import Transformer, rotation_at
from imece.train.batch import BatchPlan
from imece.train.precision import Precision


def compile_now(model: Transformer, plan: BatchPlan, precision: Precision) -> float:
    """Compile the blocks of a model that is not wrapped yet; seconds. One block of each kind is run, for all.

    UserError where there is nothing to compile with.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # a second, which others need not wait for

    began = time.perf_counter()
    compile_blocks(model, dynamic=False)
    try:
        with torch.compiler.set_stance("default"):  # an earlier session in this process has set the other
            for block in _kinds(model):
                _run_a_block(model, block, plan, precision)
    except BackendCompilerFailed as error:
        why = str(error.inner_exception).partition("\n")[0]
        raise UserError(
            f"--compute.compile: {why}; on a CPU torch wants a C++ compiler, such as g++, on a GPU triton: "
            "install it, or leave that option out"
        ) from None
    torch.compiler.set_stance("eager_on_recompile")
    return time.perf_counter() - began


def _kinds(model: Transformer) -> list[nn.Module]:
    """One block of those that share their code."""
    config = model.config
    kinds = {(config.window_of(at), at in config.nope_layers): block for at, block in enumerate(model.blocks)}
    return [*kinds.values()]


def _run_a_block(model: Transformer, block: nn.Module, plan: BatchPlan, precision: Precision) -> None:
    """Forward and backward, as training does it; parameters keep no gradient of it."""
    device = model.embed.weight.device
    residual = torch.zeros(plan.micro, plan.seq, model.config.width, device=device, requires_grad=True)
    rotation = rotation_at(model.config, 0, plan.seq, device)
    with precision.autocast():
        out = model.through(block, residual.clone(), rotation)
    torch.autograd.grad(out.sum(), [residual, *block.parameters()])
