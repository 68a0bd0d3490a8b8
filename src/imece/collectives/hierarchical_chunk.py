"""One chunk of a collective over hosts: reduce-scatter, all-gather, and what is made of the two.

    place   of a rank: its index among the ranks of its host
    part    what one rank owns of the chunk, [n]; all parts of a chunk have the same length
    row     the parts of the ranks with one place, by host

Reduce-scatter: a rank sums the row of its place over the ranks of its host, sends the other hosts' parts of
that row to them, and adds up what comes for its own part, in the order of hosts. All-gather: it sends its
part to its place on the other hosts, and hands the row that has come to the ranks of its host.

All-reduce is one and then the other. So is the sum of rows, but its rows are not handed to other ranks of the
host. With two hosts, each would send half a row in each of the two, and get the other half. Sending a whole
row at once is no more data, in half the messages, and nobody waits for another's sum: so with two hosts a row
is one part, which both hosts add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from imece.collectives import native
from imece.collectives.execute import TAG_HIERARCHICAL, Message, post
from imece.collectives.given_up import Waitable
from imece.collectives.pending import wait_for
from imece.collectives.shared_memory.arithmetic import reduction
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.collectives.wire_formats import FORMATS

Tensor = torch.Tensor
Row = list[Tensor]
Cut = Callable[[Tensor, int], Row]
"""(tensor, place) -> the row of that place in the tensor, for one chunk."""
Stage = Sequence[Callable[[], None]]
"""What a chunk does in one tick, in this order."""


class HostGroups(NamedTuple):
    """A world of K hosts with H ranks each, as one of its ranks sees it."""

    host: dist.ProcessGroup  # the ranks of this host
    cross: dist.ProcessGroup  # the ranks with this rank's place on every host
    ranks: Sequence[Sequence[int]]  # all of them, by host and place
    lane: int = 0
    """Calls in different lanes run side by side: each lane has its own `host` group, and its own tag
    in `cross`."""

    opened: Sequence[Tensor] = ()
    """The bytes of this call's tensor on all ranks of the host, if they have already met over it."""

    @property
    def world_size(self) -> int:
        """K x H."""
        return self.host.size() * self.cross.size()

    @property
    def peers(self) -> list[int]:
        """For each host, the rank in `cross` with this rank's place: a group has its own order of hosts."""
        members = dist.get_process_group_ranks(self.cross)
        return [members.index(ranks[self.host.rank()]) for ranks in self.ranks]


