"""The memory behind shared_empty: blocks never overlap, holes close again, nothing stays behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.collectives.shared_memory import arena, segment
from imece.collectives.shared_memory.arena import Arenas, shared_empty

PAGE = 4096
SMALL_ARENA_BYTES = 16 * PAGE


@pytest.fixture(autouse=True, scope="module")
def small_arenas() -> object:
    """Small ones, so that a few allocations fill several; restored at the end of the file."""
    patch = pytest.MonkeyPatch()
    patch.setattr(arena, "_ARENA_BYTES", SMALL_ARENA_BYTES)
    yield
    patch.undo()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize


def check_books(arenas: Arenas, held: list[torch.Tensor]) -> None:
    """The invariants: sorted lists, holes that neither touch nor overlap, and holes + blocks = arena."""
    assert arenas._starts == sorted(arenas._starts)
    assert arenas._starts == [each.segment.address for each in arenas._arenas]
    taken = dict.fromkeys(arenas._starts, 0)
    for tensor in held:
        start, stop = span(tensor)
        home = max(address for address in taken if address <= start)
        taken[home] += -(-(stop - start) // PAGE) * PAGE
    for each in arenas._arenas:
        last = -1
        for start, stop in each.holes:
            assert last < start < stop <= each.segment.nbytes, each.holes  # equal would be two that touch
            last = stop
        free = sum(stop - start for start, stop in each.holes)
        assert free + taken[each.segment.address] == each.segment.nbytes


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 3 * SMALL_ARENA_BYTES // 2)),
        st.tuples(st.just("take"), st.integers(1, 2 * PAGE)),
        st.tuples(st.just("give"), st.integers(0, 30)),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(steps=steps)
def test_any_sequence_of_takes_and_gives(steps: list[tuple[str, int]]) -> None:
    arenas = Arenas()
    held: list[torch.Tensor] = []
    for at, (what, number) in enumerate(steps):
        if what == "take":
            tensor = arenas.empty((number,), torch.uint8)
            tensor.fill_(at % 251)
            held.append(tensor)
        elif held:
            held.pop(number % len(held))
        spans = sorted(map(span, held))
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False)), "overlap"
        check_books(arenas, held)
        del spans
        if what == "take":
            del tensor
    kept = [int(each[0]) for each in held]
    assert all(bool((each == value).all()) for each, value in zip(held, kept, strict=True)), "written over"
    held.clear()
    assert arenas._arenas == [] and arenas._starts == [], "an arena outlived its last tensor"


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=12),
    pick=st.integers(0, 11),
    cut=st.tuples(st.integers(0, 3 * PAGE), st.integers(0, 3 * PAGE)),
)
def test_locate_finds_shared_tensors_only(sizes: list[int], pick: int, cut: tuple[int, int]) -> None:
    arenas = Arenas()
    held = [arenas.empty((size,), torch.uint8) for size in sizes]
    tensor = held[pick % len(held)]
    tensor.copy_(torch.arange(tensor.numel()).remainder(250))
    start, stop = sorted(min(each, tensor.numel()) for each in cut)
    view = tensor[start:stop]
    if view.numel():
        found = arenas.locate(view.data_ptr(), view.numel())
        assert found is not None
        other_side = segment.attach(os.getpid(), found.fd, found.serial)
        read = other_side.memory[found.offset_bytes : found.offset_bytes + view.numel()]
        assert torch.equal(read, view), "locate names other bytes"
    ordinary = torch.empty(100, dtype=torch.uint8)
    assert arenas.locate(ordinary.data_ptr(), 100) is None
    for each in arenas._arenas:
        first, nbytes = each.segment.address, each.segment.nbytes
        assert arenas.locate(first, nbytes) is not None
        assert arenas.locate(first - 1, 1) is None, "before the arena"
        assert arenas.locate(first + 1, nbytes) is None, "beyond its end"
    assert Arenas().locate(tensor.data_ptr(), 1) is None


def test_a_block_lives_as_long_as_its_last_view() -> None:
    arenas = Arenas()
    view = arenas.empty((4, 1000), torch.float32)[2:, 5:].t()
    view.fill_(3.0)
    assert arenas._arenas, "the view holds it"
    array = view.numpy()
    del view
    assert arenas._arenas, "so does numpy's view of it"
    assert float(array.sum()) == 3.0 * array.size
    del array
    assert not arenas._arenas


def test_freed_arenas_give_back_their_memory_and_descriptor() -> None:
    def mapped() -> int:
        return sum("imece-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    maps, fds = mapped(), opened()
    for _ in range(200):
        tensors = [shared_empty(SMALL_ARENA_BYTES // 4) for _ in range(3)]
        assert mapped() > maps and opened() > fds, "the count would not show a leak"
        del tensors
    assert (mapped(), opened()) == (maps, fds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 3, 4), (0,), (5, 0)):
        tensor = shared_empty(shape, dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        tensor.fill_(1)
        assert tensor.clone().flatten().tolist() == [1] * tensor.numel()
    assert shared_empty(7).shape == (7,) and shared_empty(7).dtype == torch.float32


@pytest.mark.parametrize("shape", [-1, (3, -2), (2**40, 2**40), (-(2**40), 2**40)])
def test_impossible_shapes_are_refused(shape: int | tuple[int, ...]) -> None:
    """Never memory that belongs to somebody else, nor an empty tensor for a size that wraps around."""
    with pytest.raises(Exception, match=r"negative|shared memory"):
        shared_empty(shape)
