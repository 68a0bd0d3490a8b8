"""When a pipeline's gradients are summed over the data axes, and how many bytes that moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import imece
from imece import Pipeline, parallelize
from imece.collectives import ops
from imece.model_parallel.schedules import Span
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.model_parallel.test_pipeline import (
    BOTH,
    EXACT,
    Case,
    mine,
    numbers_of,
    one_rank,
    optimizer_of,
    piped,
    tied,
    tokens_of,
)

BATCH, MICRO = 16, 4  # of both data ranks; micro-batches of each
CAP_MB = 0.0006  # buckets of a matrix


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), *(nn.Linear(9, 9) for _ in range(6)), nn.Linear(9, 5)).double()


def logits_loss(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def counted(names: tuple[str, ...], group: dist.ProcessGroup) -> Iterator[list[int]]:
    """Bytes of each of these collectives in the group, but for flags of one byte a parameter."""
    sent: list[int] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            real = getattr(ops, name)

            def call(tensor: Tensor, *rest: Any, real: Callable[..., Any] = real, **options: Any) -> Any:
                if options["group"] is group and options["label"] != "used parameters":
                    sent.append((rest[0] if rest and isinstance(rest[0], Tensor) else tensor).nbytes)
                return real(tensor, *rest, **options)

            stack.enter_context(mock.patch.object(ops, name, call))
        yield sent


def leaves_early(schedule: str, strategy: str) -> None:
    with contextlib.closing(imece.init(BOTH)) as mesh:
        pipeline = Pipeline(layers(), mesh, micro_batches=MICRO, schedule=schedule, loss=F.mse_loss)
        made = parallelize(pipeline.part, optimizer_of, strategy, mesh, bucket_cap_mb=CAP_MB, overlap=True)
        part, optimizer = made
        part.record_trace()
        for step in range(2):
            optimizer.zero_grad()
            with counted(("all_reduce", "reduce_scatter"), mesh.data_group) as sent:
                pipeline.step(*mine(numbers_of(step, BATCH), mesh))
        trace, buckets = part.last_trace, len(part.reducer.buckets)
        assert trace is not None and buckets >= 3
        assert [each.index for each in trace.buckets] == list(range(buckets)), "each leaves once"
        assert sent == [each.nbytes for each in trace.buckets], "nothing else moves"
        own = sum(each.nbytes for each in part.parameters())
        assert own <= sum(sent) < own + 128 * buckets, "of micro-batches no more than of one"
        backwards = [span for span in pipeline.spans if span.what == "backward"]
        first, last = trace.buckets[0].launched_s, backwards[-1]
        if schedule == "interleaved":  # the other stage of this rank ended before
            assert first < last.start_s
        assert last_of_a_stage(backwards).start_s < first < last.end_s
        assert trace.buckets[-1].launched_s < last.end_s, "not at the end of the step"


def last_of_a_stage(backwards: list[Span]) -> Span:
    """The first one of those after which a stage has no more."""
    return next(each for each in backwards if each.micro_batch == MICRO - 1)


def shared_ones_leave_last(group: dist.ProcessGroup) -> None:
    """The embedding's gradient comes from both ends of the pipeline; what else is there does not wait."""
    with contextlib.closing(imece.init(BOTH)) as mesh:
        pipeline = Pipeline(tied(), mesh, micro_batches=MICRO, loss=logits_loss)
        part, _ = parallelize(
            pipeline.part, optimizer_of, "replicate", mesh, bucket_cap_mb=CAP_MB, overlap=True
        )
        part.record_trace()
        for step in range(2):
            part.zero_grad()
            pipeline.step(*mine(tokens_of(step, BATCH), mesh))
        slot = next(each for each in part.reducer.slots if each.name == "embed.weight")
        assert part.last_trace is not None
        left, end = part.last_trace.buckets, pipeline.spans[-1].end_s
        assert slot.bucket.index == len(left) - 1, "laid by when it comes"
        assert left[0].launched_s < end < left[-1].launched_s


def shared_by_stages_of_a_rank(group: dist.ProcessGroup) -> None:
    """What both use is not through when the first of them is."""
    case = Case({"replicate": 4}, "interleaved", tied, strategy="zero1")
    with contextlib.closing(imece.init(case.axes)) as mesh:
        losses, parameters, pipeline = piped(case, mesh)
        expected, whole = one_rank(case, mesh.batch_ranks)
        assert len(pipeline.stages) == 2
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < EXACT
        assert all((each - whole[name]).abs().max() < EXACT for name, each in parameters.items())


class Sometimes(nn.Module):
    """Has layers that some micro-batches alone go through."""

    def __init__(self, first: int) -> None:
        """first: the number of the first call."""
        super().__init__()
        self.early, self.late = nn.Linear(5, 5), nn.Linear(5, 5)
        self.calls = first

    def forward(self, x: Tensor) -> Tensor:
        number, self.calls = self.calls % MICRO, self.calls + 1
        return torch.tanh((self.late if number == MICRO - 1 else self.early)(x))


def sometimes(first: int) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 5), Sometimes(first), Sometimes(first), nn.Linear(5, 5)).double()


def what_the_last_micro_batch_does_not_use(strategy: str) -> None:
    with contextlib.closing(imece.init(BOTH)) as mesh:
        pipeline = Pipeline(sometimes(-1), mesh, micro_batches=MICRO, loss=F.mse_loss)  # -1: finds its shapes
        _, optimizer = parallelize(pipeline.part, optimizer_of, strategy, mesh, overlap=True)
        model = sometimes(0)
        whole = optimizer_of(model.parameters())
        for step in range(3):
            x, y = numbers_of(step, BATCH)
            pipeline.step(*mine((x, y), mesh))
            optimizer.step()
            optimizer.zero_grad()
            for rank_x, rank_y in zip(x.chunk(2), y.chunk(2), strict=True):
                for inputs, targets in zip(rank_x.chunk(MICRO), rank_y.chunk(MICRO), strict=True):
                    (F.mse_loss(model(inputs), targets) / (2 * MICRO)).backward()
            whole.step()
            whole.zero_grad()
        expected = model.state_dict()
        for name, each in pipeline.part.state_dict().items():
            assert (each - expected[name]).abs().max() < EXACT, name


def _leaves(schedule: str, strategy: str) -> Check:
    return lambda group: leaves_early(schedule, strategy)


def _not_all(strategy: str) -> Check:
    return lambda group: what_the_last_micro_batch_does_not_use(strategy)


SCHEDULES, STRATEGIES = ("gpipe", "1f1b", "interleaved"), ("replicate", "zero1", "zero2")
CHECKS: dict[str, Check] = {
    **{f"{each} {strategy}": _leaves(each, strategy) for each in SCHEDULES for strategy in STRATEGIES},
    **{f"not in the last {strategy}": _not_all(strategy) for strategy in STRATEGIES},
    "shared ones leave last": shared_ones_leave_last,
    "shared to the last": shared_by_stages_of_a_rank,
}
ALWAYS = ["1f1b replicate", "gpipe zero1", "interleaved zero2", *[name for name in CHECKS if "last" in name]]
_REST = [name for name in CHECKS if name not in ALWAYS]


@pytest.mark.parametrize(
    "job",
    [
        *jobs(__name__, ALWAYS, (4, "shm")),
        *slow(jobs(__name__, _REST, (4, "shm"))),
        *jobs(__name__, ["interleaved replicate"], (4, "gloo")),
    ],
)
def test_sums(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
