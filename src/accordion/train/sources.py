"""Sources of data: read files, folders and saved datasets as documents or rows."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal

from accordion.errors import UsageError, nearest, some_of
from accordion.files import NOT_REGULAR
from accordion.models.language import brief
from accordion.train.config import DataConfig

Split = Literal["train", "validation"]
VALIDATION_SHARE = 20  # one document in this many
CSV = {".csv": ",", ".tsv": "\t"}  # suffix -> separator of columns
TABLES = (".parquet", ".arrow", *CSV)
ROWS = (".jsonl", ".ndjson", ".json", *TABLES)  # suffixes of files with rows
COMPRESSED = (".gz", ".bz2", ".zst")
DATASET_MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")
PIECE_CHARS = 1 << 20  # longer text files are read in pieces of about this size, split at the end of a line
HEAD_BYTES = 1 << 16  # read from a file in a folder, to see if it is text
# Tests are repetitive, and encodings are generated tables.
NOT_STDLIB_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
SHOWN = 20  # files that a message names
TAKES = "JSON, JSONL, CSV, parquet, Arrow, a folder of such files, or a saved datasets folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row of data. `where`: its file and line or row, for messages. `values`: field -> value, for the fields that are read."""

    where: str
    values: dict[str, Any]
    split: Split


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of fields that every row must have (`needed`), and of fields that are read if a row has them (`optional`)."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    key: str = ""  # the configuration key that names them

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)

    def row(self, where: str, values: Mapping[str, Any], split: Split, what: str = "field") -> DataRow:
        """Return a row with those fields of `values` (name -> value) that are in `names`. Raises `UsageError` if a needed one is
        missing. `where`: file and line or row, for messages. `what`: word for a field in the error, "field" or "column"."""
        for name in self.needed:
            if name not in values:
                near = nearest(name, list(values)[:20]) if values else "it is empty."
                raise UsageError(f"{where} has no {what} {name!r}{self.key and f' ({self.key})'}; {near}")
        read = {name: values[name] for name in self.names if name in values}
        return DataRow(where=where, values=read, split=split)


FIELDS = {"chat": Fields(("messages",), ("tools",)), "prompt": Fields(("prompt", "completion"))}


def split_by_key(key: str) -> Split:
    """Return the split of the document named `key`: 1 of 20 is for validation, by a hash that is equal on every machine."""
    return "validation" if zlib.crc32(key.encode(errors="surrogatepass")) % VALIDATION_SHARE == 0 else "train"


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's format, without that of its compression: `.jsonl` of `a.jsonl.gz`."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return plain.suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """Open the file `path` to read its bytes, decompressed if the suffix is in `COMPRESSED`."""
    if path.suffix.lower() not in COMPRESSED:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path)))


def read_rows(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Yield the rows of a file or of a folder saved by `datasets`, with the fields named in `fields`. `key`: name of the file
    in the source. A hash of `key` and the row's number decides the row's split, unless a saved folder names splits. Raises
    `UsageError`, which names the line or row, for a row that cannot be read or lacks a needed field."""
    rows = _saved if path.is_dir() else _table if suffix_of(path) in TABLES else _json
    return rows(path, key, fields)


def _json(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Yield the rows of JSON Lines, or of one array in a `.json` file. Raises `UsageError` if a row is no JSON object."""
    # Not read by `datasets`, which gives all rows the fields and types of the first 10 MB: a later field is an error, missing
    # fields are null, and text that looks like a date becomes a time.
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
    """Yield the rows of a CSV, parquet or Arrow file. Raises `UsageError` if it is unreadable, or if its columns are wrong."""
    what, number = f"data file {str(path)!r}", 0
    try:
        names, tables = _tables(path, fields)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{what} has two columns named {twice!r}; rename one of them.")
        fields.row(what, dict.fromkeys(names), "train", "column")
        for table in tables:
            for values in table.to_pylist():
                number += 1
                where = f"{str(path)!r} row {number}"
                yield fields.row(where, values, split_by_key(f"{key}:{number}"), "column")
    except UsageError:
        raise
    except Exception as error:  # of datasets, pyarrow and pandas
        kind, place = suffix_of(path).removeprefix("."), f" beyond row {number}" if number else ""
        raise UsageError(f"{what} is no {kind} file that can be read{place}: {brief(error)}") from None


def _tables(path: Path, fields: Fields) -> tuple[list[str], Iterator[Any]]:
    """Return (names of all columns, iterator of tables with the rows) of a file. Parquet tables have only columns in `fields`."""
    suffix, options = suffix_of(path), dict[str, Any]()
    if suffix == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        return names, file.iter_batches(1024, columns=[name for name in names if name in fields.names])
    import datasets

    if suffix in CSV:
        with opened(path) as data, io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as text:
            names = next(csv.reader(text, delimiter=CSV[suffix]), [])
        options = {"sep": CSV[suffix], "index_col": False, "encoding": "utf-8-sig"}
        # Otherwise "1" is read as a number and "NA" as missing.
        options["features"] = datasets.Features(dict.fromkeys(names, datasets.Value("string")))
        options |= {"keep_default_na": False, "na_filter": False}
    with TemporaryDirectory() as cache:  # for a lock file
        kind, files = "csv" if suffix in CSV else "arrow", [escape(str(path.absolute()))]
        rows = datasets.load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=cache, **options)
    return names if suffix in CSV else rows.column_names, rows.with_format("arrow").iter(1024)


