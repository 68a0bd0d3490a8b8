"""Layout: every element of every tensor lies in exactly one place, whatever the tensors, caps and shards."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from imece import layout
from imece.layout import Bucket, Item, Layout, Part, Place, build

ITEMSIZE = {"int8": 1, "bfloat16": 2, "float32": 4}
EXAMPLES = settings(max_examples=120)


def item(name: str, *shape: int, dtype: str = "float32", device: str = "cpu", group: int = 0) -> Item:
    return Item(name, shape, dtype, ITEMSIZE[dtype], device, group)


def contents(built: Layout) -> list[list[int]]:
    return [[place.item for place in bucket.places] for bucket in built.buckets]


def kind(thing: Item | Bucket) -> tuple[str, int, str, int]:
    return thing.dtype, thing.itemsize, thing.device, thing.group


# ---------------------------------------------------------------- any items, any caps


@dataclass(frozen=True)
class Case:
    """The arguments of one call of build, and what it returned."""

    items: tuple[Item, ...]
    cap_bytes: int | list[int]
    shards: int
    align_bytes: int
    order: list[int] | None
    built: Layout

    @property
    def positions(self) -> dict[int, int]:
        """item -> when it comes in the order."""
        order = range(len(self.items))[::-1] if self.order is None else self.order
        return {index: position for position, index in enumerate(order)}

    def cap(self, k: int) -> int:
        """The cap of bucket k of its kind."""
        return self.cap_bytes if isinstance(self.cap_bytes, int) else self.cap_bytes[: k + 1][-1]


def arguments(case: Case) -> dict[str, Any]:
    return {field.name: getattr(case, field.name) for field in fields(case) if field.name != "built"}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = st.tuples(st.sampled_from(sorted(ITEMSIZE)), st.sampled_from(["cpu", "meta"]), st.integers(0, 1))
    few = st.sampled_from(draw(st.lists(kinds, min_size=1, max_size=3)))  # so that one fills several buckets
    shapes = st.lists(st.integers(0, 5), max_size=3)
    count = draw(st.integers(0, 14))  # st.lists alone would draw mostly very short ones
    drawn = draw(st.lists(st.tuples(few, shapes), min_size=count, max_size=count))
    items = tuple(
        item(f"p{i}", *shape, dtype=dtype, device=device, group=group)
        for i, ((dtype, device, group), shape) in enumerate(drawn)
    )
    caps = st.integers(1, 200)
    given: dict[str, Any] = {
        "cap_bytes": draw(caps | st.lists(caps, min_size=1, max_size=3)),
        "shards": draw(st.integers(1, 5)),
        "align_bytes": draw(st.sampled_from([8, 16, 24, 64])),
        "order": draw(st.none() | st.permutations(range(len(items)))),
    }
    return Case(items, built=build(items, **given), **given)


@given(cases())
@EXAMPLES
def test_every_item_has_exactly_one_place(case: Case) -> None:
    assert case.built.items == case.items
    assert sorted(chain.from_iterable(contents(case.built))) == list(range(len(case.items)))
    for bucket in case.built.buckets:
        assert bucket.places
        end = 0
        for place in bucket.places:
            assert place.start == end  # no overlap, no gap
            assert place.stop - place.start == case.items[place.item].numel
            assert kind(case.items[place.item]) == kind(bucket)
            end = place.stop
        assert bucket.used_numel == end


@given(cases(), st.sampled_from([16, 32]))
@EXAMPLES
def test_items_begin_aligned(case: Case, align_bytes: int) -> None:
    built = build(**arguments(case), item_align_bytes=align_bytes)
    assert sorted(chain.from_iterable(contents(built))) == list(range(len(case.items)))
    for bucket in built.buckets:
        step, end = align_bytes // bucket.itemsize, 0
        for place in bucket.places:
            assert place.start == -(-end // step) * step  # no overlap, no more of a gap than must be
            end = place.stop
            assert end - place.start == case.items[place.item].numel
        assert end <= bucket.numel


@given(cases())
@EXAMPLES
def test_shards_are_equal_aligned_and_cover_the_bucket(case: Case) -> None:
    for bucket in case.built.buckets:
        assert bucket.shards == case.shards
        shards = [bucket.shard(rank) for rank in range(case.shards)]
        edges = [0, *(stop for _, stop in shards)]
        assert shards == list(pairwise(edges))
        assert edges[-1] == bucket.numel >= bucket.used_numel
        assert {stop - start for start, stop in shards} == {bucket.shard_numel}
        assert all(start * bucket.itemsize % case.align_bytes == 0 for start, _ in shards)
        padding_bytes = bucket.nbytes - bucket.used_numel * bucket.itemsize
        assert 0 <= padding_bytes < case.shards * case.align_bytes


@given(cases())
@EXAMPLES
def test_the_parts_of_all_shards_are_each_item(case: Case) -> None:
    for bucket in case.built.buckets:
        seen: list[tuple[int, int]] = []  # (item, its element), as the bucket lies
        for rank in range(case.shards):
            start, stop = bucket.shard(rank)
            for part in bucket.parts(start, stop):
                assert start <= part.bucket_start == len(seen)
                assert part.item_start < part.item_stop
                seen += [(part.item, element) for element in range(part.item_start, part.item_stop)]
                assert len(seen) <= stop
        held = [place.item for place in bucket.places]
        assert seen == [(index, element) for index in held for element in range(case.items[index].numel)]


@given(cases(), st.data())
@EXAMPLES
def test_parts_of_any_range(case: Case, data: st.DataObject) -> None:
    for bucket in case.built.buckets:
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, bucket.numel)] * 2)))
        expected = {
            at: (place.item, at - place.start)
            for place in bucket.places
            for at in range(place.start, place.stop)
            if start <= at < stop
        }
        parts = bucket.parts(start, stop)
        assert expected == {
            part.bucket_start + i: (part.item, part.item_start + i)
            for part in parts
            for i in range(part.item_stop - part.item_start)
        }
        assert len({part.item for part in parts}) == len(parts)


@given(cases())
@EXAMPLES
def test_a_bucket_is_closed_as_soon_as_it_reaches_its_cap(case: Case) -> None:
    positions = case.positions
    for this in {kind(i) for i in case.items}:
        alike = [bucket for bucket in case.built.buckets if kind(bucket) == this]
        in_order = sorted((i for i in positions if kind(case.items[i]) == this), key=positions.__getitem__)
        assert [place.item for bucket in alike for place in bucket.places] == in_order
        for k, bucket in enumerate(alike):
            used_bytes = bucket.used_numel * bucket.itemsize
            assert used_bytes - case.items[bucket.places[-1].item].nbytes < case.cap(k)
            assert used_bytes >= case.cap(k) or bucket is alike[-1]


@given(cases())
@EXAMPLES
def test_buckets_are_numbered_by_when_they_are_complete(case: Case) -> None:
    assert [bucket.index for bucket in case.built.buckets] == list(range(len(case.built.buckets)))
    complete = [max(case.positions[i] for i in held) for held in contents(case.built)]
    assert complete == sorted(complete)


@given(cases(), st.randoms(use_true_random=False))
@EXAMPLES
def test_the_same_arguments_give_the_same_layout_and_another_order_the_same_items(
    case: Case, random: Any
) -> None:
    again = build(list(case.items), **{k: v for k, v in arguments(case).items() if k != "items"})
    assert again == case.built

    order = random.sample(range(len(case.items)), len(case.items))
    rebuilt = build(**(arguments(case) | {"order": order}))
    assert rebuilt.items == case.items
    assert sorted(chain.from_iterable(contents(rebuilt))) == list(range(len(case.items)))


@given(cases())
@EXAMPLES
def test_buckets_hold_what_torch_would_put_there(case: Case) -> None:
    items = [replace(i, group=0) for i in case.items if i.numel]
    caps = [case.cap(k) for k in range(4)]
    tensors = [torch.empty(i.shape, dtype=getattr(torch, i.dtype), device=i.device) for i in items]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, caps) if tensors else ([], [])
    ours = contents(build(items, cap_bytes=caps, order=range(len(items))))
    assert sorted(ours) == sorted(theirs)


# ---------------------------------------------------------------- figures worked out by hand

GPT = [
    item("wte.weight", 1000, 64),  # 256000 bytes
    item("wpe.weight", 128, 64),  # 32768
    item("h.0.ln.weight", 64),  # 256
    item("h.0.qkv.weight", 192, 64),  # 49152
    item("h.0.proj.weight", 64, 64),  # 16384
    item("h.0.up.weight", 256, 64),  # 65536
    item("h.0.down.weight", 64, 256),  # 65536
    item("ln.weight", 64),  # 256
    item("scale"),  # 4
]


def test_a_small_gpt_on_four_ranks() -> None:
    built = build(GPT, cap_bytes=[20_000, 100_000], shards=4)
    assert contents(built) == [[8, 7, 6], [5, 4, 3], [2, 1, 0]]
    first, second, third = built.buckets
    assert first.places == (Place(8, 0, 1), Place(7, 1, 65), Place(6, 65, 16449))
    assert (first.used_numel, first.numel, first.nbytes) == (16449, 16512, 66048)  # 258 times 4 x 16 elements
    assert [first.shard(rank) for rank in range(4)] == [
        (0, 4128),
        (4128, 8256),
        (8256, 12384),
        (12384, 16512),
    ]
    assert first.parts(*first.shard(0)) == [Part(8, 0, 1, 0), Part(7, 0, 64, 1), Part(6, 0, 4063, 65)]
    assert first.parts(*first.shard(3)) == [Part(6, 12319, 16384, 12384)]
    assert first.parts(16449, 16512) == []
    assert (second.used_numel, second.numel, second.shard_numel) == (32768, 32768, 8192)
    assert (third.used_numel, third.numel, third.shard_numel) == (72256, 72256, 18064)
    assert third.places[-1] == Place(0, 8256, 72256) and first.places[-1] == Place(6, 65, 16449)


def test_each_cap_of_a_list_and_the_last_again() -> None:
    halves = [item(f"p{i}", 8) for i in range(8)]  # 32 bytes each
    assert contents(build(halves, cap_bytes=[1, 64], order=range(8))) == [[0], [1, 2], [3, 4], [5, 6], [7]]


def test_each_kind_has_its_own_first_bucket() -> None:
    mixed = [item(f"p{i}", 8, group=i % 2) for i in range(8)]
    built = build(mixed, cap_bytes=[1, 64], order=range(8))
    assert contents(built) == [[0], [1], [2, 4], [3, 5], [6], [7]]
    assert [bucket.group for bucket in built.buckets] == [0, 1, 0, 1, 0, 1]


def test_a_bucket_that_is_complete_late_is_numbered_late() -> None:
    mixed = [item("a", 8), item("b", 8, dtype="bfloat16"), item("c", 8, dtype="bfloat16"), item("d", 8)]
    assert contents(build(mixed, cap_bytes=1 << 20, order=range(4))) == [[1, 2], [0, 3]]


def test_an_item_above_the_cap_is_alone_only_if_it_comes_first() -> None:
    items = [item("small", 1), item("large", 100), item("last", 1)]
    assert contents(build(items, cap_bytes=8, order=[1, 0, 2])) == [[1], [0, 2]]
    assert contents(build(items, cap_bytes=8, order=[0, 1, 2])) == [[0, 1], [2]]


def test_items_without_elements() -> None:
    items = [item("a", 0, 3), item("b", 2), item("c", 0)]
    built = build(items, cap_bytes=8, order=range(3))
    assert contents(built) == [[0, 1], [2]]
    assert built.buckets[0].places[0] == Place(0, 0, 0)
    assert built.buckets[0].parts(0, 16) == [Part(1, 0, 2, 0)]
    empty = built.buckets[1]
    assert (empty.numel, empty.nbytes, empty.shard(0), empty.parts(0, 0)) == (0, 0, (0, 0), [])


def test_no_items_no_buckets() -> None:
    assert build([], cap_bytes=1) == Layout((), ())


# ---------------------------------------------------------------- items that are not cut


@dataclass(frozen=True)
class Dealt:
    """A layout in which the items of some groups are whole, and the one in which all are cut."""

    case: Case
    whole: list[int]
    built: Layout

    @property
    def buckets(self) -> list[Bucket]:
        """Those of whole items."""
        return [bucket for bucket in self.built.buckets if bucket.group in self.whole]


@st.composite
def dealt(draw: st.DrawFn) -> Dealt:
    case = draw(cases())
    whole = draw(st.sampled_from([[0], [1], [0, 1]]))
    return Dealt(case, whole, build(**arguments(case), whole=whole))


def work(item: Item) -> int:
    """Of a product of the matrices with themselves."""
    if len(item.shape) < 2:
        return item.numel
    return item.numel * min(item.shape[-2:])


def owners(bucket: Bucket) -> dict[int, list[int]]:
    """item -> the ranks in whose shards some of it lies."""
    found: dict[int, list[int]] = {}
    for rank in range(bucket.shards):
        for part in bucket.parts(*bucket.shard(rank)):
            found.setdefault(part.item, []).append(rank)
    return found


@given(dealt())
@EXAMPLES
def test_a_whole_item_lies_in_one_shard(dealt: Dealt) -> None:
    items = dealt.case.items
    assert sorted(chain.from_iterable(contents(dealt.built))) == list(range(len(items)))
    for bucket in dealt.buckets:
        assert all(len(ranks) == 1 for ranks in owners(bucket).values())
        parts = [part for rank in range(bucket.shards) for part in bucket.parts(*bucket.shard(rank))]
        assert sorted((part.item, part.item_start, part.item_stop) for part in parts) == sorted(
            (place.item, 0, items[place.item].numel) for place in bucket.places if items[place.item].numel
        )
        for place, following in pairwise(bucket.places):
            assert place.stop <= following.start
        for place in bucket.places:
            assert place.stop - place.start == items[place.item].numel
            assert kind(items[place.item]) == kind(bucket)


@given(dealt())
@EXAMPLES
def test_shards_of_whole_items_are_as_long_as_the_fullest(dealt: Dealt) -> None:
    for bucket in dealt.buckets:
        assert bucket.numel == bucket.shards * bucket.shard_numel
        step = dealt.case.align_bytes // bucket.itemsize
        filled = [0] * bucket.shards
        for rank in range(bucket.shards):
            start, stop = bucket.shard(rank)
            end = start
            for part in bucket.parts(start, stop):
                assert part.bucket_start == end  # no gap but after the last one
                end += part.item_stop - part.item_start
            filled[rank] = end - start
        assert bucket.shard_numel == -(-max(filled) // step) * step


@given(dealt())
@EXAMPLES
def test_work_is_balanced_over_all_buckets(dealt: Dealt) -> None:
    """No rank has more than another by more than the largest item."""
    items = dealt.case.items
    total = [0] * dealt.case.shards
    largest = 0
    for bucket in dealt.buckets:
        for index, (rank,) in owners(bucket).items():
            total[rank] += work(items[index])
            largest = max(largest, work(items[index]))
        assert max(total) - min(total) <= largest


@given(dealt())
@EXAMPLES
def test_the_caps_of_whole_items_count_once_a_shard(dealt: Dealt) -> None:
    case, items = dealt.case, dealt.case.items
    for this in {kind(bucket) for bucket in dealt.buckets}:
        alike = [bucket for bucket in dealt.buckets if kind(bucket) == this]
        in_order = sorted(
            (i for i in case.positions if kind(items[i]) == this), key=case.positions.__getitem__
        )
        taken = iter(in_order)
        for k, bucket in enumerate(alike):
            held = [next(taken) for _ in bucket.places]
            assert sorted(held) == sorted(place.item for place in bucket.places)
            sizes = [items[index].nbytes for index in held]
            assert sum(sizes[:-1]) < case.cap(k) * case.shards
            assert sum(sizes) >= case.cap(k) * case.shards or bucket is alike[-1]


@given(dealt())
@EXAMPLES
def test_whole_items_change_nothing_for_other_groups(dealt: Dealt) -> None:
    def others(built: Layout) -> list[tuple[tuple[Place, ...], int]]:
        return [(each.places, each.numel) for each in built.buckets if each.group not in dealt.whole]

    assert others(dealt.built) == others(dealt.case.built)
    again = build(**arguments(dealt.case), whole=set(dealt.whole))
    assert again == dealt.built


def test_matrices_on_two_ranks() -> None:
    items = [
        item("small", 4, 4),
        item("bias", 4),
        item("large", 16, 8),
        item("wide", 2, 32),
        item("last", 8, 8),
    ]
    built = build(items, cap_bytes=1 << 20, shards=2, whole=[0], order=range(5))
    # Work: 1024 large, 512 last, 128 wide, 64 small, 4 bias.
    (bucket,) = built.buckets
    assert owners(bucket) == {2: [0], 4: [1], 3: [1], 0: [1], 1: [1]}
    assert bucket.shard_numel == 160  # 64 + 64 + 16 + 4 elements, in steps of 16
    assert bucket.places == (
        Place(2, 0, 128), Place(4, 160, 224), Place(3, 224, 288), Place(0, 288, 304), Place(1, 304, 308),
    )  # fmt: skip
    assert (bucket.used_numel, bucket.numel) == (308, 320)


def test_work_of_one_bucket_counts_in_the_next() -> None:
    items = [item(f"p{i}", 8, 8) for i in range(3)] + [item("bias", 8)]
    built = build(items, cap_bytes=1, shards=3, whole=[0], order=range(4))
    assert [list(owners(bucket).values()) for bucket in built.buckets] == [[[0]], [[1]], [[2]], [[0]]]


def test_more_ranks_than_items() -> None:
    (bucket,) = build([item("a", 3, 3)], cap_bytes=1, shards=4, whole=[0]).buckets
    assert [bucket.parts(*bucket.shard(rank)) for rank in range(4)] == [[Part(0, 0, 9, 0)], [], [], []]
    assert (bucket.shard_numel, bucket.used_numel, bucket.nbytes) == (16, 9, 256)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("items", "changes", "message"),
    [
        ([item("a", 1), item("b"), item("a", 2)], {}, "items 0 and 2 have the same name, 'a'"),
        ([item("a", 3, -1)], {}, "'a' has shape [3, -1]; no dim may be negative"),
        ([Item("a", (1,), "x", 0)], {}, "'a' has itemsize 0; it must be at least 1 byte"),
        (
            [Item("a", (1,), "x", 2), Item("b", (1,), "x", 4)],
            {},
            "x has itemsize 2 in 'a' and 4 in 'b'; a dtype has one",
        ),
        ([item("a")], {"cap_bytes": 0}, "cap_bytes is 0; a bucket's cap must be at least 1 byte"),
        ([item("a")], {"cap_bytes": [5, -2]}, "cap_bytes is [5, -2]; a bucket's cap must be at least 1 byte"),
        ([item("a")], {"cap_bytes": []}, "cap_bytes is []; a bucket's cap must be at least 1 byte"),
        ([item("a")], {"shards": 0}, "shards is 0; it must be at least 1"),
        ([item("a")], {"align_bytes": 0}, "align_bytes is 0; it must be at least 1"),
        (
            [item("a", dtype="bfloat16"), item("b", 9)],
            {"align_bytes": 6},
            "align_bytes is 6, no multiple of the 4 bytes of an element of 'b' (float32)",
        ),
        (
            [item("a"), item("b"), item("c")],
            {"order": [2, 2, 5, -1]},
            "order must hold each index of the 3 items once: 5 is no item, -1 is no item, 2 ('c') comes 2 "
            "times, 0 ('a') is missing, 1 ('b') is missing",
        ),
        (
            [item(f"p{i}") for i in range(9)],
            {"order": range(4)},
            "order must hold each index of the 9 items once: 4 ('p4') is missing, 5 ('p5') is missing, "
            "6 ('p6') is missing",
        ),
    ],
)
def test_what_build_refuses(items: list[Item], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(items, **({"cap_bytes": 64} | changes))
    assert str(caught.value) == message


def test_a_rank_or_range_that_does_not_exist() -> None:
    built = build(GPT, cap_bytes=[20_000, 100_000], shards=4)
    bucket = built.buckets[0]
    for rank in (-1, 4):
        with pytest.raises(IndexError, match=f"bucket 0 has no shard {rank}: its 4 shards .* from 0 to 3"):
            bucket.shard(rank)
    for start, stop in [(-1, 5), (5, 4), (0, 16513)]:
        with pytest.raises(ValueError) as caught:
            bucket.parts(start, stop)
        assert str(caught.value) == f"[{start}, {stop}) is not within bucket 0, which is [0, 16512)"


def test_layout_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("layout_alone", layout.__file__)
    assert spec is not None
    assert spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it raises
    monkeypatch.setitem(sys.modules, "layout_alone", alone)
    spec.loader.exec_module(alone)
    made = alone.build([alone.Item("a", (3,), "float32", 4)], cap_bytes=1)
    assert made.buckets[0].numel == 16
