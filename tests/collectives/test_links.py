"""Links: all ranks measure the same, and the arithmetic chooses the right schedule."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from imece.collectives import auto, ops
from imece.collectives.choice import best_parts, choose, predict
from imece.collectives.link_types import Link, Links, Native
from imece.collectives.link_types import table_line as line
from imece.collectives.links import _slowest, measure, pairs_to_measure
from imece.collectives.schedules import SCHEDULES
from imece.errors import UserError
from tests.ranks import run_ranks

MIB = 1 << 20
# Two hosts of two ranks, 1 Gbit/s between them; one host of eight ranks. 1 us = 1e-6 s.
NATIVE = {op: Native(2e-3, 2 / 0.12e9) for op in SCHEDULES}
TWO_HOSTS = Links(
    "gloo", 4, ((0, 1), (2, 3)), ((0, 1, Link(50e-6, 2e9)), (0, 2, Link(200e-6, 0.12e9))),
    Link(50e-6, 2e9), Link(200e-6, 0.12e9), NATIVE, 0.1e-9,
)  # fmt: skip
ONE_HOST = Links("gloo", 8, (tuple(range(8)),), (), Link(50e-6, 2e9), None, {}, 0.1e-9)


def chosen(op: str, nbytes: int, links: Links, **more: Any) -> str:
    return choose(op, nbytes, links, **more).name


def test_predictions_are_the_formulae() -> None:
    a, b, c, n = 50e-6, 1 / 2e9, 0.1e-9, float(MIB)
    times = predict("all_reduce", MIB, ONE_HOST)
    assert times["ring"] == pytest.approx(2 * 7 * a + 2 * 7 / 8 * n * b + 7 / 8 * n * c)
    assert times["recursive_doubling"] == pytest.approx(3 * (a + n * b + n * c))
    assert times["tree"] == pytest.approx(2 * 3 * (a + n * b) + 3 * n * c)
    assert times["root"] == pytest.approx(8 * a + 14 * n * b + 7 * n * c)
    assert predict("reduce_scatter", MIB, ONE_HOST)["ring"] == pytest.approx(7 * a + 7 / 8 * n * (b + c))
    assert predict("all_gather", MIB, ONE_HOST)["ring"] == pytest.approx(7 * a + 7 / 8 * n * b)
    parts = best_parts(MIB, ONE_HOST)
    assert parts == round((6 * n * b / a) ** 0.5)
    assert predict("broadcast", MIB, ONE_HOST)["pipelined_ring"] == pytest.approx(
        (6 + parts) * (a + n * b / parts)
    )


def test_hierarchical_by_hand() -> None:
    n = 16.0 * MIB
    inside = 2 * (50e-6 + n / 2 / 2e9)  # reduce-scatter and all-gather of two ranks
    between = 2 * 200e-6 + n / 0.12e9  # two slices of n/2 share the cable: 2 * 1/2 * n
    summed = (1 / 2 + 1 / 4) * n * 0.1e-9
    assert predict("all_reduce", 16 * MIB, TWO_HOSTS)["hierarchical"] == pytest.approx(
        inside + between + summed
    )
    scattered = predict("reduce_scatter", 16 * MIB, TWO_HOSTS)["hierarchical"]
    assert scattered == pytest.approx((inside + between) / 2 + summed)
    assert predict("all_gather", 16 * MIB, TWO_HOSTS)["hierarchical"] == pytest.approx((inside + between) / 2)


def test_message_size_decides() -> None:
    assert chosen("all_reduce", 1024, ONE_HOST) == "recursive_doubling"
    assert chosen("all_reduce", 64 * MIB, ONE_HOST) == "ring"
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        assert chosen(op, 16 * MIB, TWO_HOSTS) == "hierarchical"
    assert chosen("broadcast", 1024, ONE_HOST) == "root"
    assert chosen("broadcast", 64 * MIB, ONE_HOST) == "pipelined_ring"
    assert chosen("reduce", 1024, ONE_HOST) == "tree"


def test_a_small_gain_over_native_does_not_count() -> None:
    ring_s = predict("all_reduce", 64 * MIB, ONE_HOST)["ring"]
    for share, name in ((0.99, "native"), (1.05, "native"), (1.2, "ring")):
        links = replace(ONE_HOST, native={"all_reduce": Native(share * ring_s, 0.0)})
        assert chosen("all_reduce", 64 * MIB, links) == name


def test_uneven_hosts_have_no_hierarchy() -> None:
    links = replace(TWO_HOSTS, hosts=((0, 1, 2), (3,)))
    assert "hierarchical" not in predict("all_reduce", MIB, links)


def test_one_rank() -> None:
    alone = Links("gloo", 1, ((0,),), (), None, None, {}, 0.0)
    assert chosen("all_reduce", MIB, alone) == "native"
    assert line(alone) == "link  gloo one rank"


def test_forced_by_environment() -> None:
    by_env = choose("all_reduce", 16 * MIB, TWO_HOSTS, forced="tree")
    assert by_env.name == "tree" and "forced by IMECE_SCHEDULE" in str(by_env)
    # An operation that does not know the name goes on choosing.
    assert choose("all_gather", 16 * MIB, TWO_HOSTS, forced="tree").why == "predicted"
    with pytest.raises(
        UserError, match="IMECE_SCHEDULE=hirarchical is no schedule: did you mean 'hierarchical'"
    ):
        choose("all_reduce", MIB, TWO_HOSTS, forced="hirarchical")
    with (
        mock.patch.object(auto, "FORCED", "hirarchical"),
        pytest.raises(UserError, match="IMECE_SCHEDULE=hirarchical is no schedule: did you mean"),
    ):
        auto.schedule_for("all_reduce", None, torch.ones(4), dist.ProcessGroup(0, 1))  # type: ignore[call-arg]
    with pytest.raises(UserError, match="unknown collective 'allreduce': did you mean 'all_reduce'"):
        choose("allreduce", MIB, TWO_HOSTS)


def test_choice_in_words() -> None:
    text = str(choose("all_reduce", 16 * MIB, TWO_HOSTS))
    assert text.startswith("16 MiB all_reduce: hierarchical, 150 ms predicted (ring 212, native 282, "), text
    assert str(choose("all_reduce", 1000, ONE_HOST)).startswith("1000 bytes all_reduce: recursive_doubling")


def test_words() -> None:
    assert line(ONE_HOST, TWO_HOSTS) == (
        "link  gloo 2.0 GB/s, 50 us    gloo 2.0 GB/s, 50 us in the host; 0.12 GB/s, 200 us between hosts"
    )


def test_pairs() -> None:
    assert len(pairs_to_measure([range(8)])) == 28
    sample = pairs_to_measure([range(8), range(8, 16), range(16, 24)])
    assert sample == [(0, 1), (0, 8), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (8, 16)]


def measured() -> tuple[dict[str, Any], str, str]:
    links = measure(hosts=[[0, 1], [2]])
    return asdict(links), line(links), str(choose("all_reduce", 16 * MIB, links))


def test_measured_alike_on_all_ranks() -> None:
    by_rank = run_ranks(measured, 3, backend="gloo")
    assert by_rank[0] == by_rank[1] == by_rank[2]
    links, words, choice = by_rank[0]
    print("\n" + words + "\n" + choice)
    assert [(a, b) for a, b, _ in links["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    assert links["inside"] == links["pairs"][0][2] and links["between"] is not None
    for _, _, link in links["pairs"]:
        assert 1e-6 < link["latency_s"] < 0.5 and 1e6 < link["bytes_per_s"] < 1e12
    assert set(links["native"]) == set(SCHEDULES)


def measure_behind_others() -> list[float]:
    group = dist.new_group(timeout=timedelta(seconds=5))
    works = [ops.all_reduce(torch.ones(300_000), group=group, async_op=True) for _ in range(6)]
    chosen = ops.all_reduce(torch.ones(4), group=group, schedule="auto")
    return [float(sums.mean()) for sums in [*(work.wait() for work in works), chosen]]


def test_links_are_measured_behind_what_was_called_before() -> None:
    """A thread may still have to begin it, and torch's calls on one group must not mix."""
    assert run_ranks(measure_behind_others, 2, backend="gloo") == [[2.0] * 7] * 2


