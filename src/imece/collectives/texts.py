"""What every rank has to say, on every rank: for messages, not for the way of a step."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from imece.collectives import ops

_MOST_BYTES = 2**20


def gather_texts(
    mine: list[str], group: dist.ProcessGroup, device: torch.device, label: str = ""
) -> list[list[str]]:
    """The lists of all ranks, by rank. Of a list of more than 1 MiB only the beginning is sent."""
    data = json.dumps(mine).encode()
    while len(data) > _MOST_BYTES:
        mine = mine[: len(mine) // 2]
        data = json.dumps(mine).encode()
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    ops.all_gather(lengths, torch.tensor([len(data)], device=device), group=group, label=label)
    longest = int(lengths.max())
    row = torch.zeros(longest, dtype=torch.uint8, device=device)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = row.new_empty(group.size() * longest)
    ops.all_gather(rows, row, group=group, label=label)
    return [json.loads(raw.tobytes().rstrip(b"\0")) for raw in rows.view(-1, longest).cpu().numpy()]
