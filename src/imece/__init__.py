"""Data-parallel training for PyTorch: one engine from DDP to ZeRO-3 and hybrid sharding.

    mesh = imece.init()                             # which rank am I, of how many, on what
    model, optimizer = imece.parallelize(model, optimizer, strategy="zero2")

    # forward, loss.backward(), optimizer.step(), optimizer.zero_grad(): your loop stays as it is

`imece launch --ranks 2 script.py` starts the ranks; so do torchrun, srun and mpirun.

    the ranks        init, Mesh, World, spawn
    a model          parallelize, MixedPrecision, DistributedDataParallel, GradScaler,
                     compile_blocks, SyncBatchNorm, convert_sync_batchnorm, cross_entropy,
                     read_settings
    divided models   tensor_parallel, Pipeline, ContextParallel
    data             DistributedSampler
    checkpoints      full_optimizer_state, load_weights; more in imece.checkpoint
    ranks that die   steps
    collectives      all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv,
                     exchange with Send and Recv, barrier, Pending, shared_empty
    exceptions       errors

Importing imece makes "shm", the backend for the CPUs of one host, known to torch.distributed.
Each name is imported on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from imece import errors
from imece.moments import at_opening
from imece.on_import import register_backend

if TYPE_CHECKING:
    from imece.checkpoint.state.full import full_optimizer_state
    from imece.checkpoint.state.weights import load_weights
    from imece.collectives.ops import (
        Pending,
        Recv,
        Send,
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        exchange,
        recv,
        reduce,
        reduce_scatter,
        send,
    )
    from imece.collectives.shared_memory import shared_empty
    from imece.data.sampler import DistributedSampler
    from imece.data_parallel.batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from imece.data_parallel.compiled import compile_blocks
    from imece.data_parallel.grad_scaler import GradScaler
    from imece.data_parallel.parallelize import parallelize
    from imece.data_parallel.replicate import DistributedDataParallel
    from imece.data_parallel.sharding.cast import MixedPrecision
    from imece.foreign.files import read_settings
    from imece.launch.spawn import spawn
    from imece.membership.steps import steps
    from imece.mesh import Mesh
    from imece.model_parallel.context import ContextParallel
    from imece.model_parallel.pipeline import Pipeline
    from imece.model_parallel.tensor import tensor_parallel
    from imece.model_parallel.vocabulary import cross_entropy
    from imece.opening import init
    from imece.world import World

__version__ = "0.1.0"

_HOMES = {
    "checkpoint.state.full": ["full_optimizer_state"],
    "checkpoint.state.weights": ["load_weights"],
    "collectives.ops": [
        "Pending", "Recv", "Send", "all_gather", "all_reduce", "barrier", "broadcast", "exchange", "recv",
        "reduce", "reduce_scatter", "send",
    ],
    "collectives.shared_memory": ["shared_empty"],
    "data.sampler": ["DistributedSampler"],
    "data_parallel.batch_norm": ["SyncBatchNorm", "convert_sync_batchnorm"],
    "data_parallel.sharding.cast": ["MixedPrecision"],
    "data_parallel.compiled": ["compile_blocks"],
    "data_parallel.grad_scaler": ["GradScaler"],
    "data_parallel.parallelize": ["parallelize"],
    "data_parallel.replicate": ["DistributedDataParallel"],
    "foreign.files": ["read_settings"],
    "launch.spawn": ["spawn"],
    "membership.steps": ["steps"],
    "model_parallel.context": ["ContextParallel"],
    "model_parallel.pipeline": ["Pipeline"],
    "model_parallel.tensor": ["tensor_parallel"],
    "model_parallel.vocabulary": ["cross_entropy"],
    "mesh": ["Mesh"],
    "opening": ["init"],
    "world": ["World"],
}  # fmt: skip
_HOME_OF = {name: f"imece.{module}" for module, names in _HOMES.items() for name in names}

__all__ = [
    "ContextParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "GradScaler",
    "Mesh",
    "MixedPrecision",
    "Pending",
    "Pipeline",
    "Recv",
    "Send",
    "SyncBatchNorm",
    "World",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "compile_blocks",
    "convert_sync_batchnorm",
    "cross_entropy",
    "errors",
    "exchange",
    "full_optimizer_state",
    "init",
    "load_weights",
    "parallelize",
    "read_settings",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
    "shared_empty",
    "spawn",
    "steps",
    "tensor_parallel",
]


def _listen() -> None:
    importlib.import_module("imece.collectives.on_signal").listen()


def _watch_gpus() -> None:
    importlib.import_module("imece.membership.gpu_errors").watch()


register_backend()
at_opening += [_listen, _watch_gpus]


if not TYPE_CHECKING:  # or type checkers would take any name for one of these

    def __getattr__(name: str) -> Any:
        """PEP 562: import the module that has `name`, and with it torch."""
        if name not in _HOME_OF:
            raise AttributeError(
                f"module 'imece' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            )
        found = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
