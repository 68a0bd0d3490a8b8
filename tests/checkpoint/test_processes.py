"""Saves in real processes: their memory, and errors from the kernel."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint import Checkpoints, Slice, all_steps, open_checkpoint
from tests.checkpoint.crew import partials
from tests.ranks import run_ranks

_TENSORS, _NUMEL = 8, 1_000_000
_TOTAL = 4 * (_TENSORS * _NUMEL + 2 * _NUMEL)  # bytes of the whole state


def _state(rank: int, step: int) -> dict[str, torch.Tensor | Slice]:
    own = torch.full((_NUMEL,), float(10 * step + rank))
    return {f"model/{i}": torch.full((_NUMEL,), float(i + step)) for i in range(_TENSORS)} | {
        "optimizer/x": Slice(own, (2, _NUMEL), _NUMEL * rank)
    }


def save_in_processes(folder: str) -> dict[str, Any]:
    """Steps 1 and 2, in which memory is measured; 3, in which rank 1 may not write more than 1 MiB; and 4."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alarms: list[str] = []
    checkpoints = Checkpoints(Path(folder), rank=rank, world_size=world_size, alarm=alarms.append, keep=4)

    def save(step: int) -> bool:
        checkpoints.save(step, tensors, {"step": step}, {"rank": rank})
        return checkpoints.finish()

    tensors: dict[str, torch.Tensor | Slice] = {"x": torch.zeros(1000)}
    assert save(0)  # all that is used for the first time
    tensors = _state(rank, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the highest is now what there is now
    before = _highest_memory()
    assert save(1) and save(2)
    growth = _highest_memory() - before
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    refused = not save(3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # Not of step 4: the other rank may be writing that by now.
    left = [name for name in partials(Path(folder)) if name.startswith("step-00000003")]
    tensors = _state(rank, 4)
    assert save(4), alarms
    checkpoints.close()
    return {"growth": growth, "refused": refused, "alarms": alarms, "left": left}


def _highest_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each of the two ranks had to say."""
    return run_ranks(save_in_processes, 2, args=(str(folder),), backend=None)


def test_memory_for_one_copy_of_the_share(told: list[dict[str, Any]]) -> None:
    for of_rank in told:
        assert 0.9 * _TOTAL / 2 < of_rank["growth"] < _TOTAL / 2 + (6 << 20)


def test_a_file_that_the_kernel_cuts_short(told: list[dict[str, Any]], folder: Path) -> None:
    for of_rank in told:
        assert of_rank["refused"] and not of_rank["left"]
        (alarm,) = of_rank["alarms"]
        assert "step 3 was not saved: rank 1: rank-00001.safetensors: File too large" in alarm
    assert all_steps(folder) == [0, 1, 2, 4]


def test_what_is_on_the_disk(told: list[dict[str, Any]], folder: Path) -> None:
    assert told
    for step, made_at in ((1, 1), (2, 1), (4, 4)):
        saved = open_checkpoint(folder / f"step-{step:08d}")
        assert saved.rank_states == [{"rank": 0}, {"rank": 1}]
        for i in range(_TENSORS):
            assert bool((saved.tensor(f"model/{i}") == i + made_at).all())
        border = saved.slice("optimizer/x", _NUMEL - 1, _NUMEL + 1)
        assert border.tolist() == [10 * made_at, 10 * made_at + 1]
