"""What a rank tells its launcher about its own end."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Client
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._utils import ExceptionWrapper

from imece.errors import MismatchError, PeerLostError, UserError
from imece.status import describe, read_failure, tell_failures


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError("it was made without what it would say")


def test_a_forked_copy_does_not_speak_for_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception ends it alone: the rank may go on, or end in another way."""
    shown = tmp_path / "shown"
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.write_text(repr(error[1])))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    stop = tell_failures(lambda: store, 3)
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
        sys.excepthook(Mute, Mute(), None)
        failure = read_failure(store, 3)
        assert failure is not None and (failure.kind, failure.message[:10]) == ("Mute", "<exception")
    finally:
        stop()


def test_a_worker_that_was_killed_is_named_beside_what_its_rank_saw_of_that() -> None:
    """As when the kernel ends a loader's worker for want of memory, while the rank takes a batch of it."""
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    try:
        assert describe(EOFError()).message == "", "it lives"
        worker.kill()
        killed = f"its worker {worker.pid} was killed by signal 9"
        assert describe(EOFError()).message == killed
        assert describe(ConnectionResetError(104, "reset")).message == f"[Errno 104] reset; {killed}"
        assert describe(ValueError("a bad sample")).message == "a bad sample"
    finally:
        worker.kill()
        worker.join()


def test_a_worker_that_has_ended_by_itself_is_named_where_that_may_be_why(tmp_path: Path) -> None:
    """As one whose dataset calls sys.exit(0): the batch that it has sent cannot be fetched."""
    worker = multiprocessing.get_context("fork").Process(target=int)
    worker.start()
    try:
        with pytest.raises(FileNotFoundError) as lost:
            Client(str(tmp_path / "socket"))
        why = f"[Errno 2] No such file or directory; its worker {worker.pid} ended with exit status 0"
        assert describe(lost.value).message == why
        with pytest.raises(FileNotFoundError) as own:
            (tmp_path / "data").stat()
        assert "; its worker" not in describe(own.value).message
    finally:
        worker.join()


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("rank 1 is gone"), RuntimeError("Connection reset by peer"), MismatchError("shapes"),
        UserError("3 ranks of 2"), ValueError("a bad sample"),
    ],
)  # fmt: skip
def test_whom_another_took_along_or_imece_tells_why_shows_the_program_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """All of eight ranks would bury the traceback of the one that failed, which stays whole; and where
    imece raises an error is not where the mistake is."""
    shown: list[str] = []
    printed = lambda *error: shown.extend(traceback.format_exception(*error))  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", printed)
    stop = tell_failures(lambda: dist.FileStore(str(tmp_path / "store"), 1), 3)

    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            raise error

    try:
        Waiting.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    except type(error) as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)
    finally:
        stop()
    text = "".join(shown)
    assert "Waiting.apply(" in text and "raise error" in text and text.endswith(f"{error}\n")
    assert ("torch/_tensor.py" in text) == isinstance(error, ValueError)


def test_what_a_worker_of_a_loader_failed_with_is_said() -> None:
    try:
        raise ValueError("a bad record")
    except ValueError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ValueError, match="Caught") as caught:
        wrapped.reraise()
    said = "Caught ValueError in DataLoader worker process 0. ValueError: a bad record"
    assert describe(caught.value).message == said
