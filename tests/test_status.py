"""What a rank tells its launcher of its own end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from imece.status import read_failure, tell_failures


def test_a_forked_copy_does_not_speak_for_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception ends it alone: the rank may go on, or end in another way."""
    shown = tmp_path / "shown"
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.write_text(repr(error[1])))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    stop = tell_failures(store, 3)
    try:
        if (pid := os.fork()) == 0:
            try:
                sys.excepthook(ValueError, ValueError("the copy's"), None)
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert shown.read_text() == 'ValueError("the copy\'s")' and read_failure(store, 3) is None
        sys.excepthook(ValueError, ValueError("its own"), None)
        failure = read_failure(store, 3)
        assert failure is not None and (failure.kind, failure.message) == ("ValueError", "its own")
    finally:
        stop()
