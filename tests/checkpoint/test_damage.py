"""Any damaged byte of a checkpoint is found, the file is named, and the previous checkpoint is used."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint import Slice, all_steps, best, newest, open_checkpoint
from imece.checkpoint.manifest import header, seal, unseal
from imece.errors import UserError
from tests.checkpoint.crew import assert_whole, crew, state_of

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 and 2, of two ranks."""
    with crew(tmp_path / "checkpoints", 2) as ranks:
        assert ranks.save(1, state_of(1)) and ranks.save(2, state_of(2))
    return tmp_path / "checkpoints"


def _refused(path: Path, says: str = "") -> None:
    """The step that `path` is in cannot be opened, and the one line says that it is because of `path`."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(path.parent)
    line = str(caught.value)
    assert str(path) in line and says in line and "\n" not in line


def _falls_back(folder: Path, path: Path) -> None:
    lines: list[str] = []
    assert_whole(newest(folder, lines.append), 1, 2)
    assert len(lines) == 1 and str(path) in lines[0]


@pytest.mark.parametrize("name", FILES)
def test_any_byte_flipped(folder: Path, name: str) -> None:
    path = folder / "step-00000002" / name
    good, generator = path.read_bytes(), random.Random(name)
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << generator.randrange(8)
        path.write_bytes(bad)
        _refused(path)
        if position % 97 == 0:
            _falls_back(folder, path)
    path.write_bytes(good)
    assert_whole(newest(folder, print), 2, 2)


@pytest.mark.parametrize("name", FILES)
def test_any_length_but_its_own(folder: Path, name: str) -> None:
    path = folder / "step-00000002" / name
    good = path.read_bytes()
    for length in {*range(0, len(good), 7), *range(len(good) - 9, len(good))}:
        path.write_bytes(good[:length])
        _refused(path)
    path.write_bytes(good + b"\n")
    _refused(path)
    path.unlink()
    _refused(path)
    _falls_back(folder, path)


def test_a_byte_of_a_tensor_is_not_looked_at_if_not_asked_for(folder: Path) -> None:
    path = folder / "step-00000002" / FILES[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    open_checkpoint(path.parent, verify=False)
    _refused(path, "checksum")


class _Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._mark),))


def test_a_pickle_never_runs(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    zipped = io.BytesIO()
    torch.save({"x": _Bomb(mark)}, zipped)
    for poison in (pickle.dumps(_Bomb(mark)), zipped.getvalue()):
        for name in FILES:
            path = folder / "step-00000002" / name
            good = path.read_bytes()
            path.write_bytes(poison)
            _refused(path)
            with pytest.raises(UserError):
                open_checkpoint(path.parent, verify=False)
            _falls_back(folder, path)
            path.write_bytes(good)
        for note in (folder / ".ranks").iterdir():
            note.write_bytes(poison)
        with crew(folder, 2) as ranks:
            assert ranks.save(2, state_of(2))
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Bomb(mark)))  # noqa: S301 - it would have
    assert mark.exists()


def _file(body: dict[str, Any], **values: Any) -> None:
    body["files"][0].update(values)


def _tensor(body: dict[str, Any], value: Any) -> None:
    body["tensors"]["model/a.weight"] = value


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "version 2": lambda body: body.update(version=2),
    "'other'": lambda body: body.update(format="other"),
    "'../../step-00000001/rank-00000.safetensors'": lambda body: _file(
        body, name="../../step-00000001/rank-00000.safetensors"
    ),
    "'/etc/passwd'": lambda body: _file(body, name="/etc/passwd"),
    "its pieces make": lambda body: _file(body, bytes=1 << 60),
    "checksum": lambda body: _file(body, sha256="0" * 64),
    "are in two files": lambda body: (
        body["files"].append(body["files"][1] | {"name": "rank-00002.safetensors"})
        or body["rank_states"].append(None)
    ),
    "are in no file": lambda body: _tensor(body, ["F32", [5, 6]]),
    "which no tensor can be": lambda body: _tensor(body, ["F32", [1 << 40, 1 << 40, 0]]),
    "F31": lambda body: _tensor(body, ["F31", [4, 6]]),
    "-4 is no whole number": lambda body: _tensor(body, ["F32", [-4, -6]]),
    "True is no whole number": lambda body: body.update(step=True),
    "it is of step 3": lambda body: body.update(step=3),
    "its metric is 'low'": lambda body: body.update(metric="low"),
    "states of ranks": lambda body: body["rank_states"].pop(),
    "KeyError": lambda body: body.pop("tensors"),
    "unhashable": lambda body: _tensor(body, [[], [4, 6]]),
    "no elements [9, 4)": lambda body: body["files"][0]["pieces"].__setitem__(0, ["model/a.weight", 9, 4]),
    "KeyError('eval')": lambda body: body.update(state={"imece/kind": "eval", "of": ["1"]}),
    "could not convert": lambda body: body["rank_states"].__setitem__(
        0, {"imece/kind": "float", "of": ["x"]}
    ),
    "not in order": lambda body: body["files"][0]["pieces"].append(body["files"][0]["pieces"][0]),
}


@pytest.mark.parametrize("says", HOSTILE)
def test_a_manifest_that_is_meant_to_mislead(folder: Path, says: str) -> None:
    path = folder / "step-00000002" / "manifest.json"
    body = unseal(path.read_bytes())
    HOSTILE[says](body)
    path.write_bytes(seal(body))
    named = path.with_name(FILES[1]) if says == "checksum" else path
    _refused(named, says)
    _falls_back(folder, named)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"metric":NaN', '{"step":' + "9" * 5000, "[1", '{"a":"\\ud8']
)
def test_json_that_is_meant_to_mislead(folder: Path, text: str) -> None:
    path = folder / "step-00000002" / "manifest.json"
    checksum = hashlib.sha256(text.encode()).hexdigest()
    path.write_bytes(f'{text},"sha256":"{checksum}"}}\n'.encode())
    _refused(path)


def test_a_header_that_says_something_else(folder: Path) -> None:
    """The sizes and the checksum are right; a program that believed the header would read other numbers."""
    path = folder / "step-00000002" / FILES[0]
    body = unseal(path.read_bytes())
    data = path.with_name(FILES[1])
    swapped = data.read_bytes().replace(b'"F32"', b'"I32"')
    assert swapped != data.read_bytes()
    data.write_bytes(swapped)
    _file(body, sha256=hashlib.sha256(swapped).hexdigest())
    path.write_bytes(seal(body))
    _refused(data, "header")
    with pytest.raises(UserError, match="header"):
        open_checkpoint(path.parent, verify=False)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str) -> None:
    path = folder / "step-00000002" / name
    path.unlink()
    os.mkfifo(path)
    _refused(path, "no plain file")
    path.unlink()
    path.mkdir()
    _refused(path, "no plain file")


def test_a_checkpoint_under_another_name(folder: Path, tmp_path: Path) -> None:
    (folder / "step-00000002").rename(folder / "step-00000007")
    _refused(folder / "step-00000007" / "manifest.json", "step 2")
    (folder / "step-00000007").rename(tmp_path / "mine")
    assert_whole(open_checkpoint(tmp_path / "mine"), 2, 2)


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert newest(tmp_path / "none", print) is None and best(tmp_path / "none", print) is None
    (tmp_path / "step-00000001").mkdir()
    lines: list[str] = []
    assert newest(tmp_path, lines.append) is None and len(lines) == 1
    assert best(tmp_path, lines.append) is None and lines == lines[:1] * 2
    assert newest(tmp_path) is None and best(tmp_path) is None
    assert capsys.readouterr().err.splitlines() == [f"imece: {each}" for each in lines]
    with pytest.raises(UserError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "step-00000002")


def test_a_tensor_that_it_does_not_have(folder: Path) -> None:
    saved = open_checkpoint(folder / "step-00000002")
    with pytest.raises(UserError, match=r"step-00000002: it has no tensor 'model/c'"):
        saved.tensor("model/c")
    with pytest.raises(ValueError, match=r"\[20, 25\) is not within the 24 elements of 'model/a.weight'"):
        saved.slice("model/a.weight", 20, 25)
    for name in FILES[1:]:
        os.truncate(saved.folder / name, 8)
    with pytest.raises(UserError, match=r"rank-0000.\.safetensors: cannot be read \(it has become shorter\)"):
        saved.tensor("model/a.weight")


def test_the_header_is_a_function_of_the_manifest(tmp_path: Path) -> None:
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, {"x": Slice(torch.arange(6).float(), (2, 3), 0)})
    saved = open_checkpoint(tmp_path / "step-00000001")
    data = (saved.folder / FILES[1]).read_bytes()
    expected = header(saved._manifest.files[0].pieces)
    assert data == expected + torch.arange(6).float().numpy().tobytes()
    assert json.loads(expected[8:])["x"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize("kind", ["a file", "a link to nowhere"])
def test_what_is_no_folder_is_damaged_and_makes_room(tmp_path: Path, kind: str) -> None:
    """As after a copy that went wrong, or where a checkpoint was moved to a disk that is not mounted."""
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        other = tmp_path / "step-00000002"
        other.write_text("") if kind == "a file" else other.symlink_to("/nowhere/step-00000002")
        assert all_steps(tmp_path) == [1, 2]
        lines: list[str] = []
        assert_whole(newest(tmp_path, lines.append), 1, 2)
        why = "it is no folder" if kind == "a file" else "a link to /nowhere/step-00000002"
        assert len(lines) == 1 and str(other) in lines[0] and why in lines[0]
        assert ranks.save(2, state_of(2)) and ranks.alarms == [[], []]
    assert_whole(newest(tmp_path, print), 2, 2)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["step-00000001", "step-00000002"]


def test_of_a_linked_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    """One that was moved to another disk, with a link where it was."""
    moved, folder = tmp_path / "moved", tmp_path / "checkpoints"
    with crew(folder, 2) as ranks:
        assert ranks.save(1, state_of(1))
        (folder / "step-00000001").rename(moved)
        (folder / "step-00000001").symlink_to(moved)
        assert_whole(newest(folder, print), 1, 2)
        assert ranks.save(2, state_of(2)) and ranks.save(3, state_of(3))
        assert ranks.alarms == [[], []]
    assert_whole(open_checkpoint(moved), 1, 2)
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["step-00000002", "step-00000003"]
