"""If branches run on streams of their own, one stream writes all gradients. Streams are stand-ins."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece.data_parallel.reducing import home
from imece.data_parallel.reducing.home import Home
from imece.data_parallel.reducing.leaving import Leaving
from imece.data_parallel.reducing.line import Line
from imece.data_parallel.sharding.freed import free
from tests.data_parallel.branches import (
    SMALL_MB,
    Branches,
    double,
    gradients,
    mean_over,
    own_input,
    same,
    total,
    wrap,
)
from tests.data_parallel.checks import Check, Job, jobs, passed

CPU = torch.device("cpu")


class Stream:
    """Stands for one of a GPU, which the CPU is taken for; `said` is what all of them were told."""

    device = CPU

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def __str__(self) -> str:
        return self._name

    def wait_stream(self, other: Stream) -> None:
        self._said.append(f"{self} waits for {other}")


class Gpu:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.main, self.side = Stream("main", self.said), Stream("side", self.said)
        self.current = self.main

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@contextlib.contextmanager
def cpu_as_gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    with (
        mock.patch.object(home, "has_streams", lambda _: True),
        mock.patch.object(torch.cuda, "current_stream", lambda _: gpu.current),
        mock.patch.object(torch.cuda, "stream", gpu.on),
    ):
        yield gpu


def node(parameter: torch.Tensor) -> Any:
    """What writes its gradient: torch makes it anew if nobody has kept it."""
    view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    return view.grad_fn.next_functions[0][0]


def test_nodes_stay_where_there_are_streams() -> None:
    parameter = nn.Parameter(torch.ones(2))
    with cpu_as_gpu(), torch.no_grad():
        its = Home([parameter])
    node(parameter).metadata["made"] = "first"
    gc.collect()
    assert node(parameter).metadata == {"made": "first"}
    its.leave()
    gc.collect()
    assert node(parameter).metadata == {}


def test_a_freed_parameter_has_a_home() -> None:
    parameter = nn.Parameter(torch.ones(2))
    free(parameter, "weight", "layer")
    with cpu_as_gpu():
        assert Home([parameter]).is_needed


def test_nothing_is_kept_on_cpus() -> None:
    parameter = nn.Parameter(torch.ones(2))
    its = Home([parameter])
    node(parameter).metadata["made"] = "first"
    gc.collect()
    assert not its.is_needed and node(parameter).metadata == {}
    with its.of(CPU):
        pass


def test_what_is_queued_at_home_comes_behind_both_streams() -> None:
    with cpu_as_gpu() as gpu:
        its = Home([nn.Parameter(torch.ones(2))])
        with its.of(CPU):
            assert gpu.current is gpu.main
        assert not gpu.said
        with gpu.on(gpu.side), its.of(CPU):
            assert gpu.current is gpu.main
            assert gpu.said == ["main waits for side"]
        assert gpu.said == ["main waits for side", "side waits for main"]


def buckets_leave_from_home(group: dist.ProcessGroup) -> None:
    """Whatever stream the last hook runs on; and one by one: each GPU has a thread of its own in backward."""
    left_from: list[str] = []
    held: list[bool] = []

    def leave(self: Leaving, bucket: Any) -> None:
        left_from.append(str(gpu.current))
        turn = Line.of(group)._turn
        other = threading.Thread(target=lambda: held.append(not turn.acquire(blocking=False)))
        other.start()
        other.join()
        launch(self, bucket)

    launch = Leaving._leave
    with cpu_as_gpu() as gpu, mock.patch.object(Leaving, "_leave", leave):
        model = wrap(double(Branches()), group, bucket_cap_mb=SMALL_MB, overlap=True)
        expected = mean_over(group, model.module, total, own_input())
        loss = total(model, own_input())
        with gpu.on(gpu.side):
            loss.backward()
    same(gradients(model), expected)
    assert len(left_from) == len(model.reducer.buckets) > 1
    assert set(left_from) == {"main"}
    assert held and all(held)


CHECKS: dict[str, Check] = {"buckets leave from home": buckets_leave_from_home}


@pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "gloo")))
def test_home(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