def _saved(path: Path, key: str, fields: Fields) -> Iterator[DataRow]:
    """Yield the rows of a folder saved by `datasets`. If the folder has a split "train" and one for validation (the first of
    "validation", "valid", "dev", "test"), rows keep these splits, and others are left out; otherwise a hash chooses each row's
    split. Raises `UsageError` if the folder cannot be read, or if a needed field is missing."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # errors of many kinds, all of an unusable folder
        raise UsageError(f"data.path {str(path)!r} is no saved datasets folder: {error}") from None
    parts = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
    held_out = next(
        (name for name in ("validation", "valid", "dev", "test") if name in parts and "train" in parts), None
    )
    for name, part in parts.items():
        if held_out is not None and name not in ("train", held_out):
            continue
        fields.row(f"data.path {str(path)!r} {name}".rstrip(), dict.fromkeys(part.column_names), "train", "column")
        for number, values in enumerate(part.select_columns([c for c in part.column_names if c in fields.names])):
            split: Split = "train" if name == "train" else "validation"
            yield fields.row(
                f"{str(path)!r} {name} row {number}".replace("  ", " "),
                values,
                split_by_key(f"{key}/{name}:{number}") if held_out is None else split,
                "column",
            )


def checked_text(value: object, where: str) -> str:
    """Return `value`. Raises `UsageError`, which names `where`, if it is not text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise UsageError(f"{where} is {type(value).__name__}, not text.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} has half of a surrogate pair (\\u{ord(value[error.start]):04x} at character {error.start}), which is no "
            "text; JSON writes such a character as both halves, or as itself in UTF-8."
        ) from None
    return value


