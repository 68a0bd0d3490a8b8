"""Which bytes lie where: tensors -> buckets -> shards. Ints in, ints out, no torch.

    item     one tensor: a parameter, its gradient, or a state of its optimizer
    bucket   a flat buffer of one dtype, device and group; it travels as one message
    place    where one item lies in its bucket
    shard    one rank's part of a bucket; the shards of a bucket have equal lengths and aligned starts
    part     the elements of one item that lie in a given range of its bucket

    bucket   | item 5  | item 4     | item 3   |pad|
    shards   |   rank 0   |   rank 1   |   rank 2  |

All positions are in elements, never in bytes. Ranks that build from the same arguments get the same layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Item:
    """One tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32"
    itemsize: int  # bytes of an element
    device: str = "cpu"
    group: int = 0  # optimizer group: tensors of different groups never share a bucket

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Place:
    """Where one item lies in its bucket, in elements."""

    item: int  # index into Layout.items
    start: int
    stop: int  # equal to start if the item has no elements


@dataclass(frozen=True)
class Part:
    """The elements [item_start, item_stop) of a flat item; the first of them lies at bucket_start in
    its bucket."""

    item: int  # index into Layout.items
    item_start: int
    item_stop: int
    bucket_start: int


@dataclass(frozen=True)
class Bucket:
    """A flat buffer: its items one after another, then padding. It has no elements if its items have none.

    Each item begins aligned, so padding may follow it. With whole items (see `build`) each shard ends in
    padding, and no item lies in two shards.
    """

    index: int
    dtype: str
    itemsize: int
    device: str
    group: int
    places: tuple[Place, ...]  # in the order of their positions
    numel: int  # including padding: a multiple of shards * (align_bytes // itemsize)
    shards: int

    @property
    def used_numel(self) -> int:
        """Elements up to the end of the last item, without the padding at the end."""
        return self.places[-1].stop if self.places else 0

    @property
    def nbytes(self) -> int:
        """Including padding."""
        return self.numel * self.itemsize

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard(self, rank: int) -> tuple[int, int]:
        """(start, stop) of the shard of `rank`. IndexError if there is no such shard."""
        if not 0 <= rank < self.shards:
            raise IndexError(
                f"bucket {self.index} has no shard {rank}: its {self.shards} shards are numbered from 0 to "
                f"{self.shards - 1}"
            )
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def parts(self, start: int, stop: int) -> list[Part]:
        """The parts of items in [start, stop), in order; padding and items without elements are left out.

        ValueError if the range is not within the bucket.
        """
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(
                f"[{start}, {stop}) is not within bucket {self.index}, which is [0, {self.numel})"
            )
        found = []
        first = bisect_right(self.places, start, key=lambda place: place.stop)
        last = bisect_left(self.places, stop, key=lambda place: place.start)
        for place in self.places[first:last]:
            low, high = max(place.start, start), min(place.stop, stop)
            if low < high:
                found.append(Part(place.item, low - place.start, high - place.start, low))
        return found


@dataclass(frozen=True)
class Layout:
    """All items and all buckets; each item lies in exactly one bucket."""

    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]


