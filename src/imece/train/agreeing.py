"""If one rank finds a mistake, all ranks end, and one of them reports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from imece.collectives.mistakes import tried
from imece.mesh import Mesh

Result = TypeVar("Result")

STATUS = 2  # exit status of a rank when a mistake was reported, by itself or another rank


def together(mesh: Mesh, call: Callable[[], Result]) -> Result:
    """`call()` on every rank. It must not contain a collective.

    If it raises UserError on some ranks, the first of these raises it and all others exit silently with
    status 2, so that nobody waits for a rank that is gone.
    """
    result, mine, wrong = tried(call, mesh.world_group, mesh.device, "mistakes of ranks")
    if not wrong:
        return cast(Result, result)
    if mine is not None and mesh.rank == next(iter(wrong)):
        raise mine
    raise SystemExit(STATUS)
