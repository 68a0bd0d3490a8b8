"""Which checkpoints are kept, what replacing one leaves behind, and which is the newest or the best."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from imece import mesh as meshes
from imece.checkpoint import Checkpoints, Saved, all_steps, best, commit, files, load, open_checkpoint
from imece.checkpoint.manifest import seal, unseal
from imece.checkpoint.room import Room
from imece.errors import UserError
from tests.checkpoint.crew import assert_whole, crew, newest_whole, partials, state_of
from tests.meshes import FakeMesh


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    metrics = {1: 5.0, 2: 3.0, 3: None, 4: 4.0, 5: math.nan, 6: 3.0, 7: -math.inf, 8: 0.0}
    stay = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [2, 4, 5], 6: [5, 6], 7: [6, 7], 8: [7, 8]}
    with crew(tmp_path, 2) as ranks:
        for step, metric in metrics.items():
            assert ranks.save(step, state_of(step), metric)
            assert all_steps(tmp_path) == stay[step]
            if step == 5:
                found = best(tmp_path, print)
                assert_whole(found, 2, 2)
                assert found is not None and found.metric == 3.0
    assert_whole(best(tmp_path, print), 8, 2)
    assert [open_checkpoint(tmp_path / f"step-{step:08d}").metric for step in (7, 8)] == [None, 0.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_older_ones_make_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """A disk with room for four: the newest, the best, and what fits besides."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def disk(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=room - sum(files.taken(path) for path in folder.glob("step-*")))

    with crew(tmp_path / "first", world_size) as ranks:
        assert ranks.save(1, state_of(1))
    room = files.taken(tmp_path / "first" / "step-00000001") * 41 // 10
    monkeypatch.setattr(shutil, "disk_usage", disk)
    stay = {4: [1, 2, 3, 4], 5: [2, 3, 4, 5], 6: [2, 4, 5, 6], 7: [2, 5, 6, 7]}
    with crew(tmp_path / "run", world_size, keep=5) as ranks:
        for step in range(1, 8):
            assert ranks.save(step, state_of(step), 1.0 if step == 2 else 2.0)
            assert all_steps(tmp_path / "run") == stay.get(step, list(range(1, step + 1)))
        assert ranks.alarms[0] == ["no room for 5 checkpoints: older ones make room for new ones"]
        room = 0
        assert ranks.save(8, state_of(8)), "it is tried whatever the disk says"
        assert all_steps(tmp_path / "run") == [2, 7, 8]
        room = sum(files.taken(path) for path in (tmp_path / "run").glob("step-*")) + 500_000
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            assert not ranks.save(9, {"x": torch.zeros(10**6)})
        for alarms in ranks.alarms:
            assert "step 9 was not saved: " in alarms[-1] and "No space left on device" in alarms[-1]
            names = "step-00000002 (the best), step-00000007, step-00000008 (the newest)"
            assert alarms[-1].endswith(f" (4.0 MB are needed, 0.5 MB are free beside {names})")
    with crew(tmp_path / "run", world_size, keep=5) as ranks:
        assert ranks.save(9, state_of(9))
        assert all_steps(tmp_path / "run") == [2, 7, 8, 9], "whether they are whole, nobody here has read"