def test_the_pipelined_ring_has_the_parts_of_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the links say where they were measured, and as many as the caller says."""
    group = dist.ProcessGroup(3, 8)  # type: ignore[call-arg]
    cut: list[int] = []
    monkeypatch.setattr(ops, "Call", lambda *_, **__: SimpleNamespace(scheduled=lambda run, *_: run()))
    monkeypatch.setattr(ops, "run_schedule", lambda steps, *_: cut.append(len(steps) - 1))
    monkeypatch.setattr(auto, "_links", {})
    tensor = torch.zeros(16 * MIB // 4)
    ops.broadcast(tensor, group=group, schedule="pipelined_ring")
    auto._links[group] = {"cpu": ONE_HOST}
    ops.broadcast(tensor, group=group, schedule="auto")
    ops.broadcast(tensor, group=group, schedule="auto", parts=3)
    assert cut == [8, best_parts(16 * MIB, ONE_HOST), 3] and cut[1] > 8


def slowest_of(seconds: list[float]) -> float:
    world = dist.group.WORLD
    assert world is not None
    return _slowest(seconds[dist.get_rank()], world, "cpu")


def test_the_slowest_rank_counts_on_all() -> None:
    seconds = [1e-6, 1 / 3, 0.25]  # a third: to the last bit of a float64
    assert run_ranks(slowest_of, 3, args=(seconds,), backend="gloo") == [1 / 3] * 3
