"""What a backward must not do: the reducer's errors, each with what to do instead."""

from __future__ import annotations

import torch

from imece.data_parallel.reducing.buckets import Slot

FROM_ONE_RANK = (
    "by a forward that did not go through the wrapped model (call model(...), not model.module(...) or a "
    "method of it), by torch.autograd.grad, or by a backward in no_sync() with none after it"
)
"""How a gradient comes that is of one rank alone."""


def second(slot: Slot, is_whole: bool) -> RuntimeError:
    """Another gradient came after the parameter's bucket had left. is_whole: see Gradients."""
    static = ", or static_graph=True to DistributedDataParallel" if is_whole else ""
    return RuntimeError(
        f"parameter {slot.name} got a second gradient in one backward, after its first was on its way: "
        f"it is used by several checkpointed blocks. Pass use_reentrant=False to checkpoint(){static}"
    )


def late(slot: Slot) -> RuntimeError:
    """A gradient came for a unit whose gradients were thought to be complete."""
    return RuntimeError(
        f"parameter {slot.name} got a gradient after its unit was over: backward did not go in the "
        f"opposite order of forward. Run both inside of `with model.gathered():`, and the step outside"
    )


def early(optimizer: torch.optim.Optimizer, slot: Slot) -> RuntimeError:
    """A step inside of backward, by a hook on a parameter, say: it sees only this rank's gradient."""
    return RuntimeError(
        f"{type(optimizer).__name__} steps {slot.name} inside of backward, before its gradient is summed "
        f"over the ranks: step when backward is over, or with DistributedDataParallel give the optimizer to "
        f"torch.distributed.optim._apply_optimizer_in_backward"
    )


def sparse(slot: Slot) -> RuntimeError:
    """A sparse gradient, from a functional embedding, say, which nobody sees before it comes."""
    return RuntimeError(
        f"parameter {slot.name} got a sparse gradient, which does not fit into a flat bucket: "
        f"use sparse=False"
    )


def changed(slot: Slot, fired: int) -> RuntimeError:
    """With static_graph: another number of gradients than in the first backward."""
    return RuntimeError(
        f"static_graph=True, but parameter {slot.name} got {fired} gradients in this backward and "
        f"{slot.uses} in the first. Leave static_graph away: unused parameters need no flag"
    )


def shared(slot: Slot) -> RuntimeError:
    """A parameter of two models that would each leave another gradient."""
    return RuntimeError(
        f"parameter {slot.name} is in two wrapped models that one backward goes through, and they are not "
        f"averaged alike, over the same ranks: wrap one module that has both"
    )


def lost(slot: Slot) -> RuntimeError:
    """A parameter that was left to a model which never came to the end of its backward."""
    return RuntimeError(
        f"parameter {slot.name} is in two wrapped models, and the backward of the other one has raised: run "
        f"the forwards of both again"
    )


def newcomer(name: str) -> RuntimeError:
    """A parameter that was added to a wrapped model."""
    return RuntimeError(
        f"parameter {name} came after the model was wrapped, and no other rank sees its gradient: wrap the "
        f"model again, with a new optimizer, or put the name into model.parameters_to_ignore"
    )
