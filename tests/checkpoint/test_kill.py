"""Processes that save are killed at random instants: the disk always holds a whole checkpoint."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from imece.checkpoint import Checkpoints, newest
from tests.checkpoint.crew import assert_whole, newest_whole, partials, state_of
from tests.ranks import run_ranks


def kill_savers(folder: str, kills: int, world_size: int, seed: int) -> dict[str, int]:
    """So many times, savers start anew from what they find, and are killed. What was seen, counted."""
    torch.set_num_threads(1)  # no threads, so it can fork: that is quick, for torch is imported already
    path, generator = Path(folder), random.Random(seed)
    seen = {"kills": 0, "midway": 0, "replacing": 0, "newer": 0}
    step = 0
    for _ in range(kills):
        done, report = os.pipe()
        savers = [_fork(path, rank, world_size, report) for rank in range(world_size)]
        os.close(report)
        try:
            for _ in range(generator.randrange(7)):
                assert os.read(done, 1), "the savers ended by themselves"
            time.sleep(generator.uniform(0.0, 0.02))
        finally:
            os.close(done)
            generator.shuffle(savers)
            for pid in savers:
                os.kill(pid, signal.SIGKILL)
                time.sleep(generator.choice([0, 0.002]))
        for pid in savers:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            seen["kills"] += 1
        seen["midway"] += bool(partials(path))
        seen["replacing"] += any(path.glob("*.old"))
        damaged: list[str] = []
        saved = newest(path, damaged.append)
        assert not damaged, damaged
        if saved is not None:
            assert saved.step >= step
            assert_whole(saved, saved.step, world_size)
            seen["newer"] += saved.step > step
            step = saved.step
        assert saved is not None or step == 0
    return seen


def _fork(folder: Path, rank: int, world_size: int, report: int) -> int:
    """A saver that goes on for ever: each step twice, so half of the time one takes another's place.

    Rank 0 writes a byte to `report` when it begins with a save, having finished the one before.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        found = newest_whole(folder)
        checkpoints = Checkpoints(folder, rank=rank, world_size=world_size, alarm=print, keep=1)
        for turn in count(2 * found.step if found else 2):
            step = turn // 2
            checkpoints.save(step, state_of(step), {"step": step}, {"rank": rank, "step": step})
            if rank == 0:
                os.write(report, b".")
            if os.getppid() != parent:
                break
    except BaseException as error:
        print(f"saver {rank}: {error!r}", file=sys.stderr, flush=True)
        raise
    finally:
        os._exit(1)


def kill_all(folder: str, kills: list[int]) -> list[dict[str, int]]:
    """`kill_savers` with 1, 2, ... ranks: kills[0] times, kills[1] times, ..."""
    return [
        kill_savers(f"{folder}/{world_size}", times, world_size, seed=world_size + times)
        for world_size, times in enumerate(kills, 1)
    ]


def _check(folder: Path, kills: list[int]) -> None:
    (all_seen,) = run_ranks(kill_all, 1, args=(str(folder), kills), backend=None, timeout_s=30 + sum(kills))
    for world_size, (times, seen) in enumerate(zip(kills, all_seen, strict=True), 1):
        print(f"{world_size} ranks: {seen}")
        assert seen["kills"] == times * world_size
        assert seen["midway"] >= times // 4, f"too few were hit in the middle of a save: {seen}"
        assert seen["newer"] >= times // 4, f"too few came so far as to save anything: {seen}"


def test_killed_at_random_instants(tmp_path: Path) -> None:
    _check(tmp_path, [13, 12])


@pytest.mark.slow
def test_killed_at_200_random_instants(tmp_path: Path) -> None:
    _check(tmp_path, [200, 200, 200])
