"""`imece.tensor_parallel`: divides the matrices of a model over the ranks of the mesh's axis "tensor".

This is Megatron-LM (Shoeybi et al. 2019) with its sequence parallelism (Korthikanti et al. 2022). Parameters
stay plain tensors under their own names, each rank holding its part, so whatever wraps and steps a model sees
ordinary parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.tensor import DTensor

from imece import mesh as meshes
from imece.collectives import ops
from imece.errors import UserError
from imece.listing import kind_of
from imece.mesh import Mesh
from imece.model_parallel.alike import Draws
from imece.model_parallel.boundary import Boundary
from imece.model_parallel.divided import Divided, divided_parameters, is_divided
from imece.model_parallel.layers import begins_parts, dims_of, divide, is_head
from imece.model_parallel.plan import planned
from imece.models.transformer import Transformer

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(
    model: Model,
    mesh: Mesh | None = None,
    *,
    plan: Mapping[str, str] | None = None,
    sequence: bool = False,
    divided_logits: bool = False,
) -> Model:
    """Divide a model's matrices over the ranks of the mesh's axis "tensor", in place; all ranks call this.

        mesh = imece.init({"replicate": 2, "tensor": 2})
        model = imece.tensor_parallel(Transformer(config), mesh)
        model, optimizer = imece.parallelize(model, optimizer, "zero1", mesh)

    Call it before `parallelize`. All ranks of a tensor group get the same batch, and compute the same loss as
    one rank with the whole model. Logits are whole on each rank unless `divided_logits` is set. model: must
    have memory; the values of the group's first rank count. mesh: by default that of imece.init(); with one
    rank along "tensor" nothing changes.

    plan: {name of modules, * for any characters: how they are divided}. There is a default for imece's
    Transformer, and for Hugging Face's models the plan that they bring.

        column    a Linear by its output features, as queries, keys, values and an MLP's first: each rank goes
                  on with its heads or channels
        row       a Linear by its input features, as what follows those: the ranks' outputs are summed
        vocab     an Embedding or the head by rows, the vocabulary; the output is whole
        heads     whole parameters that are used for a rank's heads alone, as norms of queries and keys
        sequence  the same for a rank's positions: everything with parameters between divided layers
        scatter   from its output on each rank holds its positions; `vocab` embeddings do it by themselves
        gather    its input is made whole; `column` and `vocab` heads do it by themselves

    sequence: between the divided layers each rank holds only positions / N of [batch, positions, width], for
    norms, residual and dropout; the last three kinds of the plan are only for this. It moves as many bytes as
    without.

    divided_logits: each rank keeps only its entries of the vocabulary of the logits [batch, positions,
    vocabulary], the largest tensor of a step. They are a DTensor, which `imece.cross_entropy` (or torch's
    F.cross_entropy inside its `loss_parallel`) takes, and whose `full_tensor()` has all logits. imece's
    Transformer still returns whole logits with a cache or for the last position only, as in sampling. Without
    a plan, a vocabulary that cannot be divided has whole logits too.

    UserError, on all ranks, for: a plan that names no module, or one that cannot be divided so; sizes that
    the number of ranks does not divide; divided_logits with a plan that divides no head; a tied parameter
    that would be divided in one place only; a model that is already wrapped or divided, or on the meta
    device. In forward for inputs that differ between the ranks, and random draws, as of dropout, that do.
    """
    arranged = meshes.chosen(mesh)
    ranks = arranged.size("tensor")
    _check(model)
    chosen = planned(model, plan, ranks, sequence)
    if divided_logits and plan is not None and not any(is_head(*each) for each in chosen.values()):
        raise UserError("divided_logits: this plan divides no head: name the Linear that it is as 'vocab'")
    if ranks == 1:
        return model
    group = arranged.group("tensor")
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        ops.broadcast(each.data, 0, group=group, label=name)
    boundary = Boundary(arranged.device_mesh["tensor"], sequence=sequence, divided_logits=divided_logits)
    done: dict[int, Divided] = {}
    for module, kind in chosen.values():
        divide(module, kind, boundary, done)
    divided = [name for name, (_, kind) in chosen.items() if dims_of(kind)]
    whole = not sequence or any(begins_parts(*each) for each in chosen.values())  # else it gets positions
    _watch_first(model, divided, boundary if whole else None)
    _watch_draws(model, Draws(group, arranged.device, "forward"))
    if isinstance(model, Transformer):
        if sequence:
            model.register_forward_pre_hook(_refuse_parts, with_kwargs=True)
        if divided_logits:
            model.register_forward_hook(_whole_for_sampling, with_kwargs=True)
    return model


def _check(model: nn.Module) -> None:
    if isinstance(model, Joinable):
        raise UserError(
            f"tensor_parallel: this {type(model).__name__} is wrapped already: divide the model, then wrap it"
        )
    if divided_parameters(model):
        raise UserError("tensor_parallel: this model is divided already")
    for name, each in model.named_parameters():
        if isinstance(each, DTensor):
            raise UserError(f"tensor_parallel: {name} is a DTensor: give a model of plain parameters")
        if each.is_meta:
            raise UserError(
                f"tensor_parallel: {name} is on the meta device: give the model memory and values first"
            )


def _watch_first(model: nn.Module, divided: list[str], boundary: Boundary | None) -> None:
    """Check in the first forward that layers are still where they were divided, and with a boundary that
    inputs are the same. A pipeline never calls the model's forward, only the embedding's."""
    unseen = list(divided)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _check_call(module, unseen, boundary, (args, kwargs))

    model.register_forward_pre_hook(check, with_kwargs=True)


@torch._disable_dynamo(recursive=True)  # not of the closure above, which it would put into a cycle
def _check_call(module: nn.Module, unseen: list[str], boundary: Boundary | None, given: Any) -> None:
    """unseen: names of divided layers that no forward has looked at yet."""
    for name in unseen:
        if not is_divided(inside := module.get_submodule(name)):
            raise UserError(
                f"{name} was divided along the axis tensor, and now is in {kind_of(inside)}, "
                "which would add to a part of a layer what belongs to the whole: adapters (LoRA) do "
                "not go with tensor_parallel; merge them before it, or train them without"
            )
    unseen.clear()
    if boundary is not None:
        boundary.check_same(given)


def _watch_draws(model: nn.Module, draws: Draws) -> None:
    """A pipeline, which never calls the model's forward, looks itself."""

    def begin(module: nn.Module, _: Any) -> None:
        if module.training:
            draws.begin()

    def end(module: nn.Module, *_: Any) -> None:
        if module.training:
            draws.end()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)


def _refuse_parts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name in ("cache", "last_only"):
        if kwargs.get(name):
            raise ValueError(f"{name}: tensor_parallel(sequence=True) goes through whole sequences alone")


def _whole_for_sampling(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor
) -> Tensor:
    asked = kwargs.get("cache") is not None or kwargs.get("last_only")
    return logits.full_tensor() if asked and isinstance(logits, DTensor) else logits
