"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from imece.writing import sync_folder, whole_file, write_whole


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, b"old")
    with whole_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["figures.json"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_ends_in_the_middle_leaves_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, b"old")
    with pytest.raises(kind, match="half"), whole_file(path) as file:
        file.write(b"ne")
        raise kind("half")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["figures.json"]


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what lies beside it, nor nothing, as of a write or fsync."""
    path = tmp_path / "figures.json"

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/figures.json'$"):
        write_whole(path, b"new", durable=True)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'$"):
        sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"/absent/figures.json'$"):
        write_whole(tmp_path / "absent" / "figures.json", b"new")
    assert os.listdir(tmp_path) == []


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "plan.html").symlink_to("kept/plan.html")
    for content in (b"old", b"new"):
        write_whole(tmp_path / "plan.html", content)
        assert (tmp_path / "kept" / "plan.html").read_bytes() == content
    assert (tmp_path / "plan.html").is_symlink()
    assert [*os.listdir(tmp_path / "kept"), *sorted(os.listdir(tmp_path))] == [
        "plan.html",
        "kept",
        "plan.html",
    ]


def test_a_pipe_gets_it_as_it_comes(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with whole_file(pipe) as file:
        file.write(b"first")
        file.flush()
        assert os.read(reader, 100) == b"first"
    os.close(reader)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_on_the_disk_before_it_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting(what: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{what}"))
        calls.append("folder" if path == tmp_path else f"{path.stat().st_size} bytes")
        fsync(what)

    def placing(*names: Any) -> None:
        calls.append("in place")
        replace(*names)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "replace", placing)
    write_whole(tmp_path / "figures.json", b"new", durable=durable)
    assert calls == (["3 bytes", "in place", "folder"] if durable else ["in place"])
