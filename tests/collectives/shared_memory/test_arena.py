"""The memory behind shared_empty: blocks never overlap, holes close again, nothing stays behind."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imece.collectives.shared_memory import arena, segment
from imece.collectives.shared_memory.arena import Arenas, shared_empty
from imece.errors import UserError

PAGE = 4096
SMALL_ARENA_BYTES = 16 * PAGE
SPARE_BYTES = 3 * SMALL_ARENA_BYTES


@pytest.fixture(autouse=True, scope="module")
def small_arenas() -> object:
    """Small ones, so that a few allocations fill several; restored at the end of the file."""
    patch = pytest.MonkeyPatch()
    patch.setattr(arena, "_ARENA_BYTES", SMALL_ARENA_BYTES)
    patch.setattr(arena, "_SPARE_BYTES", SPARE_BYTES)
    yield
    patch.undo()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize


def check_books(arenas: Arenas, held: list[torch.Tensor]) -> None:
    """The invariants: an index by address, holes that neither touch nor overlap, holes + blocks = arena."""
    everything = arenas._in_use + arenas._spares
    starts, owners = arenas._by_address
    assert starts == sorted(each.segment.address for each in everything)
    assert starts == [each.address for each in owners]
    assert sum(each.segment.nbytes for each in arenas._spares) <= SPARE_BYTES
    taken = dict.fromkeys(starts, 0)
    for tensor in held:
        start, stop = span(tensor)
        home = max(address for address in taken if address <= start)
        taken[home] += -(-(stop - start) // PAGE) * PAGE
    for each in everything:
        last = -1
        for start, stop in each.holes:
            assert last < start < stop <= each.segment.nbytes, each.holes  # equal would be two that touch
            last = stop
        free = sum(stop - start for start, stop in each.holes)
        assert free + taken[each.segment.address] == each.segment.nbytes
        assert (free == each.segment.nbytes) == (each in arenas._spares)


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
    check_books(arenas, held)


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
    for each in arenas._in_use:
        first, nbytes = each.segment.address, each.segment.nbytes
        assert arenas.locate(first, nbytes) is not None
        assert arenas.locate(first - 1, 1) is None, "before the arena"
        assert arenas.locate(first + 1, nbytes) is None, "beyond its end"
    assert Arenas().locate(tensor.data_ptr(), 1) is None


def test_a_block_lives_as_long_as_its_last_view() -> None:
    arenas = Arenas()
    view = arenas.empty((4, 1000), torch.float32)[2:, 5:].t()
    view.fill_(3.0)
    assert arenas._in_use, "the view holds it"
    array = view.numpy()
    del view
    assert arenas._in_use, "so does numpy's view of it"
    assert float(array.sum()) == 3.0 * array.size
    del array
    assert not arenas._in_use


def mapped() -> int:
    return sum("imece-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_freed_arenas_give_back_their_memory_and_descriptor() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    arenas = Arenas()  # the process's own may hold a spare that has room for all five

    def cycle() -> None:
        tensors = [arenas.empty((SMALL_ARENA_BYTES,), torch.uint8) for _ in range(5)]  # two are too many
        assert mapped() >= 5, "the count would not show a leak"
        del tensors

    cycle()
    maps, fds, freed = mapped(), opened(), arenas.freed
    for _ in range(100):
        cycle()
    assert (mapped(), opened()) == (maps, fds)
    assert arenas.freed - freed == 200


def made_and_dropped(arenas: Arenas, nbytes: int) -> int:
    """Serial of the arena in which a tensor of `nbytes` was."""
    tensor = arenas.empty((nbytes,), torch.uint8)
    found = arenas.locate(tensor.data_ptr(), nbytes)
    assert found is not None
    return found.serial


def test_the_newest_spares_are_used_again() -> None:
    arenas = Arenas()
    first = made_and_dropped(arenas, SMALL_ARENA_BYTES)
    assert {made_and_dropped(arenas, SMALL_ARENA_BYTES) for _ in range(50)} == {first}
    assert arenas.freed == 0
    second = made_and_dropped(arenas, SPARE_BYTES)
    assert arenas.freed == 1 and [each.segment.serial for each in arenas._spares] == [second]
    small = made_and_dropped(arenas, PAGE)
    assert small not in (first, second), "one page would have kept all of it alive"
    made_and_dropped(arenas, SPARE_BYTES + PAGE)
    assert arenas.freed == 3 and [each.segment.serial for each in arenas._spares] == [small], "too large"
    check_books(arenas, [])


def test_spares_go_before_memory_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = Arenas()
    made_and_dropped(arenas, SPARE_BYTES)

    def available() -> int:
        return 4 * SPARE_BYTES - sum(each.segment.nbytes for each in arenas._spares)

    monkeypatch.setattr(segment, "available_bytes", available)
    tensor = arenas.empty((4 * SPARE_BYTES,), torch.uint8)
    assert arenas.freed == 1
    with pytest.raises(UserError, match="shared memory"):
        arenas.empty((5 * SPARE_BYTES,), torch.uint8)
    check_books(arenas, [tensor])


def test_takes_what_tensors_need_and_no_more() -> None:
    """Pages of an arena that no tensor has are not resident; those of a tensor are before it is written."""
    arenas = Arenas()
    held = [arenas.empty((numel,), torch.uint8) for numel in (1, PAGE + 1)]
    (owner,) = arenas._by_address[1]
    taken = os.fstat(owner.fd).st_blocks * 512
    header = PAGE
    assert owner.nbytes == SMALL_ARENA_BYTES
    assert taken in (header, header + 3 * PAGE)  # the former on kernels before Linux 5.14
    check_books(arenas, held)


def test_tensors_that_end_in_the_middle_of_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may end them: the books are open, so they must wait, but not for ever."""
    arenas = Arenas()
    held = [arenas.empty((SMALL_ARENA_BYTES,), torch.uint8) for _ in range(5)]
    create, left = segment.create, []

    def create_and_end(nbytes: int, purpose: str, *, populate: bool = False) -> segment.Segment:
        held.clear()
        left.append(len(arenas._in_use))
        return create(nbytes, purpose, populate=populate)

    monkeypatch.setattr(segment, "create", create_and_end)
    tensor = arenas.empty((2 * SMALL_ARENA_BYTES,), torch.uint8)
    assert left == [5] and len(arenas._in_use) == 1 and arenas.freed == 2
    check_books(arenas, [tensor])


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after a microsecond in place of 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_make_and_drop_tensors(often: None) -> None:
    arenas = Arenas()

    def work(number: int) -> None:
        for at in range(300):
            held = [arenas.empty((PAGE * (1 + (at + more) % 9),), torch.uint8) for more in range(3)]
            for tensor in held:
                tensor.fill_(number)
            for tensor in held:
                assert arenas.locate(tensor.data_ptr(), tensor.numel()) is not None
                assert bool((tensor == number).all()), "another thread has the same memory"

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what a thread raised
    check_books(arenas, [])


