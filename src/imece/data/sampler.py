"""Which samples a rank reads: torch's `DistributedSampler`, plus reshuffling and resuming.

An *order* is one permutation of all samples; it depends only on (length, seed, epoch). The ranks take turns:
position p belongs to rank p mod num_replicas. So one number says where an epoch stands: `consumed`, the
samples that all ranks together have had. Any other number of ranks can go on from there:

    order      4 0 6 2 5 1 3 7 8 9
    2 ranks    0 1 0 1                consumed = 4
    3 ranks            0 1 2 0 1 2
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from imece import mesh as meshes
from imece.errors import UserError
from imece.listing import kind_of

Uneven = Literal["pad", "drop", "keep"]
UNEVEN: tuple[Uneven, ...] = ("pad", "drop", "keep")

_FORMAT = 1  # of state_dict and of the order: a position means nothing in another order
_BLOCK = 8192  # indices computed at once
_ROUNDS = 10  # with fewer rounds, some permutations of 5 to 9 samples come too often
_GIVES_TO_WORKER = "torch.utils.data.dataloader", "_try_put_index"  # module and function
_STARTED_AS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_Indices = npt.NDArray[np.uint64]


class DistributedSampler(TorchDistributedSampler[int]):
    """One rank's indices: disjoint from the other ranks', together complete, in another order each epoch.

    It takes what torch's takes (and is one, for those who ask by isinstance), and differs in this:

    - Each iteration is the next epoch by itself. After `set_epoch(e)` the next one is epoch e, then e + 1.
      All ranks must begin equally many: to look at a batch on one rank only, make a sampler for that.
    - `state_dict` and `load_state_dict` work in mid-epoch, and at another number of ranks.
    - `uneven` says what happens when the ranks cannot get equally many samples: "pad" repeats a few from the
      order's beginning, "drop" leaves out the last few, "keep" hands out each exactly once, so that the last
      ranks get one sample less and the loop must stand that (DistributedDataParallel.join). By default as
      torch: "drop" if `drop_last`, else "pad".
    - Without a process group it serves a single process.

    Rank and number of ranks are those of when it was made. Where ranks come and go while it is in use, as in
    `imece.steps`, and where a step may come again, one that is made in each step follows from its number:

        sampler = imece.DistributedSampler(dataset)
        epoch, step = divmod(number, len(dataset) // global_batch)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": step * global_batch})
        mine = range(sampler.rank, global_batch, sampler.num_replicas)
        inputs, targets = default_collate([dataset[i] for _, i in zip(mine, sampler)])

    The indices of a (seed, epoch) are not torch's. They are computed in blocks: no memory for each sample.
    `len()` is the number of this rank's samples in a whole epoch, also for one that was resumed in its midst.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven | None = None,
    ) -> None:
        """num_replicas, rank: by default torch.distributed's, or 1 and 0 without a process group. On a mesh
        of `imece.init`, ranks along context, tensor and pipeline read the same: they are one replica.

        TypeError if the dataset has no length, or is a DataLoader. ValueError if rank is not below
        `num_replicas`, if `uneven` contradicts `drop_last`, and if a launcher started several ranks that have
        not met yet.
        """
        if isinstance(dataset, DataLoader):  # its length counts batches
            raise TypeError(
                "a DataLoader is no dataset: DataLoader(dataset, sampler=DistributedSampler(dataset))"
            )
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"{kind_of(dataset)} has no __len__, so its samples cannot be divided among ranks: "
                "let an IterableDataset yield a rank's own, "
                "itertools.islice(samples, mesh.batch_rank, None, mesh.batch_ranks)"
            )
        num_replicas, rank = _place(num_replicas, rank)
        if uneven is None:
            uneven = "drop" if drop_last else "pad"
        if uneven not in UNEVEN:
            raise ValueError(f"uneven={uneven!r}: one of {', '.join(UNEVEN)}")
        if drop_last and uneven != "drop":
            raise ValueError(f"drop_last=True is uneven='drop', but uneven={uneven!r} was given: give one")
        self._start: _Start | None = _Start(0, 0)
        self._latest = _Iteration(epoch=-1, first=0, end=0)
        super().__init__(
            cast("Dataset[Any]", dataset),
            num_replicas=num_replicas,
            rank=rank,
            shuffle=bool(shuffle),
            seed=operator.index(seed),
            drop_last=uneven == "drop",
        )
        self.uneven = uneven
        self.length = len(dataset)
        self.total_size = self._end(0)
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __repr__(self) -> str:
        place, order = self._state(), f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return (
            f"<imece.DistributedSampler rank {self.rank} of {self.num_replicas}, epoch {place['epoch']}, "
            f"{place['consumed']:,} of {self.length:,} samples read by all ranks, {order}>"
        )

    @property
    def epoch(self) -> int:
        """The epoch that was begun last; after `set_epoch` and `load_state_dict`, the next one."""
        return self._latest.epoch if self._start is None else self._start.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration this epoch, from its first sample or from where `load_state_dict` left it.

        An epoch other than the loaded one drops the loaded position, with a warning if it was in mid-epoch.
        """
        epoch = operator.index(epoch)
        start = self._start
        if start is not None and start.epoch == epoch:
            self._start = replace(start, named=True)
            return
        if start is not None and 0 < start.consumed < self.length:
            warnings.warn(
                f"set_epoch({epoch}) drops what load_state_dict restored: epoch {start.epoch} at sample "
                f"{start.consumed} of {self.length}; to go on from there, count epochs from {start.epoch}",
                stacklevel=2,
            )
        self._start = _Start(epoch, 0, again=start is None and epoch == self._latest.epoch)

    def state_dict(self, samples: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, for JSON: the same on all ranks that have drawn equally many samples.

        Take it at a step's end, and let every rank load rank 0's: if the samples do not come out even,
        rank 0 is the one that has a last one.

        samples: how many samples of this rank the loop has really had since its iteration began. A
        DataLoader with workers draws indices ahead of the loop, and what it has drawn is counted otherwise:

            seen = 0
            for inputs, targets in loader:
                step(inputs, targets)
                seen += len(inputs)
                state = sampler.state_dict(samples=seen)

        With num_workers=0, and after an iteration that ran to its end, `state_dict()` alone is right; with
        workers it warns. ValueError if the iteration has not drawn so many.
        """
        if samples is None and self._start is None and self._latest.is_ahead:
            warnings.warn(
                "a DataLoader with workers draws samples ahead of the loop, and state_dict() counts those "
                "too: to resume from it would leave them out. Say how many samples this rank's loop has had "
                "in this iteration: state_dict(samples=...)",
                stacklevel=2,
            )
        return self._state(samples)

    def _state(self, samples: int | None = None) -> dict[str, Any]:
        start, latest = self._start, self._latest
        if start is not None and start.again:
            start = None
        epoch, drawn = (latest.epoch, latest.drawn) if start is None else (start.epoch, 0)
        if samples is not None and not 0 <= samples <= drawn:
            raise ValueError(
                f"state_dict(samples={samples}): rank {self.rank} has drawn {drawn} samples since this "
                f"iteration of epoch {epoch} began"
            )
        consumed = self._consumed(latest, samples) if start is None else start.consumed
        return {
            "format": _FORMAT,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "epoch": epoch,
            "consumed": consumed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration the rest of the epoch in which `state` was taken.

        If nothing is left, it is the next epoch, unless `set_epoch` names the finished one: then it is empty.
        ValueError for the state of another dataset, seed or order.
        """
        own = self._state()
        if not isinstance(state, Mapping):
            raise TypeError(f"{kind_of(state)} is no sampler's state: what its state_dict() returned")
        missing = [key for key in own if key not in state]
        if missing:
            raise ValueError(f"not a sampler's state: it has no {', '.join(missing)}")
        for key, value in own.items():
            if key not in ("epoch", "consumed") and state[key] != value:
                raise ValueError(
                    f"the state was taken with {key} {state[key]}, this sampler has {key} {value}"
                )
        epoch, consumed = operator.index(state["epoch"]), operator.index(state["consumed"])
        if not 0 <= consumed <= self.length:
            raise ValueError(f"the state has consumed {consumed} of {self.length} samples")
        self._start = _Start(epoch, consumed, named=False)

    def __iter__(self) -> Iterator[int]:
        # A generator on purpose: the epoch begins when the first index is asked for. A DataLoader also makes
        # iterators that it never uses, and those must not count as epochs.
        now = self._latest = self._begin()
        now.for_workers = _asked_for_workers()
        order = _Order(self.length, f"{self.seed} {now.epoch}" if self.shuffle else None)
        turns = range(now.first + self.rank, now.end, self.num_replicas)
        for block in range(0, len(turns), _BLOCK):
            some = turns[block : block + _BLOCK]
            positions = np.arange(some.start, some.stop, some.step, dtype=np.uint64)
            for index in order.at(positions % np.uint64(self.length)).tolist():
                now.drawn += 1
                yield index
        now.over = True

    def _begin(self) -> _Iteration:
        start, self._start = self._start, None
        if start is None:
            start = _Start(self._latest.epoch + 1, 0)
        elif not start.named and start.consumed == self._end(start.consumed):
            start = _Start(start.epoch + 1, 0)
        return _Iteration(start.epoch, start.consumed, self._end(start.consumed))

    def _end(self, first: int) -> int:
        """The position after the last one that an iteration from position `first` hands out."""
        left = self.length - first
        if self.uneven == "pad":
            left = math.ceil(left / self.num_replicas) * self.num_replicas
        elif self.uneven == "drop":
            left -= left % self.num_replicas
        return first + left

    def _consumed(self, iteration: _Iteration, samples: int | None) -> int:
        """Samples that all ranks have had when each has had `samples`; by default as many as this one has
        drawn."""
        drawn = iteration.drawn if samples is None else samples
        reached = iteration.first + drawn * self.num_replicas
        over = reached >= iteration.end or (samples is None and iteration.over)
        return self.length if over else reached  # at the end, dropped samples count too


@dataclass(frozen=True)
class _Start:
    """Where the next iteration begins."""

    epoch: int
    consumed: int  # samples of its order that all ranks together have had
    named: bool = True  # by set_epoch; False: only by load_state_dict
    # set_epoch named the epoch of the latest iteration, which may be running: Lightning lets a DataLoader's
    # workers draw ahead before it names the epoch. So this name counts until the next iteration.
    again: bool = False


@dataclass
class _Iteration:
    """What one iteration hands out, and how far it is. Positions are in the epoch's order."""

    epoch: int
    first: int  # position
    end: int  # position; beyond the order's length if padded
    drawn: int = 0  # samples that this rank has drawn
    over: bool = False
    for_workers: bool = False

    @property
    def is_ahead(self) -> bool:
        """Whether more samples were drawn than the loop has had, as far as that can be known."""
        return self.for_workers and not self.over


def _asked_for_workers() -> bool:
    """Whether a DataLoader asks for this index to give it to a worker, perhaps through a batch sampler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _GIVES_TO_WORKER:
            return True
        frame = frame.f_back
    return False


class _Order:
    """A permutation of range(length), the same on every machine, computed only where it is needed.

    The positions form rows x columns. Each round shifts every row by a hash of the column, then every column
    by a hash of the row: a permutation of rows * columns >= length places. An index beyond the length is sent
    through again until it falls within.
    """

    def __init__(self, length: int, key: str | None) -> None:
        """key: what the permutation depends on; None for range(length) itself."""
        rows = math.isqrt(max(length - 1, 0)) + 1
        rows += rows % 2  # if both were odd, only even permutations could occur
        self._length = length
        self._rows, self._columns = np.uint64(rows), np.uint64(max(1, math.ceil(length / rows)))
        self._keys: list[np.uint64] | None = None
        if key is not None:
            digest = hashlib.shake_128(key.encode()).digest(16 * _ROUNDS)
            self._keys = list(np.frombuffer(digest, "<u8").astype(np.uint64))

    def at(self, positions: _Indices) -> _Indices:
        """The indices at these positions, each less than length."""
        if self._keys is None:
            return positions
        indices = self._shift(positions)
        while len(outside := np.flatnonzero(indices >= self._length)):
            indices[outside] = self._shift(indices[outside])
        return indices

    def _shift(self, places: _Indices) -> _Indices:
        assert self._keys is not None
        row, column = np.divmod(places, self._columns)
        for row_key, column_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            row += _hash(column, row_key, self._rows)
            row -= self._rows * (row >= self._rows)
            column += _hash(row, column_key, self._columns)
            column -= self._columns * (column >= self._columns)
        return row * self._columns + column


def _hash(values: _Indices, key: np.uint64, limit: np.uint64) -> _Indices:
    """Numbers below `limit`, which must be below 2^32. The constants are MurmurHash3's."""
    mixed = (values + key) * np.uint64(0xFF51_AFD7_ED55_8CCD)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xC4CE_B9FE_1A85_EC53)
    return ((mixed >> np.uint64(32)) * limit) >> np.uint64(32)


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """num_replicas and rank, by default torch.distributed's. ValueError if they are impossible."""
    if num_replicas is None or rank is None:
        met = dist.is_available() and dist.is_initialized()
        started = max(
            (int(text) for name in _STARTED_AS if (text := os.environ.get(name, "")).isdecimal()), default=1
        )
        alone = num_replicas == 1 or (num_replicas is None and started == 1)
        if not met and not alone:
            raise ValueError(
                f"one of {max(started, num_replicas or 1)} ranks, but torch.distributed is not initialized: "
                "call imece.init() before the sampler is made, or give it both num_replicas and rank"
            )
        own = _met() if met else (1, 0)
        num_replicas = own[0] if num_replicas is None else num_replicas
        rank = own[1] if rank is None else rank
    num_replicas, rank = operator.index(num_replicas), operator.index(rank)
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas}: at least 1")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank {rank} of {num_replicas} replicas: ranks count from 0 to {num_replicas - 1}")
    return num_replicas, rank


def _met() -> tuple[int, int]:
    """(how many shares of the data the ranks that have met read, this rank's share)."""
    try:
        mesh = meshes.current()
    except UserError:
        return dist.get_world_size(), dist.get_rank()
    return mesh.batch_ranks, mesh.batch_rank
