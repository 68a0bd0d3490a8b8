"""Rounds of benchmarks: they alternate, and leave out those in which others had the processor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from imece.bench import rounds
from imece.bench.rounds import Taken, alternate


def with_shares(monkeypatch: pytest.MonkeyPatch, shares: Sequence[float]) -> None:
    """A machine of which others have `shares` in one round after another, each of 10 s."""
    clock = [(sum(shares[:at]) * 10.0, at * 10.0) for at in range(len(shares) + 1)]
    moments = iter([moment for at in range(len(shares)) for moment in (clock[at], clock[at + 1])])
    monkeypatch.setattr(rounds, "_processor_s", lambda: next(moments))


class Log:
    """Measures nothing: answers with the number of the call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, way: str) -> int:
        self.calls.append(way)
        return len(self.calls)


def test_each_round_begins_with_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shares(monkeypatch, [0.0] * 4)
    log = Log()
    found, taken = alternate(["a", "b", "c"], 4, log)
    assert "".join(log.calls) == "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}
    assert taken == Taken((0.0,) * 4) and taken.lines == []


def test_a_round_that_others_disturbed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shares(monkeypatch, [0.01, 0.3, 0.0, 0.05, 0.015])
    found, taken = alternate(["a"], 3, Log())
    assert found == {"a": [1, 3, 5]}
    assert taken.kept == pytest.approx((0.01, 0.0, 0.015)) and taken.dropped == pytest.approx((0.3, 0.05))
    assert taken.lines == [
        "  others had 0 to 2 % of this virtual machine's processor in these rounds; "
        "2 more, with 5 to 30 %, do not count"
    ]


def test_the_least_disturbed_do_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with_shares(monkeypatch, [0.4, 0.1, 0.3, 0.2, 0.5, 0.6])
    found, taken = alternate(["a"], 2, Log())
    assert found == {"a": [2, 4]}, "in the order in which they were made"
    assert len(taken.dropped) == 4
    assert "had 10 to 20 % of" in taken.lines[0] and "4 more, with 30 to 60 %" in taken.lines[0]


def test_of_this_machine() -> None:
    taken, whole = rounds._processor_s()
    assert 0.0 <= taken < whole
    found, share = alternate(["a"], 1, lambda _: sum(range(3_000_000)))
    assert len(found["a"]) == 1 and all(0.0 <= each <= 1.0 for each in (*share.kept, *share.dropped))
