"""Mistakes of a user that only some ranks can see: one exchange tells all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from imece.collectives.texts import gather_texts, of_ranks
from imece.errors import UserError

Result = TypeVar("Result")


class Outcome(NamedTuple, Generic[Result]):
    """The result of a call on this rank, and the mistakes on any rank."""

    result: Result | None
    mine: UserError | None
    wrong: dict[int, str]
    """Rank in the world -> its mistake, ascending; if empty, there is a result."""

    def on_all(self) -> Result:
        """The result. If any rank has made a mistake, UserError on all: the own one, or that of the first."""
        if self.mine is not None:
            raise self.mine
        for rank, text in self.wrong.items():
            raise UserError(f"rank {rank}: {text}")
        return cast(Result, self.result)


def tried(
    call: Callable[[], Result], group: dist.ProcessGroup, device: torch.device, label: str
) -> Outcome[Result]:
    """Run `call()`, which makes no collective, on every rank of `group`; its UserErrors are returned,
    not raised."""
    mine: UserError | None = None
    result: Result | None = None
    try:
        result = call()
    except UserError as error:
        mine = error
    said = gather_texts([str(mine)] if mine else [], group, device, label)
    wrong = {rank: texts[0] for rank, texts in of_ranks(group, said).items() if texts}
    return Outcome(result, mine, wrong)
