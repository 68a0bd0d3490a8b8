"""A mistake that one rank finds ends all of them, and is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from imece.collectives.mistakes import tried
from imece.mesh import Mesh

Result = TypeVar("Result")

STATUS = 2  # with which a rank ends when another one, or itself, has said what is wrong


def together(mesh: Mesh, call: Callable[[], Result]) -> Result:
    """`call()` on every rank. No collective may be within it.

    If it raises UserError on any rank, the first of these ranks raises it and all others leave silently with
    status 2: nobody waits for a rank that has gone.
    """
    result, mine, wrong = tried(call, mesh.world_group, mesh.device, "mistakes of ranks")
    if not wrong:
        return cast(Result, result)
    if mine is not None and mesh.rank == next(iter(wrong)):
        raise mine
    raise SystemExit(STATUS)
