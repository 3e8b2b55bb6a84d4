"""Rows of JSON, CSV, parquet and Arrow files and of saved datasets, one after another, each with its place for a message."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal
from zlib import crc32

from accordion.errors import UsageError, nearest
from accordion.models.language import brief

Split = Literal["train", "validation"]
VALIDATION_SHARE = 20  # one document in this many
CSV = {".csv": ",", ".tsv": "\t"}  # suffix -> what separates columns
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
KINDS |= dict.fromkeys(CSV, "csv")
DATASET_MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """One row. `where`: file and line or row, for a message. `left`: names of its fields that were not asked for."""

    where: str
    values: dict[str, Any]
    split: Split
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of fields: those that every row must have, and those that are read if a row has them."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    key: str = ""  # of the configuration that names them

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)

    def row(self, where: str, values: Mapping[str, Any], split: Split, what: str = "field") -> DataRow:
        """Return a row with these fields. Raises `UsageError` if one is missing."""
        for name in self.needed:
            if name not in values:
                near = nearest(name, list(values)[:20]) if values else "it is empty."
                raise UsageError(f"{where} has no {what} {name!r}{self.key and f' ({self.key})'}; {near}")
        own = {name: values[name] for name in self.names if name in values}
        return DataRow(where=where, values=own, split=split, left=tuple(name for name in values if name not in own))


def _zstandard(path: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}


def split_by_key(key: str) -> Split:
    """Return the split of a document by a hash of its name, the same on every machine."""
    return "validation" if crc32(key.encode(errors="surrogatepass")) % VALIDATION_SHARE == 0 else "train"


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's format, without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return plain.suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its suffix says."""
    file: IO[bytes] = COMPRESSED.get(path.suffix.lower(), partial(open, mode="rb"))(path)
    return file


def read_rows(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Yield the rows of a file or of a saved datasets folder. Raises `UsageError` naming the file and the line or row."""
    if path.is_dir():
        yield from _saved(path, key, fields)
    elif KINDS[suffix_of(path)] == "json":
        yield from _json(path, key, fields)
    else:
        yield from _table(path, key, fields)


def _json(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Rows of JSON Lines, or of one array in a file named `.json`, each with its own fields.

    `datasets` gives all rows of a file the fields and types of its first 10 MB: rows with a later field are an error, fields
    that a row lacks are null, and texts that look like dates are times.
    """
    may_be_array = suffix_of(path) == ".json"
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if may_be_array and text.startswith(b"["):
                for index, row in enumerate(_parsed(text + file.read(), repr(str(path))), 1):
                    yield _object(row, f"{str(path)!r} row {index}", f"{key}:{index}", fields)
                return
            if text:
                may_be_array = False
                where = f"{str(path)!r} line {number}"
                yield _object(_parsed(text, where), where, f"{key}:{number}", fields)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError):
        more = ", and this file looks like one array of all of them" if text.lstrip()[:1] == b"[" else ""
        raise UsageError(f"{where} is no JSON; JSONL has one object in each line{more}.") from None


def _object(row: object, where: str, key: str, fields: Fields) -> DataRow:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is JSON but no object; JSONL has one object in each line.")
    return fields.row(where, row, split_by_key(key))


def _table(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Rows of a file that `datasets` reads."""
    what = f"data file {str(path)!r}"
    number = 0
    try:
        for values in _table_values(path, columns_of(path, fields), fields):
            number += 1
            yield fields.row(f"{str(path)!r} row {number}", values, split_by_key(f"{key}:{number}"), "column")
    except (UsageError, GeneratorExit):
        raise
    except Exception as error:  # of datasets, pyarrow and pandas
        place = f" beyond row {number}" if number else ""
        raise UsageError(
            f"{what} is no {KINDS[suffix_of(path)]} file that can be read{place}: {brief(error)}"
        ) from None


def columns_of(path: Path, fields: Fields) -> list[str]:
    """Return the column names of a CSV or parquet file, none of Arrow's. Raises `UsageError` unless they have `fields`."""
    what, suffix, names = f"data file {str(path)!r}", suffix_of(path), list[str]()
    if suffix in CSV:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            names = next(csv.reader(text, delimiter=CSV[suffix]), [])
    elif suffix == ".parquet":
        from pyarrow import parquet

        names = parquet.read_schema(path).names
    else:
        return names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{what} has two columns named {twice!r}; rename one of them.")
    fields.row(what, dict.fromkeys(names), "train", "column")
    return names


def _table_values(path: Path, names: list[str], fields: Fields) -> Iterator[dict[str, Any]]:
    import datasets

    kind = KINDS[suffix_of(path)]
    how: dict[str, Any] = {}
    if kind == "csv":
        text = datasets.Value("string")  # else a column of "1" or "NA" is numbers or nothing
        how = {"sep": CSV[suffix_of(path)], "encoding": "utf-8-sig", "keep_default_na": False, "na_filter": False}
        how["features"] = datasets.Features(dict.fromkeys(names, text))
    elif kind == "parquet":
        how = {"columns": [name for name in names if name in fields.names], "batch_size": 1024}
    left = [name for name in names if name not in fields.names]
    with TemporaryDirectory() as cache:  # for a lock file
        files = [escape(str(path.absolute()))]
        for row in datasets.load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=cache, **how):
            yield {**row, **dict.fromkeys(left)}


def _saved(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Rows of a folder that `datasets` saved. Parts that are neither for training nor for validation are left out."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # its readers' own errors; all of them mean that the folder is unusable
        raise UsageError(f"data.path {str(path)!r} is no saved datasets folder: {error}") from None
    parts = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
    held_out = next(
        (name for name in ("validation", "valid", "dev", "test") if name in parts and "train" in parts), None
    )
    for name, part in parts.items():
        if held_out is not None and name not in ("train", held_out):
            continue
        left = [column for column in part.column_names if column not in fields.names]
        for number, values in enumerate(part.remove_columns(left)):
            split: Split = "train" if name == "train" else "validation"
            yield fields.row(
                f"{str(path)!r} {name} row {number}".replace("  ", " "),
                {**values, **dict.fromkeys(left)},
                split_by_key(f"{key}/{name}:{number}") if held_out is None else split,
                "column",
            )


def checked_text(value: object, where: str) -> str:
    """Return `value` if it is text. Raises `UsageError`."""
    if not isinstance(value, str):
        raise UsageError(f"{where} is {type(value).__name__}, not text.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} holds half of a surrogate pair (\\u{ord(value[error.start]):04x} at character {error.start}), which is "
            "no text; JSON writes such a character as two of them, or as itself in UTF-8."
        ) from None
    return value
