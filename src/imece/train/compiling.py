"""torch.compile in `imece train`: the blocks, before the first step, for the shape of its micro-batches.

Whatever comes in another shape is computed as if nothing was compiled: validation, sampling, micro-batches
that are smaller because a rank has died. So nobody waits for a compiler in the middle of a run, and a run
that is gone on with computes each micro-batch as the undisturbed one does.
"""

from __future__ import annotations

import copy
import time

import torch
from torch import nn

from imece.data_parallel.compiled import compile_blocks
from imece.errors import UserError
from imece.models.transformer import Block, Transformer, rotation_at
from imece.train.batch import BatchPlan
from imece.train.precision import Precision


def compile_now(model: Transformer, plan: BatchPlan, precision: Precision, device: torch.device) -> float:
    """Compile the blocks of a model that is not wrapped yet, for `device`; seconds.

    One block of each kind is run, for all that share its code: such as has memory of its own, as the model's
    may have none yet.

    UserError where there is nothing to compile with.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # a second, which others need not wait for

    began = time.perf_counter()
    blocks = nn.ModuleList(_kinds(model, device))
    compile_blocks(model, dynamic=False)
    compile_blocks(nn.ModuleDict({"blocks": blocks}), units=[Block], dynamic=False)
    try:
        with torch.compiler.set_stance("default"):  # an earlier session in this process has set the other
            for block in blocks:
                _run_a_block(model, block, plan, precision, device)
            if not model.embed.weight.requires_grad:  # then what the first block reads wants no gradient
                _run_a_block(model, blocks[0], plan, precision, device, wants_gradient=False)
    except BackendCompilerFailed as error:
        why = str(error.inner_exception).partition("\n")[0]
        raise UserError(
            f"--compute.compile: {why}; on a CPU torch wants a C++ compiler, such as g++, on a GPU triton: "
            "install it, or leave that option out"
        ) from None
    torch.compiler.set_stance("eager_on_recompile")
    return time.perf_counter() - began


def _kinds(model: Transformer, device: torch.device) -> list[nn.Module]:
    """A block for each kind of those that share their code."""
    config = model.config
    kinds = {(config.window_of(at), at in config.nope_layers): at for at in range(config.layers)}
    blocks: list[nn.Module] = [Block(config, at).to(device) for at in kinds.values()]
    if not model.embed.weight.requires_grad:  # with adapters
        blocks = [copy.deepcopy(model.blocks[at]) for at in kinds.values()]
        if not model.embed.weight.is_meta:
            return blocks
        blocks = [block.to_empty(device=device) for block in blocks]
    for parameter in (each for block in blocks for each in block.parameters()):
        parameter.detach().zero_()
    return [*blocks]


def _run_a_block(
    model: Transformer,
    block: nn.Module,
    plan: BatchPlan,
    precision: Precision,
    device: torch.device,
    wants_gradient: bool = True,
) -> None:
    """Forward and backward, as training does it. wants_gradient: whether what the block reads does."""
    residual = torch.zeros(plan.micro, plan.seq, model.config.width, device=device)
    residual.requires_grad_(wants_gradient)
    rotation = rotation_at(model.config, torch.arange(plan.seq, device=device))
    with precision.autocast():
        out = model.through(block, residual.clone(), rotation)
    torch.autograd.grad(out.sum(), [each for each in (residual, *block.parameters()) if each.requires_grad])
