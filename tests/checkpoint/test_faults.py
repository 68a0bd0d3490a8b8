"""A disk or a rank that fails costs a save and an alarm; never training, and never an older checkpoint."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint import Checkpoints, Slice, all_steps, commit, files
from tests.checkpoint.crew import Crew, assert_whole, crew, newest_whole, partials, state_of

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
            name = "the partial folder" if path.name.endswith(".partial") else path.name
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
        "fsync rank-00000.json.new",
        "replace rank-00000.json",
        "fsync the partial folder",
        "fsync manifest.json.new",
        "replace manifest.json",
        "fsync the partial folder",
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
        monkeypatch.setattr(ranks.ranks[1], "_room", lambda nbytes: None)
        assert not ranks.save(2, state_of(2))
        assert all("rank 1: no memory" in alarms[0] and len(alarms) == 1 for alarms in ranks.alarms)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(tmp_path: Path, absent: int) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        there = ranks.ranks[1 - absent]
        there._limit_s = 0.2
        there.save(2, state_of(2), {}, None)
        assert not there.finish()
        assert f"nothing came from rank {absent}" in ranks.alarms[1 - absent][0]
        assert not partials(tmp_path)
        assert_whole(newest_whole(tmp_path), 1, 2)
    assert ranks.alarms[absent] == []
    with crew(tmp_path, 2) as others:
        assert others.save(3, state_of(3)) and not partials(tmp_path)
        assert_whole(newest_whole(tmp_path), 3, 2)


@pytest.mark.parametrize("first", ["rank 0", "rank 1"])
def test_they_agree_when_one_gives_up_while_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Rank 1 loses its patience at the very moment in which rank 0 puts the checkpoint in place."""
    given_up, in_place = threading.Event(), threading.Event()
    put, withdraw = files.put_in_place, files.withdraw

    def slow_put(partial: Path, final: Path) -> None:
        assert given_up.wait(20)
        put(partial, final)
        in_place.set()

    def watched_withdraw(partial: Path) -> bool:
        if first == "rank 1":
            assert withdraw(partial)
            given_up.set()
            return True
        given_up.set()
        assert in_place.wait(20)
        return withdraw(partial)

    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        ranks.ranks[1]._limit_s = 0.1
        with monkeypatch.context() as patch:
            patch.setattr(files, "put_in_place", slow_put)
            patch.setattr(files, "withdraw", watched_withdraw)
            done = ranks.save(2, state_of(2))
        assert done == (first == "rank 0")
        assert [len(alarms) for alarms in ranks.alarms] == ([0, 0] if done else [1, 1])
        assert_whole(newest_whole(tmp_path), 2 if done else 1, 2)
        assert not partials(tmp_path)


def test_a_rank_that_comes_too_late_hears_of_it(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, state_of(1))
        limit_s, ranks.ranks[0]._limit_s = ranks.ranks[0]._limit_s, 0.5
        for rank in (2, 0):
            ranks.ranks[rank].save(2, state_of(2), {}, None)
        assert not ranks.ranks[0].finish() and not ranks.ranks[2].finish()
        ranks.ranks[1].save(2, state_of(2), {}, None)
        assert not ranks.ranks[1].finish()
        ranks.ranks[0]._limit_s = limit_s
        assert [len(alarms) for alarms in ranks.alarms] == [1, 1, 1]
        assert all("nothing came from rank 1 for" in alarms[0] for alarms in ranks.alarms)
        assert ranks.save(3, state_of(3)) and not partials(tmp_path)


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"a": torch.zeros(3)}, "tensor 'b' is float32[2] on rank 0 and missing on rank 1"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "tensor 'c' is missing on rank 0"),
        (
            {"a": torch.zeros(3), "b": torch.zeros(2).long()},
            "tensor 'b' is float32[2] on rank 0 and int64[2]",
        ),
        ({"a": torch.zeros(3), "b": Slice(torch.zeros(1), (2,), 1)}, "float32[2] in slices on rank 1"),
    ],
)
def test_ranks_that_disagree(tmp_path: Path, odd: dict[str, torch.Tensor | Slice], says: str) -> None:
    usual = {"a": torch.zeros(3), "b": torch.zeros(2)}
    with crew(tmp_path, 2) as ranks:
        assert not ranks.save(1, lambda rank: odd if rank else usual)
        assert all(len(alarms) == 1 and says in alarms[0] for alarms in ranks.alarms)
        assert all_steps(tmp_path) == [] and not partials(tmp_path)


@pytest.mark.parametrize(
    ("starts", "says"), [((0, 3), r"[2, 3) are in no file"), ((0, 1), r"[1, 2) are in two files")]
)
def test_slices_that_do_not_make_a_tensor(tmp_path: Path, starts: tuple[int, int], says: str) -> None:
    with crew(tmp_path, 2) as ranks:
        assert not ranks.save(1, lambda rank: {"x": Slice(torch.zeros(2), (5,), starts[rank])})
        assert all(f"tensor 'x': its elements {says}" in alarms[0] for alarms in ranks.alarms)


def test_what_a_killed_job_left_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Rank 1 of the killed job had its part of step 2 on the disk, and told where."""
    killed = Crew(tmp_path, 2)
    assert killed.save(1, state_of(1))
    killed.ranks[1].save(2, state_of(7), {}, None)
    for _ in range(2000):
        if list(tmp_path.glob("*.partial/rank-00001.json")):
            break
        time.sleep(0.01)
    killed.ranks[1].close()  # a thread cannot be killed; nothing of what it wrote goes away
    assert list(tmp_path.glob("*.partial/rank-00001.json"))
    alarms: list[str] = []
    first = Checkpoints(tmp_path, rank=1, world_size=2, alarm=alarms.append, limit_s=10)
    first.save(2, state_of(2), {"step": 2}, {"rank": 1, "step": 2})  # before there is a new rank 0
    second = Checkpoints(tmp_path, rank=0, world_size=2, alarm=alarms.append, limit_s=10)
    second.save(2, state_of(2), {"step": 2}, {"rank": 0, "step": 2})
    assert second.finish() and first.finish() and not alarms
    assert_whole(newest_whole(tmp_path), 2, 2)
    assert not partials(tmp_path)
    for checkpoints in (first, second, killed.ranks[0]):
        checkpoints.close()


def test_closing_gives_up_what_is_under_way(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        ranks.ranks[0].save(2, state_of(2), {}, None)
        ranks.ranks[0].close()
        assert not ranks.ranks[0].finish()
        assert "step 2 was not saved: training ended" in ranks.alarms[0][0]
        assert all_steps(tmp_path) == [1] and not partials(tmp_path)
        with pytest.raises(ValueError, match="after close"):
            ranks.ranks[0].save(3, state_of(3), {}, None)


def test_closing_does_not_wait_for_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, begun = os.write, threading.Event()
    with crew(tmp_path, 1) as ranks:

        def waiting(descriptor: int, data: memoryview) -> int:
            begun.set()
            assert ranks.ranks[0]._stop.wait(20)
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
