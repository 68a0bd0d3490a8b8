"""A mistake that one rank finds ends all of them, and is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from imece.collectives.texts import gather_texts
from imece.errors import UserError
from imece.mesh import Mesh

Result = TypeVar("Result")

STATUS = 2  # with which a rank ends when another one, or itself, has said what is wrong


def together(mesh: Mesh, call: Callable[[], Result]) -> Result:
    """`call()` on every rank. No collective may be within it.

    If it raises UserError on any rank, the first of these ranks raises it and all others leave silently with
    status 2: nobody waits for a rank that has gone.
    """
    mistake: UserError | None = None
    result: Result | None = None
    try:
        result = call()
    except UserError as error:
        mistake = error
    said = gather_texts([str(mistake)] if mistake else [], mesh.world_group, mesh.device, "mistakes of ranks")
    wrong = [rank for rank, texts in enumerate(said) if texts]
    if not wrong:
        return result  # type: ignore[return-value]  # without a mistake, call() has returned
    if mistake is not None and mesh.rank == wrong[0]:
        raise mistake
    raise SystemExit(STATUS)