def build(
    items: Sequence[Item],
    *,
    cap_bytes: int | Sequence[int],
    shards: int = 1,
    align_bytes: int = 64,
    item_align_bytes: int = 1,
    order: Sequence[int] | None = None,
    whole: Collection[int] = (),
    modules_whole: bool = False,
    blocks: Mapping[int, int] | None = None,
) -> Layout:
    """Put items into buckets in `order`: indices into `items`; by default the last item comes first.

    Items of equal (dtype, device, group) fill one bucket until they have cap_bytes or more; then the next
    bucket begins. So a bucket may exceed its cap by one item, and an item larger than the cap gets no bucket
    of its own if one is already begun. If cap_bytes is a sequence, the k-th bucket of each (dtype, device,
    group) has cap_bytes[k], and the last entry repeats. Padding does not count towards the cap.

    Buckets are numbered by when their last item comes in `order`: if gradients come in that order, bucket i
    is complete before bucket i + 1.

    modules_whole: items whose names differ only after the last dot, such as a module's weight and bias, stay
    in one bucket. Their gradients come together, in any order, so a bucket that held only one of them might
    be complete after the next bucket.

    whole: groups whose items are not cut: each item lies in one shard, for optimizers that look at whole
    matrices. The cap of such a bucket is per shard. The items of a bucket are dealt out by falling cost, each
    to the rank with the least work so far. The cost of an item of shape [..., m, n] is m * n * min(m, n), as
    for a product of the matrix with itself.

    align_bytes: the length of a shard is a multiple of it. item_align_bytes: each item begins at a multiple
    of it, or of its itemsize if that is larger. blocks: {group: elements}; shards cut the items of this group
    only at multiples of this number of the item's elements.

    ValueError, with names and numbers, for: a name given twice, a negative dim, an itemsize below 1, two
    itemsizes for one dtype, a cap or align_bytes below 1, align_bytes that is no multiple of an itemsize,
    shards < 1, an order that is no permutation.
    """
    items = tuple(items)
    order = range(len(items))[::-1] if order is None else order
    caps = [cap_bytes] if isinstance(cap_bytes, int) else list(cap_bytes)
    if min(caps, default=0) < 1:
        raise ValueError(f"cap_bytes is {cap_bytes}; a bucket's cap must be at least 1 byte")
    if shards < 1:
        raise ValueError(f"shards is {shards}; it must be at least 1")
    _check_items(items, align_bytes)
    _check_order(order, items)

    alike: dict[tuple[str, str, int], list[int]] = {}
    for index in order:
        alike.setdefault((items[index].dtype, items[index].device, items[index].group), []).append(index)
    contents = [
        content
        for (_, _, group), indices in alike.items()
        for content in _fill(
            indices, items, [cap * shards for cap in caps] if group in whole else caps, modules_whole
        )
    ]
    position = {index: i for i, index in enumerate(order)}
    contents.sort(key=lambda content: position[content[-1]])
    work = [0] * shards
    buckets = []
    for i, content in enumerate(contents):
        first = items[content[0]]
        dealt = _deal(content, items, work) if first.group in whole else [content]
        block = math.lcm((blocks or {}).get(first.group, 1), max(1, item_align_bytes // first.itemsize))
        buckets.append(_bucket(i, dealt, items, shards, align_bytes, block))
    return Layout(items, tuple(buckets))


def _deal(content: Sequence[int], items: Sequence[Item], work: list[int]) -> list[list[int]]:
    """The items of a bucket by rank; adds the cost of each item to the `work` of its rank."""
    dealt: list[list[int]] = [[] for _ in work]
    filled = [0] * len(work)
    for index in sorted(content, key=lambda index: (-_work(items[index]), content.index(index))):
        rank = min(range(len(work)), key=lambda rank: (work[rank], filled[rank]))
        work[rank] += _work(items[index])
        filled[rank] += items[index].numel
        dealt[rank].append(index)
    return dealt


def _work(item: Item) -> int:
    return item.numel * min(item.shape[-2:]) if len(item.shape) > 1 else item.numel


def _fill(
    indices: Sequence[int], items: Sequence[Item], caps: Sequence[int], modules_whole: bool
) -> Iterator[list[int]]:
    """The items of each bucket. Bucket k is closed as soon as it has caps[k] bytes; the last cap repeats."""
    closed, content, content_bytes = 0, [], 0
    modules = [items[index].name.rpartition(".")[0] if modules_whole else index for index in indices]
    for index, module, following in zip(indices, modules, [*modules[1:], None], strict=True):
        content.append(index)
        content_bytes += items[index].nbytes
        if content_bytes >= caps[min(closed, len(caps) - 1)] and module != following:
            yield content
            closed, content, content_bytes = closed + 1, [], 0
    if content:
        yield content


def _bucket(
    index: int,
    dealt: Sequence[Sequence[int]],
    items: Sequence[Item],
    shards: int,
    align_bytes: int,
    block: int,
) -> Bucket:
    """dealt: one list, of items that lie one after another across all shards, or one list per shard."""
    first = next(items[item] for each in dealt for item in each)
    step = math.lcm(align_bytes // first.itemsize, block) * (shards if len(dealt) == 1 else 1)
    longest = max(sum(-(-items[item].numel // block) * block for item in each) for each in dealt)
    length = -(-longest // step) * step
    places = []
    for at, each in enumerate(dealt):
        end = at * length
        for item in each:
            places.append(Place(item, end, end + items[item].numel))
            end += -(-items[item].numel // block) * block
    return Bucket(
        index=index,
        dtype=first.dtype,
        itemsize=first.itemsize,
        device=first.device,
        group=first.group,
        places=tuple(places),
        numel=length * len(dealt),
        shards=shards,
    )


def _check_items(items: Sequence[Item], align_bytes: int) -> None:
    if align_bytes < 1:
        raise ValueError(f"align_bytes is {align_bytes}; it must be at least 1")
    index_of: dict[str, int] = {}
    first_of: dict[str, Item] = {}  # by dtype
    for index, item in enumerate(items):
        if index_of.setdefault(item.name, index) != index:
            raise ValueError(f"items {index_of[item.name]} and {index} have the same name, {item.name!r}")
        if any(size < 0 for size in item.shape):
            raise ValueError(f"{item.name!r} has shape {list(item.shape)}; no dim may be negative")
        if item.itemsize < 1:
            raise ValueError(f"{item.name!r} has itemsize {item.itemsize}; it must be at least 1 byte")
        first = first_of.setdefault(item.dtype, item)
        if item.itemsize != first.itemsize:
            raise ValueError(
                f"{item.dtype} has itemsize {first.itemsize} in {first.name!r} and {item.itemsize} in "
                f"{item.name!r}; a dtype has one"
            )
        if align_bytes % item.itemsize:
            raise ValueError(
                f"align_bytes is {align_bytes}, no multiple of the {item.itemsize} bytes of an element of "
                f"{item.name!r} ({item.dtype})"
            )


def _check_order(order: Sequence[int], items: Sequence[Item]) -> None:
    """ValueError unless `order` names every item once; the message shows at most three of each mistake."""
    count = Counter(order)
    wrong = [f"{index} is no item" for index in count if index not in range(len(items))][:3]
    twice = [index for index, times in count.items() if times > 1 and index in range(len(items))]
    wrong += [f"{index} ({items[index].name!r}) comes {count[index]} times" for index in twice[:3]]
    missing = [index for index in range(len(items)) if index not in count]
    wrong += [f"{index} ({items[index].name!r}) is missing" for index in missing[:3]]
    if wrong:
        raise ValueError(f"order must hold each index of the {len(items)} items once: {', '.join(wrong)}")
