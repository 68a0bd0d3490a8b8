"""Who is silent, from what is seen at each look."""

from __future__ import annotations

from imece.launch.silence import Silence


def test_one_that_beats_no_more() -> None:
    silence = Silence(10.0)
    found = [silence.look({0: now, 1: min(now, 5)}, float(now)) for now in range(20)]
    assert found.index([1]) == 15 and all(each in ([], [1]) for each in found)


def test_nobody_is_silent_because_nobody_looked() -> None:
    """The launcher was stopped for an hour, or looks late again and again."""
    silence = Silence(10.0)
    for now in (0.0, 1.0, 2.0, 3600.0, 3601.0, 3602.0, 3603.0):
        assert silence.look({0: 1}, now) == []
    silence = Silence(10.0)
    assert [silence.look({0: 1}, 1000.0 * count) for count in range(4)] == [[]] * 4


def test_it_begins_with_the_first_beat_and_may_be_switched_off() -> None:
    silence = Silence(2.0)
    assert all(silence.look({}, float(now)) == [] for now in range(100))
    never = Silence(0.0)
    assert all(never.look({0: 1}, float(now)) == [] for now in range(100))


def test_forgiven() -> None:
    silence = Silence(4.0)
    assert [bool(silence.look({0: 1}, now / 2)) for now in range(10)] == [False] * 8 + [True] * 2
    silence.forgive()
    assert [bool(silence.look({0: 1}, 5 + now / 2)) for now in range(10)] == [False] * 8 + [True] * 2
