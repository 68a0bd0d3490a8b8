"""One rank's mistake ends all ranks, and is reported once."""

from __future__ import annotations

from typing import Any

import imece
from imece.errors import UserError
from imece.train.agreeing import together
from tests.ranks import run_ranks


def ends(wrong: list[list[int]]) -> list[Any]:
    """For each list of ranks that make a mistake, how `together` ended on this rank."""
    mesh = imece.init()

    def call(ranks: list[int]) -> str:
        if mesh.rank in ranks:
            raise UserError(f"mistake of {mesh.rank}")
        return f"value of {mesh.rank}"

    found: list[Any] = []
    for ranks in wrong:
        try:
            found.append(together(mesh, lambda ranks=ranks: call(ranks)))  # type: ignore[misc]
        except UserError as mistake:
            found.append(f"raised {mistake}")
        except SystemExit as leaving:
            found.append(leaving.code)
    return found


def test_who_says_it() -> None:
    by_rank = run_ranks(ends, 3, args=([[], [0], [2], [1, 2], [0, 1, 2], []],), backend=None)
    by_case = [list(case) for case in zip(*by_rank, strict=True)]
    fine = ["value of 0", "value of 1", "value of 2"]
    assert by_case == [
        fine,
        ["raised mistake of 0", 2, 2],
        [2, 2, "raised mistake of 2"],
        [2, "raised mistake of 1", 2],
        ["raised mistake of 0", 2, 2],
        fine,
    ]


def raises_another() -> None:
    mesh = imece.init()

    def call() -> None:
        if mesh.rank == 1:
            raise KeyError("a fault of ours")

    together(mesh, call)


def test_our_own_faults_are_not_hidden() -> None:
    traces = run_ranks(raises_another, 2, backend=None, expect="KeyError: 'a fault of ours'|PeerLostError")
    assert "KeyError" in traces[1]
