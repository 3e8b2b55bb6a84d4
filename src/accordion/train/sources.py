"""Where the text comes from: files, folders, JSONL, parquet and datasets, as one stream of documents."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from accordion.errors import UsageError, nearest
from accordion.files import NOT_REGULAR
from accordion.train.config import DataConfig

Split = Literal["train", "validation"]
VALIDATION_SHARE = 20  # one document in this many
PIECE_CHARS = 1 << 20  # longer text files come in pieces of about this size, cut at a line's end
# Tests are repetitive, and encodings are tables written by a program.
NOT_STDLIB_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
TEXT_TYPES = ("string", "large_string", "string_view")
DATASET_MARKS = ("dataset_dict.json", "dataset_info.json", "state.json")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one document. `key` names the document; `ends`: no more of it follows; `split` where the data says it."""

    key: str
    text: str
    ends: bool = True
    split: Split | None = None


Reader = Callable[[Path, str, str], Iterator[Piece]]
"""Called with (file or folder, key of it, text field)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Text that was found. `stamp` changes when a file is added, removed or written."""

    name: str
    label: str
    files: tuple[tuple[str, Path, Reader], ...]
    text_field: str
    stamp: str

    def pieces(self) -> Iterator[Piece]:
        """Every document in a fixed order. Raises `UsageError` naming the file and the line or row."""
        for key, path, reader in self.files:
            try:
                yield from reader(path, key, self.text_field)
            except OSError as error:
                raise UsageError(f"data file {str(path)!r} cannot be read: {error.strerror or error}.") from None
            except UnicodeDecodeError:  # of a column; text files are told with the byte
                raise UsageError(f"data file {str(path)!r} holds text that is no UTF-8; write it anew.") from None


def split_of(piece: Piece) -> Split:
    """Of which split a document is: what the data says, else by a hash of its name, the same everywhere."""
    return piece.split if piece.split is not None else split_by_key(piece.key)


def split_by_key(key: str) -> Split:
    return "validation" if crc32(key.encode(errors="surrogatepass")) % VALIDATION_SHARE == 0 else "train"


def find(config: DataConfig) -> Source:
    """The source that `data.path` names, or the standard library. Raises `UsageError` where there is none."""
    if config.path is None:
        return _stdlib(config)
    path = Path(config.path)
    files: list[tuple[str, Path, Reader]]
    if not path.exists():
        if path.is_symlink():
            raise UsageError(f"data.path {config.path!r} is a link to {os.readlink(path)!r}, which does not exist.")
        raise UsageError(f"data.path {config.path!r} does not exist; {_neighbour(path)}")
    if path.is_dir():
        if any((path / mark).is_file() for mark in DATASET_MARKS):
            files = [(path.name, path, _datasets)]
            odd = [p for p in sorted(path.rglob("*")) if p.exists() and not (p.is_file() or p.is_dir())]
            if odd:
                raise UsageError(f"data file {str(odd[0])!r} is {NOT_REGULAR}.")
        else:
            files = [(str(p.relative_to(path)), p, _reader_in_folder(p)) for p in _walk(path)]
        if not files:
            raise UsageError(f"data.path {config.path!r} is a folder without files.")
    elif path.is_file():
        files = [(path.name, path, READERS.get(path.suffix.lower(), _text))]
        if path.stat().st_size == 0:
            raise UsageError(f"data.path {config.path!r} is an empty file.")
    else:
        raise UsageError(f"data.path {config.path!r} is neither a file nor a folder.")
    return _source(path.resolve().name.split(".")[0] or "data", config.path, files, config.text_field)


def _neighbour(path: Path) -> str:
    """What there is in its place, for a message."""
    folder = path.parent
    if not folder.is_dir():
        return f"nor does the folder {str(folder)!r}."
    here = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    return nearest(path.name, here[:20]) if here else f"{str(folder)!r} is empty."


def _stdlib(config: DataConfig) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[str, Path, Reader]] = [
        (str(p.relative_to(root)), p, _lenient_text) for p in _walk(root, without=NOT_STDLIB_TEXT) if p.suffix == ".py"
    ]
    if not files:
        raise UsageError(
            f"the standard library at {str(root)!r} has no source files on this machine; pass --data.path."
        )
    label = f"the standard library of Python {platform.python_version()}"
    return _source("stdlib", label, files, config.text_field)


def _source(name: str, label: str, files: list[tuple[str, Path, Reader]], text_field: str) -> Source:
    stamp = hashlib.sha256(json.dumps([name, text_field]).encode())
    for key, path, reader in files:
        inner = _walk(path) if path.is_dir() else [path]
        try:
            stats = [(p.stat().st_size, p.stat().st_mtime_ns) for p in inner]
        except OSError as error:
            raise UsageError(f"data file {str(path)!r} cannot be read: {error.strerror or error}.") from None
        stamp.update(json.dumps([key, str(path.resolve()), reader.__name__, stats]).encode())
    return Source(name=name, label=label, files=tuple(files), text_field=text_field, stamp=stamp.hexdigest())


