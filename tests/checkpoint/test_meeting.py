"""Ranks that save together find each other, agree on the result, and never wait for ever."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from imece import mesh as meshes
from imece.checkpoint import Checkpoints, Slice, all_steps, commit, files, meeting, save, writer
from tests.checkpoint.crew import Crew, assert_whole, crew, newest_whole, partials, state_of
from tests.meshes import FakeMesh

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_never_comes(tmp_path: Path, absent: int) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        there = ranks.ranks[1 - absent]
        there._writer._limit_s = 0.2
        there.save(2, state_of(2), {}, None)
        assert not there.finish()
        assert f"nothing came from rank {absent}" in ranks.alarms[1 - absent][0]
        assert not partials(tmp_path)
        assert_whole(newest_whole(tmp_path), 1, 2)
    assert ranks.alarms[absent] == []
    with crew(tmp_path, 2) as others:
        assert others.save(3, state_of(3)) and not partials(tmp_path)
        assert_whole(newest_whole(tmp_path), 3, 2)


def test_a_rank_that_may_not_write_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a remount: rank 0 would never hear of it, however long it waited."""
    with crew(tmp_path, 2) as ranks:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

        monkeypatch.setattr(meeting, "write_whole", refuse)
        monkeypatch.setattr(files, "write", refuse)
        assert not ranks.save(1, state_of(1))
        for rank, alarms in enumerate(ranks.alarms):
            (line,) = alarms
            assert line.startswith("the checkpoint of step 1 was not saved: " + f"rank {rank}: " * (rank > 0))
            assert line.endswith(os.strerror(errno.EROFS))
    assert not partials(tmp_path)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_save_different_steps(tmp_path: Path, late: int) -> None:
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, state_of(1))
        for rank in (1, 0, 2) if late == 0 else (0, 2, 1):
            ranks.ranks[rank].save(2 + (rank == 1), state_of(2), {}, None)
            time.sleep(0.1)
        assert not any(each.finish() for each in ranks.ranks)
        why = "ranks save step-00000002, step-00000003: call save on all with the same step"
        for rank, alarms in enumerate(ranks.alarms):
            assert alarms == [f"the checkpoint of step {2 + (rank == 1)} was not saved: {why}"]
        assert not partials(tmp_path)
        assert ranks.save(4, state_of(4))


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
        ranks.ranks[1]._writer._limit_s = 0.1
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
        limit_s, ranks.ranks[0]._writer._limit_s = ranks.ranks[0]._writer._limit_s, 0.5
        for rank in (2, 0):
            ranks.ranks[rank].save(2, state_of(2), {}, None)
        assert not ranks.ranks[0].finish() and not ranks.ranks[2].finish()
        ranks.ranks[1].save(2, state_of(2), {}, None)
        assert not ranks.ranks[1].finish()
        ranks.ranks[0]._writer._limit_s = limit_s
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_two_jobs_in_one_folder_the_last_one_has_it(tmp_path: Path, world_size: int) -> None:
    """The other one is told which, on all ranks, and writes and removes nothing there any more."""
    with crew(tmp_path, world_size) as first, crew(tmp_path, world_size) as second:
        assert first.save(1, state_of(1))
        assert second.save(2, state_of(2))
        before = sorted(tmp_path.rglob("*"))
        assert not first.save(7, state_of(7))
        for alarms in first.alarms:
            (line,) = alarms
            who = f"another job (process {os.getpid()} on {socket.gethostname()})"
            assert f"step 7 was not saved: {who} has begun to save in {tmp_path}: give each its own" in line
        assert sorted(tmp_path.rglob("*")) == before
        assert second.save(3, state_of(3)) and second.alarms == [[]] * world_size
        assert_whole(newest_whole(tmp_path), 3, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_job_begins_amid_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """And removes, as what a killed one has left, what is being written."""
    put_together = commit.put_together
    with crew(tmp_path, world_size) as first, crew(tmp_path, world_size) as second:
        assert first.save(1, state_of(1))

        def begins(*args: Any) -> Any:
            monkeypatch.setattr(commit, "put_together", put_together)
            assert second.save(2, state_of(2))
            return put_together(*args)

        monkeypatch.setattr(commit, "put_together", begins)
        assert not first.save(7, state_of(7))
        assert all("another job (process" in alarms[0] for alarms in first.alarms), first.alarms
        assert all_steps(tmp_path) == [1, 2] and not partials(tmp_path)


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


def test_ranks_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 is gone amid a save; rank 0, alone in the mesh from then on, does not wait for it."""
    mesh, alarms = FakeMesh({"replicate": 2}), list[str]()
    monkeypatch.setattr(meshes, "current", lambda: mesh)
    saves = Checkpoints(tmp_path, rank=0, world_size=2, alarm=alarms.append)
    other = Checkpoints(tmp_path, rank=0, world_size=1, alarm=alarms.append)  # not the mesh's: as it was told
    saves.save(1, {"a": torch.ones(4)}, {}, rank_state=None)
    mesh.world = replace(mesh.world, world_size=1)
    save._count_worlds()
    saves.save(2, {"a": torch.ones(4)}, {}, rank_state=None)
    assert saves.finish() and all_steps(tmp_path) == [2]
    (alarm,) = alarms
    assert alarm.startswith("the checkpoint of step 1 was not saved: the ranks changed before it was ")
    saves.close()
    with pytest.raises(ValueError, match=r"not after close\(\)"):
        saves.save(3, {"a": torch.ones(4)}, {}, rank_state=None)
    mesh.world = replace(mesh.world, world_size=3)
    save._count_worlds()
    other.save(3, {"a": torch.ones(4)}, {}, rank_state=None)
    assert other.finish(), alarms


def no_room_for_rank_0(path: Path, *args: Any, write: Callable[..., Any] = files.write) -> Any:
    """files.write on a disk that has none for what rank 0 writes."""
    if path.name.endswith("00000.safetensors"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return write(path, *args)


def test_rank_0_fails_before_it_has_heard_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first save comes to nothing at once; a rank that begins later still hears why."""
    with crew(tmp_path, 2) as ranks, monkeypatch.context() as patch:
        patch.setattr(files, "write", no_room_for_rank_0)
        ranks.ranks[0].save(1, state_of(1), {}, None)
        time.sleep(0.3)
        ranks.ranks[1].save(1, state_of(1), {}, None)
        began = time.monotonic()
        assert [rank.finish() for rank in ranks.ranks] == [False, False]
        assert time.monotonic() - began < 20  # and not until its time is up
        assert "rank-00000.safetensors: No space left" in ranks.alarms[1][0]


def no_room_for(files_named: str) -> Callable[[Any, Any], None]:
    """os.replace on a disk that has none for what was written anew; a renamed file takes no more."""
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        if str(source).endswith(".partial") and fnmatch(str(target), files_named):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    return replace


def test_the_others_hear_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On which rank 0 can write no new file, not even one to say so."""
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", no_room_for("*00000.json"))
            for step in range(2, 6):
                began = time.monotonic()
                assert not ranks.save(step, state_of(step))
                assert time.monotonic() - began < 10, "half of what a rank waits for one that says nothing"
        for alarms in ranks.alarms:
            assert len(alarms) == 4 and all(
                "rank-00000.json: No space left on device" in each for each in alarms
            )
        assert not partials(tmp_path)
        assert ranks.save(6, state_of(6))
        assert_whole(newest_whole(tmp_path), 6, 2)


@pytest.mark.parametrize("whose", ["0000[01].json", "00000.json", "00001.json"])
def test_a_disk_that_is_full_before_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """No rank knows of the others by then, and what they have to say finds the room that was kept for it."""
    with crew(tmp_path, 2) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", no_room_for(f"*/{whose}"))
            patch.setattr(files, "write", no_room_for_rank_0)
            for step in range(1, 4):
                began = time.monotonic()
                assert not ranks.save(step, state_of(step))
                assert time.monotonic() - began < 10, "half of what a rank waits for one that says nothing"
        for alarms in ranks.alarms:
            assert len(alarms) == 3 and all("00000.safetensors: No space" in each for each in alarms), alarms
        assert ranks.save(6, state_of(6))
        assert_whole(newest_whole(tmp_path), 6, 2)


@pytest.mark.parametrize("whose", ["*", "*/00000.*", "*/00001.*"])
def test_a_disk_that_is_full_before_any_room_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """A rank can say nothing to the others but that, and none may wait for it, as training waits for them."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_room_for(whose))
        if whose != "*/00001.*":
            patch.setattr(files, "write", no_room_for_rank_0)
        ranks = Crew(tmp_path, 2)
        for step in (1, 2):
            began = time.monotonic()
            assert not ranks.save(step, state_of(step))
            assert time.monotonic() - began < 10, "half of what a rank waits for one that says nothing"
    assert [len(alarms) for alarms in ranks.alarms] == [2, 2], ranks.alarms
    assert all(
        "No space left on device" in alarm or "could write no more" in alarm
        for alarms in ranks.alarms
        for alarm in alarms
    ), ranks.alarms
    assert ranks.save(3, state_of(3)), ranks.alarms
    assert_whole(newest_whole(tmp_path), 3, 2)
    assert not list(tmp_path.glob(".ranks/*.mute-*"))


def test_rank_0_hears_of_a_rank_that_alone_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its part nor to say so."""
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", no_room_for("*/rank-00001.json"))
            began = time.monotonic()
            assert not ranks.save(2, state_of(2))
            assert time.monotonic() - began < 10, "half of what a rank waits for one that says nothing"
        why = "rank 1 failed, and could write no more than that; its disk may be full"
        own = "rank 1: rank-00001.json: No space left on device"
        said = [[f"the checkpoint of step 2 was not saved: {each}"] for each in (why, own)]
        assert ranks.alarms == said and not partials(tmp_path)
        assert ranks.save(3, state_of(3))


def test_a_note_takes_as_much_memory_as_it_has_bytes(tmp_path: Path) -> None:
    """And not as much as it may have: where memory is limited (ulimit -v), no save succeeded."""
    ranks = [meeting.Meeting(tmp_path, rank, 2) for rank in range(2)]
    ranks[1].arrive()
    tracemalloc.start()
    ranks[0].arrive()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks[0].all_heard(1) and peak_bytes < 1 << 20


def test_a_save_that_somebody_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        ranks.ranks[0].save(2, state_of(2), {}, None)
        while not list(tmp_path.glob("*.partial/rank-00000.json")):
            time.sleep(0.01)
        tmp_path.rename(tmp_path.with_name("gone"))  # at once: rank 0 takes its own files away meanwhile
        began = time.monotonic()
        assert not ranks.ranks[0].finish() and time.monotonic() - began < 10
        assert ranks.alarms[0][0].endswith(".partial was removed while it was written")
        ranks.ranks[1].save(2, state_of(2), {}, None)
        assert not ranks.ranks[1].finish() and ranks.alarms[1] == ranks.alarms[0]
        assert ranks.save(3, state_of(3)), ranks.alarms
        # Put in place, and removed before rank 1 has looked.
        with monkeypatch.context() as patch:
            patch.setattr(files, "put_in_place", lambda partial, final: shutil.rmtree(partial))
            patch.setattr(writer, "_GONE_S", 0.5)
            ranks.ranks[1].save(4, state_of(4), {}, None)
            ranks.ranks[0].save(4, state_of(4), {}, None)
            began = time.monotonic()
            assert not ranks.ranks[1].finish() and time.monotonic() - began < 10
        ranks.ranks[0].finish()
        assert ranks.alarms[1][1].endswith(".partial was removed while it was written")


def test_where_no_rank_can_write_each_knows_it(tmp_path: Path) -> None:
    folder, aside = tmp_path / "checkpoints", tmp_path / "aside"
    with crew(folder, 2) as ranks:
        assert ranks.save(1, state_of(1))
        folder.rename(aside)
        folder.write_text("a file in its place")
        began = time.monotonic()
        assert not ranks.save(2, state_of(2))
        assert time.monotonic() - began < 10
        for (alarm,), said in zip(ranks.alarms, ("File exists", "Not a directory"), strict=True):
            assert said in alarm
        folder.unlink()
        aside.rename(folder)
        assert ranks.save(3, state_of(3)), ranks.alarms
        assert_whole(newest_whole(folder), 3, 2)
