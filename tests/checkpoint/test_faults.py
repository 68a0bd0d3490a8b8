"""A failing disk or rank costs a save and raises an alarm, but never stops training."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint import all_steps, commit, manifest
from tests.checkpoint.crew import assert_whole, crew, newest_whole, partials, state_of

# Of the saver's thread: what goes wrong on a disk is told by an alarm, never by a traceback.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


def _fail(
    monkeypatch: pytest.MonkeyPatch, call: str, when: Callable[[str], bool], number: int = errno.ENOSPC
) -> list[str]:
    """From now on os.<call> fails where `when` says so of its file's path; the list tells of what it did."""
    real, fired = getattr(os, call), list[str]()

    def failing(what: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        if when(path):
            fired.append(path)
            raise OSError(number, os.strerror(number), None if isinstance(what, int) else path)
        return real(what, *args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    return fired


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_midway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, number: int
) -> None:
    name, written = f"rank-{rank:05d}.safetensors", list[str]()

    def second(path: str) -> bool:
        if path.endswith(name):
            written.append(path)
        return path.endswith(name) and len(written) > 1

    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            fired = _fail(patch, "write", second, number)
            assert not ranks.save(2, state_of(2))
        assert fired and written  # after the header, before the data
        for alarms in ranks.alarms:
            (line,) = alarms
            assert "step 2 was not saved" in line and f"{name}: {os.strerror(number)}" in line
        assert not partials(tmp_path)
        assert_whole(newest_whole(tmp_path), 1, 2)
        assert ranks.save(3, state_of(3))
        assert_whole(newest_whole(tmp_path), 3, 2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("call", ["fsync", "replace", "open", "write", "mkdir", "unlink"])
def test_any_single_call_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, world_size: int
) -> None:
    """The k-th call of one kind fails, for every k that there is; step 5 replaces one, and prunes another."""
    for k in range(1000):
        folder, count = tmp_path / str(k), 0

        def this_one(path: str, folder: Path = folder, k: int = k) -> bool:
            nonlocal count
            count += str(folder) in path
            return str(folder) in path and count == k + 1

        with crew(folder, world_size, keep=1) as ranks:
            assert ranks.save(4, state_of(4)) and ranks.save(5, state_of(5))
            with monkeypatch.context() as patch:
                fired = _fail(patch, call, this_one)
                done = ranks.save(5, state_of(5))
            # What failed may have been tried again, or have come after the save: then all is well.
            assert all(len(alarms) == 1 for alarms in ranks.alarms) or done
            assert_whole(newest_whole(folder), 5, world_size)
            assert done or not list(folder.glob("*.old"))
            assert ranks.save(6, state_of(6)), ranks.alarms
            assert_whole(newest_whole(folder), 6, world_size)
            assert all_steps(folder) == [6] and not partials(folder)
        if not fired:
            assert k > 0
            return
    raise AssertionError(f"os.{call} was called more than 1000 times")


def test_all_is_on_the_disk_before_it_is_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No power failure can be made here, so it is the order of the calls that is compared."""
    calls: list[str] = []

    def note(call: str) -> None:
        real = getattr(os, call)

        def noting(what: Any, *args: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else args[0])
            name = path.name.replace(f".{os.getpid()}.partial", " beside")
            name = "the partial folder" if name.endswith(".partial") else name
            calls.append(f"{call} {'the folder' if path == tmp_path else name}")
            return real(what, *args)

        monkeypatch.setattr(os, call, noting)

    with crew(tmp_path, 1, keep=1) as ranks:
        assert ranks.save(1, state_of(1))
        note("fsync")
        note("replace")
        assert ranks.save(2, state_of(2))
    assert calls == [
        "fsync rank-00000.safetensors",
        "replace rank-00000.json",  # it goes away before the end, so it may get lost
        "fsync manifest.json beside",
        "replace manifest.json",
        "fsync the partial folder",
        "replace step-00000002",
        "fsync the folder",
        "replace the partial folder",  # step 1 is removed
    ]


def test_nothing_is_removed_before_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew(tmp_path, 1, keep=1) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            fired = _fail(patch, "fsync", lambda path: path == str(tmp_path), errno.EIO)
            assert ranks.save(2, state_of(2))
        assert fired and "older checkpoints were not removed" in ranks.alarms[0][0]
        assert all_steps(tmp_path) == [1, 2]


def test_a_disk_that_takes_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
    assert_whole(newest_whole(tmp_path), 1, 2)


@pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("rank", "where"), [(0, "put_together"), (1, "write_part")])
def test_a_mistake_of_ours_is_an_alarm_and_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, where: str
) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    real = getattr(commit, where)

    def mistaken(*args: Any) -> Any:
        if where == "put_together" or args[1] == rank:
            raise RuntimeError("no such case")
        return real(*args)

    with crew(tmp_path, 2) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(commit, where, mistaken)
            assert not ranks.save(1, state_of(1))
        assert all(len(alarms) == 1 and "no such case" in alarms[0] for alarms in ranks.alarms)
        assert [str(error) for error in raised] == ["no such case"]
        assert ranks.save(2, state_of(2)) and not partials(tmp_path)


def test_no_memory_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))

        def none(nbytes: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
            if nbytes:
                raise RuntimeError("not enough memory: you tried to allocate")
            return torch.zeros(0, dtype=dtype)

        tensors, ranks.ranks[1]._buffer = state_of(2), torch.empty(0, dtype=torch.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", none)
            assert not ranks.save(2, tensors)
        assert all("rank 1: no memory" in alarms[0] and len(alarms) == 1 for alarms in ranks.alarms)
        assert ranks.save(3, state_of(3))


def test_what_could_not_be_read_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(tmp_path, 2, keep=1) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "as_json", lambda value, name: None)
            assert not ranks.save(2, state_of(2))
        with monkeypatch.context() as patch:
            patch.setattr(commit, "MOST_BYTES", 100)
            assert not ranks.save(3, state_of(3))
        for alarms in ranks.alarms:
            assert "step 2 was not saved: not as a manifest should be" in alarms[0]
            assert "step 3 was not saved: manifest.json would have" in alarms[1]
        assert_whole(newest_whole(tmp_path), 1, 2)


def test_closing_does_not_wait_for_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun = os.write, threading.Event()
    with crew(tmp_path, 1) as ranks:

        def waiting(descriptor: int, data: memoryview) -> int:
            begun.set()
            assert ranks.ranks[0]._writer.stop.wait(20)
            return write(descriptor, data)

        monkeypatch.setattr(os, "write", waiting)
        ranks.ranks[0].save(1, state_of(1), {}, None)
        assert begun.wait(20)
        ranks.ranks[0].close()
        assert "training ended before it was written" in ranks.alarms[0][0]
        assert all_steps(tmp_path) == [] and not partials(tmp_path)


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    with crew(folder, 2) as ranks:
        assert ranks.save(1, state_of(1))
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
        with monkeypatch.context() as patch:
            assert _fail(patch, "write", lambda path: path.endswith("rank-00000.safetensors")) == []
            assert not ranks.save(2, state_of(2))
        assert [len(alarms) for alarms in ranks.alarms] == [1, 1]
        assert ranks.save(3, state_of(3)), ranks.alarms
        assert_whole(newest_whole(folder), 3, 2)
