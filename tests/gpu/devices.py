"""The same tests for CPU and GPU: on the CPU they are seen to pass and fail, on a GPU they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.ranks import run_ranks

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run_on(
    fn: Callable[..., Any], ranks: int, device: str, args: Sequence[Any] = (), hosts: bool = False
) -> list[Any]:
    """What `fn(device, *args)` returned in each rank; hosts: each as if on a host of its own.

    On a GPU in fresh interpreters: a copy of a process cannot use CUDA if that one has looked for it.
    """
    return run_ranks(
        fn, ranks, args=[device, *args], backend=None, fresh=device == "cuda", timeout_s=240,
        ranks_per_host=1 if hosts else None,
    )  # fmt: skip
