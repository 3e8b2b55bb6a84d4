"""Text from every kind of file becomes the same documents, and errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from accordion.errors import UsageError
from accordion.train.config import DataConfig
from accordion.train.sources import PIECE_CHARS, Piece, find, split_by_key

TEXTS = [f"document {i}\nwith two lines\n" for i in range(5)]
JSONL = ("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)) + "\n\n").encode()
ARRAY = [{"text": text} for text in TEXTS]
TABLE = pa.table({"id": range(5), "text": TEXTS})


def csv_text(columns: tuple[str, str], separator: str) -> str:
    text = io.StringIO(newline="")
    rows = [{"id": i, "text": value} for i, value in enumerate(TEXTS)]
    writer = csv.DictWriter(text, columns, delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def arrow(new: Callable[..., pa.RecordBatchFileWriter]) -> bytes:
    sink = io.BytesIO()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue()


def parquet_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


FILES = {
    "rows.jsonl": JSONL,
    "rows.jsonl.gz": gzip.compress(JSONL),
    "rows.jsonl.zst": pa.compress(JSONL, codec="zstd", asbytes=True),
    "rows.json": json.dumps(ARRAY, indent=1).encode(),
    # A byte order mark, and blank lines before the array.
    "windows.json": ("\ufeff\r\n  " + json.dumps(ARRAY)).encode(),
    "rows.csv": csv_text(("id", "text"), ",").encode(),
    "rows.tsv.gz": gzip.compress(csv_text(("text", "id"), "\t").encode("utf-8-sig")),  # with Excel's byte order mark
    "rows.parquet": parquet_of(TABLE),
    "stream.arrow": arrow(pa.ipc.new_stream),
    "file.arrow": arrow(pa.ipc.new_file),
}


def file(folder: Path, name: str, content: bytes | None = None) -> Path:
    (folder / name).write_bytes(FILES[name] if content is None else content)
    return folder / name


def read(path: Path, **options: str) -> list[Piece]:
    return list(find(DataConfig(path=str(path), **options)).pieces())


def text_folder(folder: Path) -> Path:
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    return folder


def datasets_folder(folder: Path, table: pa.Table = TABLE) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(table.to_pydict()).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def linked(folder: Path) -> Path:
    for name in ("real", "data"):
        (folder / name).mkdir()
    file(folder / "real", "rows.jsonl")
    (folder / "data" / "sub").symlink_to(folder / "real")
    (folder / "real" / "circle").symlink_to(folder / "real")
    return folder / "data"


@pytest.mark.parametrize("kind", [*FILES, text_folder, datasets_folder, linked])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_kind_gives_the_same_documents(tmp_path: Path, kind: str | Callable[[Path], Path]) -> None:
    pieces = read(file(tmp_path, kind) if isinstance(kind, str) else kind(tmp_path))
    assert [piece.text for piece in pieces] == TEXTS
    assert all(piece.ends for piece in pieces)


@pytest.mark.parametrize("kind", ["parquet", "datasets", "folder"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_kind_gives_the_same_rows_of_chats(tmp_path: Path, kind: str) -> None:
    messages = [[{"role": "user", "content": str(i)}] for i in range(30)]
    table = pa.table({"messages": messages, "more": range(30)})
    if kind == "folder":
        path = file(tmp_path, "x.jsonl", "\n".join(map(json.dumps, table.to_pylist())).encode()).parent
        (path / "README.md").write_text("beside it")
    else:
        path = (
            datasets_folder(tmp_path, table) if kind == "datasets" else file(tmp_path, "x.parquet", parquet_of(table))
        )
    found = list(find(DataConfig(path=str(path), format="chat")).rows())
    assert [row.values for row in found] == [{"messages": messages[i]} for i in range(30)]
    assert {row.split for row in found} <= {"train", "validation"}
    assert all(str(i + (kind != "datasets")) in row.where for i, row in enumerate(found))


def test_a_text_file_is_one_document_in_pieces(tmp_path: Path) -> None:
    line = "x" * 99 + "\r\n"
    text = line * (2 * PIECE_CHARS // len(line))
    pieces = read(file(tmp_path, "long.txt", text.encode()))
    assert len(pieces) > 1
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(p.text for p in pieces) == text


def test_unread_files_of_a_folder_are_listed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "zeros").write_bytes(b"text\0more")
    (tmp_path / "settings.json").write_text('{\n  "a": 1\n}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("ä" * 40000)  # longer than what is looked at, cut inside a character
    (tmp_path / "latin.txt").write_bytes("Café".encode("latin-1"))
    (tmp_path / "lost.txt").symlink_to("nowhere")
    (tmp_path / "table.csv").write_text("name\na\n")
    source = find(DataConfig(path=str(tmp_path)))
    assert [key for key, _ in source.files] == [os.path.join("sub", "a.txt")]
    assert source.unread == {
        "image.png": "has a NUL byte, and is no UTF-8 text",
        "latin.txt": "is no UTF-8 text (byte 0xe9); convert it, or give a JSONL or parquet file its usual suffix",
        "lost.txt": "a link to nothing",
        "settings.json": "line 1 is no JSON; JSONL has one object in each line",
        "table.csv": "has no column 'text' (data.text_field); valid: name",
        "zeros": "has a NUL byte, and is no UTF-8 text",
    }
    (tmp_path / "only").mkdir()
    (tmp_path / "image.png").rename(tmp_path / "only" / "image.png")
    with pytest.raises(UsageError, match=r"no file that can be read: image.png \(has a NUL byte"):
        find(DataConfig(path=str(tmp_path / "only")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_splits_of_a_datasets_folder_are_kept(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    pieces = [(piece.text, piece.split) for piece in read(tmp_path / "saved")]
    assert sorted(pieces) == [("train", "train"), ("validation", "validation")]


def test_the_standard_library_is_always_there() -> None:
    source = find(DataConfig())
    keys = [key for key, _ in source.files]
    assert source.name == "stdlib"
    assert "argparse.py" in keys
    assert not any("test" in Path(key).parts for key in keys)
    validation_keys = [key for key in keys if split_by_key(key) == "validation"]
    assert 0.02 < len(validation_keys) / len(keys) < 0.1


def test_the_stamp_changes_with_the_files(tmp_path: Path) -> None:
    folder = text_folder(tmp_path)
    config = DataConfig(path=str(folder))
    first = find(config).stamp
    assert find(config).stamp == first
    (folder / "0.txt").write_text("other")
    second = find(config).stamp
    (folder / "new.txt").write_text("new")
    assert len({first, second, find(config).stamp}) == 3


WIDE = "has a NUL byte, and is no UTF-8 text"
ENCODINGS = {"utf-16": WIDE, "utf-16-le": WIDE, "utf-32": WIDE, "latin-1": "is no UTF-8 text (byte 0xdf"}
TWICE = parquet_of(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))
BAD_FILES: list[tuple[str, bytes, tuple[str, ...]]] = [  # name, content, parts of the error
    ("rows.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', ("line 2", "'txt'")),
    ("rows.jsonl", b'{"text": "a"}\n\n{"text": 3}\n', ("line 3", "is int")),
    ("rows.jsonl", b'{"text": null}\n', ("line 1", "NoneType")),
    ("rows.jsonl", b'{"text": "a"}\n{"text": "bc\\ud800"}\n', ("line 2: field 'text' has half of a surrogate",)),
    ("rows.jsonl", b"[1]\n", ("line 1", "no object")),
    ("rows.jsonl", b'{"text": "a"}\n{"text": \n', ("line 2", "no JSON")),
    ("rows.jsonl", b"{}\n", ("line 1", "it is empty")),
    ("rows.jsonl", b"[" * 100_000 + b"\n", ("line 1", "no JSON")),
    ("bad.parquet", b"PAR1 but no more", ("is no parquet file that can be read",)),
    ("bad.arrow", b"ARROW1 but no more", ("is no arrow file that can be read",)),
    ("bad.csv", b'text\n"a\n', ("is no csv file that can be read",)),
    ("x.csv", b"text,text\na,b\n", ("has two columns named 'text'",)),
    ("x.parquet", TWICE, ("has two columns named 'text'",)),
    ("rows.jsonl.gz", FILES["rows.jsonl.gz"][:-20], ("rows.jsonl.gz' cannot be read",)),
    ("rows.jsonl.gz", b"no gzip", ("rows.jsonl.gz' cannot be read",)),
    *(
        (f"x.{kind}", '{"text": "Straße"}\n'.encode(encoding), (f"x.{kind}' {what}",))
        for kind in ("txt", "jsonl", "csv")
        for encoding, what in ENCODINGS.items()
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "expected"), BAD_FILES, ids=[f"{name}: {expected[-1]}" for name, _, expected in BAD_FILES]
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, expected: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as error:
        read(file(tmp_path, name, content))
    assert [part for part in (*expected, str(tmp_path / name)) if part not in str(error.value)] == []


def test_a_bad_column_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "rows.parquet")
    with pytest.raises(UsageError, match=r"no column 'txt'.*'text'"):
        read(path, text_field="txt")
    with pytest.raises(UsageError, match="row 1: field 'id' is int, not text"):
        read(path, text_field="id")


def test_values_of_a_csv_file_are_text(tmp_path: Path) -> None:
    """A cell of "1" or "NA" is that text, not a number and not missing; rows without text are left out."""
    pieces = read(file(tmp_path, "x.csv", b'text,id\n1,1\nNA,x\n"",\n2024-01-01,2\nshort\n'))
    assert [piece.text for piece in pieces] == ["1", "NA", "2024-01-01", "short"]


def test_rows_keep_their_own_fields_and_texts(tmp_path: Path) -> None:
    """A field that only a late row has, and texts that look like dates."""
    rows = [{"text": "2024-01-01"}] * 12_000 + [{"text": "x" * 1000}] * 11_000 + [{"text": "end", "more": {"a": 1}}]
    pieces = read(file(tmp_path, "x.jsonl", "\n".join(map(json.dumps, rows)).encode()))
    texts = [piece.text for piece in pieces]
    assert (texts[0], texts[-1], len(texts)) == ("2024-01-01", "end", len(rows))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_paths_without_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    for folder in ("empty", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    for name, wrong in (
        ("corpsu.txt", r"does not exist.*'corpus.txt'"),
        ("nowhere/a.txt", "does not exist"),
        ("empty", "without files"),
        ("broken", "no saved datasets folder"),
    ):
        with pytest.raises(UsageError, match=wrong):
            read(tmp_path / name)
    with pytest.raises(UsageError, match=r"data\.format chat takes JSON, JSONL, CSV, parquet"):
        find(DataConfig(format="chat"))