def _walk(folder: Path, without: Collection[str] = ()) -> list[Path]:
    """Regular files below, in an order that is the same on every machine; not hidden ones, nor folders named in `without`."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _text(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    del text_field
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = file.readlines(PIECE_CHARS)
            while lines:
                text, lines = "".join(lines), file.readlines(PIECE_CHARS)
                yield Piece(key, text, ends=not lines)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data file {str(path)!r} is no UTF-8 text (byte 0x{error.object[error.start]:02x}); convert it, or give JSONL or "
            "parquet their usual suffix."
        ) from None


def _lenient_text(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    """A small file; bytes that are not UTF-8 are replaced (a few sources say another encoding in their first line)."""
    del text_field
    text = path.read_text(encoding="utf-8", errors="replace")
    if text:
        yield Piece(key, text)


def _text_or_nothing(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    """In a folder, a file that is no text (an image beside it) is left out."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # else the head was cut inside a character
            return
    if b"\0" not in head:
        yield from _text(path, key, text_field)


def _jsonl(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Piece(f"{key}:{number}", _jsonl_text(line, f"{str(path)!r} line {number}", text_field))


def _jsonl_text(line: bytes, where: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is no JSON; JSONL has one object in each line.") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where} is JSON but no object with a field {text_field!r}.")
    if text_field not in row:
        near = nearest(text_field, list(row)[:20]) if row else "it is empty."
        raise UsageError(f"{where} has no field {text_field!r} (data.text_field); {near}")
    if not isinstance(row[text_field], str):
        raise UsageError(f"{where}: field {text_field!r} is {type(row[text_field]).__name__}, not text.")
    text = str(row[text_field])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where}: field {text_field!r} holds half of a surrogate pair (\\u{ord(text[error.start]):04x} at character "
            f"{error.start}), which is no text; JSON writes such a character as two of them, or as itself in UTF-8."
        ) from None
    return text


def _check_column(where: str, text_field: str, columns: Mapping[str, str]) -> None:
    """`columns`: name -> type, as the library writes it."""
    if text_field not in columns:
        raise UsageError(
            f"{where} has no column {text_field!r} (data.text_field); {nearest(text_field, list(columns)[:20])}"
        )
    if columns[text_field].removeprefix("dictionary<values=").split(",")[0] not in TEXT_TYPES:
        raise UsageError(f"{where}: column {text_field!r} is {columns[text_field]}, not text.")


def _parquet(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
    except pa.ArrowException as error:
        raise UsageError(f"data file {str(path)!r} is no parquet file: {error}") from None
    with table:
        schema = table.schema_arrow
        _check_column(
            f"data file {str(path)!r}", text_field, {name: str(schema.field(name).type) for name in schema.names}
        )
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                number += 1
                if text:
                    yield Piece(f"{key}:{number}", text)


def held_out_of(parts: Mapping[str, object]) -> str | None:
    """Which part of a datasets folder is for validation, where its names say so."""
    return next((name for name in ("validation", "valid", "dev", "test") if name in parts and "train" in parts), None)


def parts_of(path: Path) -> tuple[dict[str, Any], str | None]:
    """The parts of a folder that `datasets` saved, by name, and which of them is held out; what is neither is left out.

    Raises `UsageError`.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # its readers' own errors; all of them mean that the folder is unusable
        raise UsageError(f"data.path {str(path)!r} is no saved datasets folder: {error}") from None
    parts = dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}
    held_out = held_out_of(parts)
    if held_out is not None:
        parts = {name: part for name, part in parts.items() if name in ("train", held_out)}
    return parts, held_out


def _datasets(path: Path, key: str, text_field: str) -> Iterator[Piece]:
    parts, held_out = parts_of(path)
    for name, part in parts.items():
        split: Split | None = None if held_out is None else "train" if name == "train" else "validation"
        _check_column(
            f"data.path {str(path)!r}", text_field, {k: str(getattr(v, "dtype", v)) for k, v in part.features.items()}
        )
        for number, row in enumerate(part.select_columns([text_field])):
            if row[text_field]:
                yield Piece(f"{key}/{name}:{number}", row[text_field], split=split)


READERS: Mapping[str, Reader] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _jsonl,
    ".parquet": _parquet,
}


def _reader_in_folder(path: Path) -> Reader:
    """As for a single file, but `.json` in a folder is rarely one object in each line, and not all files are text."""
    suffix = path.suffix.lower()
    return _text_or_nothing if suffix == ".json" else READERS.get(suffix, _text_or_nothing)
