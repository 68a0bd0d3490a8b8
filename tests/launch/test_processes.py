"""Ending processes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess

import pytest

from imece.launch.processes import hear_of_cpu_limit, kill_group


def test_a_launcher_without_means_to_look_kills_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait forever for a rank that nobody has ended."""

    def no_memory(_: str) -> list[str]:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with subprocess.Popen(["sleep", "2"], process_group=0) as rank, monkeypatch.context() as patch:
        patch.setattr("os.listdir", no_memory)
        kill_group(rank.pid)
    assert rank.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("before", "after"), [((60, 60), (59, 60)), ((20, 60), (20, 60)), ((1, 1), (1, 1))])
def test_a_limit_of_cpu_time_ends_a_rank_by_a_signal_that_says_so(
    before: tuple[int, int], after: tuple[int, int]
) -> None:
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, before)
        hear_of_cpu_limit()
        os._exit(resource.getrlimit(resource.RLIMIT_CPU) != after)
    assert os.waitpid(pid, 0)[1] == 0
