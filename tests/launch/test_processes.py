"""Ending processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess

import pytest

from imece.launch.processes import kill_group


def test_a_launcher_without_means_to_look_kills_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait forever for a rank that nobody has ended."""

    def no_memory(_: str) -> list[str]:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with subprocess.Popen(["sleep", "2"], process_group=0) as rank, monkeypatch.context() as patch:
        patch.setattr("os.listdir", no_memory)
        kill_group(rank.pid)
    assert rank.returncode == -signal.SIGKILL
