"""What a rank computes from the ranks' pieces: order, rounding, and where the running result may lie."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.collectives.shared_memory.arithmetic import reduction

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16)


def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), 7, dtype=dtype)


def pieces_of(count: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype) for _ in range(count)]
    low = 0 if dtype == torch.uint8 else -9
    return [torch.randint(low, 9, (numel,), generator=generator).to(dtype) for _ in range(count)]


def in_order(op: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The definition, one element at a time in Python for integers, in torch's fp32 or fp64 for floats."""
    dtype = pieces[0].dtype
    if not dtype.is_floating_point:
        results = []
        for values in zip(*(each.tolist() for each in pieces), strict=True):
            if op in ("sum", "avg"):
                total = sum(values)
                results.append(int(total / len(values)) if op == "avg" else total)
            elif op == "product":
                results.append(math.prod(values))
            else:
                results.append(min(values) if op == "min" else max(values))
        return torch.tensor(results, dtype=torch.int64).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    binary = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    result = pieces[0].to(wide)
    for piece in pieces[1:]:
        result = binary(result, piece.to(wide))
    return (result / len(pieces) if op == "avg" else result).to(dtype)


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(FLOATS + INTEGERS),
    op=st.sampled_from(["sum", "avg", "product", "min", "max"]),
    count=st.integers(1, 7),
    numel=st.integers(0, 40),
    out_is=st.sampled_from([None, 0, 1, 2, 6]),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition(
    dtype: torch.dtype, op: str, count: int, numel: int, out_is: int | None, seed: int
) -> None:
    """Bit for bit, with the output apart or on top of one of the pieces."""
    pieces = pieces_of(count, numel, dtype, seed)
    wanted = in_order(op, pieces)
    how = reduction(op, dtype)
    alias = out_is if out_is is not None and out_is < count else None
    out = torch.empty(numel, dtype=dtype) if alias is None else pieces[alias]
    before = [piece.clone() for piece in pieces]
    how(pieces, out, scratch, in_place=alias is None or alias < 2)
    assert torch.equal(out, wanted)
    for at, (piece, old) in enumerate(zip(pieces, before, strict=True)):
        assert at == alias or torch.equal(piece, old), "a piece of another rank was written to"


def test_the_rule_about_in_place_matters() -> None:
    """A running result on top of a later addend would add the wrong thing: the flag is no decoration."""
    pieces = pieces_of(4, 10, torch.float32, 0)
    wanted = in_order("sum", pieces)
    how = reduction("sum", torch.float32)
    how(pieces, pieces[3], scratch, in_place=True)
    assert not torch.equal(pieces[3], wanted)


def test_half_precision_is_summed_in_fp32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        pieces = [torch.full((5,), value, dtype=dtype) for value in (1024.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
        out, naive = torch.empty(5, dtype=dtype), pieces[0]
        for piece in pieces[1:]:
            naive = naive + piece
        how = reduction("sum", dtype)
        how(pieces, out, scratch, in_place=True)
        assert torch.equal(out, torch.full((5,), 1030.0).to(dtype))
        assert dtype == torch.float16 or not torch.equal(out, naive), "these numbers would not show it"


def test_average_of_integers_is_exact_and_truncates() -> None:
    how = reduction("avg", torch.int32)
    pieces = [torch.tensor([2**31 - 1, -7, 7, -1], dtype=torch.int32)] * 2
    pieces.append(torch.tensor([2**31 - 1, 3, -3, 0], dtype=torch.int32))
    out = torch.empty(4, dtype=torch.int32)
    how(pieces, out, scratch, in_place=True)
    assert out.tolist() == [2**31 - 1, -3, 3, 0]


def test_nan_reaches_the_result() -> None:
    for dtype, op in itertools.product(FLOATS, ("sum", "avg", "product", "min", "max")):
        pieces = pieces_of(3, 4, dtype, 1)
        pieces[1][2] = float("nan")
        how = reduction(op, dtype)
        out = torch.empty(4, dtype=dtype)
        how(pieces, out, scratch, in_place=True)
        assert out.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("median", torch.float32, "cannot reduce with 'median'"),
        ("band", torch.float32, "works on integers"),
        ("max", torch.complex64, "have no order"),
        ("sum", torch.uint16, "cannot reduce torch.uint16 with 'sum'"),
        ("max", torch.float8_e4m3fn, "cannot reduce torch.float8_e4m3fn with 'max'"),
    ],
)
def test_what_does_not_exist_is_refused(op: str, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reduction(op, dtype)
