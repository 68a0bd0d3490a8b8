"""torch.compile in `imece train`: compiles the blocks before the first step, for the shape of its batch.

Any other shape runs uncompiled: validation, sampling, and micro-batches that are smaller because a rank died.
So nobody waits for a compiler in the middle of a run, and a resumed run computes each micro-batch as the
undisturbed one does.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from imece.data_parallel.compiled import compile_blocks
from imece.errors import UserError
from imece.models.foreign import ForeignModel
from imece.models.language_model import LanguageModel, give_memory
from imece.models.transformer import Block, Transformer, rotation_at, visible_from
from imece.train.batch import BatchPlan
from imece.train.model.precision import Precision
from imece.writing import NO_SPACE, NOT_ALLOWED


def compile_now(
    model: LanguageModel, plan: BatchPlan, precision: Precision, device: torch.device, separate: bool = False
) -> float:
    """Compile the blocks of a model that is not wrapped yet, for `device`; returns the seconds. separate:
    whether attention stays within a document.

    Runs one block of each kind, for all blocks that share its code; of a model of transformers, where only
    running them tells kinds apart, a copy of each, one after the other. They get memory of their own, because
    the model may have none yet.

    UserError if there is no compiler, or nowhere to write what it makes.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # takes a second: other runs need not pay it

    began = time.perf_counter()
    try:
        with torch.compiler.set_stance("default"):  # an earlier session in this process may have set another
            if isinstance(model, ForeignModel):
                _compile_foreign(model, plan, precision, device, separate)
            else:
                _compile_own(model, plan, precision, device, separate)
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        mend = "on a CPU torch wants a C++ compiler, such as g++, on a GPU triton: install it"
        if isinstance(inner, OSError) and inner.errno in (*NO_SPACE, *NOT_ALLOWED):
            mend = "set TORCHINDUCTOR_CACHE_DIR to a folder that has room and can be written"
        why = str(inner).partition("\n")[0]
        raise UserError(f"--compute.compile: {why}; {mend}, or leave that option out") from None
    torch.compiler.set_stance("eager_on_recompile")
    return time.perf_counter() - began


def _compile_own(
    model: Transformer, plan: BatchPlan, precision: Precision, device: torch.device, separate: bool
) -> None:
    blocks = nn.ModuleList(_kinds(model, device))
    compile_blocks(model, dynamic=False)
    compile_blocks(nn.ModuleDict({"blocks": blocks}), units=[Block], dynamic=False)
    for block in blocks:
        _run_a_block(model, block, plan, precision, device, separate)
    if not model.embed.weight.requires_grad:  # then the first block's input needs no gradient
        _run_a_block(model, blocks[0], plan, precision, device, separate, wants_gradient=False)


def _compile_foreign(
    model: ForeignModel, plan: BatchPlan, precision: Precision, device: torch.device, separate: bool
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    twin = copy.deepcopy(model).train()
    compile_blocks(model, dynamic=False)
    blocks = {name: twin.get_submodule(name) for name in compile_blocks(twin, dynamic=False)}
    for name in blocks:
        twin.set_submodule(name, nn.Identity())
    twin.inner.set_output_embeddings(nn.Identity())  # comes after all blocks, and may be large
    give_memory(twin, device)
    for name, block in blocks.items():
        twin.set_submodule(name, _Alone(block, device))
    tokens = torch.zeros(plan.micro, plan.seq, dtype=torch.int64, device=device)
    at = torch.arange(plan.seq, device=device).expand_as(tokens)
    try:
        with precision.autocast():
            twin(tokens)
            if separate:  # where a document ends within a sequence there is another mask
                twin(tokens, begins=at.clamp(max=1))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # blocks may be of any code
        if isinstance(error, BackendCompilerFailed):
            raise
        why = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--compute.compile: blocks of the kind {model.config.kind} do not run alone ({why}): "
            "leave that out"
        ) from error


class _Alone(nn.Module):
    """A block that has memory only while it runs, forward and backward, as in training."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.block, self._device = block, device

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in self._modules else getattr(self._modules["block"], name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        block = self.block.to_empty(device=self._device)
        with torch.no_grad():
            for each in (*block.parameters(), *block.buffers()):
                each.zero_()
        # What blocks hand on in a dict of their own must stay that dict.
        inputs, kwargs = tuple(map(_anew, inputs)), {key: _anew(each) for key, each in kwargs.items()}
        out = block(*inputs, **kwargs)
        sources = [*tree_leaves((inputs, kwargs)), *block.parameters()]
        wanted = [each for each in sources if isinstance(each, Tensor) and each.requires_grad]
        total = sum(
            each.sum() for each in tree_leaves(out) if isinstance(each, Tensor) and each.requires_grad
        )
        if isinstance(total, Tensor):
            torch.autograd.grad(total, wanted, allow_unused=True)
        block.to("meta")
        return tree_map(_anew, out)


def _anew(value: Any) -> Any:
    """A tensor with the same values and strides, and no history."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def _kinds(model: Transformer, device: torch.device) -> list[nn.Module]:
    """One block for each kind, i.e. for blocks that share their code."""
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
    separate: bool,
    wants_gradient: bool = True,
) -> None:
    """Run forward and backward as in training. wants_gradient: whether the block's input needs a gradient."""
    residual = torch.zeros(plan.micro, plan.seq, model.config.width, device=device)
    residual.requires_grad_(wants_gradient)
    at = torch.arange(plan.seq, device=device)
    rotation = rotation_at(model.config, at)
    visible = visible_from(torch.zeros_like(at).expand(plan.micro, -1)) if separate else None
    with precision.autocast():
        out = model.through(block, residual.clone(), rotation, None, visible)
    torch.autograd.grad(out.sum(), [each for each in (residual, *block.parameters()) if each.requires_grad])