class Chunk:
    """A chunk under way. The four kinds of call are lists of stages, equally long for all chunks of
    a call."""

    def __init__(
        self,
        hosts: HostGroups,
        peers: Sequence[int],
        tensor: Tensor,
        in_host: Sequence[Tensor],
        cut: Cut,
        op: str = "sum",
        wire: str | None = None,
        whole: Tensor | None = None,
    ) -> None:
        """peers: of `hosts`. tensor: this rank's, 1D. in_host: the tensors of all ranks of the host, if this
        rank can access them. cut: into one part per host, or into one for both of two hosts. whole: all rows
        of `tensor`, if they lie one after the other."""
        self.host, self.cross, self.place = hosts.host, hosts.cross, hosts.host.rank()
        self.tag = TAG_HIERARCHICAL + hosts.lane
        self.peers, self.here = peers, peers.index(hosts.cross.rank())
        self.tensor, self.cut, self.op, self.whole = tensor, cut, op, whole
        self.wire = FORMATS[wire] if wire is not None and hosts.cross.size() > 1 else None
        self.mine = cut(tensor, self.place)
        self.result = self.mine  # where the sums of the own row go, and what is gathered of it
        self.theirs = [cut(each, self.place) for each in in_host]
        self.at_once = len(self.mine) < len(peers)
        self.in_place = whole is not None
        """Whether the own row's sums over the host's ranks may lie in `result`."""
        self.part = self.result[0 if self.at_once else self.here]
        # Under way; let go of when it has come.
        self.works: list[Waitable] = []
        self.arrived: Row = []  # by host, this one's included

    def reduce_scatter(self, out: Tensor) -> list[Stage]:
        """out: [n], gets the sum of the own part; nothing else is written."""
        self.part = out
        return [[self._send_sums], [self._add_up]]

    def all_gather(self) -> list[Stage]:
        """Gather the own parts, which lie in their places."""
        return [[self._send_part], [self._take_parts, self._bring]]

    def gather_row(self) -> list[Stage]:
        """Like all_gather, but the row is handed to nobody."""
        return [[self._send_part], [self._take_parts]]

    def all_reduce(self) -> list[Stage]:
        """In place."""
        if self.at_once:
            return [[self._send_sums], [self._add_up, self._bring]]
        return [[self._send_sums], [self._add_up, self._send_part], [self._take_parts, self._bring]]

    def sum_of_row(self, out: Row) -> list[Stage]:
        """out: shaped like the own row, which it may be; nothing else is written."""
        self.result, self.in_place = out, True
        self.part = out[0 if self.at_once else self.here]
        if self.at_once:
            return [[self._send_sums], [self._add_up]]
        return [[self._send_sums], [self._add_up, self._send_part], [self._take_parts]]

    # Reduce-scatter.

    def _send_sums(self) -> None:
        sums = self._sum_in_host()
        if self.wire is not None:
            sums = [self.wire.pack(each) for each in sums]
        if self.at_once:
            sums = sums * len(self.peers)
        self.arrived = [
            each if host == self.here else torch.empty_like(each) for host, each in enumerate(sums)
        ]
        self._exchange(sums, self.arrived)

    def _add_up(self) -> None:
        """In the order of hosts, whichever rank adds."""
        self._wait()
        if self.wire is None:
            _reduce(self.op, self.arrived, self.part)
        else:
            self.wire.unpack(self.arrived[0], self.part)
            for each in self.arrived[1:]:
                self.wire.add(each, self.part)
        self.arrived = []

    def _sum_in_host(self) -> Row:
        """Sum the own row; in place if it will be overwritten anyway: what was read is in the cache."""
        if self.host.size() == 1:
            return self.mine
        if self.theirs and self.in_place:
            for at, place in enumerate(self.result):
                _reduce(self.op, [row[at] for row in self.theirs], place)
            return self.result
        sums = self.tensor.new_empty((len(self.mine), self.part.numel()))
        if self.theirs:
            for at, place in enumerate(sums):
                _reduce(self.op, [row[at] for row in self.theirs], place)
        else:
            rows = self.whole if self.whole is not None else torch.cat(self._rows())
            self._in_host("reduce_scatter", rows, sums.view(-1))
        return list(sums)

    # All-gather.

    def _send_part(self) -> None:
        part, self.arrived = self.part, self.result
        if self.wire is not None:
            part = self.wire.pack(part)
            self.wire.unpack(part, self.part)  # what the others get
            self.arrived = [torch.empty_like(part) for _ in self.result]
        self._exchange([part] * len(self.result), self.arrived)

    def _take_parts(self) -> None:
        self._wait()
        if self.wire is not None:
            for host, each in enumerate(self.arrived):
                if host != self.here:
                    self.wire.unpack(each, self.result[host])
        self.arrived = []

    def _bring(self) -> None:
        """Hand the own row to all ranks of the host."""
        for place, row in enumerate(self.theirs):
            if place != self.place:
                for target, part in zip(row, self.mine, strict=True):
                    target.copy_(part)
        if self.theirs or self.host.size() == 1:
            return
        rows = self.whole
        if rows is None:
            rows = self.tensor.new_empty(self.host.size() * len(self.mine) * self.part.numel())
        length = rows.numel() // self.host.size()
        own = rows[self.place * length : (self.place + 1) * length]
        if self.whole is None:
            torch.cat(self.mine, out=own)
        self._in_host("all_gather", own, rows)
        if self.whole is None:
            for target, part in zip(self._rows(), rows.view(-1, self.part.numel()), strict=True):
                target.copy_(part)

    # Helpers.

    def _rows(self) -> Row:
        """The parts of all ranks, by place and host."""
        return [part for place in range(self.host.size()) for part in self.cut(self.tensor, place)]

    def _in_host(self, what: Literal["reduce_scatter", "all_gather"], source: Tensor, target: Tensor) -> None:
        """For a rank that cannot access the others' tensors."""
        if isinstance(self.host, SharedMemoryGroup) and source.device.type == "cpu":
            self.host.run_now(what, source, target, self.op if what == "reduce_scatter" else "")
        elif what == "reduce_scatter":
            wait_for(native.reduce_scatter(target, source, self.op, self.host), "the sum in the host")
        else:
            wait_for(native.all_gather(target, source, self.host), "the gather in the host")

    def _exchange(self, sent: Row, places: Row) -> None:
        """sent, places: by host; what goes there, and where what comes from there is put."""
        others = [(self.here + i) % len(self.peers) for i in range(1, len(self.peers))]  # not all to one
        sends = [Message(sent[host], self.peers[host], self.tag) for host in others]
        receives = [Message(places[host], self.peers[host], self.tag) for host in others]
        self.works = post(sends, receives, self.cross)

    def _wait(self) -> None:
        for work in self.works:
            wait_for(work, "the exchange between hosts")
        self.works = []


def _reduce(op: str, parts: Sequence[Tensor], out: Tensor) -> None:
    """out = op over parts, in their order; `out` may be one of them."""
    how = reduction(op, out.dtype)
    in_place = all(out.data_ptr() != each.data_ptr() for each in parts[2:])
    how(parts, out, lambda numel, dtype: out.new_empty(numel, dtype=dtype), in_place)
