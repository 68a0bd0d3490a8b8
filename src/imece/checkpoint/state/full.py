"""An optimizer's state for whole parameters, put together on rank 0 as torch's own state dicts have it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from imece.checkpoint.deal import Slice
from imece.checkpoint.state.kept import Kept
from imece.checkpoint.state.names import OPTIMIZER
from imece.checkpoint.state.plain import by_key, value_of
from imece.checkpoint.state.sliced import Entries, slices_of
from imece.checkpoint.state.staged import place_of
from imece.checkpoint.state.weights import on_all
from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.texts import gather_json
from imece.data_parallel.optimizer import parameters_of
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding.block_wise import elements_per
from imece.data_parallel.sharding.stepped import SteppedParts
from imece.listing import kind_of
from imece.model_parallel.divided import divided_parameters

_LABEL = "an optimizer's full state"


def full_optimizer_state(model: DistributedDataParallel, optimizer: Optimizer) -> dict[str, Any]:
    """On rank 0, the state dict that `optimizer` would have if it stepped whole parameters, as with strategy
    `replicate`; {} on the others. All ranks call this.

    All of it lies on the CPU, and later steps do not change it. `optimizer.load_state_dict` takes it with
    every strategy at any number of ranks, on every rank alike; so does a plain torch optimizer. For speed and
    large models use `TrainingState`, which gathers nothing.

    TypeError if the model is not wrapped, or `optimizer` is no optimizer. ValueError for an optimizer of
    another model, for one that keeps its state in blocks, and for a model that is divided along the mesh's
    axes tensor and pipeline.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper is around it
    kind = type(optimizer).__name__
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"full_optimizer_state: {kind_of(model)} is not wrapped: give what imece.parallelize or "
            "imece.DistributedDataParallel returned"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"full_optimizer_state: one optimizer is expected, not {kind}; call it for each")
    if divided_parameters(model.module) or place_of(model) is not None:
        raise ValueError(
            "full_optimizer_state: this model is divided along the axis tensor or pipeline: save it by "
            "imece.checkpoint.TrainingState"
        )
    is_first = model.process_group.rank() == 0
    if not isinstance(model, ShardedDataParallel):
        return _on_cpu(optimizer.state_dict()) if is_first else {}
    if all(each.optimizer is not optimizer for each in model.stepped):
        raise ValueError(
            f"full_optimizer_state: this {kind} was not given to parallelize together with this model"
        )
    if elements_per(optimizer):
        raise ValueError(
            f"full_optimizer_state: {kind} keeps its state in blocks: save it by "
            "imece.checkpoint.TrainingState"
        )
    kept = _gathered(model, optimizer)
    return _state_dict(model, optimizer, kept) if is_first else {}


def _gathered(model: ShardedDataParallel, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """By parameter, and by key as in plain.py; empty on all ranks but the first."""
    kept, parts = Kept(optimizer), {part.parameter for part in model.parts}

    def entries() -> Entries:
        return {
            each: (kept.made_by, kept.entries(each)) for each in parameters_of(optimizer) if each in parts
        }

    pieces: dict[str, Slice] = {
        name: value
        for name, value in slices_of(model, on_all(model, entries)).items()
        if name.startswith(OPTIMIZER) and isinstance(value, Slice)
    }
    group, device = model.process_group, model.device
    places = [[each.start, each.tensor.numel()] for each in pieces.values()]
    of_all = zip(*gather_json(places, group, device, _LABEL), strict=True)
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for (name, own), of in zip(pieces.items(), of_all, strict=True):
        whole = _whole(own, of, group, device)
        if whole is not None:
            parameter, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            found[parameter][key] = whole
    return found


def _whole(
    own: Slice, places: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> Tensor | None:
    """One whole tensor, on rank 0. places: for each rank the first element that it has, and how many."""
    # Over NCCL rank 0 would make a communicator with each rank, and each takes memory of its GPU.
    device = host_device(group, device)
    if group.rank():
        if own.tensor.numel():
            ops.send(own.tensor.to(device), 0, group=group, label=_LABEL)
        return None
    whole = torch.empty(own.shape, dtype=own.tensor.dtype, device="cpu")
    flat = whole.view(-1)
    flat[own.start : own.start + own.tensor.numel()] = own.tensor.detach().view(-1)
    for rank, (start, numel) in enumerate(places):
        if rank and numel:
            part = torch.empty(numel, dtype=whole.dtype, device=device)
            flat[start : start + numel] = ops.recv(part, rank, group=group, label=_LABEL)
    return whole


def _state_dict(
    model: ShardedDataParallel, optimizer: Optimizer, kept: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """As torch's state dict, whose numbers count the parameters of all groups."""
    # As they were wrapped: whoever has replaced one in the module since, the optimizer steps the old one.
    names = {id(each): name for name, each in model.sharding.trained.named}
    stepped = SteppedParts.of(optimizer)
    assert stepped is not None, "it is one of the model's"
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for group, whole in zip(optimizer.param_groups, stepped.whole, strict=True):
        for at, each in enumerate(whole["params"], number):
            if of := kept.get(names.get(id(each), "")):
                state[at] = {unquote(key): value_of(value) for key, value in by_key(of).items()}
        many = len(whole["params"])
        groups.append({**group, **whole, "params": list(range(number, number + many))})
        number += many
    return {"state": state, "param_groups": groups}


def _on_cpu(value: Any) -> Any:
    """The value with copies of all its tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value
