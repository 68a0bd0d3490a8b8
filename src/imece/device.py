"""Which device this rank computes on, and which torch.distributed backends move its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from imece.errors import UserError
from imece.world import World

_INTERNAL = ("undefined", "fake")  # torch's backends that move nothing


@dataclass(frozen=True)
class Backends:
    """Names of torch.distributed backends, as init_process_group takes them."""

    world: str
    """For groups that may span hosts."""
    host: str
    """For groups of which each stays on one host."""
    own: str
    """The backend that moves tensors of this mesh's device: shm, gloo or nccl."""


def has_streams(tensor: torch.Tensor) -> bool:
    """Whether operations on it are queued in a stream and may end later than the call."""
    return tensor.is_cuda


def is_current(stream: torch.cuda.Stream) -> bool:
    """Whether `stream` and its device are the current ones of this thread. torch's own functions would make
    objects to compare, which takes longer."""
    index = stream.device.index
    raw = getattr(stream, "cuda_stream", None)
    if raw is None:  # no stream of torch's
        return torch.cuda.current_stream(stream.device) == stream
    on_device = torch._C._cuda_getDevice() == index
    return bool(on_device and torch._C._cuda_getCurrentRawStream(index) == raw)


def keeps_freed(device: torch.device) -> bool:
    """Whether torch keeps freed memory at hand for the next request. On a CPU it goes back to the system, and
    comes again page by page."""
    return device.type == "cuda"


def casts_fast(device: torch.device) -> bool:
    """Whether casting a shard in each gather is cheap. On a CPU the cast would take the cores that
    forward needs."""
    return device.type == "cuda"


def behind_this_stream(memory: torch.Tensor) -> None:
    """The caller frees `memory`: it is reused only after this stream's work until now, whichever stream
    allocated it."""
    if has_streams(memory):
        memory.record_stream(torch.cuda.current_stream(memory.device))


def choose_device(asked: str | torch.device | None, world: World, backend: str | None = None) -> torch.device:
    """This rank's device, made torch's current one if it is a GPU. Ranks share GPUs if the `backend` is Gloo.
    Without a launcher it is the current GPU; if that is the first, the one of the rank, modulo their number.

    UserError if there is no such device, or if the `backend` does not move its tensors.
    """
    mover = _mover_of_gpus(backend)
    usual = "cuda" if torch.cuda.is_available() and mover is not None else "cpu"
    try:
        device = torch.device(asked if asked is not None else usual)
    except RuntimeError:
        raise UserError(f"device {asked!r}: 'cpu', 'cuda', or a GPU by its number, 'cuda:0'") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UserError(f"device {str(asked)!r}: imece runs on 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise UserError(f"device {str(asked)!r}: torch sees no GPU on this host: use 'cpu', or leave it out")
    if mover is None:
        raise UserError(
            f"device {str(asked)!r} with backend {backend!r}, which moves the CPU's tensors alone: leave one "
            "of them out"
        )
    if mover != "nccl" and "cpu:shm" in str(backend).split(","):
        raise UserError(
            f"backend {backend!r}: beside shm a GPU's tensors go over NCCL alone; leave it out, or take "
            "backend='gloo' (IMECE_BACKEND=gloo), on which ranks share GPUs"
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        there = "one GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise UserError(f"device {str(asked)!r}: this rank sees {there}")
    # A launcher that shows each rank only its own GPU leaves one choice, whatever the local rank.
    share = count == 1 or mover == "gloo" or world.launcher == "single"
    own = world.local_rank % count if share else world.local_rank
    if world.launcher == "single" and torch.cuda.is_initialized():  # the script may have chosen
        own = torch.cuda.current_device() or own
    index = device.index if device.index is not None else own
    if index >= count:
        raise UserError(
            f"{world.local_world_size} ranks on this host, but {count} GPUs: start {count} ranks, or use "
            "backend='gloo' (IMECE_BACKEND=gloo), on which they share GPUs, or device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _mover_of_gpus(backend: str | None) -> str | None:
    """The backend for a GPU's tensors in "gloo", "cpu:gloo,cuda:nccl" and the like; None if the text names
    none. If `backend` is None, NCCL."""
    if backend is None:
        return "nccl"
    if ":" not in backend:
        return backend if backend != "shm" else None
    return dict(part.rpartition(":")[::2] for part in backend.split(",")).get("cuda")


def usable_gpus() -> int:
    """The number of GPUs that torch can use here: the driver may count some that are too new or too old
    for torch."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def best_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def home_among(group: dist.ProcessGroup) -> torch.device:
    """Where to put a model that has no memory yet, if only its ranks are known: on this rank's GPU if there
    is one and the group has a backend for GPUs. A group on Gloo alone counts as one of CPUs, though Gloo
    takes both.
    """
    if torch.cuda.is_available() and _by_device(group).get("cuda", "gloo") != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _by_device(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backend of a group by device; None means the group of all ranks."""
    config = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":", 1) for part in config.split(","))


def check_backend(asked: str | None) -> None:
    """UserError if torch was built without the backend `asked` for."""
    if asked is None:
        return
    known = [each for each in dist.Backend.backend_list if dist.is_backend_available(each)]
    for part in asked.split(","):
        if part.split(":")[-1] not in known:
            usual = [each for each in known if each not in _INTERNAL]
            raise UserError(f"backend {asked!r}: torch here has {', '.join(usual)}")


def choose_backends(device: torch.device, one_host: bool, asked: str | None) -> Backends:
    """The backends for groups within and between hosts: those `asked` for, or the fastest for the device.

    "nccl" is the fastest for GPUs; tensors on CPUs, which it does not move, get another one.
    """
    if asked is not None and not (asked == "nccl" and device.type == "cuda"):
        own = {part.split(":")[0]: part.split(":")[-1] for part in asked.split(",")}
        return Backends(asked, asked, own.get(device.type, asked))
    if device.type == "cuda":
        host = "cpu:shm,cuda:nccl"
        return Backends(host if one_host else "cpu:gloo,cuda:nccl", host, "nccl")
    return Backends("shm" if one_host else "gloo", "shm", "shm" if one_host else "gloo")


def adopted_backends(device: torch.device, asked: str | None) -> Backends:
    """The backends of the existing process group; UserError if they are not what was `asked` for."""
    config = str(dist.get_backend_config())
    own = _by_device().get(device.type)
    if own is None:
        raise UserError(f"torch.distributed was initialized with {config}: not for {device.type} tensors")
    if asked is not None and own != asked and config != asked:
        raise UserError(f"backend {asked!r} asked for, but torch.distributed was initialized with {config}")
    return Backends(config, config, own)
