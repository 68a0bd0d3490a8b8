"""Parquet and datasets return the texts put into them; without the extra, one line says what to install."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from imece.data import tables
from imece.data.corpus import documents
from imece.data.records import Texts
from imece.data.sources import sources
from tests.data.helpers import mistake


def texts(files: list[Path], field: str = "text") -> list[str]:
    return [document.text for document in documents(files, Texts(field))]


@pytest.fixture
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", True)
    package.disable_progress_bars()
    return package


def write_parquet(arrow: Any, path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path, **options)
    return path


# --- without the packages ---


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    assert "pip install 'imece[data]'" in mistake(sources, [tmp_path / name])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    assert "pip install 'imece[data]'" in mistake(sources, [tmp_path])  # not passed over in silence


def test_a_dataset_of_the_hub_without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = mistake(sources, ["hf:somebody/texts"])
    assert "datasets" in message and "pip install 'imece[data]'" in message


def save_by_hand(folder: Path, names: list[str]) -> None:
    """What save_to_disk writes, but with tables that are empty files."""
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for name in names:
        (folder / name).touch()


def test_the_files_of_a_saved_dataset_are_those_it_names(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "one", ["b.arrow", "a.arrow"])
    (tmp_path / "one/cache-123.arrow").touch()  # datasets leaves such beside them
    assert tables.saved(tmp_path / "one", None) == [tmp_path / "one/b.arrow", tmp_path / "one/a.arrow"]
    assert tables.saved(tmp_path, None) is None


def test_which_split_is_read(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_by_hand(tmp_path / "two" / split, [f"{split}.arrow"])
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert tables.saved(tmp_path / "two", None) == [tmp_path / "two/train/train.arrow"]
    assert tables.saved(tmp_path / "two", "test") == [tmp_path / "two/test/test.arrow"]
    message = mistake(sources, [f"hf:{tmp_path}/two:valid"])
    assert "no split 'valid'" in message and "train, test" in message
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["test"]}')
    assert tables.saved(tmp_path / "two", None) == [tmp_path / "two/test/test.arrow"]
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["test", "other"]}')
    assert "no split 'train'" in mistake(tables.saved, tmp_path / "two", None)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"_data_files": [3]}', '{"_data_files": [{}]}', "[" * 9999]
)
def test_a_damaged_saved_dataset(tmp_path: Path, content: str) -> None:
    save_by_hand(tmp_path / "one", ["a.arrow"])
    (tmp_path / "one/state.json").write_text(content)
    message = mistake(sources, [tmp_path / "one"])
    assert str(tmp_path / "one") in message and "damaged" in message


def test_a_saved_dataset_of_which_a_file_is_gone(tmp_path: Path) -> None:
    save_by_hand(tmp_path / "one", ["a.arrow", "b.arrow"])
    (tmp_path / "one/b.arrow").unlink()
    assert "b.arrow: no such file" in mistake(sources, [tmp_path / "one"])


# --- with them ---


def test_parquet_row_by_row(arrow: Any, tmp_path: Path) -> None:
    rows = [f"row {number} €" for number in range(1000)]
    written = [*rows[:500], None, "", *rows[500:]]
    file = write_parquet(
        arrow, tmp_path / "a.parquet", {"n": range(1002), "text": written}, row_group_size=300
    )
    found = list(documents(sources([file])))
    assert [document.text for document in found] == rows
    assert (found[499].name, found[500].name) == ("a.parquet:500", "a.parquet:503")
    assert sources([tmp_path]) == [file]


def test_kinds_of_strings(arrow: Any, tmp_path: Path) -> None:
    plain = arrow.array(["one", "two", "one"])
    for number, column in enumerate((plain, plain.dictionary_encode(), plain.cast(arrow.large_string()))):
        file = write_parquet(arrow, tmp_path / f"{number}.parquet", {"text": column})
        assert texts(sources([file])) == ["one", "two", "one"]


def test_tables_that_are_refused(arrow: Any, tmp_path: Path) -> None:
    file = write_parquet(arrow, tmp_path / "a.parquet", {"body": ["x"], "n": [1]})
    assert "a.parquet: no column 'text'; its columns are 'body', 'n'" in mistake(sources, [file])
    assert "column 'n' holds int64" in mistake(sources, [file], Texts("n"))
    assert texts(sources([file], Texts("body")), "body") == ["x"]
    empty = write_parquet(arrow, tmp_path / "b.parquet", {"text": arrow.array([None, ""], arrow.string())})
    assert "nothing in it holds any text" in mistake(sources, [empty])
    content = file.read_bytes()
    for name, cut in (("c.parquet", content[: len(content) // 2]), ("d.arrow", content), ("e.arrow", b"x")):
        (tmp_path / name).write_bytes(cut)
        assert name in mistake(sources, [tmp_path / name])
    latin = arrow.array([b"good", b"gr\xf6\xdfer"], arrow.binary()).view(arrow.string())
    file = write_parquet(arrow, tmp_path / "f.parquet", {"text": latin})
    assert "f.parquet: column 'text' is not UTF-8" in mistake(texts, [file])


def test_a_dataset_saved_to_disk(datasets: Any, tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(2500)]
    whole = datasets.Dataset.from_dict({"text": rows, "n": list(range(2500))})
    whole.save_to_disk(tmp_path / "whole", num_shards=2)
    assert texts(sources([tmp_path / "whole"])) == rows
    whole.select([7, 3, 5]).save_to_disk(tmp_path / "some")
    assert texts(sources([f"hf:{tmp_path}/some"])) == ["row 7", "row 3", "row 5"]
    both = datasets.DatasetDict(train=whole, test=whole.select(range(9)))
    both.save_to_disk(tmp_path / "both")
    assert texts(sources([tmp_path / "both"])) == rows
    assert texts(sources([f"hf:{tmp_path}/both:test"])) == rows[:9]
    message = mistake(sources, [tmp_path / "whole"], Texts("body"))
    assert "no column 'body'; its columns are 'text', 'n'" in message


def test_a_dataset_that_datasets_prepares(datasets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    for split, number in (("train", 5), ("test", 3)):
        lines = [json.dumps({"text": f"{split} {row}"}) for row in range(number)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    assert texts(sources([f"hf:{folder}"])) == [f"train {row}" for row in range(5)]
    assert texts(sources([f"hf:{folder}:test"])) == ["test 0", "test 1", "test 2"]
    message = mistake(sources, [f"hf:{folder}:valid"])
    assert "no split 'valid'" in message and "test" in message
    assert "hf:nobody/nothing:" in mistake(sources, ["hf:nobody/nothing"])
