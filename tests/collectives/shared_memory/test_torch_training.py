"""torch's own data-parallel wrappers train on "shm" with the same losses as on Gloo.

Two ranks have only one order of summing, so losses are bit-equal; with three, Gloo's order differs and losses
agree within rounding. The control: without the wrapper the losses clearly differ.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import async_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import imece  # noqa: F401 - registers the backend
from imece.errors import MismatchError
from tests.ranks import run_ranks

STEPS = 4
WIDTH = 48


class Model(nn.Module):
    """A few layers; with `optional`, one layer is used by some ranks in some steps only."""

    def __init__(self, *, optional: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 200), nn.GELU(), nn.Linear(200, WIDTH)) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH) if optional else None
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        if self.extra is not None and (step + dist.get_rank()) % 2:
            x = x + self.extra(x)
        out: Tensor = self.head(x)
        return out


Optimizer = Callable[[Any], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Optimizer = adam, accumulate: bool = False) -> list[float]:
    """The loss of each step on this rank's own batches."""
    steps = optimizer(model)
    losses = []
    for step in range(STEPS):
        for part in range(2 if accumulate else 1):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
            x = torch.randn(8, WIDTH, generator=generator)
            y = torch.randint(0, 10, (8,), generator=generator)
            if accumulate and part == 0:
                with model.no_sync():
                    nn.functional.cross_entropy(model(x, step), y).backward()
                continue
            loss = nn.functional.cross_entropy(model(x, step), y)
            loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    return losses


def ddp() -> list[float]:
    return train(DistributedDataParallel(Model(), bucket_cap_mb=0.05))


def ddp_unused() -> list[float]:
    return train(DistributedDataParallel(Model(optional=True), bucket_cap_mb=1, find_unused_parameters=True))


def ddp_static_views() -> list[float]:
    return train(DistributedDataParallel(Model(), static_graph=True, gradient_as_bucket_view=True))


def ddp_no_sync() -> list[float]:
    return train(DistributedDataParallel(Model()), accumulate=True)


def ddp_fp16_hook() -> list[float]:
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


def ddp_bf16_hook() -> list[float]:
    """torch refuses its bf16 hook by name where there is no NCCL; under another name it is welcome."""
    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    return train(model)


def sharded() -> list[float]:
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model)


def sharded_old() -> list[float]:
    return train(FullyShardedDataParallel(Model(), device_id=torch.device("cpu")))


def zero_optimizer() -> list[float]:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    return train(DistributedDataParallel(Model()), optimizer)


def alone() -> list[float]:
    return train(Model())


WAYS: dict[str, Callable[[], list[float]]] = {
    "DDP": ddp,
    "DDP, unused parameters": ddp_unused,
    "DDP, static graph": ddp_static_views,
    "DDP, no_sync": ddp_no_sync,
    "DDP, fp16 hook": ddp_fp16_hook,
    "DDP, bf16 hook": ddp_bf16_hook,
    "fully_shard": sharded,
    "FSDP1": sharded_old,
    "ZeroRedundancyOptimizer": zero_optimizer,
}


def train_on_both() -> dict[str, Any]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for backend in ("gloo", "shm"):
        place = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=place, rank=rank, world_size=size)
        found[backend] = {name: way() for name, way in WAYS.items()}
        found[backend]["alone"] = alone()
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def losses(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(train_on_both, request.param, backend=None, timeout_s=200)


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_those_of_gloo(losses: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(losses):
        ours, theirs = found["shm"][name], found["gloo"][name]
        assert len(ours) == STEPS
        if len(losses) == 2:
            assert ours == theirs, (rank, ours, theirs)
        tolerance = 3e-2 if "bf16" in name else 2e-3 if "fp16" in name else 1e-5
        assert ours == pytest.approx(theirs, rel=tolerance), (rank, ours, theirs)
        assert ours != pytest.approx(found["shm"]["alone"], rel=1e-2), "averaging changed nothing"


def test_half_precision_was_really_used(losses: list[dict[str, Any]]) -> None:
    for found in losses:
        plain = found["shm"]["DDP"]
        assert found["shm"]["DDP, bf16 hook"] != plain and found["shm"]["DDP, fp16 hook"] != plain


def state_of_rank_0() -> dict[str, Any]:
    """What torch's own tools make of it, that ask the group which devices it moves."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    wanted = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {name: value.clone() for name, value in wanted.items()}, options=options)
    with tempfile.TemporaryDirectory() as folder:
        group, place = dist.new_group(), [folder]
        dist.broadcast_object_list(place, src=0)
        target = f"{place[0]}/saved"
        cast(Any, async_save(model.state_dict(), checkpoint_id=target, process_group=group)).result()
        dist.barrier()  # before the folder goes
    loaded: Any = {name: cast(Any, value).full_tensor() for name, value in model.state_dict().items()}
    same = all(torch.equal(loaded[name], value) for name, value in wanted.items())
    world = cast(Any, dist.group.WORLD)
    backends = [world._get_backend(device).name() for device in world._device_types]
    return {"same": same, "backends": backends}


def test_torchs_state_dicts_travel() -> None:
    assert run_ranks(state_of_rank_0, 2, backend="shm") == [{"same": True, "backends": ["shm"]}] * 2


def go_apart() -> None:
    """One rank stops training earlier than the other, as by a limit that it finds by itself."""
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(2, 4)).sum()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"MismatchError: .*rank 1 all_gather"):
            loss.backward()
    else:
        with pytest.raises(MismatchError, match=r"rank 0 called all_reduce"):
            dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))


def test_calls_that_differ_are_an_error_in_torchs_ddp() -> None:
    run_ranks(go_apart, 2, backend="shm")


def fail_alone() -> None:
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    else:
        work = dist.broadcast(torch.ones(3), 0, async_op=True)
    with pytest.raises(MismatchError, match="differs between ranks"):
        cast(Any, work).get_future().wait()


def test_a_future_raises_the_error_of_its_call() -> None:
    run_ranks(fail_alone, 2, backend="shm")