def test_a_rank_that_fails_when_rank_0_has_removed_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has nowhere to say so, and tells what rank 0 has to say, as all do."""
    has_failed = threading.Event()

    def full(descriptor: int, _data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00000.safetensors"):
            assert has_failed.wait(20)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def gone(partial: Path, *_: object) -> None:
        has_failed.set()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(partial))

    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            patch.setattr(commit, "write_excuse", gone)
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000))
            assert not ranks.save(2, {"x": torch.zeros(10**6)})
        ((first,), (second,)) = ranks.alarms
        assert first == second and "(4.0 MB are needed, 0.5 MB are free beside " in first
        assert ranks.save(3, state_of(3)) and not partials(tmp_path)


def test_a_rank_that_writes_before_rank_0_has_made_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, too_early = tmp_path / "step-00000001", threading.Event()
    really_write, really_make = os.write, Room.make

    def write(descriptor: int, data: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00001.safetensors") and oldest.exists():
            too_early.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_write(descriptor, data)

    def make(room: Room, partial: Path) -> None:
        assert too_early.wait(20)
        really_make(room, partial)

    with crew(tmp_path, 2, keep=3) as ranks:
        assert ranks.save(1, state_of(1)) and ranks.save(2, state_of(2))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(Room, "make", make)
        assert ranks.save(3, state_of(3)), ranks.alarms
    assert_whole(newest_whole(tmp_path), 3, 2)
    assert all_steps(tmp_path) == [2, 3] and ranks.alarms[1] == []


def test_no_metric_no_best(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1))
    assert best(tmp_path, print) is None


def test_the_best_that_is_damaged_is_passed_over_by_name(tmp_path: Path) -> None:
    with crew(tmp_path, 1, keep=3) as ranks:
        for step, metric in ((1, 1.0), (2, 3.0), (3, 2.0)):
            assert ranks.save(step, state_of(step), metric)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"

    def passed_over() -> str:
        lines: list[str] = []
        assert_whole(best(tmp_path, lines.append), 3, 1)
        (line,) = lines
        return line.removeprefix(f"{tmp_path}/step-00000001/")

    path.write_bytes(path.read_bytes()[:-1] + b"?")
    why = "its checksum is not that of its content"
    assert passed_over() == f"rank-00000.safetensors: damaged ({why})"
    path.unlink()
    why = "No such file or directory"
    assert passed_over() == f"rank-00000.safetensors: damaged ({why})"
    path.with_name("manifest.json").unlink()
    assert passed_over() == f"manifest.json: damaged ({why})"


def test_the_best_that_is_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job prunes between the look at which is the best and the reading of it."""
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1), 1.0) and ranks.save(2, state_of(2), 2.0)
    opened, lines = load.open_checkpoint, list[str]()

    def prunes(path: Path, **how: bool) -> Saved:
        if path.name == "step-00000001":
            shutil.rmtree(path)
        return opened(path, **how)

    monkeypatch.setattr(load, "open_checkpoint", prunes)
    assert_whole(best(tmp_path, lines.append), 2, 1)
    assert not (tmp_path / "step-00000001").exists() and not lines


@pytest.mark.parametrize("key", ["metric_on", "metric_over"])
def test_metrics_of_other_texts_or_more_of_one_are_not_compared(tmp_path: Path, key: str) -> None:
    """Those that do not say of what they are, as older ones, are compared with all."""
    saves: tuple[tuple[int, str | None, float | None, int, list[int]], ...] = (
        # step, measured on, metric, then the best, and what stays
        (1, None, 2.0, 1, [1]),
        (2, "a", 3.0, 1, [1, 2]),
        (3, "a", 1.0, 3, [3]),
        (4, "b", 9.0, 4, [4]),
        (5, "b", 7.0, 5, [5]),
        (6, "b", 8.0, 5, [5, 6]),
    )
    with contextlib.closing(Checkpoints(tmp_path, rank=0, world_size=1, keep=1, alarm=print)) as checkpoints:
        for step, on, metric, expected, stay in saves:
            state = {"step": step} | ({key: on} if on else {})
            checkpoints.save(step, state_of(step), state, {}, metric=metric)
            assert checkpoints.finish()
            found = best(tmp_path, print)
            assert found is not None and found.step == expected
            assert all_steps(tmp_path) == stay


def test_a_save_that_takes_no_other_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the room, nor as one too many; but the next one does, and later steps go in any case."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with contextlib.closing(Checkpoints(tmp_path, rank=0, world_size=1, keep=2, alarm=print)) as checkpoints:
        for step, keep_all, stay in (
            (1, False, [1]), (9, True, [1, 9]), (3, True, [1, 3]), (4, True, [1, 3, 4]), (5, False, [4, 5]),
        ):  # fmt: skip
            checkpoints.save(step, state_of(step), {"step": step}, {}, keep_all=keep_all)
            assert checkpoints.finish()
            assert all_steps(tmp_path) == stay


def test_later_steps_of_a_course_that_was_left_go_away(tmp_path: Path) -> None:
    with crew(tmp_path, 1, keep=3) as ranks:
        for step in (2, 4, 6):
            assert ranks.save(step, state_of(step), metric=1 / step)
        assert ranks.save(3, state_of(3), metric=9.0)  # resumed from step 2
        assert all_steps(tmp_path) == [2, 3] and ranks.alarms == [[]]
    assert_whole(newest_whole(tmp_path), 3, 1)


