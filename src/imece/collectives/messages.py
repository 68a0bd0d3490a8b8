"""Messages between two ranks, alone or several that progress together. See also the head of ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from imece.collectives.calls import Call, copy_back, flat_place, group_or_default
from imece.collectives.execute import Message, post
from imece.collectives.given_up import Waitable
from imece.collectives.pending import Pending, without_gradients
from imece.collectives.reduction import flattened
from imece.collectives.shared_memory.tensors import check_rank, check_tag, check_tensor, check_written
from imece.listing import kind_of

Tensor = torch.Tensor
Group = dist.ProcessGroup


@dataclass(frozen=True, eq=False)  # tensors cannot be compared
class Send:
    """One message of `exchange`: `tensor` to rank `dst` of the group."""

    tensor: Tensor
    dst: int
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Recv:
    """One message of `exchange`: into `tensor`, from rank `src` of the group."""

    tensor: Tensor
    src: int
    tag: int = 0


def send(tensor: Tensor, dst: int, *, tag: int = 0, group: Group | None = None, label: str = "") -> Tensor:
    """Send M bytes to rank dst, which calls `recv` with the same dtype, numel and tag; returns when they
    have left.

    Messages of one pair and tag arrive in the order of sending. On a GPU, `recv` receives these messages, not
    `exchange`. ValueError if dst is this rank or not in the group, for a tag that is no int of 64 bits, and
    for any tag over NCCL, which has none.

    dst counts within the group: a ProcessGroup that holds both ranks, None for all. label: what the tensor
    is, for errors. PeerLostError if the other rank is gone, CollectiveTimeoutError if it comes too late.
    """
    check_tensor("send", tensor)
    group = group_or_default(group)
    _check_peer("send to", dst, group)
    check_tag(tag)
    messages = [Message(flattened(tensor), dst, tag)]
    call = Call("send", group, tensor, root=dst, label=label)
    call.native(lambda: post(messages, [], group, alone=True), tensor, None, async_op=False)
    return tensor


def recv(tensor: Tensor, src: int, *, tag: int = 0, group: Group | None = None, label: str = "") -> Tensor:
    """Receive M bytes from rank src of the group into `tensor`, and return it. tag, label and errors: as
    for `send`."""
    check_tensor("recv", tensor)
    group = group_or_default(group)
    _check_peer("recv from", src, group)
    check_tag(tag)
    place = flat_place(tensor)
    call = Call("recv", group, tensor, root=src, label=label)
    call.native(
        lambda: post([], [Message(place, src, tag)], group, alone=True),
        tensor,
        lambda: copy_back(place, tensor),
        async_op=False,
    )
    return tensor


@overload
def exchange(
    messages: Sequence[Send | Recv],
    *,
    group: Group | None = None,
    async_op: Literal[False] = False,
    label: str = "",
) -> None: ...
@overload
def exchange(
    messages: Sequence[Send | Recv], *, group: Group | None = None, async_op: Literal[True], label: str = ""
) -> Pending[None]: ...
@overload
def exchange(
    messages: Sequence[Send | Recv], *, group: Group | None = None, async_op: bool, label: str = ""
) -> Pending[None] | None: ...
def exchange(
    messages: Sequence[Send | Recv], *, group: Group | None = None, async_op: bool = False, label: str = ""
) -> Any:
    """All these messages progress together, in any order, without deadlock; a rank may write to itself.

    Messages of one pair and tag arrive in the order in which they are listed. Over NCCL tags only tell
    messages of one call apart, and the first call in a group waits for all its ranks: if a rank may have no
    messages, make another call first, such as an all_reduce. Returns None when all messages have ended
    (async_op: a Pending of None). ValueError for ranks outside the group, and for a Send and a Recv of this
    rank to itself that do not match.

    group: a ProcessGroup that holds this rank; None for all ranks. label: what the tensors are, for errors.
    PeerLostError if another rank is gone, CollectiveTimeoutError if it comes too late.
    """
    if not isinstance(messages, Sequence):
        raise TypeError(f"exchange: a list of imece.Send and imece.Recv is expected, not {kind_of(messages)}")
    group = group_or_default(group)
    rank = group.rank()
    sends, receives, places = [], [], []
    for message in messages:
        if not isinstance(message, Send | Recv):
            raise TypeError(f"exchange: imece.Send or imece.Recv is expected, not {type(message).__name__}")
        check_tensor(type(message).__name__, message.tensor)
        check_tag(message.tag)
        if isinstance(message, Send):
            check_rank("send to", message.dst, group)
            if message.dst != rank:
                sends.append(Message(flattened(message.tensor), message.dst, message.tag))
        else:
            check_rank("recv from", message.src, group)
            check_written(message.tensor)
            if message.src != rank:
                place = flat_place(message.tensor)
                places.append((place, message.tensor))
                receives.append(Message(place, message.src, message.tag))
    to_self = _pairs_with_itself(messages, rank)

    def finish() -> None:
        for place, tensor in places:
            copy_back(place, tensor)

    def start() -> list[Waitable]:
        for sent, received in to_self:
            received.tensor.detach().copy_(sent.tensor.reshape(received.tensor.shape))
        return post(sends, receives, group)

    first = messages[0].tensor if messages else None
    with without_gradients(*(message.tensor for message in messages if isinstance(message, Recv))):
        return Call("exchange", group, first, label=label).native(start, None, finish, async_op)


def _pairs_with_itself(messages: Sequence[Send | Recv], rank: int) -> list[tuple[Send, Recv]]:
    sends = [message for message in messages if isinstance(message, Send) and message.dst == rank]
    pairs = []
    for message in messages:
        if isinstance(message, Recv) and message.src == rank:
            match = next((each for each in sends if each.tag == message.tag), None)
            if match is None or match.tensor.numel() != message.tensor.numel():
                sent = "nothing" if match is None else f"{match.tensor.numel()} elements"
                raise ValueError(
                    f"rank {rank} sends itself {sent} with tag {message.tag} and receives "
                    f"{message.tensor.numel()} elements"
                )
            sends.remove(match)
            pairs.append((match, message))
    if sends:
        raise ValueError(f"rank {rank} sends itself {len(sends)} messages that it does not receive")
    return pairs


def _check_peer(what: str, rank: int, group: Group) -> None:
    check_rank(what, rank, group)
    if rank == group.rank():
        raise ValueError(f"{what} rank {rank}: that is this rank itself; use exchange, or copy")
