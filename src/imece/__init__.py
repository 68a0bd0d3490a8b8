"""Data-parallel training for PyTorch: `imece.init()`, collectives, and the backend "shm" for one host's CPUs.

Importing imece registers "shm" with torch.distributed.
"""

from imece import errors
from imece.checkpoint.weights import load_weights
from imece.collectives import on_signal, shared_memory
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
from imece.data_parallel.parallelize import parallelize
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.shard import MixedPrecision
from imece.launch.spawn import spawn
from imece.membership.steps import steps
from imece.mesh import Mesh, at_opening, init
from imece.world import World

__version__ = "0.1.0"

shared_memory.register()
at_opening(on_signal.listen)

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "Mesh",
    "MixedPrecision",
    "Pending",
    "Recv",
    "Send",
    "SyncBatchNorm",
    "World",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "convert_sync_batchnorm",
    "errors",
    "exchange",
    "init",
    "load_weights",
    "parallelize",
    "recv",
    "reduce",
    "reduce_scatter",
    "send",
    "shared_empty",
    "spawn",
    "steps",
]
