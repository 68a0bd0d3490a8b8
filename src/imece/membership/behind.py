"""If every rank holds everything: a rank that is behind gets the whole state from one that is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from imece.checkpoint.deal import Slice
from imece.checkpoint.state.training_state import TrainingState
from imece.collectives import ops
from imece.collectives.texts import gather_json
from imece.membership.pieces import DTYPES, Pieces

_CHUNK_BYTES = 64 * 2**20


class _Sent(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def catch_up(
    state: TrainingState,
    root: int,
    receives: bool,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    frozen: bool = True,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Give the whole training state of rank `root` to the ranks behind it. All ranks of `group` call this.

    receives: whether this rank is behind. device: of the model. frozen: include the parameters that are
    not trained. check: raises if anything that has come was aborted on its way; then nothing is loaded.
    """
    sends = group.rank() == root
    left_out = set() if frozen else state.frozen_names()
    own = state.own() if sends else {}
    held = {name: Slice.of(value) for name, value in own.items() if name not in left_out}
    table = [[name, str(each.tensor.dtype), list(each.shape)] for name, each in held.items()]
    said = gather_json(table, group, device, "names of the training state")[root]
    pieces = Pieces()
    for chunk in _chunks(said):
        nbytes = sum(each.nbytes for each in chunk)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if sends:
            parts = [held[each.name].tensor.detach().reshape(-1).view(torch.uint8) for each in chunk]
            torch.cat([part.to(device) for part in parts], out=flat)
        ops.broadcast(flat, root, group=group, label="training state for ranks that are behind")
        if receives:
            for each, part in zip(chunk, flat.split([each.nbytes for each in chunk]), strict=True):
                pieces.add(each.name, each.shape, 0, part.clone().view(each.dtype).cpu())
    if receives:
        check()
        state.load(pieces, frozen=frozen)


def _chunks(table: Sequence[Sequence[Any]]) -> Iterator[list[_Sent]]:
    """Tensors grouped to travel together, in a few large messages."""
    chunk: list[_Sent] = []
    for name, dtype, shape in table:
        sent = _Sent(name, DTYPES[dtype], tuple(shape))
        if chunk and sum(each.nbytes for each in chunk) + sent.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(sent)
    if chunk:
        yield chunk
