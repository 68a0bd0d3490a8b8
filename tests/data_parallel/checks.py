"""Many checks in few starts of ranks: each on a group of its own, each a test of its own.

    CHECKS = {"sum": check_sum}                          # each: check(group) -> None, on every rank

    @pytest.mark.parametrize("job", jobs(__name__, CHECKS, (2, "shm"), (3, "gloo")))
    def test_sum(job: Job, request: pytest.FixtureRequest) -> None:
        passed(job, request)

The selected tests of one number of ranks and one backend, of all files, share starts of _TOGETHER checks.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

Check = Callable[[dist.ProcessGroup], None]

_GROUP_TIMEOUT_S = 60.0  # a check that fails on one rank alone keeps the others waiting so long
_TOGETHER = 60  # checks of one start: few enough for its time limit on any machine
_START_TIMEOUT_S = 240.0


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Within a check: what each rank has."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True)
class Job:
    """One check at one number of ranks on one backend."""

    module: str  # whose CHECKS has it
    name: str
    world_size: int
    backend: str

    @property
    def where(self) -> tuple[int, str]:
        return self.world_size, self.backend


def jobs(module: str, names: Iterable[str], *where: tuple[int, str]) -> list[Any]:
    """Parameters for pytest: every check at each (number of ranks, backend)."""
    names = list(names)
    found = [Job(module, name, *place) for place in where for name in names]
    assert found, "no check to run"
    return [pytest.param(job, id=f"{job.name}-{job.world_size} {job.backend}") for job in found]


def slow(found: list[Any]) -> list[Any]:
    """The same parameters, for `make test-all` alone: a sibling of each runs always."""
    return [pytest.param(*each.values, marks=pytest.mark.slow, id=each.id) for each in found]


def run_each(wanted: list[list[str]]) -> list[str]:
    """In a rank. wanted: [module, name] of each check. What became of them: a traceback, "" if one passed."""
    told = []
    for module, name in wanted:
        print("---", name, flush=True)  # the last one before a hang
        check: Check = importlib.import_module(module).CHECKS[name]
        dist.barrier()  # one that failed before comes late
        group = dist.new_group(timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
        torch.manual_seed(dist.get_rank())
        try:
            check(group)
            told.append("")
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - kept: the test of that name shows it
            told.append(traceback.format_exc())
        dist.destroy_process_group(group)
    return told


_told: dict[Job, list[str] | AssertionError] = {}  # by job: what each rank told, or how the start failed


def passed(job: Job, request: pytest.FixtureRequest) -> None:
    """AssertionError with the tracebacks of the job's check. The first test of a start runs all of it."""
    if job not in _told:
        alike = [each for each in _selected(request) if each.where == job.where]
        first = alike.index(job) // _TOGETHER * _TOGETHER
        _start(alike[first : first + _TOGETHER])
    told = _told[job]
    if isinstance(told, AssertionError):
        raise told
    wrong = [f"--- rank {rank}\n{each}" for rank, each in enumerate(told) if each]
    assert not wrong, f"{job.name}, {job.world_size} ranks on {job.backend}\n" + "\n".join(wrong)


def _selected(request: pytest.FixtureRequest) -> list[Job]:
    """Of all tests that pytest will run."""
    found = (getattr(item, "callspec", None) for item in request.session.items)
    parameters = (spec.params.get("job") for spec in found if spec is not None)
    return [each for each in parameters if isinstance(each, Job)]


def _start(together: list[Job]) -> None:
    first = together[0]
    try:
        by_rank = run_ranks(
            run_each,
            first.world_size,
            args=[[[job.module, job.name] for job in together]],
            backend=first.backend,
            timeout_s=_START_TIMEOUT_S,
            after_failure_s=_GROUP_TIMEOUT_S,
        )
    except AssertionError as error:
        _told.update(dict.fromkeys(together, error))
    else:
        _told.update(zip(together, (list(each) for each in zip(*by_rank, strict=True)), strict=True))
