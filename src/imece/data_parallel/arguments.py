"""DistributedDataParallel's arguments, which are torch's: what they mean here, which are refused and why."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from imece.collectives.calls import group_or_default
from imece.collectives.schedules import check_name
from imece.collectives.wire import check_wire
from imece.layout import MIB
from imece.listing import kind_of

_MOST_MIB = 2**20  # 1 TiB; a cap in bytes is more from 1 MiB on


def refuse(delayed: object, delayed_by: object, mixed_precision: object, check_reduction: bool) -> None:
    """ValueError for arguments of torch that imece cannot honour."""
    if delayed is not None or delayed_by is not None:
        raise ValueError(
            "delay_all_reduce_named_params is not supported: a parameter is reduced as soon as it is ready"
        )
    if mixed_precision is not None:
        raise ValueError("mixed_precision is not supported: use torch.autocast around the forward")
    if check_reduction:
        warnings.warn("check_reduction does nothing, as in torch", FutureWarning, stacklevel=3)


def check_way(schedule: str | None, wire: str | None, overlap: bool | None) -> None:
    """ValueError for an unknown name, at construction: in the first backward other ranks would
    already wait. And for an `overlap` that is no bool: "auto" would be taken for True."""
    if overlap not in (None, False, True):
        raise ValueError(f"overlap={overlap!r}: True, False, or None for what suits the ranks")
    check_wire(wire)
    if schedule not in (None, "auto"):
        check_name("all_reduce", schedule)


def group_of(group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group that one of the two arguments names; by default that of all ranks. TypeError for what is no
    group or DeviceMesh."""
    if device_mesh is None:
        return group_or_default(group)
    if group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh: {kind_of(device_mesh)} is no DeviceMesh of torch: give process_group=")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(0)


def trained(module: nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.Tensor]]:
    """Parameters that want a gradient, each once, in registration order.

    RuntimeError if there are none, or if one has no shape yet; ValueError for sparse gradients, and for one
    that torch has divided.
    """
    named: list[tuple[str, torch.Tensor]] = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    if not named:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that "
            "requires a gradient"
        )
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name} has no shape yet: run one forward before wrapping the module"
            )
        if hasattr(parameter, "placements"):  # to import DTensor takes longer than all the rest here
            raise ValueError(
                f"parameter {name} is a DTensor: torch has divided the model already, by fully_shard or "
                f"parallelize_module. Give it as it was before; imece.tensor_parallel(model, mesh, plan=...) "
                f"divides matrices"
            )
    for prefix, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            raise ValueError(
                f"{prefix or 'the module'} has sparse gradients, which do not fit into a flat bucket: "
                f"construct it with sparse=False"
            )
    return named


def warn_of_max_norm(module: nn.Module) -> None:
    """Warn of embeddings with max_norm: forward shortens the rows that this rank looks up, on this rank."""
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None:
            warnings.warn(
                f"{name or 'the module'} has max_norm={each.max_norm}: a forward shortens the rows that its "
                f"own rank looks up, so the ranks' parameters drift apart. Leave max_norm out, and shorten "
                f"all rows after each step, inside of `with model.gathered(write=True):` and no_grad: "
                f"weight.renorm_({each.norm_type}, 0, {each.max_norm})",
                stacklevel=3,
            )


def refuse_meta(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """ValueError that names a parameter or buffer on the meta device."""
    for name, each in named:
        if each.is_meta:
            raise ValueError(
                f"{name} is on the meta device, without memory: call the module's to_empty() and initialise "
                f"it before wrapping; a sharded strategy of imece.parallelize takes it as it is"
            )


def device_indices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    devices: Collection[torch.device],
) -> tuple[list[int] | None, int | None]:
    """Both arguments as numbers; None if inputs are not moved. devices: those of the parameters.

    TypeError for `device_ids` that are no list; ValueError for devices that cannot be.
    """
    if not isinstance(device_ids, list | tuple | None):
        raise TypeError(f"device_ids: {kind_of(device_ids)}, where a list of one device belongs, or nothing")
    types = {each.type for each in devices}
    if len(types) > 1 and "meta" in types:
        raise ValueError(
            "some parameters are on the meta device, without memory, and others are not: make all of them "
            "there, or none"
        )
    if len(types) > 1:
        raise ValueError(f"all parameters must be on one type of device; these are on {sorted(types)}")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can name one device of this rank, not {list(device_ids)}")
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device is not None:
            raise ValueError(
                f"device_ids={device_ids} and output_device={output_device} are for a module on one GPU; "
                f"this one is on {', '.join(sorted(map(str, devices)))}: leave both out"
            )
        return None, None
    indices = [torch.cuda._utils._get_device_index(each, True) for each in (device_ids[0], output_device)
               if each is not None]  # fmt: skip
    return indices[:1], indices[-1]


def buffer_flags(broadcast: bool | None, forward: bool | None) -> tuple[bool, bool]:
    """(broadcast buffers before each forward, broadcast them at construction)."""
    if broadcast is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified; the former, which is "
            "deprecated, is ignored." if forward is not None else
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; with False it still "
            "broadcasts buffers once, at construction.",
            FutureWarning,
            stacklevel=3,
        )  # fmt: skip
    if forward is not None:
        return forward, True
    each = broadcast is not False
    return each, each


def bucket_caps(cap_mb: object, cap_list: Sequence[float] | None) -> tuple[list[int], bool, bool]:
    """(caps in bytes, whether one cap holds for all buckets, whether measurements choose the cap).

    cap_mb: MiB, a list of them, "auto" or None; cap_list: torch's other way to give a list. No caps:
    the default.
    """
    choose = cap_mb == "auto" and not cap_list
    if choose:
        cap_mb = None
    given = list(cap_list or (cap_mb if isinstance(cap_mb, list | tuple) else ()))
    single = given == [] and isinstance(cap_mb, int | float) and not isinstance(cap_mb, bool)
    caps = [float(cap_mb)] if single else given  # type: ignore[arg-type]
    if any(not 0 < each < math.inf for each in caps) or (cap_mb is not None and not caps):
        raise ValueError(f"bucket_cap_mb={cap_mb!r}: MiB, more than 0 and finite; a list of them; or 'auto'")
    if any(each > _MOST_MIB for each in caps):
        raise ValueError(f"bucket_cap_mb={cap_mb!r}: MiB, not bytes: 25, say")
    return [int(each * MIB) for each in caps], single, choose
