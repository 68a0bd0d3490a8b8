"""Posted buckets: ranks that are done early sum for those still in backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import imece
from imece.data_parallel.reducing.buckets import Bucket
from imece.data_parallel.reducing.posting import Posting
from imece.errors import CollectiveError
from tests.data_parallel.checks import Job, jobs, passed

LIMIT_S = 60.0
NUMEL = 6 * 64  # of each parameter: a shard for each of 2 or 3 ranks
CAP_MB = NUMEL * 4 / 2**20  # each parameter has a bucket
Hook = Callable[[], None]


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(NUMEL))


class Two(nn.Module):
    """Backward comes to `second` first, then to the hook, then to `first`. Both gradients are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Factor(), Factor()
        self.between: Hook | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first.vector * x
        if self.between is not None:
            between = self.between
            hidden.register_hook(lambda _: between())
        return hidden + self.second.vector * x


def wrapped(strategy: str, group: dist.ProcessGroup) -> tuple[Any, Two]:
    module = Two()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model, _ = imece.parallelize(module, optimizer, strategy, group, bucket_cap_mb=CAP_MB, overlap=False)
    return model, module


def own_input() -> torch.Tensor:
    return torch.full((NUMEL,), float(dist.get_rank() + 1))


def mean(group: dist.ProcessGroup) -> float:
    return (group.size() + 1) / 2


def own_part(model: Any, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank is to get of the gradient of `second`, where it is summed."""
    view: torch.Tensor
    (view,) = (slot.view for slot in model.reducer.slots if slot.name == "second.vector")
    length = NUMEL // group.size()
    return view if model.strategy == "replicate" else view[dist.get_rank() * length :][:length]


def summed(model: Any, group: dist.ProcessGroup) -> bool:
    return torch.allclose(own_part(model, group), torch.tensor(mean(group)), rtol=1e-6)


def wait_until_summed(model: Any, group: dist.ProcessGroup) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not summed(model, group):
        assert time.monotonic() < deadline, own_part(model, group)
        time.sleep(0.0005)


def the_last_rank_finds_its_work_done(group: dist.ProcessGroup) -> None:
    for strategy in ("replicate", "zero1"):
        model, module = wrapped(strategy, group)
        assert len(model.reducer.buckets) == 2
        for step in range(3):
            if dist.get_rank() == group.size() - 1:
                module.between = lambda model=model: wait_until_summed(model, group)
            model(own_input()).sum().backward()
            for parameter in (*module.parameters(), *(part.parameter for part in model.parts)):
                grad = parameter.grad
                assert grad is None or torch.allclose(grad, torch.tensor(mean(group)), rtol=1e-6), step
            model.zero_grad()


def fail() -> None:
    raise ArithmeticError("in the midst of backward")


def one_fails_before_any_has_summed(group: dist.ProcessGroup) -> None:
    """It runs that backward again, of which the others know nothing."""
    for strategy in ("replicate", "zero1"):
        model, module = wrapped(strategy, group)
        for _ in range(2):
            module.between = fail if dist.get_rank() == 0 else lambda: dist.barrier()
            loss = model(own_input()).sum()
            if dist.get_rank() == 0:
                with pytest.raises(ArithmeticError):
                    loss.backward()
                model.zero_grad()
                module.between = None
                loss = model(own_input()).sum()
                dist.barrier()
            loss.backward()
            assert summed(model, group)
            model.zero_grad()


def one_fails_after_another_has_summed(group: dist.ProcessGroup) -> None:
    model, module = wrapped("replicate", group)

    def wait_and_fail() -> None:
        wait_until_summed(model, group)
        fail()

    if dist.get_rank() == 0:
        module.between = wait_and_fail
        with pytest.raises(ArithmeticError):
            model(own_input()).sum().backward()
    with pytest.raises(CollectiveError, match="rank 0 was to sum anew what it had posted"):
        model(own_input()).sum().backward()


def where_it_is_done(group: dist.ProcessGroup) -> None:
    """Not where buckets travel by a hook, in fewer bits, by a schedule, or while backward goes on."""

    def posts(**options: Any) -> bool:
        module, posted = Two(), list[int]()
        hook = options.pop("hook", None)
        model = imece.DistributedDataParallel(module, process_group=group, **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        with pytest.MonkeyPatch.context() as patch:
            post = Posting.post

            def noted(self: Posting, bucket: Bucket) -> None:
                posted.append(bucket.index)
                post(self, bucket)

            patch.setattr(Posting, "post", noted)
            model(own_input()).sum().backward()
        assert torch.allclose(module.second.vector.grad, torch.tensor(mean(group)), rtol=1e-2)  # type: ignore[arg-type]
        return bool(posted)

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(group, bucket)

    assert posts(overlap=False) == (dist.get_backend(group) == "shm")
    assert not posts(overlap=True)
    assert not posts(overlap=False, wire="bf16")
    assert not posts(overlap=False, schedule="ring")
    assert not posts(overlap=False, hook=hook)


def moved_into_shared_memory(group: dist.ProcessGroup) -> None:
    """As `share_memory()` and queues do to gradients: one rank, after a backward or in the midst of one."""

    def move() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.share_memory_()

    for overlap, cap_mb in ((False, CAP_MB), (False, 1), (True, CAP_MB)):
        module = Two()
        model = imece.DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=cap_mb, overlap=overlap
        )
        for step in range(6):
            module.between = move if step in (2, 4) and dist.get_rank() == 0 else None
            model(own_input()).sum().backward()
            for slot in model.reducer.slots:
                grad, flat = slot.parameter.grad, slot.bucket.flat
                assert grad is not None
                assert torch.allclose(grad, torch.tensor(mean(group)), rtol=1e-6), (step, overlap, cap_mb)
                assert flat.data_ptr() <= grad.data_ptr() < flat.data_ptr() + flat.nbytes
            if step == 1 and dist.get_rank() == 0:
                move()
            model.zero_grad(set_to_none=step % 2 == 0)


def parts_moved_into_shared_memory(group: dist.ProcessGroup) -> None:
    """A part's gradient lies in its bucket, which moves with it: nobody would sum it any more."""
    model, _ = wrapped("zero1", group)
    for _ in range(2):
        model(own_input()).sum().backward()
    for part in model.parts:
        part.parameter.grad.share_memory_()
    with pytest.raises(RuntimeError, match=r"gradients of \w+.vector were moved out .*: give .* a clone"):
        model(own_input())


CHECKS = {
    "moved into shared memory": moved_into_shared_memory,
    "parts moved into shared memory": parts_moved_into_shared_memory,
    "the last rank finds its work done": the_last_rank_finds_its_work_done,
    "one fails before any has summed": one_fails_before_any_has_summed,
    "one fails after another has summed": one_fails_after_another_has_summed,
    "where it is done": where_it_is_done,
}
ON_SHM = ["the last rank finds its work done", "one fails before any has summed"]


@pytest.mark.parametrize(
    "job",
    [
        *jobs(__name__, CHECKS, (2, "shm")),
        *jobs(__name__, ON_SHM, (3, "shm")),
        *jobs(__name__, ["where it is done", "moved into shared memory"], (2, "gloo")),
    ],
)
def test_posting(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
