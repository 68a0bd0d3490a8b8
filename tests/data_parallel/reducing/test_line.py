"""Whose buckets leave first if one backward reaches several models."""

from __future__ import annotations

from typing import Any

import pytest

from imece.data_parallel.reducing.line import Line


class Model:
    """Of a reducer what a line knows."""

    def __init__(self, name: str, line: Line, let_go: list[str]) -> None:
        self.name, self.line, self.said = name, line, let_go

    def let_go(self) -> None:
        self.said.append(self.name)


@pytest.fixture
def models() -> list[Any]:
    line, said = Line(), list[str]()
    models = [Model(name, line, said) for name in "abc"]
    for each in [*models, *models]:  # a backward may reach one twice
        line.stand(each)
    return models


def test_the_first_leaves_and_the_next_one_goes(models: list[Any]) -> None:
    first, second, third = models
    line = first.line
    assert [line.is_first(each) for each in models] == [True, False, False]
    line.leave(first)
    assert first.said == ["b"]
    assert [line.is_first(each) for each in models] == [False, True, False]
    line.leave(second)
    line.leave(third)
    assert first.said == ["b", "c"]
    assert not any(line.is_first(each) for each in models)


def test_those_that_have_raised_are_passed_over(models: list[Any]) -> None:
    first, second, third = models
    line = first.line
    ahead = line.ahead_of(third)
    assert ahead == [first, second]
    line.pass_over(ahead)
    assert line.is_first(third)
    assert line.ahead_of(first) == [], "it is not in line any more"
