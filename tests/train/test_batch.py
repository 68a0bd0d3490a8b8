"""The arithmetic of a global batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.errors import UserError
from imece.train.batch import BatchPlan, plan_batch, shared_among
from imece.train.config import BatchSection


@given(
    ranks=st.integers(1, 40), sequences=st.integers(1, 300), micro=st.integers(0, 9), seq=st.integers(1, 99)
)
def test_every_sequence_is_computed_once(ranks: int, sequences: int, micro: int, seq: int) -> None:
    section = BatchSection(sequences=sequences, micro=micro)
    if sequences % (ranks * max(1, micro)):
        with pytest.raises(UserError):
            plan_batch(section, seq, ranks)
        return
    plan = plan_batch(section, seq, ranks)
    assert plan.micro * plan.accumulation * ranks == plan.sequences == sequences
    assert (plan.seq, plan.ranks, plan.tokens) == (seq, ranks, sequences * seq)
    assert plan.micro == micro if micro else plan.micro <= 8
    by_tokens = BatchSection(sequences=7, tokens=sequences * seq, micro=micro)
    assert plan_batch(by_tokens, seq, ranks) == plan


@given(
    now=st.integers(1, 9), ranks=st.integers(1, 9), micro=st.integers(1, 9), accumulation=st.integers(1, 9)
)
def test_another_number_of_ranks_has_the_same_batch(
    now: int, ranks: int, micro: int, accumulation: int
) -> None:
    plan = BatchPlan(4, ranks * micro * accumulation, ranks, micro, accumulation)
    other = shared_among(plan, now)
    assert (other.sequences, other.ranks) == (plan.sequences, now) and other.micro <= plan.micro
    most = -(-plan.sequences // now)  # sequences of the rank that has most of them
    assert other.micro * (other.accumulation - 1) < most <= other.micro * other.accumulation


@pytest.mark.parametrize(
    ("share", "micro"), [(1, 1), (2, 2), (8, 8), (9, 3), (11, 1), (12, 6), (16, 8), (22, 2), (64, 8)]
)
def test_the_most_at_once_that_divide_a_ranks_share(share: int, micro: int) -> None:
    for ranks in (1, 2, 3):
        assert plan_batch(BatchSection(sequences=ranks * share), 4, ranks).micro == micro


def test_in_words() -> None:
    words = plan_batch(BatchSection(sequences=64), 256, 2).describe()
    assert words == ("64 sequences x 256 = micro-batch 8 x 4 accumulated x 2 ranks, 16,384 tokens a step")
    assert "x 1 rank," in plan_batch(BatchSection(sequences=4), 8, 1).describe()
    assert " over 1 rank, " in BatchPlan(seq=8, sequences=7, ranks=1, micro=4, accumulation=2).describe()


@pytest.mark.parametrize(
    ("section", "ranks", "said"),
    [
        (
            {"sequences": 30},
            4,
            "sequences 30 cannot be divided by 4 ranks; the nearest are 28 and 32, or 3 or 5 ranks",
        ),
        (
            {"sequences": 8},
            7,
            "sequences 8 cannot be divided by 7 ranks; the nearest are 7 and 14, or 4 or 8 ranks",
        ),
        (
            {"sequences": 8, "micro": 2},
            3,
            "sequences 8 cannot be divided by 3 ranks x micro-batch 2; the nearest are 6 and 12, or 2 or 4 "
            "ranks",
        ),
        (
            {"sequences": 7, "tokens": 144},
            2,
            "tokens 144, which is 9 sequences, cannot be divided by 2 ranks; the nearest are 128 and 160, or "
            "1 or 3 ranks",
        ),
        (
            {"sequences": 30, "micro": 4},
            4,
            "sequences 30 cannot be divided by 4 ranks x micro-batch 4; the nearest are 16 and 32",
        ),
        (
            {"sequences": 5, "micro": 2},
            1,
            "sequences 5 cannot be divided by 1 rank x micro-batch 2; the nearest are 4 and 6",
        ),
        (
            {"sequences": 6, "micro": 4},
            2,
            "micro 4 is more than the 3 sequences of a rank in a step: at most 3",
        ),
        (
            {"sequences": 3, "micro": 2},
            2,
            "micro 2 is more than the 1 sequence of a rank in a step: at most 1",
        ),
        (
            {"tokens": 100},
            2,
            "tokens 100 is not a multiple of sequences of 16 tokens; the nearest are 96 and 112",
        ),
        ({"tokens": 9}, 2, "tokens 9 is not a multiple of sequences of 16 tokens; the nearest are 16 and 32"),
    ],
)
def test_what_cannot_be_divided(section: dict[str, int], ranks: int, said: str) -> None:
    with pytest.raises(UserError) as mistake:
        plan_batch(BatchSection(**section), 16, ranks)
    assert str(mistake.value) == f"--batch.{said}"


def test_more_ranks_than_sequences() -> None:
    with pytest.raises(UserError) as mistake:
        plan_batch(BatchSection(sequences=3), 16, 4)
    assert str(mistake.value) == (
        "--ranks 4 are more than the 3 sequences of a step: at most 3 ranks, or at least --batch.sequences 4"
    )
    with pytest.raises(UserError, match=r"at most 3 ranks, or at least --batch.tokens 64$"):
        plan_batch(BatchSection(tokens=48), 16, 4)
