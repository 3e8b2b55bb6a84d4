"""Rows of JSONL, parquet and saved datasets, one after another: some fields of each, and where it stands for a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion.errors import UsageError, nearest
from accordion.train.config import DataConfig
from accordion.train.sources import DATASET_MARKS, Split, find, parts_of, split_by_key


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """`where`: file and line or row, for a message. `split`: of which the row is; by a hash of its place if no name says it."""

    where: str
    values: dict[str, Any]
    split: Split


Reader = Callable[[Path, str, Sequence[str]], Iterator[DataRow]]
"""Called with (file or folder, key of it, fields)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSource:
    """Rows that were found. `stamp` changes when a file is added, removed or written."""

    name: str
    label: str
    files: tuple[tuple[str, Path, Reader], ...]
    fields: tuple[str, ...]
    stamp: str

    def rows(self) -> Iterator[DataRow]:
        """Every row in a fixed order. Raises `UsageError` naming the file and the line or row."""
        for key, path, reader in self.files:
            try:
                yield from reader(path, key, self.fields)
            except OSError as error:
                raise UsageError(f"data file {str(path)!r} cannot be read: {error.strerror or error}.") from None
            except UnicodeDecodeError:
                raise UsageError(f"data file {str(path)!r} holds text that is no UTF-8; write it anew.") from None


def find_rows(config: DataConfig, fields: tuple[str, ...]) -> RowSource:
    """The rows that `data.path` names. Raises `UsageError` where there are none."""
    takes = f"data.format {config.format} takes JSONL, parquet, a folder of such files, or a saved datasets folder"
    if config.path is None:
        raise UsageError(f"{takes}; give --data.path one.")
    source = find(config)
    files = tuple((key, path, reader) for key, path, _ in source.files if (reader := _reader_of(path)) is not None)
    if not files:
        raise UsageError(f"data.path {config.path!r} is none of these: {takes}.")
    return RowSource(name=source.name, label=source.label, files=files, fields=fields, stamp=source.stamp)


def _reader_of(path: Path) -> Reader | None:
    if path.is_dir():
        return _datasets if any((path / mark).is_file() for mark in DATASET_MARKS) else None
    return {".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _jsonl, ".parquet": _parquet}.get(path.suffix.lower())


def _jsonl(path: Path, key: str, fields: Sequence[str]) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{str(path)!r} line {number}"
                row = _object(line, where)
                _check_fields(where, fields, list(row), "field")
                yield DataRow(
                    where=where, values={name: row[name] for name in fields}, split=split_by_key(f"{key}:{number}")
                )


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        more = ", and this file looks like one array of all of them" if line.lstrip()[:1] == b"[" else ""
        raise UsageError(f"{where} is no JSON; JSONL has one object in each line{more}.") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where} is JSON but no object; JSONL has one object in each line.")
    return row


def _check_fields(where: str, fields: Sequence[str], there: list[str], what: str) -> None:
    for name in fields:
        if name not in there:
            near = nearest(name, there[:20]) if there else "it is empty."
            raise UsageError(f"{where} has no {what} {name!r}; {near}")


def _parquet(path: Path, key: str, fields: Sequence[str]) -> Iterator[DataRow]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
    except pa.ArrowException as error:
        raise UsageError(f"data file {str(path)!r} is no parquet file: {error}") from None
    with table:
        _check_fields(f"data file {str(path)!r}", fields, table.schema_arrow.names, "column")
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=list(fields)):
            for values in batch.to_pylist():
                number += 1
                yield DataRow(where=f"{str(path)!r} row {number}", values=values, split=split_by_key(f"{key}:{number}"))


def _datasets(path: Path, key: str, fields: Sequence[str]) -> Iterator[DataRow]:
    parts, held_out = parts_of(path)
    for name, part in parts.items():
        _check_fields(f"data.path {str(path)!r}", fields, list(part.features), "column")
        for number, values in enumerate(part.select_columns(list(fields))):
            split: Split = "train" if name == "train" else "validation"
            yield DataRow(
                where=f"{str(path)!r} {name} row {number}".replace("  ", " "),
                values=values,
                split=split_by_key(f"{key}/{name}:{number}") if held_out is None else split,
            )
