"""Fingerprints: packing is exact, and messages about mismatches name both sides."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imece.cli.launch import options as launch_options
from imece.collectives import fingerprint as fp
from imece.collectives.recording import BODY
from imece.launchers import MOST_RANKS

TORCH_DTYPES = [dtype for dtype in fp.DTYPE_CODES if dtype is not None]


@given(
    op=st.sampled_from(fp.OPS),
    reduce_op=st.sampled_from(fp.REDUCE_OPS),
    dtype=st.sampled_from(TORCH_DTYPES),
    numel=st.integers(0, fp.MAX_NUMEL),
    root=st.integers(-1, MOST_RANKS - 1),
)
def test_unpack_returns_what_was_packed(
    op: str, reduce_op: str, dtype: torch.dtype, numel: int, root: int
) -> None:
    packed = fp.pack(op, reduce_op, dtype, numel, root)
    assert 0 <= packed < 2**63
    assert fp.unpack(packed) == (op, reduce_op, str(dtype).removeprefix("torch."), root, numel)


def test_every_rank_of_the_largest_job_has_its_own_fingerprint_and_record() -> None:
    last = MOST_RANKS - 1
    assert fp.unpack(fp.pack("broadcast", "", torch.float32, 1, last)).root == last
    assert BODY.unpack(BODY.pack(0, 0, 0, 0, last, *[0] * 6, b""))[4] == last
    assert launch_options.MOST_RANKS <= MOST_RANKS


def test_each_field_alone_changes_the_fingerprint() -> None:
    calls = [
        fp.pack("all_reduce", "sum", torch.float32, 8),
        fp.pack("all_gather", "sum", torch.float32, 8),
        fp.pack("all_reduce", "max", torch.float32, 8),
        fp.pack("all_reduce", "sum", torch.int32, 8),
        fp.pack("all_reduce", "sum", torch.float32, 9),
        fp.pack("all_reduce", "sum", torch.float32, 8, 0),
        fp.pack("all_reduce", "sum", torch.float32, 8, 1),
        fp.pack("barrier", "", None, 0),
    ]
    for one, other in itertools.combinations(calls, 2):
        assert one != other


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(KeyError):
        fp.pack("all_reduse", "sum", torch.float32, 1)


def test_describe() -> None:
    assert fp.describe(fp.pack("all_reduce", "avg", torch.bfloat16, 12)) == "all_reduce(avg) of bfloat16[12]"
    assert fp.describe(fp.pack("broadcast", "", torch.int64, 8, 2)) == "broadcast from 2 of int64[8]"
    assert fp.describe(fp.pack("send", "", torch.uint8, 8, 0)) == "send to 0 of uint8[8]"
    assert fp.describe(fp.pack("barrier", "", None, 0)) == "barrier"


def test_equal_calls_have_nothing_to_explain() -> None:
    same = fp.pack("all_reduce", "sum", torch.float32, 8)
    assert fp.explain(1, dict.fromkeys(range(2), fp.Said(same, (2, 4)))) is None


def test_the_message_of_the_interface() -> None:
    message = fp.explain(
        812,
        {
            rank: fp.Said(fp.pack("all_reduce", "sum", torch.float32, numel), label=label)
            for rank, (numel, label) in enumerate(
                ((2359296, "blocks.3.mlp.up.weight ..."), (589824, "blocks.3.attention.out.weight"))
            )
        },
    )
    assert message == (
        "all_reduce number 812 differs between ranks: rank 0 sent float32[2359296] "
        "(blocks.3.mlp.up.weight ...), rank 1 float32[589824] (blocks.3.attention.out.weight). "
        "Do both ranks run the same forward?"
    )


def test_equal_ranks_are_named_together_and_other_operations_in_full() -> None:
    gather = fp.Said(fp.pack("all_gather", "", torch.float32, 4))
    other = fp.Said(fp.pack("broadcast", "", torch.float32, 4, 0))
    message = fp.explain(7, {0: gather, 1: gather, 2: gather, 3: other})
    assert message == (
        "collective number 7 differs between ranks: ranks 0-2 called all_gather of float32[4], "
        "rank 3 broadcast from 0 of float32[4]. Do all ranks run the same forward?"
    )


def test_only_the_shape_differs() -> None:
    same = fp.pack("all_reduce", "sum", torch.float32, 6)
    message = fp.explain(3, {0: fp.Said(same, (2, 3)), 1: fp.Said(same, (3, 2))})
    assert message is not None and "rank 0 sent float32[2, 3], rank 1 float32[3, 2]" in message


def test_only_the_reduce_op_or_the_root_differs() -> None:
    ops = {r: fp.Said(fp.pack("all_reduce", op, torch.float32, 6)) for r, op in enumerate(("sum", "max"))}
    roots = {r: fp.Said(fp.pack("reduce", "sum", torch.float32, 6, r)) for r in range(2)}
    assert "rank 0 called all_reduce(sum) of float32[6], rank 1 all_reduce(max) of" in str(fp.explain(3, ops))
    assert "rank 0 called reduce(sum) to 0 of float32[6], rank 1 reduce(sum) to 1 of" in str(
        fp.explain(3, roots)
    )


def test_only_a_label_differs_that_all_ranks_must_have() -> None:
    same, labels = fp.pack("all_gather", "", torch.float32, 6), {0: "unit 1", 1: "unit 2"}
    plain = {r: fp.Said(same, label=label, name=fp.name_of(label)) for r, label in labels.items()}
    assert fp.explain(3, plain) is None
    named = {r: each._replace(name=fp.name_of(fp.SameLabel(each.label))) for r, each in plain.items()}
    assert fp.explain(3, named) == (
        "all_gather number 3 differs between ranks: rank 0 sent float32[6] (unit 1), rank 1 float32[6] (unit "
        "2). Do both ranks run the same units in one order (units= says which: none that only some run, as "
        "experts)?"
    )


def test_only_the_way_differs() -> None:
    same = fp.pack("broadcast", "", torch.float32, 6, 1)
    ways = {0: "", 1: "schedule pipelined_ring, parts 3", 2: ""}
    assert fp.explain(3, dict.fromkeys(ways, fp.Said(same, way="wire bf16"))) is None
    assert fp.explain(3, {rank: fp.Said(same, way=way) for rank, way in ways.items()}) == (
        "broadcast number 3 differs between ranks: ranks 0, 2 sent float32[6] with neither schedule nor "
        "wire, rank 1 float32[6] with schedule pipelined_ring, parts 3. Do all ranks have the same "
        "IMECE_SCHEDULE, and give the same schedule, wire and parts?"
    )
    shapes = {0: (2, 3), 1: (3, 2), 2: (2, 3)}
    text = str(fp.explain(3, {rank: fp.Said(same, shapes[rank], way=way) for rank, way in ways.items()}))
    assert "3, 2] with schedule pipelined_ring, parts 3. Do all ranks run the same forward?" in text