# -- files and folders


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a document, or a part of that text. `ends`: True for the last part. `split`: that of the document."""

    text: str
    split: Split
    ends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Data to read, which `find` returns: as text by `pieces`, as rows by `rows`. `name`: in names of run folders. `label`: in
    messages. `files`: (name in the source, path) of each. `stamp`: hash that changes when a file is added, removed or written.
    `unread`: name of a file that is left out -> reason."""

    name: str
    label: str
    files: tuple[tuple[str, Path], ...]
    fields: Fields
    stamp: str
    unread: Mapping[str, str]

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents in a fixed order; long text files in pieces. In tables, rows without text are left out. Raises
        `UsageError`, which names the file and the line or row, for text that cannot be read."""
        for key, path in self.files:
            with _named(path):
                yield from _rows_as_pieces(path, key, self.fields) if _has_rows(path) else self._text(path, key)

    def rows(self) -> Iterator[DataRow]:
        """Yield all rows in a fixed order. Raises `UsageError`, which names file and line, for a row that cannot be read."""
        for key, path in self.files:
            with _named(path):
                yield from read_rows(path, key, self.fields)

    def _text(self, path: Path, key: str) -> Iterator[Piece]:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            lines = text.readlines(PIECE_CHARS)
            while lines:
                piece, lines = "".join(lines), text.readlines(PIECE_CHARS)
                yield Piece(piece, split_by_key(key), ends=not lines)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context manager that turns errors of its body in reading or decoding `path` into a `UsageError` that names `path`."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"data file {str(path)!r} cannot be read: {reason}.") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data file {str(path)!r} is no UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it, or give a JSONL or "
            "parquet file its usual suffix."
        ) from None


def _has_rows(path: Path) -> bool:
    return path.is_dir() or suffix_of(path) in ROWS


def _rows_as_pieces(path: Path, key: str, fields: Fields) -> Iterator[Piece]:
    (field,) = fields.needed
    is_json = not path.is_dir() and suffix_of(path) not in TABLES
    for row in read_rows(path, key, fields):
        if is_json or row.values[field] not in (None, ""):
            yield Piece(checked_text(row.values[field], f"{row.where}: field {field!r}"), row.split)


def find(config: DataConfig) -> Source:
    """Return the source that `data.path` names; without a path, the source files of Python's standard library. `unread` of the
    source names files of a folder that cannot be read. Raises `UsageError` if nothing can be read as `data.format` says."""
    fields = FIELDS.get(config.format) or Fields((config.text_field,), key="data.text_field")
    if config.path is None:
        if config.format != "text":
            raise UsageError(f"data.format {config.format} takes {TAKES}; give --data.path one.")
        root, label = Path(sysconfig.get_path("stdlib")), f"the standard library of Python {platform.python_version()}"
        modules = [p for p in _walk(root, without=NOT_STDLIB_TEXT) if p.suffix == ".py" and p.is_file()]
        return _source("stdlib", label, {str(p.relative_to(root)): p for p in modules}, fields, {})
    path = Path(config.path)
    unread: dict[str, str] = {}
    if not path.exists():
        names = sorted(p.name for p in path.parent.iterdir())[:20] if path.parent.is_dir() else []
        raise UsageError(
            f"data.path {config.path!r} does not exist" + (f"; {nearest(path.name, names)}" if names else ".")
        )
    if path.is_dir() and not any((path / mark).is_file() for mark in DATASET_MARKS):
        files = {str(p.relative_to(path)): p for p in _walk(path)}
        if not files:
            raise UsageError(f"data.path {config.path!r} is a folder without files.")
        reasons = {key: _reason(p, key, config, fields) for key, p in files.items()}
        unread = {key: reason for key, reason in reasons.items() if reason is not None}
        files = {key: p for key, p in files.items() if key not in unread}
        left = [f"{key} ({reason})" for key, reason in unread.items()]
        if not files:
            raise UsageError(f"data.path {config.path!r} has no file that can be read: {some_of(left, SHOWN)}.")
    else:
        files = {path.name: path}
        if config.format != "text" and not _has_rows(path):
            raise UsageError(f"data.path {config.path!r} is text, and data.format {config.format} takes {TAKES}.")
        if not path.is_dir() and (reason := _reason(path, path.name, config, fields)) is not None:
            raise UsageError(f"data file {config.path!r} {reason}.")
    return _source(path.resolve().name.split(".")[0] or "data", config.path, files, fields, unread)


def _reason(path: Path, key: str, config: DataConfig, fields: Fields) -> str | None:
    """Return the reason why a file cannot be read as data; None if it seems readable. Reads the file's first bytes, and of a
    JSON or CSV file also the first row. Does not open parquet and Arrow files. `key`: name of the file in the source."""
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() and not path.exists() else f"is {NOT_REGULAR}"
    has_rows, suffix = _has_rows(path), suffix_of(path)
    if config.format != "text" and not has_rows:
        return f"text, and data.format {config.format} takes rows"
    if suffix in (".parquet", ".arrow"):
        return None
    try:
        with _named(path), opened(path) as file:
            head = file.read(HEAD_BYTES)
            if b"\0" in head:
                return "has a NUL byte, and is no UTF-8 text"
            codecs.getincrementaldecoder("utf-8")().decode(head, len(head) < HEAD_BYTES)
        # In a folder of texts, such files often have other content than rows of text.
        if suffix == ".json" or suffix in CSV:
            next(read_rows(path, key, fields), None)
    except UsageError as error:
        return str(error).removeprefix(f"data file {str(path)!r} ").removeprefix(f"{str(path)!r} ").rstrip(".")
    return None


def _source(name: str, label: str, files: Mapping[str, Path], fields: Fields, unread: Mapping[str, str]) -> Source:
    stamp = hashlib.sha256(json.dumps([name, fields.names]).encode())
    for key, path in files.items():
        inner = _walk(path) if path.is_dir() else [path]
        with _named(path):
            stats = [(p.stat().st_size, p.stat().st_mtime_ns) for p in inner]
        stamp.update(json.dumps([key, str(path.resolve()), stats]).encode())
    pairs = tuple(files.items())
    return Source(name=name, label=label, files=pairs, fields=fields, stamp=stamp.hexdigest(), unread=unread)


def _walk(folder: Path, without: Collection[str] = ()) -> list[Path]:
    """Return all files below `folder`, following links, in the same order on every machine. Leaves out hidden files and folders,
    folders named in `without`, and folders that were already walked under another name."""
    files, walked = [], set[Path]()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := Path(place).resolve()) in walked:
            folders.clear()
            continue
        walked.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files)