def test_a_forked_child_takes_memory_of_its_own() -> None:
    held = shared_empty(PAGE, torch.uint8).fill_(1)
    dropped = shared_empty(PAGE, torch.uint8).zero_()
    place = dropped.data_ptr()
    del dropped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork with threads
        child = os.fork()
    if child == 0:
        shared_empty(PAGE, torch.uint8).fill_(2)
        known = bool((held == 1).all())
        held.fill_(3)
        os._exit(0 if known and bool((held == 3).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child does not have what it knew"
    tensor = shared_empty(PAGE, torch.uint8)
    assert tensor.data_ptr() == place
    assert held.sum() == PAGE, "the child wrote into what this process holds"
    assert tensor.sum() == 0, "the child wrote into what this process hands out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    for shape in ((), (3,), (2, 3, 4), (0,), (5, 0)):
        tensor = shared_empty(shape, dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        tensor.fill_(1)
        assert tensor.clone().flatten().tolist() == [1] * tensor.numel()
    assert shared_empty(7).shape == (7,) and shared_empty(7).dtype == torch.float32
    assert shared_empty(np.prod([2, 3])).shape == (6,)


def test_the_name_of_a_dtype_is_none() -> None:
    with pytest.raises(TypeError, match="dtype='float32': one of torch's"):
        shared_empty(3, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [-1, (3, -2), (2**40, 2**40), (-(2**40), 2**40), (np.int64(2**40),) * 2])
def test_impossible_shapes_are_refused(shape: int | tuple[int, ...]) -> None:
    """Never memory that belongs to somebody else, nor an empty tensor for a size that wraps around."""
    with pytest.raises(Exception, match=r"negative|shared memory"):
        shared_empty(shape)
