"""Names of torch's DistributedDataParallel that other libraries use; most of them are private."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from imece.data_parallel.buffers import BufferHook, BufferSync, Hook
from imece.data_parallel.reducer import Reducer
from imece.data_parallel.same import sync_from

_BUILTIN_HOOKS = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class TorchNames:
    """Mixed into DistributedDataParallel; each name does what a public one does."""

    process_group: dist.ProcessGroup
    reducer: Reducer
    static_graph: bool
    dim: int
    device: torch.device
    device_type: str
    forward_sync_buffers: bool
    buffer_sync: BufferSync

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[int | torch.device]
    ) -> Any:
        """(args, kwargs) for each device, tensors cut along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Outputs of several devices on one, put together along `dim`."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_id: int) -> Any:
        """([args], [kwargs]) with their tensors on this device."""
        return _to_kwargs(inputs, kwargs, torch.device(self.device_type, device_id), False)

    @property
    def join_device(self) -> torch.device:
        """For torch's Join; and the group below."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are kept alike."""
        return self.buffer_sync.tensors

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The same buffers by name."""
        return self.buffer_sync.named

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Hook,
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, {name: buffer})` keeps buffers alike instead of a broadcast. TypeError:
        not callable."""
        self.buffer_sync.hook = BufferHook(hook, state, comm_hook_location)

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:  # fmt: skip
        """A buffer hook may call this to get the default broadcast; all buffers travel as one message."""
        tensors = self.buffer_sync.tensors if bufs is None else bufs
        sync_from(authoritative_rank, tensors, self.process_group, "buffers")

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Leave these parameters and buffers to their rank; call this before the model is wrapped."""
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]
        for name, parameter in module.named_parameters():
            if name in names:
                parameter._ddp_ignored = True  # type: ignore[attr-defined]
        for name, buffer in module.named_buffers():
            if name in names:
                buffer._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters that are not left to their rank."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _set_static_graph(self) -> None:
        self.static_graph = True
        self.reducer.learn()

    def _register_builtin_comm_hook(self, kind: dist.BuiltinCommHookType) -> None:
        self.register_comm_hook(self.process_group, _BUILTIN_HOOKS[kind])  # type: ignore[attr-defined]

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()
