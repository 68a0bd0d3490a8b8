"""Texts that ranks exchange arrive, at any length."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from imece.collectives import ops, texts
from imece.collectives.texts import gather_json, gather_texts


class Alone:
    """The group of a single rank, which needs no other to gather."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("letter", ["x", "\N{SNOW CAPPED MOUNTAIN}"])
def test_of_what_is_too_long_the_beginning_arrives(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "all_gather", lambda out, mine, **_: out.copy_(mine))

    def said(*texts: str) -> list[str]:
        group = cast(dist.ProcessGroup, Alone())
        return gather_texts(list(texts), group, torch.device("cpu"))[0]

    assert said() == []
    assert said("a", letter * 1000) == ["a", letter * 1000]
    long = letter * 2**21
    cut = letter * 2**16 + " ... (2097152 characters)"
    assert said(long) == said(long, "b") == [cut]
    assert said("a", long) == ["a"]


class Pair:
    """The group of two ranks, of which the second one says `other`."""

    def __init__(self, other: Any) -> None:
        self._data, self._begin = json.dumps(other).encode(), 0
        self.calls: list[int] = []  # bytes that each rank sent

    def size(self) -> int:
        return 2

    def all_gather(self, out: torch.Tensor, mine: torch.Tensor, **_: Any) -> None:
        if mine.dtype is torch.int64:
            out.copy_(torch.tensor([int(mine), len(self._data)]))
            return
        self.calls.append(len(mine))
        part = self._data[self._begin : self._begin + len(mine)].ljust(len(mine), b"\0")
        self._begin += len(mine)
        out.copy_(torch.cat([mine, torch.frombuffer(bytearray(part), dtype=torch.uint8)]))


@pytest.mark.parametrize(("mine", "other"), [(40, 1000), (1000, 40), (90, 90), (0, 0)])
def test_what_a_program_reads_arrives_whole(mine: int, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_MOST_BYTES", 100)
    pair = Pair("o" * other)
    monkeypatch.setattr(ops, "all_gather", pair.all_gather)
    said = gather_json("m" * mine, cast(dist.ProcessGroup, pair), torch.device("cpu"))
    assert said == ["m" * mine, "o" * other]
    longest = max(mine, other) + 2
    assert sum(pair.calls) == longest and max(pair.calls) <= 100, "in parts"