def test_a_run_that_begins_anew_removes_none_of_later_steps(tmp_path: Path) -> None:
    """Its loop has forgotten to load, perhaps, and they are days of work."""
    courses = {
        (200, 300): "",
        (100,): f"step-00000200, step-00000300: of later steps than 100, {{}} set aside in {tmp_path}/left-1",
        (50,): f"step-00000100: of later steps than 50, {{}} set aside in {tmp_path}/left-2",
    }
    for steps, alarm in courses.items():
        with crew(tmp_path, 2) as ranks:
            for step in steps:
                assert ranks.save(step, state_of(step), metric=1 / step)
        assert all_steps(tmp_path) == list(steps)
        said = alarm.format("written before this run began or was taken up again:")
        assert ranks.alarms == [[said] if said else [], []]
    assert_whole(newest_whole(tmp_path / "left-1"), 300, 2)
    assert_whole(best(tmp_path / "left-2", print), 100, 2)


def test_what_cannot_be_read_does_not_count_and_stays(tmp_path: Path) -> None:
    with crew(tmp_path, 1, keep=2) as ranks:
        for step in (1, 2):
            assert ranks.save(step, state_of(step))
        shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000003")
        path = tmp_path / "step-00000003" / "manifest.json"
        path.write_bytes(seal(unseal(path.read_bytes()) | {"version": 2, "step": 3}))
        assert ranks.save(4, state_of(4))
        assert all_steps(tmp_path) == [2, 3, 4]
        assert ranks.save(5, state_of(5))
        assert all_steps(tmp_path) == [3, 4, 5]


def test_the_same_step_again(tmp_path: Path) -> None:
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, state_of(1))
        assert_whole(newest_whole(tmp_path), 1, 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".ranks", "step-00000001"]


@pytest.mark.parametrize("new_is_there", [False, True])
def test_killed_while_one_takes_the_place_of_another(tmp_path: Path, new_is_there: bool) -> None:
    """Readers find one of the two at any time; the next job puts it right."""
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1)) and ranks.save(2, state_of(2))
    place = tmp_path / "step-00000002"
    shutil.copytree(place, tmp_path / "step-00000002.old")
    shutil.rmtree(place)
    if new_is_there:
        with crew(tmp_path / "elsewhere", 2) as ranks:
            assert ranks.save(2, state_of(2))
        shutil.copytree(tmp_path / "elsewhere" / "step-00000002", place)
    world_size = 2 if new_is_there else 1
    assert_whole(newest_whole(tmp_path), 2, world_size)
    assert all_steps(tmp_path) == [1, 2]
    with crew(tmp_path, 1, keep=3) as ranks:
        assert ranks.save(3, state_of(3))
        assert not (tmp_path / "step-00000002.old").exists()
        assert_whole(open_checkpoint(tmp_path / "step-00000002"), 2, world_size)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_reader_meets_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool) -> None:
    """The newest is moved aside, or replaced as well, while it is being read."""
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1)) and ranks.save(2, state_of(2))
    place, old, real = tmp_path / "step-00000002", tmp_path / "step-00000002.old", load.open_checkpoint

    def late(folder: Path, **how: bool) -> Saved:
        if old.exists():
            return real(folder, **how)
        place.rename(old)
        if replaced:
            shutil.copytree(old, place)
        raise UserError("some of the files were of the one, some of the other")

    monkeypatch.setattr(load, "open_checkpoint", late)
    assert_whole(newest_whole(tmp_path), 2, 1)
    assert old.exists() and place.exists() == replaced


