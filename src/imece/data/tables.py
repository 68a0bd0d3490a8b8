"""Reads texts from tables: Parquet files, and Hugging Face datasets, which lie on disk as Arrow files.

pyarrow reads both; the package `datasets` only downloads "hf:NAME". Both come with the extra `data`; without
tables neither is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import reprlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from imece.data.records import Reading, take_instead
from imece.errors import UserError
from imece.listing import some, words_of

SUFFIXES = (".parquet", ".arrow")

_ROWS = 256  # rows read at once, so this many texts are in memory
_NAMED = 8  # columns or fields that a message names


def rows(path: Path, reading: Reading) -> Iterator[tuple[int, list[object]]]:
    """(row, its values in the columns that are the reading's fields) of each row; rows count from 1.

    UserError if the file is no table, if a column is missing or has another type, if a text is not UTF-8, and
    if pyarrow is missing.
    """
    arrow = _package("pyarrow")
    try:
        with arrow.OSFile(str(path)) as file:
            row = 0
            for columns in _columns(arrow, file, path, reading):
                for values in zip(*(column.to_pylist() for column in columns), strict=True):
                    row += 1
                    yield row, list(values)
    except UnicodeDecodeError as error:
        named = few(reading.fields)
        raise UserError(f"{path}: column {named} is not UTF-8 after row {row}: write it anew") from error
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a {path.suffix} table ({words_of(error)}): write it anew") from error


def require() -> None:
    """UserError if pyarrow is missing."""
    _package("pyarrow")


def saved(folder: Path, split: str | None) -> list[Path] | None:
    """The files of a dataset that `save_to_disk` wrote into `folder`; None if there is none.

    split: which one of several; None takes the only one, or else "train". UserError if there is no such
    split, or if the folder is damaged.
    """
    try:
        if os.path.isfile(several := folder / "dataset_dict.json"):
            folder /= _chosen(json.loads(several.read_text())["splits"], split, str(folder))
        state, info = folder / "state.json", folder / "dataset_info.json"
        if not os.path.isfile(state) or not os.path.isfile(info):
            return None
        files = [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder}: a damaged dataset ({error!r}): save it to disk anew") from error
    for path in files:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file, but the dataset in this folder needs it: save it anew")
    return files


def fetched(name: str, split: str | None) -> list[Path]:
    """The files of a dataset of the Hugging Face Hub, downloaded if they are missing.

    name: as for `datasets.load_dataset`. UserError, in its words, if that fails.
    """
    datasets = _package("datasets")
    try:
        builder = datasets.load_dataset_builder(name)
        builder.download_and_prepare()
        found = list(builder.info.splits)
    except Exception as error:  # errors of many classes: the network's, the Hub's, pyarrow's, a reader's own
        hint = "name another, or save it to disk with datasets' save_to_disk and name that folder"
        raise UserError(f"hf:{name}: {words_of(error)}; {hint}") from error
    dataset = builder.as_dataset(split=_chosen(found, split, f"hf:{name}"))
    return [Path(file["filename"]) for file in dataset.cache_files]


def _chosen(splits: list[str], split: str | None, where: str) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if (wanted := split or "train") in splits:
        return wanted
    raise UserError(f"{where}: no split {wanted!r}: name one of {', '.join(splits)} as hf:NAME:SPLIT")


def _columns(arrow: Any, file: Any, path: Path, reading: Reading) -> Iterator[list[Any]]:
    """The pieces of the columns, one after the other."""
    if path.suffix.lower() == ".parquet":
        table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
        _check(arrow, table.schema_arrow, path, reading)
        batches = table.iter_batches(_ROWS, columns=list(reading.fields))
    else:
        stream = arrow.ipc.open_stream(file)
        _check(arrow, stream.schema, path, reading)
        batches = (batch.slice(first, _ROWS) for batch in stream for first in range(0, len(batch), _ROWS))
    for batch in batches:
        yield [batch.column(field) for field in reading.fields]


def _check(arrow: Any, schema: Any, path: Path, reading: Reading) -> None:
    for field in reading.fields:
        if schema.names.count(field) != 1:
            raise UserError(
                f"{path}: no column {field!r}; its columns are {few(schema.names)}: "
                f"{take_instead(reading, schema.names)}"
            )
        kind, types = schema.field(field).type, arrow.types
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if reading.strings and not is_string:
            raise UserError(f"{path}: column {field!r} holds {kind}, not strings: name another")


def few(names: Collection[str]) -> str:
    """The first few names, shortened so that a message stays one line."""
    return some([reprlib.repr(name) for name in names], _NAMED) or "none at all"


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"tables and datasets need the package {name}: pip install 'imece[data]'") from error
