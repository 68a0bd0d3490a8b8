"""Bytes in any pieces, the same lines out."""

from __future__ import annotations

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from imece.launch.output import Printed, RankOutput

_TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xff"]), max_size=30).map(b"".join)


@given(_TEXT, st.lists(st.integers(0, 60), max_size=6))
def test_it_does_not_matter_where_reads_cut(text: bytes, cuts: list[int]) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    target = io.BytesIO()
    output = RankOutput(3, target, Printed())
    for start, stop in itertools.pairwise(at):
        output.feed(text[start:stop])
    output.finish()
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removesuffix(b"\n").split(b"\n")
    assert target.getvalue() == (b"".join(b"[rank 3] %s\n" % line for line in lines) if text else b"")


def test_long_lines_come_in_pieces() -> None:
    target = io.BytesIO()
    RankOutput(0, target, Printed()).feed(b"x" * 200_000)
    assert 130_000 < target.getvalue().count(b"x") < 200_000


def test_tracebacks_are_repeated_only_if_others_spoke_since() -> None:
    printed = Printed()
    one, other = (RankOutput(rank, io.BytesIO(), printed) for rank in range(2))
    one.feed(b"hello\n[rank0]: Traceback (most recent call last):\n  File\nValueError\n")
    assert one.failure_lines() == []
    other.feed(b"noise\n")
    assert one.failure_lines() == [b"Traceback (most recent call last):", b"  File", b"ValueError"]
    assert other.failure_lines() == []
