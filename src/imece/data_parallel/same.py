"""All ranks hold the same model: checked at construction, copied from rank 0, watched for drift."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.collectives.texts import gather_texts, of_ranks
from imece.errors import MismatchError
from imece.listing import rank_words, some

_FLAT_BYTES = 64 * 2**20
_SHOWN = 5  # parameters in a message
_WRITE_ALIKE = (
    "All ranks write the same values, or load the same file; what rank 0 alone has goes to the others first, "
    "by imece.broadcast(parameter.detach(), 0)"
)


def check_same_shapes(
    named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """MismatchError on every rank that names the first differing parameter, unless all ranks agree.

    Compares names, shapes, dtypes, strides and the number of parameters.
    """
    mine = [f"{name}: {_kind(each)}" for name, each in named]
    if texts := texts_that_differ(mine, group, device, "digest of the parameters"):
        at, here = first_difference(texts, "no parameter")
        counts = {rank: len(each) for rank, each in texts.items()}
        have = f"; the ranks have {by_rank(counts)} parameters" if len(set(counts.values())) > 1 else ""
        raise MismatchError(
            f"DDP expects same model across all ranks, but parameter {at} is {by_rank(here)}{have}. "
            f"Do all ranks build the same model?"
        )


def check_same_optimizers(mine: list[str], group: dist.ProcessGroup, device: torch.device) -> None:
    """MismatchError unless all ranks have the same list. mine: what steps each parameter."""
    if texts := texts_that_differ(mine, group, device, "digest of the optimizers"):
        _, here = first_difference(texts, "nothing")
        raise MismatchError(f"the ranks' optimizers differ: {by_rank(here)}. Do all ranks make the same?")


def texts_that_differ(
    mine: list[str], group: dist.ProcessGroup, device: torch.device, label: str
) -> dict[int, list[str]]:
    """The lists of all ranks, by rank; empty if they are equal, which one message of 32 bytes can tell."""
    checksum = hashlib.sha256("\n".join(mine).encode()).digest()
    words = torch.frombuffer(bytearray(checksum), dtype=torch.int64).to(host_device(group, device))
    digests = words.new_empty(group.size() * words.numel())
    ops.all_gather(digests, words, group=group, label=label)
    same = len({tuple(row) for row in digests.view(group.size(), -1).tolist()}) == 1
    return {} if same else of_ranks(group, gather_texts(mine, group, device))


def first_difference(texts: Mapping[int, Sequence[str]], missing: str) -> tuple[int, dict[int, str]]:
    """The index of the first text that is not the same on all ranks, and theirs by rank. texts: lists that
    differ; missing: stands for the text of a rank that has no more."""
    rows = zip_longest(*texts.values(), fillvalue=missing)
    at, row = next((at, row) for at, row in enumerate(rows) if len(set(row)) > 1)
    return at, dict(zip(texts, row, strict=True))


def sync_from(
    root: int,
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Give all ranks the values of rank `root`. Tensors travel flat, up to 64 MiB at a time.

    device: where they travel, if some lie in memory that the group does not reach.

    ValueError for a tensor that is not dense.
    """
    flats: list[list[torch.Tensor]] = []
    open_flat: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in (inner for each in tensors for inner in tensors_inside(each)):
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"the model has a {str(tensor.layout).removeprefix('torch.')} tensor of shape "
                f"{list(tensor.shape)}, and ranks send each other dense ones: name it in the module's "
                f"_ddp_params_and_buffers_to_ignore, and make it alike on all ranks"
            )
        key = (tensor.dtype, tensor.device)
        members, nbytes = open_flat.get(key, ([], 0))
        if not members or nbytes + tensor.nbytes > _FLAT_BYTES:
            members, nbytes = [], 0
            flats.append(members)
        members.append(_unexpanded(tensor.detach()))
        open_flat[key] = members, nbytes + members[-1].nbytes
    with torch.no_grad():
        for members in flats:
            flat = torch.cat([each.reshape(-1) for each in members])
            flat = flat.to(device) if device is not None else flat
            ops.broadcast(flat, root, group=group, label=label)
            for member, part in zip(members, flat.split([each.numel() for each in members]), strict=True):
                member.copy_(part.view(member.shape))


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Each element in memory once: expand() shows some of them often, and nothing may write into that."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(tensor.size(dim), 1))
    return tensor


def check_drift(named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, step: int) -> None:
    """MismatchError that names ranks and parameters unless all ranks hold the same bits."""
    if differ := _which_differ(named, group):
        raise MismatchError(
            f"step {step}: the ranks' parameters have drifted apart: {differ} (of {len(named)} parameters). "
            f"Something changed them on one rank alone, or an operation gives other results there"
        )


