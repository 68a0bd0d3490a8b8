"""What a user got wrong, when only some of the ranks can see it: all of them learn of it in one exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from imece.collectives.texts import gather_texts
from imece.errors import UserError

Result = TypeVar("Result")


class Outcome(NamedTuple, Generic[Result]):
    """What came of a call on this rank, and what went wrong on any."""

    result: Result | None
    mine: UserError | None
    wrong: dict[int, str]
    """Rank -> its mistake, ascending; empty if there is none, and then there is a result."""


def tried(
    call: Callable[[], Result], group: dist.ProcessGroup, device: torch.device, label: str
) -> Outcome[Result]:
    """`call()`, without any collective in it, on every rank of `group`; its UserErrors are not raised."""
    mine: UserError | None = None
    result: Result | None = None
    try:
        result = call()
    except UserError as error:
        mine = error
    said = gather_texts([str(mine)] if mine else [], group, device, label)
    return Outcome(result, mine, {rank: texts[0] for rank, texts in enumerate(said) if texts})
