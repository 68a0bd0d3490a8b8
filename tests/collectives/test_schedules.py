"""Every schedule, simulated in one process: right results, no deadlock, bytes and steps of the formulae."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.collectives.schedules import (
    SCHEDULES,
    Incoming,
    Outgoing,
    Schedule,
    bounds,
    build,
    cost,
)

Array = npt.NDArray[np.int64]
Combine = Callable[[Array, Array], Array]
PAIRS = [(op, name) for op, names in SCHEDULES.items() for name in names if name != "hierarchical"]


def sent_elements(plan: Schedule) -> int:
    return sum(send.stop - send.start for step in plan for send in step.sends)


class StuckError(Exception):
    """No message can move, and somebody waits."""


class Simulator:
    """A message takes one round, and moves only when both its ends are posted, as without buffers."""

    def __init__(self, plans: list[Schedule], data: list[Array], combine: Combine) -> None:
        self.plans, self.data, self.combine = plans, data, combine
        self.next_step = [0] * len(plans)
        self.left: list[set[Outgoing | Incoming]] = [set() for _ in plans]  # of the step under way
        self.sums: list[list[tuple[Incoming, Array]]] = [[] for _ in plans]
        self.sends: dict[tuple[int, int], deque[Outgoing]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Incoming]] = defaultdict(deque)

    def run(self) -> int:
        """The number of rounds until every rank has ended."""
        rounds = 0
        while self._post():
            rounds += 1
            if not self._deliver():
                raise StuckError(
                    f"ranks {[rank for rank, left in enumerate(self.left) if left]} wait forever"
                )
        if any(self.sends.values()) or any(self.receives.values()):
            raise StuckError("messages are left over")
        return rounds

    def _post(self) -> bool:
        for rank, plan in enumerate(self.plans):
            while not self.left[rank] and self.next_step[rank] < len(plan):
                step = plan[self.next_step[rank]]
                self.next_step[rank] += 1
                self.left[rank] = {*step.sends, *step.receives}
                for send in step.sends:
                    self.sends[rank, send.peer].append(send)
                for receive in step.receives:
                    self.receives[receive.peer, rank].append(receive)
        return any(self.left)

    def _deliver(self) -> bool:
        moved = []
        for (source, target), queue in self.sends.items():
            posted = self.receives[source, target]
            while queue and posted:
                send, receive = queue.popleft(), posted.popleft()
                assert (send.start, send.stop) == (receive.start, receive.stop), f"{send} meets {receive}"
                moved.append(
                    (source, target, send, receive, self.data[source][send.start : send.stop].copy())
                )
        for source, target, send, receive, values in moved:
            self.left[source].remove(send)
            self.left[target].remove(receive)
            if receive.how == "copy":
                self.data[target][receive.start : receive.stop] = values
            else:
                self.sums[target].append((receive, values))
        for rank, left in enumerate(self.left):
            if not left:
                self._sum(rank)
        return bool(moved)

    def _sum(self, rank: int) -> None:
        """As the executor: when the step has ended, the rank with the lower number on the left."""
        for receive, values in self.sums[rank]:
            mine = self.data[rank][receive.start : receive.stop]
            mine[:] = self.combine(values, mine) if receive.peer < rank else self.combine(mine, values)
        self.sums[rank].clear()


def simulate(plans: list[Schedule], data: list[Array], combine: Combine = np.add) -> tuple[list[Array], int]:
    """(each rank's data afterwards, rounds)."""
    after = [each.copy() for each in data]
    return after, Simulator(plans, after, combine).run()


def plans_of(
    op: str, name: str, world_size: int, numel: int, root: int = 0, parts: int = 3
) -> list[Schedule]:
    return [build(op, name, rank, world_size, numel, root=root, parts=parts) for rank in range(world_size)]


def data_of(world_size: int, numel: int) -> list[Array]:
    return [np.random.default_rng([rank, numel]).integers(-99, 99, numel) for rank in range(world_size)]


def check(op: str, data: list[Array], after: list[Array], root: int) -> None:
    """AssertionError unless `after` is what `op` makes of `data`."""
    total = np.sum(data, axis=0)
    slices = bounds(len(total), len(data))
    for rank, ((start, stop), got) in enumerate(zip(slices, after, strict=True)):
        if op == "all_reduce":
            np.testing.assert_array_equal(got, total)
        elif op == "broadcast":
            np.testing.assert_array_equal(got, data[root])
        elif op == "reduce" and rank == root:
            np.testing.assert_array_equal(got, total)
        elif op == "reduce_scatter":
            np.testing.assert_array_equal(got[start:stop], total[start:stop])
        elif op == "all_gather":
            for (a, b), owner in zip(slices, data, strict=True):
                np.testing.assert_array_equal(got[a:b], owner[a:b])


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize("world_size", range(1, 18))
def test_result(op: str, name: str, world_size: int) -> None:
    for numel in (0, 1, world_size - 1, world_size, 3 * world_size + 1, 97):
        for root in {0, world_size // 2, world_size - 1} if op in ("broadcast", "reduce") else {0}:
            data = data_of(world_size, numel)
            after, _ = simulate(plans_of(op, name, world_size, numel, root), data)
            check(op, data, after, root)


@pytest.mark.parametrize("name", [name for op, name in PAIRS if op == "all_reduce"])
@pytest.mark.parametrize("world_size", range(1, 18))
def test_all_ranks_compute_the_same_bits(name: str, world_size: int) -> None:
    """Neither commutative nor associative, so equal results mean equal order."""
    data = data_of(world_size, 41)
    after, _ = simulate(
        plans_of("all_reduce", name, world_size, 41), data, lambda left, right: 3 * left - 5 * right
    )
    for got in after:
        np.testing.assert_array_equal(got, after[0])


@settings(max_examples=150, deadline=None)
@given(pair=st.sampled_from(PAIRS), world_size=st.integers(2, 12), numel=st.integers(1, 60), pick=st.data())
def test_a_dropped_step_is_caught(
    pair: tuple[str, str], world_size: int, numel: int, pick: st.DataObject
) -> None:
    """The negative control: these tests must see any missing step of any rank."""
    op, name = pair
    data = [each + 1000 * (rank + 1) for rank, each in enumerate(data_of(world_size, numel))]
    plans = plans_of(op, name, world_size, numel)
    steps = [(rank, i) for rank, plan in enumerate(plans) for i, step in enumerate(plan) if any(step)]
    rank, i = pick.draw(st.sampled_from(steps))
    del plans[rank][i]
    with pytest.raises((StuckError, AssertionError)):
        after, _ = simulate(plans, data)
        check(op, data, after, 0)


@settings(max_examples=200, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    world_size=st.integers(1, 17),
    numel=st.integers(0, 300),
    parts=st.integers(1, 9),
)
def test_steps_keep_their_promise(pair: tuple[str, str], world_size: int, numel: int, parts: int) -> None:
    """The executor relies on it: in a step, copied ranges touch nothing, summed ones equal or miss sent."""
    for rank, plan in enumerate(plans_of(*pair, world_size, numel, world_size - 1, parts)):
        for step in plan:
            messages: list[Outgoing | Incoming] = [*step.sends, *step.receives]
            assert all(m.peer != rank and 0 <= m.peer < world_size for m in messages)
            assert all(0 <= m.start < m.stop <= numel for m in messages)
            for receive in step.receives:
                for send in step.sends:
                    apart = receive.stop <= send.start or send.stop <= receive.start
                    assert apart or (receive.how == "sum" and receive[1:3] == send[1:3])
            ranges = sorted((receive.start, receive.stop) for receive in step.receives)
            assert all(before[1] <= after[0] for before, after in pairwise(ranges))


@settings(max_examples=60, deadline=None)
@given(world_size=st.integers(2, 400), chunk=st.integers(1, 1000), pick=st.data())
def test_ring_sends_the_formula(world_size: int, chunk: int, pick: st.DataObject) -> None:
    rank, rest = pick.draw(st.integers(0, world_size - 1)), pick.draw(st.integers(0, world_size - 1))
    numel = chunk * world_size
    plan = build("all_reduce", "ring", rank, world_size, numel)
    assert sent_elements(plan) * world_size == 2 * (world_size - 1) * numel
    assert sent_elements(plan) == cost("all_reduce", "ring", world_size, numel).nbytes
    assert len(plan) == 2 * (world_size - 1) == cost("all_reduce", "ring", world_size, numel).steps
    halves = [build(op, "ring", rank, world_size, numel) for op in ("reduce_scatter", "all_gather")]
    assert plan == halves[0] + halves[1]
    # Where the elements cannot be divided evenly, each of the two halves misses by less than one element.
    uneven = sent_elements(build("all_reduce", "ring", rank, world_size, numel + rest))
    assert abs(uneven - 2 * (world_size - 1) / world_size * (numel + rest)) < 2


@pytest.mark.parametrize(("op", "name"), PAIRS)
@pytest.mark.parametrize("world_size", range(1, 18))
def test_rounds_and_bytes_are_those_of_the_model(op: str, name: str, world_size: int) -> None:
    numel, parts = 24 * world_size, 4
    plans = plans_of(op, name, world_size, numel, parts=parts)
    _, rounds = simulate(plans, data_of(world_size, numel))
    expected = cost(op, name, world_size, numel, parts)
    assert rounds == expected.steps
    most = max(sent_elements(plan) for plan in plans)
    assert most <= expected.nbytes
    if name in ("ring", "recursive_doubling") and world_size & (world_size - 1) == 0:
        assert most == expected.nbytes


@pytest.mark.parametrize("parts", [1, 2, 5, 64])
@pytest.mark.parametrize("world_size", [2, 3, 7, 33])
def test_pipelined_broadcast_takes_its_time(world_size: int, parts: int) -> None:
    """A part takes M/(S·B); simulated, all have arrived after K−2+S of them, and the model says the same."""
    nbytes, bandwidth = 64 * 1000.0, 1e6
    _, rounds = simulate(
        plans_of("broadcast", "pipelined_ring", world_size, 64, parts=parts), data_of(world_size, 64)
    )
    measured_s = rounds * nbytes / (parts * bandwidth)
    assert measured_s == pytest.approx((world_size - 2 + parts) * nbytes / (parts * bandwidth))
    modelled = cost("broadcast", "pipelined_ring", world_size, nbytes, parts)
    assert modelled.nbytes / bandwidth == pytest.approx(measured_s)
    if parts == 1:
        assert measured_s == pytest.approx((world_size - 1) * nbytes / bandwidth)


@pytest.mark.parametrize("name", ["tree", "recursive_doubling"])
@pytest.mark.parametrize("world_size", [1000, 1024, 2049])
def test_thousands_of_ranks(name: str, world_size: int) -> None:
    data = data_of(world_size, 3)
    after, rounds = simulate(plans_of("all_reduce", name, world_size, 3), data)
    check("all_reduce", data, after, 0)
    assert rounds == cost("all_reduce", name, world_size, 3).steps <= 2 * world_size.bit_length()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("all_reduce", "rinng", 0, 2, 4), "did you mean 'ring'"),
        (lambda: build("all_reduce", "nonsense", 0, 2, 4), "one of root, ring"),
        (lambda: build("reduce_all", "ring", 0, 2, 4), "unknown collective 'reduce_all'"),
        (lambda: build("all_reduce", "ring", 2, 2, 4), "rank 2 is outside the group of 2 ranks"),
        (lambda: build("broadcast", "tree", 0, 2, 4, root=7), "root 7 is outside the group of 2 ranks"),
        (lambda: build("broadcast", "pipelined_ring", 0, 2, 4, parts=0), "at least 1 part, not 0"),
        (lambda: cost("all_reduce", "hierarchical", 4, 8), "two kinds of links"),
    ],
)
def test_mistakes_are_said_in_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
