"""Gathers texts from all ranks on all ranks: for messages, not for use within a step.

They travel on the CPU if the group moves the CPU's tensors. On a GPU the host would wait for all that it has
to do; and if a rank is lost meanwhile, NCCL's call is aborted, which leaves anything in place of the texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from imece.collectives import ops
from imece.collectives.calls import host_device

Said = TypeVar("Said")

_MOST_BYTES = 2**20
_MOST_CHARACTERS = 2**16  # of one text: JSON takes up to 12 bytes for each


def gather_texts(
    mine: list[str], group: dist.ProcessGroup, device: torch.device, label: str = ""
) -> list[list[str]]:
    """The lists of all ranks, in the group's order. Of a list of more than 1 MiB only the beginning is sent.
    A single text that is longer is shortened, and says so.
    """
    data = json.dumps(mine).encode()
    while len(data) > _MOST_BYTES:
        mine = mine[: len(mine) // 2] or [mine[0][:_MOST_CHARACTERS] + f" ... ({len(mine[0])} characters)"]
        data = json.dumps(mine).encode()
    return gather_json(mine, group, device, label)


def gather_json(mine: Any, group: dist.ProcessGroup, device: torch.device, label: str = "") -> list[Any]:
    """Every rank's object, in the group's order, complete however long: it travels in parts of 1 MiB a rank.

    For data that a program reads; for messages to people `gather_texts` is enough. device: of the model.
    TypeError if `mine` is no JSON.
    """
    device = host_device(group, device)
    data = bytearray(json.dumps(mine).encode())
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    ops.all_gather(lengths, torch.tensor([len(data)], device=device), group=group, label=label)
    longest = int(lengths.max())
    said = [bytearray() for _ in range(group.size())]
    for begin in range(0, longest, _MOST_BYTES):
        part = data[begin : begin + _MOST_BYTES]
        row = torch.zeros(min(_MOST_BYTES, longest - begin), dtype=torch.uint8, device=device)
        if part:
            row[: len(part)] = torch.frombuffer(part, dtype=torch.uint8).to(device)
        rows = row.new_empty(group.size() * len(row))
        ops.all_gather(rows, row, group=group, label=label)
        for text, raw in zip(said, rows.view(-1, len(row)).cpu().numpy(), strict=True):
            text += raw.tobytes()
    return [json.loads(text.rstrip(b"\0")) for text in said]


def of_ranks(group: dist.ProcessGroup, said: Sequence[Said]) -> dict[int, Said]:
    """What the ranks of a group said, by their ranks in the world, which is how errors name them."""
    return dict(zip(dist.get_process_group_ranks(group), said, strict=True))
