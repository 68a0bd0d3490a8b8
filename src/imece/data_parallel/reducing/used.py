"""What ranks tell each other at the end of a backward, in one small collective.

used     by parameter, whether this rank used it; then whether any rank did
alike    digests of what must be the same on all ranks: learning rates, and elements of parameters
written  whether the script wrote into parameters of this rank; then whether it did on any
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.pending import Pending
from imece.collectives.texts import gather_texts, of_ranks
from imece.data_parallel.same import by_rank, first_difference
from imece.errors import MismatchError

_DIGEST_BYTES = 4
_NOTHING = bytes(2 * _DIGEST_BYTES)  # of a rank that has none: zeros leave the largest of all as it is
_TOLD_BYTES = 2 * len(_NOTHING) + 1  # of what is told beside the used parameters: two digests, and `written`


class Alike(NamedTuple):
    """What must be the same on all ranks that have it."""

    rates: Sequence[float] = ()
    """Learning rates, by parameter group; none if they are unknown or do not matter."""
    elements: Sequence[tuple[str, float]] = ()
    """Of parameters, with their names, if something may have changed them on this rank alone."""

    written: bool = False
    """Whether the script wrote into parameters of this rank, and ranks are to compare them."""

    @property
    def values(self) -> tuple[Sequence[float], Sequence[float]]:
        """The numbers of each kind of which there is a digest."""
        return self.rates, [value for _, value in self.elements]

    @property
    def told(self) -> bytes:
        """For each kind _DIGEST_BYTES bytes, and then each of them subtracted from 255; then `written`."""
        digests = [_digest(each) if each else _NOTHING for each in self.values]
        return b"".join(digests) + bytes([self.written])


_NONE = Alike()


class Used:
    """What the ranks of one group tell each other about one model."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, many: int) -> None:
        """device: of the parameters; many: their number."""
        self._group, self._device = group, host_device(group, device)
        self._counts: array[int] = array("i")  # the flags that were sent last
        self._alike, self._alike_told = _NONE, b""
        # uint8: flags by parameter, then what `Alike.told` has. This rank's, and the largest of all ranks'
        self._told = torch.zeros(many + _TOLD_BYTES, dtype=torch.uint8, device=self._device)
        self._largest = torch.empty_like(self._told)
        self._coming: Pending | torch.Tensor | None = None
        self.anywhere: list[int] = []
        """By parameter, whether some rank used it in the last backward that was asked about."""
        self.written = False
        """Whether ranks are to compare their parameters, since the script wrote into some of them. Alike on
        all ranks; whoever compares sets it back."""

    def begin(self) -> None:
        """A backward begins: nothing is exchanged yet."""
        self._coming = None

    def exchange(self, fired: array[int], touched: array[int], alike: Alike, async_op: bool) -> None:
        """Tell what this rank used. fired, touched: by parameter, not 0 if this backward or an earlier one
        used it.
        """
        counts = array("i", map(max, fired, touched)) if any(touched) else fired
        if counts != self._counts:  # they seldom change, and copying to a GPU waits for all it has to do
            self._counts = counts[:]
            self._told[: len(counts)] = torch.tensor(
                [bool(count) for count in counts], dtype=torch.uint8, device="cpu"
            )
        self._alike = alike if self._reads else _NONE
        alike_told = self._alike.told
        if alike_told != self._alike_told:
            self._alike_told = alike_told
            self._told[len(counts) :] = torch.frombuffer(bytearray(alike_told), dtype=torch.uint8)
        self._coming = ops.all_reduce(
            self._largest.copy_(self._told), "max", group=self._group, async_op=async_op,
            label="used parameters",
        )  # fmt: skip

    def wait(self, *, read: bool) -> bool:
        """Wait until all ranks have told. False if nothing was exchanged in this backward.

        read: put the answer into `anywhere`. On a GPU that waits for all of backward, so do it only for an
        unused parameter.

        MismatchError on every rank if learning rates or elements differ; the message names them.
        """
        if self._coming is None:
            return False
        told = self._coming.wait() if isinstance(self._coming, Pending) else self._coming
        self._coming = None
        if read:
            assert told is not None
            self.anywhere = told[:-_TOLD_BYTES].tolist()
        if self._reads:
            self._compare()
        return True

    @property
    def _reads(self) -> bool:
        """Whether reading takes no time: the flags lie on a CPU, which may be so for a model on a GPU too."""
        return self._device.type == "cpu"

    def _compare(self) -> None:
        """A digest and its complement add up to 255s, unless the largest bytes are from different ranks."""
        *digests, written = self._largest[-_TOLD_BYTES:].tolist()
        rates, elements = digests[: len(_NOTHING)], digests[len(_NOTHING) :]
        self.written |= bool(written)
        if _is_of_many(rates):
            mine = [repr(rate) for rate in self._alike.rates]
            at, said = self._first_difference(mine, "learning rates that differ")
            raise MismatchError(
                f"the ranks' learning rates differ, in parameter group {at}: {by_rank(said)}. Give a "
                f"scheduler that looks at a loss, as ReduceLROnPlateau does, the same one on all ranks: the "
                f"mean of theirs"
            )
        if _is_of_many(elements):
            mine = [f"{value!r} of {name}" for name, value in self._alike.elements]
            _, said = self._first_difference(mine, "elements of parameters that differ")
            raise MismatchError(
                f"the ranks' parameters differ, in an element: {by_rank(said)}. Something wrote by `.data` "
                f"into this rank's part, outside of its optimizer's step, and the others do not have that: "
                f"give imece.parallelize the outermost optimizer, such as a Lookahead; or call "
                f"imece.barrier() before it and model.take_over_masters() after it, on all ranks"
            )

    def _first_difference(self, mine: list[str], label: str) -> tuple[int, Mapping[int, str]]:
        """The index of the first text that is not the same on all ranks that have some, and theirs
        by rank."""
        texts = gather_texts(mine, self._group, self._device, label)
        return first_difference(
            {rank: each for rank, each in of_ranks(self._group, texts).items() if each}, "none"
        )

    def give_up(self) -> None:
        """Nobody will ask for what is under way."""
        if isinstance(self._coming, Pending):
            self._coming.give_up()
        self._coming = None
        del self._group


def _digest(values: Sequence[float]) -> bytes:
    """_DIGEST_BYTES bytes, and then each of them subtracted from 255."""
    digest = zlib.crc32(array("d", values)).to_bytes(_DIGEST_BYTES, "big")
    return digest + bytes(255 - each for each in digest)


def _is_of_many(largest: Sequence[int]) -> bool:
    """Whether the largest bytes of all ranks' digests come from digests that differ."""
    halves = zip(largest[:_DIGEST_BYTES], largest[_DIGEST_BYTES:], strict=True)
    return not {sum(each) for each in halves} <= {255} and any(largest)
