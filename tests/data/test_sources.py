"""A name gives each of its files once, in a fixed order; missing ones are reported in one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from imece.data import corpus
from imece.data.corpus import documents, total_bytes
from imece.data.sources import absolute_name, sources
from tests.data.helpers import mistake, write


def test_a_folder_gives_what_its_suffixes_say_but_nothing_hidden(tmp_path: Path) -> None:
    wanted = [
        write(tmp_path / name, "x") for name in ("A.TXT", "a.py", "b/c.txt", "b/d/e.md", "f.jsonl", "g.rst")
    ]
    for name in ("a.bin", "b/.git/h.py", ".i/j.txt", "k", "l.py~"):
        write(tmp_path / name, "x")
    (tmp_path / "m.py").mkdir()
    os.symlink(tmp_path / "nowhere", tmp_path / "n.py")
    assert sources([tmp_path]) == sorted(wanted)
    assert sources([str(tmp_path)]) == sorted(wanted)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """Once each, whatever circles they make; what is in the folder itself keeps its own name."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    write(root / "z/own.txt", "own")
    write(root / ".hidden/store/a.txt", "hidden")
    write(elsewhere / "b/c.txt", "linked")
    write(tmp_path / "further/d.txt", "further")
    for link, target in {
        root / "a": root / "z",
        root / "b": elsewhere,
        root / "c": elsewhere / "b",
        root / "store": root / ".hidden/store",
        root / "z/up": root,
        root / "nowhere": tmp_path / "gone",
        elsewhere / "back": root,
        elsewhere / "on": tmp_path / "further",
    }.items():
        link.symlink_to(target)
    found = [os.path.relpath(path, root) for path in sources([root])]
    assert found == ["b/b/c.txt", "b/on/d.txt", "store/a.txt", "z/own.txt"]


def test_each_file_comes_once_whatever_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a.py", "x"), write(tmp_path / "b.py", "y")
    os.symlink(first, tmp_path / "c.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources(["b.py", "a.py", tmp_path, f"{tmp_path}/*.py", "~/a.py", "./b.py"]) == [first, second]


def test_globs_find_any_file(tmp_path: Path) -> None:
    wanted = write(tmp_path / "a/b/c.tex", "x")
    assert sources([f"{tmp_path}/**/*.tex"]) == [wanted]
    bracketed = write(tmp_path / "[a].txt", "x")
    assert sources([str(bracketed)]) == [bracketed]  # a file of that name goes before a pattern


def test_what_runs_write_is_no_text(tmp_path: Path) -> None:
    """Wherever the run folder lies, and whatever is in it; but not what only looks like a part of one."""
    wanted = [write(tmp_path / name, "x") for name in ("a.txt", "b/config.toml.txt", "b/c.md")]
    write(tmp_path / "b/metrics.jsonl", '{"text": "mine"}')
    for run in (tmp_path / "runs/small", tmp_path / "b/other"):
        for name in ("config.toml", "metrics.jsonl", "checkpoints/notes.txt"):
            write(run / name, '{"step": 1}')
    (tmp_path / "link").symlink_to("runs/small")
    passed: list[Path] = []
    assert sources([tmp_path, tmp_path / "b"], run_folders=passed) == sorted(
        [*wanted, tmp_path / "b/metrics.jsonl"]
    )
    runs = [tmp_path / "b/other", tmp_path / "runs/small"]
    assert passed == runs
    passed.clear()
    assert sources([f"{tmp_path}/**/*.[tm]*"], run_folders=passed) == sorted(wanted)
    assert passed == runs
    named = tmp_path / "runs/small/checkpoints/notes.txt"
    assert sources([named]) == [named]
    assert "no .txt, .md" in mistake(sources, [runs[0]])
    assert "no file matches" in mistake(sources, [f"{runs[0]}/*"])


@pytest.mark.parametrize("also", [".lock", "metrics.jsonl"])
def test_a_run_is_one_from_its_first_moment_on(tmp_path: Path, also: str) -> None:
    """Or its first command would read what it keeps of a tokenizer, and the next one would not."""
    wanted = write(tmp_path / "a.txt", "x")
    for name in ("config.toml", also, "from/merges.txt"):
        write(tmp_path / "run" / name, "x")
    for whole in (tmp_path, f"{tmp_path}/**/*.txt"):
        passed: list[Path] = []
        assert sources([whole], run_folders=passed) == [wanted]
        assert passed == [tmp_path / "run"]


def test_names_that_hold_wherever_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a [b]"
    write(folder / "c?.txt", "x")
    (folder / "set").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/me")
    escaped = f"{tmp_path}/a [[]b]"
    for name, expected in {
        "c.txt": f"{folder}/c.txt",
        "../d": f"{tmp_path}/d",
        "~/d": "/home/me/d",
        "c?.txt": f"{folder}/c?.txt",  # a file of that name goes before a pattern
        "?.txt": f"{escaped}/?.txt",
        "../**/*": f"{tmp_path}/**/*",
        "/e/*": "/e/*",
        "hf:set": f"hf:{folder}/set",
        "hf:./set:train": f"hf:{folder}/set:train",
        "hf:user/set:train": "hf:user/set:train",
    }.items():
        assert absolute_name(name) == expected
        assert absolute_name(expected) == expected


def test_without_paths_it_is_the_standard_library() -> None:
    files = sources([])
    root = corpus.common_folder(files)
    names = [os.path.relpath(file, root) for file in files]
    assert {"abc.py", "json/decoder.py", "asyncio/base_events.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert total_bytes(files) > 5_000_000


def test_places_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert "no such file" in mistake(sources, [tmp_path / "a.txt"])
    for link, to in (("dangling.txt", "a.txt"), ("loop", "loop")):
        (tmp_path / link).symlink_to(to)
        assert f"{link}: a link that leads to nothing: check" in mistake(sources, [tmp_path / link])
    assert "no .txt, .md" in mistake(sources, [tmp_path / "empty"])
    assert "neither a file" in mistake(sources, [tmp_path / "pipe"])
    assert mistake(sources, ["hf:"]) == "hf: names no dataset: say hf:NAME or hf:NAME:SPLIT"
    assert "no file matches" in mistake(sources, [f"{tmp_path}/*.txt"])
    assert "no file matches" in mistake(sources, [f"{tmp_path}/*"])  # folders and pipes only
    assert "no such file" in mistake(total_bytes, [tmp_path / "a.txt"]).lower()


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "folder/a.txt", "x")
    locked = tmp_path / "folder/b"
    locked.mkdir()

    def refuse(path: object, *_: object, **__: object) -> None:  # root may read all, so we play the kernel
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert "a.txt: cannot be read (Permission denied)" in mistake(sources, [file])
        assert "a.txt: cannot be read (Permission denied)" in mistake(list, documents([file]))
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) if path == str(locked) else scandir(path))
    assert f"{locked}: cannot be read (Permission denied)" in mistake(sources, [tmp_path / "folder"])


def test_what_may_not_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others may list and not enter, and a text where a path is wanted."""
    file, find = write(tmp_path / "shut/a.txt", "x"), os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{file.parent}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return find(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    shut = "a.txt: cannot be read (Permission denied): name files that you may read"
    for path in (file, tmp_path / "s*/a.txt", tmp_path / "sh*/a*"):
        assert mistake(sources, [path]).endswith(shut)
    long = mistake(sources, [f"{tmp_path}/{'once upon a * ' * 1000}"])
    assert " upon a * ': cannot be read (File name too long)" in long and len(long) < 120
    assert "no such file" in mistake(sources, ["a\0b"])