def test_one_that_is_removed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that goes on beside an export: what is open stays, and of the others one is told."""
    with crew(tmp_path, 2, keep=1) as ranks:
        assert ranks.save(1, state_of(1))
        reads = load.open_checkpoint(tmp_path / "step-00000001")
        monkeypatch.setattr(load, "_MOST_OPEN", 1)
        reads_less = load.open_checkpoint(tmp_path / "step-00000001")
        assert ranks.save(2, state_of(2))
    assert all_steps(tmp_path) == [2]
    for name, each in state_of(1).items():
        assert torch.equal(reads.tensor(name), each)
    with pytest.raises(UserError) as caught:
        for name in state_of(1):
            reads_less.tensor(name)
    assert str(caught.value) == (
        f"{tmp_path}/step-00000001/rank-00001.safetensors: removed meanwhile, by a run that goes on and "
        "keeps the newest: try again"
    )


def test_leftovers_of_a_killed_job_go_away_and_nothing_else(tmp_path: Path) -> None:
    for name in ("step-00000003.0123-4.partial", "step-00000003.partial", "step-00000004.x", "mine.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("half")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (tmp_path / "step-00000005.partial").symlink_to(outside)
    before = {path.name for path in tmp_path.iterdir()}
    with crew(tmp_path, 1) as ranks:
        assert {path.name for path in tmp_path.iterdir()} == before, "another job may be writing there"
        assert ranks.save(8, state_of(8))
        left = {path.name for path in tmp_path.iterdir()} - {"step-00000005.partial"}
        assert left == {"step-00000004.x", "mine.partial", "outside", "step-00000008", ".ranks"}
        assert (outside / "kept").exists()
        (tmp_path / "step-00000003.0123-5.partial").mkdir()
        assert ranks.save(9, state_of(9))
        assert "step-00000003.0123-5.partial" not in partials(tmp_path)
        assert all_steps(tmp_path) == [8, 9]


def test_a_folder_that_one_may_list_and_not_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-00000001").mkdir()

    def refuse(path: Path) -> bool:  # root may enter all, so we play the kernel
        raise PermissionError(13, "Permission denied", str(path))

    with (
        monkeypatch.context() as played,
        pytest.raises(UserError, match=r"cannot be read \(Permission denied\): check the path and its"),
    ):
        played.setattr(Path, "lstat", refuse)
        newest_whole(tmp_path)


def test_a_checkpoint_that_one_may_not_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1))

    def refuse(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(load, "_size", refuse)
    with pytest.raises(UserError, match=r"manifest.json: cannot be read \(Permission denied\): check its"):
        open_checkpoint(tmp_path / "step-00000001")


def test_a_folder_of_checkpoints_is_none(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, state_of(1))
    with pytest.raises(
        UserError, match=f"{tmp_path}: it is no checkpoint, it has no manifest.json: name one of"
    ):
        open_checkpoint(tmp_path)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest.json: damaged \(No such file"):
        open_checkpoint(tmp_path / "step-00000001")


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="file: it is a file: name a folder for checkpoints"),
        crew(tmp_path / "file", 1),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"in: checkpoints cannot be written there \(Not a directory\): check"),
        crew(tmp_path / "file" / "in", 1),
    ):
        pass
    with pytest.raises(UserError, match="file: cannot be read"):
        newest_whole(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_in_which_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It would be found out by the first save, hours later. A full disk may have room by then."""

    def refuse(dir: Path) -> None:
        raise OSError(number, os.strerror(number), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    why = re.escape(f"checkpoints cannot be written there ({os.strerror(number)}): check the path and its")
    refused = pytest.raises(UserError, match=why)
    with crew(tmp_path, 1) as ranks, refused if number != errno.ENOSPC else contextlib.nullcontext():
        ranks.ranks[0].check_writable()


def test_keeps_at_least_one(tmp_path: Path) -> None:
    for keep in (0, "2"):
        with pytest.raises(ValueError, match=f"keep={keep!r}: a whole number, at least 1"):
            Checkpoints(tmp_path, rank=0, world_size=1, keep=keep)  # type: ignore[arg-type]


def test_ranks_are_those_of_the_world(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank=2, world_size=2: ranks are 0, 1"):
        Checkpoints(tmp_path, rank=2, world_size=2, alarm=print)
    with pytest.raises(UserError, match="there is no mesh of ranks yet"):
        Checkpoints(tmp_path)


def test_ranks_are_those_of_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, and alarms go to standard error."""
    monkeypatch.setattr(meshes, "current", lambda: FakeMesh({"replicate": 1}))
    with contextlib.closing(Checkpoints(tmp_path / "folder")) as checkpoints:
        checkpoints.save(1, state_of(1), {"step": 1})
        assert checkpoints.finish()
        assert open_checkpoint(tmp_path / "folder" / "step-00000001").rank_states == [None]
        shutil.rmtree(tmp_path / "folder")
        (tmp_path / "folder").touch()
        checkpoints.save(2, state_of(2), {"step": 2})
        assert not checkpoints.finish()
    assert capsys.readouterr().err.startswith("imece: ")