@contextlib.contextmanager
def written_alike(
    named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, device: torch.device, by: str
) -> Iterator[None]:
    """Inside, all ranks write the same values into parameters. Afterwards MismatchError that names one which
    only some have written, unless all ranks hold the same bits. by: what the script calls to write so.

    All bits are compared only where ranks have written into different parameters, as far as torch counts
    writes, or have other first, middle or last elements, since writes through `.data` are not counted.
    """
    before = [each._version for _, each in named]
    yield
    mine = [name for (name, each), was in zip(named, before, strict=True) if each._version != was]
    looked_at = torch.cat([_some_bytes(each).to(device) for _, each in named])
    mine.append(hashlib.sha256(looked_at.cpu().numpy().tobytes()).hexdigest())
    label = f"parameters written by {by}, which all ranks call"
    if texts_that_differ(mine, group, device, label) and (differ := _which_differ(named, group)):
        raise MismatchError(
            f"inside of {by} only some ranks have written, or not the same: {differ} (of {len(named)} "
            f"parameters). {_WRITE_ALIKE}"
        )


def apart_by_writes(
    named: Sequence[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    wrote: bool,
    more: bool,
) -> str:
    """After the script wrote into parameters on some rank: which ranks and parameters differ, in words, on
    all ranks; empty if all ranks hold the same bits. A collective.

    wrote: whether it did on this rank. more: whether ranks may differ here for now, as it has written since
    then, or into parts that a step brings to all. Where that is so on some rank nobody can tell.
    """
    if not (differ := _which_differ(named, group)):
        return ""
    mine = ["wrote"] * wrote + ["more"] * more
    said = of_ranks(group, gather_texts(mine, group, device, "who wrote"))
    if any("more" in each for each in said.values()):
        return ""
    who = rank_words([rank for rank, each in said.items() if each])
    return (
        f"the script wrote into parameters on {who}, outside of an optimizer's step, and now the ranks "
        f"differ: {differ} (of {len(named)} parameters). {_WRITE_ALIKE}"
    )


def _which_differ(named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup) -> str:
    """The first parameters of which ranks hold different bits, with those ranks; empty if there are none."""
    device = named[0][1].device
    with torch.no_grad():
        mine = torch.stack([digest(each).to(device) for _, each in named])
    everybody = mine.new_empty(group.size() * mine.numel())
    ops.all_gather(everybody, mine, group=group, label="digests of the parameters")
    rows = everybody.view(group.size(), -1)
    if bool((rows == rows[0]).all()):
        return ""
    said = []
    for (name, _), column in zip(named, rows.t().tolist(), strict=True):
        votes = Counter(column)
        if len(votes) > 1:
            (most, count), *_ = votes.most_common()
            odd = rank_words([rank for rank, value in of_ranks(group, column).items() if value != most])
            said.append(f"{name} on {odd}" if count > 1 else f"{name} on all ranks")
    return some(said, _SHOWN, "; ")


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 digest of all bits; it does not depend on the order of summation."""
    if is_made_of_others(tensor):
        return digest(torch.stack([digest(each) for each in tensors_inside(tensor)]))
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-raw.numel() // 8) * 8)
        padded[: raw.numel()] = raw
        raw = padded
    words = raw.view(torch.int64)
    mixed = words >> 29
    mixed ^= words
    # A plain sum would not see two words that changed places.
    mixed *= torch.arange(1, 2 * words.numel() + 1, 2, device=words.device)
    return mixed.sum()


def _some_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Those of its first, middle and last elements, uint8."""
    raw = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors_inside(tensor)]
    return torch.cat([each[at:][:16] for each in raw for at in (0, each.numel() // 2, -16)])


def is_made_of_others(tensor: object) -> bool:
    """Whether its class keeps its values in other tensors: a quantised one, say, in codes and scales."""
    return is_traceable_wrapper_subclass(tensor)


def tensors_inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors of which `tensor` is made; itself if it is an ordinary one."""
    if not is_made_of_others(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from tensors_inside(getattr(tensor, name))


def _kind(tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strides}{frozen}"


def by_rank(said: Mapping[int, object]) -> str:
    """What each rank says, grouped by answer: "7 on rank 1, 1 on ranks 0, 2-5"."""
    by_words: dict[str, list[int]] = {}
    for rank, words in said.items():
        by_words.setdefault(str(words), []).append(rank)
    return ", ".join(f"{words} on {rank_words(ranks)}" for words, ranks in by_words.items())
