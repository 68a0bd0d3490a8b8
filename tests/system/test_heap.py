"""A step on a CPU reuses the memory that the previous one freed."""

from __future__ import annotations

import resource
import sys

import pytest
import torch
from torch import nn

import imece
from tests.ranks import run_ranks


def count_page_faults() -> int:
    """Of a step, which saves more for its backward than glibc keeps by itself: 128 MiB in blocks of 1."""
    imece.init(device="cpu")
    factor = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([factor], lr=1e-3)
    counts = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x = torch.ones(2**18)
        for _ in range(64):
            x = (x * factor).abs()
        x.mean().backward()
        del x
        optimizer.step()
        optimizer.zero_grad()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[4:])  # holes of the first ones fill up; and the system may take pages at any time


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_a_step_takes_no_memory_anew() -> None:
    (kept,) = run_ranks(count_page_faults, 1, backend=None)
    assert kept < 100
    each_mapped = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # whatever lies at the end of the heap
    (as_asked,) = run_ranks(count_page_faults, 1, backend=None, env=each_mapped, fresh=True)
    assert as_asked > 500, "the environment sets it, and init() is to leave it alone"
