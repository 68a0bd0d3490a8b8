"""bucket_cap_mb="auto": the arithmetic compared with hand-made results, and its effect on a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from imece import DistributedDataParallel
from imece.buckets import default_cap_bytes
from imece.data_parallel.reducing.cap import CAPS_BYTES, EACH_S, best_cap
from imece.data_parallel.reducing.whole import WholeGradients
from imece.layout import MIB
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed, slow

ARRIVALS = [(MIB, 0.010 * (at + 1)) for at in range(16)]  # 16 gradients of 1 MiB, one each 10 ms


def test_latency_asks_for_large_buckets() -> None:
    """Nothing but latency, more than a backward of small buckets can hide: one bucket is best."""
    cap, exposed_s = best_cap(ARRIVALS, lambda nbytes: 0.1, MIB)
    assert cap == max(CAPS_BYTES) and exposed_s == pytest.approx(0.1 + EACH_S)


def test_bandwidth_asks_for_small_buckets() -> None:
    """5 ms a MiB and no latency: of 1 MiB buckets all but the last hide, of larger ones more stays."""
    cap, exposed_s = best_cap(ARRIVALS, lambda nbytes: 0.005 * nbytes / MIB, MIB)
    assert cap == MIB and exposed_s == pytest.approx(0.005 + EACH_S)


def test_a_slow_wire_wants_an_early_start() -> None:
    """20 ms a MiB: the wire is behind from the first bucket on, so only the start of it counts."""
    cap, exposed_s = best_cap(ARRIVALS, lambda nbytes: 0.020 * nbytes / MIB, MIB)
    # The first bucket ends at 30 ms. The next is there by then if it has 2 MiB; with 4 it comes 20 ms later.
    assert cap == 2 * MIB
    assert exposed_s == pytest.approx(0.010 + 0.320 - 0.160 + 9 * EACH_S)


def test_gradients_that_come_together_are_one_bucket() -> None:
    """Where nothing hides, more buckets only cost more."""
    together = [(nbytes, 1.0) for nbytes, _ in ARRIVALS]
    assert best_cap(together, lambda nbytes: 0.001 + 0.005 * nbytes / MIB, MIB)[0] >= 16 * MIB


@given(
    st.lists(st.tuples(st.integers(1, 8 * MIB), st.floats(0, 0.05)), min_size=1, max_size=40),
    st.floats(0, 0.01),
    st.floats(0, 0.02),
)
def test_no_other_cap_is_predicted_to_be_better(
    steps: list[tuple[int, float]], latency_s: float, per_mib_s: float
) -> None:
    """Against a simulation of its own: buckets made first, then sent one after the other."""
    arrivals, now = [], 0.0
    for nbytes, wait in steps:
        now += wait
        arrivals.append((nbytes, now))

    def simulated(cap: int) -> float:
        buckets: list[list[tuple[int, float]]] = [[]]
        for each in arrivals:
            if sum(nbytes for nbytes, _ in buckets[-1]) >= (cap if len(buckets) > 1 else MIB):
                buckets.append([])
            buckets[-1].append(each)
        free = 0.0
        for bucket in buckets:
            nbytes = sum(each for each, _ in bucket)
            free = max(free, bucket[-1][1]) + latency_s + per_mib_s * nbytes / MIB + EACH_S
        return free - now

    cap, exposed_s = best_cap(arrivals, lambda nbytes: latency_s + per_mib_s * nbytes / MIB, MIB)
    assert exposed_s == pytest.approx(simulated(cap))
    assert exposed_s <= 1.02 * min(simulated(each) for each in CAPS_BYTES) + 1e-9


def chosen_by_all(group: dist.ProcessGroup) -> None:
    """The first backward has torch's default; the second what rank 0 found; gradients are right in both."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), process_group=group, bucket_cap_mb="auto"
    )
    gradients = model.reducer.gradients
    assert isinstance(gradients, WholeGradients)
    before, first = gradients.caps_bytes, gradients.all
    for step in range(3):
        x = torch.full((4, 256), float(dist.get_rank() + 1))
        alone = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        alone.load_state_dict(model.module.state_dict())
        model.zero_grad()
        model(x).square().mean().backward()
        expected = [torch.zeros_like(each) for each in alone.parameters()]
        for rank in range(group.size()):
            alone.zero_grad()
            alone(torch.full((4, 256), float(rank + 1))).square().mean().backward()
            for each, parameter in zip(expected, alone.parameters(), strict=True):
                assert parameter.grad is not None
                each += parameter.grad / group.size()
        for each, parameter in zip(expected, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, each)
        assert step or gradients.caps_bytes == before, "nothing is known before the first backward"
    *_, cap = gradients.caps_bytes
    found = gathered((cap, len(model.reducer.buckets)), group)
    assert found.count(found[0]) == group.size() and cap in CAPS_BYTES
    assert gradients.all is not first


CHECKS: dict[str, Check] = {"chosen by all": chosen_by_all}


@pytest.mark.parametrize(
    "job", [*jobs(__name__, CHECKS, (2, "shm")), *slow(jobs(__name__, CHECKS, (3, "gloo")))]
)
def test_auto(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


def test_large_models_have_no_more_buckets_for_it_and_small_ones_the_usual() -> None:
    assert default_cap_bytes(gradients_bytes=100 * MIB) == default_cap_bytes() == 25 * MIB
    assert default_cap_bytes(gradients_bytes=1600 * MIB) == 50 * MIB
    assert default_cap_bytes(gradients_bytes=6400 * MIB, borrows=True) == 100 * MIB
