"""Ranks that load together, played by threads: each reads its share, and all get the same result."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from imece.checkpoint import Saved, reading
from imece.checkpoint.reading import newest_of_all
from imece.collectives import mistakes
from imece.errors import UserError
from tests.checkpoint.crew import assert_whole, crew, state_of

FILES = 5
_WAIT_S = 10.0  # never reached, but where a rank left the others


class Ranks:
    """`read` has the files of which each rank read every byte, as PARENT/NAME, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
        self.world_size, self.read = world_size, defaultdict[int, list[str]](list)
        self._barrier, self._said = threading.Barrier(world_size), [None] * world_size
        monkeypatch.setattr(reading, "gather_json", self._gather)
        monkeypatch.setattr(mistakes, "gather_texts", self._gather)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: range(world_size))
        self._real, self._own = hashlib.file_digest, threading.local()
        monkeypatch.setattr(hashlib, "file_digest", self._digest)

    def load(self, *folders: Path) -> list[tuple[Saved | str | None, list[str]]]:
        """What each rank finds in its folder, or is told that is wrong; and the lines of damage it gets."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(self._load, range(self.world_size), folders))

    def _load(self, rank: int, folder: Path) -> tuple[Saved | str | None, list[str]]:
        self._own.rank, damaged = rank, list[str]()
        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: self.world_size)
        try:
            found = newest_of_all(folder, damaged.append, cast(dist.ProcessGroup, group), torch.device("cpu"))
        except UserError as error:
            return str(error), damaged
        return found, damaged

    def _gather(self, mine: Any, *_: Any) -> list[Any]:
        self._said[self._own.rank] = mine
        self._barrier.wait(_WAIT_S)
        every = list(self._said)
        self._barrier.wait(_WAIT_S)
        return every

    def _digest(self, opened: Any, name: str) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{opened.fileno()}"))
        self.read[self._own.rank].append(f"{path.parent.name[-1]}/{int(path.stem.removeprefix('rank-'))}")
        return self._real(opened, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2, of five ranks."""
    with crew(tmp_path / "checkpoints", FILES) as ranks:
        assert ranks.save(1, state_of(1)) and ranks.save(2, state_of(2))
    return tmp_path / "checkpoints"


def damage(folder: Path, file: int) -> str:
    """Another last byte of a file of step 2; what is said of it."""
    path = folder / "step-00000002" / f"rank-{file:05d}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return f"{path}: damaged (its checksum is not that of its content)"


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_each_file_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    ranks = Ranks(monkeypatch, world_size)
    for saved, damaged in ranks.load(*[folder] * world_size):
        assert_whole(cast(Saved, saved), 2, FILES)
        assert not damaged
    for rank in range(world_size):
        assert ranks.read[rank] == [f"2/{file}" for file in range(rank, FILES, world_size)]


def test_all_fall_back_where_one_sees_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, line = Ranks(monkeypatch, 3), damage(folder, 4)
    for saved, damaged in ranks.load(folder, folder, folder):
        assert_whole(cast(Saved, saved), 1, FILES)
        assert damaged == [line]
    assert ranks.read == {0: ["2/0", "2/3", "1/0", "1/3"], 1: ["2/1", "2/4", "1/1", "1/4"], 2: ["2/2", "1/2"]}


def test_none_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder / "step-00000001")
    line = damage(folder, 1)
    assert Ranks(monkeypatch, 2).load(folder, folder) == [(None, [line])] * 2


def test_a_disk_of_its_own_is_read_by_whoever_has_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks: all of one disk was copied to the other, and there one file is hurt."""
    other = shutil.copytree(folder, folder.with_name("other"))
    ranks, line = Ranks(monkeypatch, 4), damage(other, 1)
    name = Path("step-00000002", "rank-00001.safetensors")
    shutil.copystat(folder / name, other / name)  # bits turn without a time
    *first, third, fourth = ranks.load(folder, folder, other, other)
    for saved, damaged in first:
        assert_whole(cast(Saved, saved), 2, FILES)
        assert not damaged
    for saved, damaged in (third, fourth):
        assert_whole(cast(Saved, saved), 1, FILES)
        assert damaged == [line]
    assert ranks.read[0] == ["2/0", "2/2", "2/4"] and ranks.read[1] == ["2/1", "2/3"]
    assert ranks.read[2] == ["2/0", "2/2", "2/4", "1/0", "1/2", "1/4"]


def test_what_one_rank_cannot_read_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := folder.with_name("file")).touch()
    line = f"{file}: cannot be read (Not a directory): check the path and its permissions"
    found = Ranks(monkeypatch, 3).load(folder, file, folder)
    assert found == [(f"rank 1: {line}", []), (line, []), (f"rank 1: {line}", [])]


def test_one_that_is_replaced_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again, and not called damaged."""
    place, check, lock = folder / "step-00000002", Saved.check, threading.Lock()
    copy = shutil.copytree(place, folder.with_name("copy"))
    damage(folder, 1)

    def late(saved: Saved, verify: bool, *share: int) -> None:
        try:
            check(saved, verify, *share)
        except UserError:
            with lock:
                if copy.exists():  # the other one may have seen nothing at all while it was replaced
                    shutil.rmtree(place)
                    copy.rename(place)
            raise

    monkeypatch.setattr(Saved, "check", late)
    for saved, damaged in Ranks(monkeypatch, 2).load(folder, folder):
        assert_whole(cast(Saved, saved), 2, FILES)
        assert not damaged
    assert not copy.exists()


def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks(monkeypatch, 2).load(tmp_path / "none", tmp_path / "none") == [(None, [])] * 2
