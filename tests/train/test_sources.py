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
from accordion.train.sources import PIECE_CHARS, find, split_by_key

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
    "windows.json": (
        "\ufeff\r\n  " + json.dumps(ARRAY)
    ).encode(),  # a byte order mark, and blank lines before the array
    "rows.csv": csv_text(("id", "text"), ",").encode(),
    "rows.tsv.gz": gzip.compress(csv_text(("text", "id"), "\t").encode("utf-8-sig")),  # with Excel's byte order mark
    "rows.parquet": parquet_of(TABLE),
    "stream.arrow": arrow(pa.ipc.new_stream),
    "file.arrow": arrow(pa.ipc.new_file),
}


def file(folder: Path, name: str, content: bytes | None = None) -> Path:
    (folder / name).write_bytes(FILES[name] if content is None else content)
    return folder / name


def text_folder(folder: Path) -> Path:
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    return folder


def datasets_folder(folder: Path) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
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
    source = find(DataConfig(path=str(file(tmp_path, kind) if isinstance(kind, str) else kind(tmp_path))))
    assert [piece.text for piece in source.pieces()] == TEXTS
    assert all(piece.ends for piece in source.pieces())


def test_a_text_file_is_one_document_in_pieces(tmp_path: Path) -> None:
    line = "x" * 99 + "\r\n"
    text = line * (2 * PIECE_CHARS // len(line))
    path = tmp_path / "long.txt"
    path.write_text(text, newline="")
    pieces = list(find(DataConfig(path=str(path))).pieces())
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
    pieces = list(find(DataConfig(path=str(tmp_path / "saved"))).pieces())
    assert {piece.text: piece.split for piece in pieces} == {"train": "train", "validation": "validation"}


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


BAD_ROWS = [
    ('{"text": "a"}\n{"txt": "b"}\n', "line 2", "'txt'"),
    ('{"text": "a"}\n\n{"text": 3}\n', "line 3", "is int"),
    ('{"text": null}\n', "line 1", "NoneType"),
    ("[1]\n", "line 1", "no object"),
    ('{"text": "a"}\n{"text": \n', "line 2", "no JSON"),
    ("{}\n", "line 1", "it is empty"),
    ("[" * 100_000 + "\n", "line 1", "no JSON"),
]


@pytest.mark.parametrize(("content", "line", "what"), BAD_ROWS, ids=[what for _, _, what in BAD_ROWS])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: str, line: str, what: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        list(find(DataConfig(path=str(path))).pieces())
    assert line in str(error.value)
    assert what in str(error.value)
    assert str(path) in str(error.value)


def test_a_bad_column_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "rows.parquet")
    with pytest.raises(UsageError, match=r"no column 'txt'.*'text'"):
        list(find(DataConfig(path=str(path), text_field="txt")).pieces())
    with pytest.raises(UsageError, match="row 1: field 'id' is int, not text"):
        list(find(DataConfig(path=str(path), text_field="id")).pieces())
    for kind, content in (("parquet", b"PAR1 but no more"), ("arrow", b"ARROW1 but no more"), ("csv", b'text\n"a\n')):
        path = file(tmp_path, f"bad.{kind}", content)
        with pytest.raises(UsageError, match=f"is no {kind} file that can be read"):
            list(find(DataConfig(path=str(path))).pieces())


def test_values_of_a_csv_file_are_text(tmp_path: Path) -> None:
    """A cell of "1" or "NA" is that text, not a number and not missing; rows without text are left out."""
    (tmp_path / "x.csv").write_text('text,id\n1,1\nNA,x\n"",\n2024-01-01,2\nshort\n')
    texts = [piece.text for piece in find(DataConfig(path=str(tmp_path / "x.csv"))).pieces()]
    assert texts == ["1", "NA", "2024-01-01", "short"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_duplicate_column_is_named(tmp_path: Path, kind: str) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = file(tmp_path, f"x.{kind}", b"text,text\na,b\n" if kind == "csv" else parquet_of(table))
    with pytest.raises(UsageError, match="has two columns named 'text'"):
        list(find(DataConfig(path=str(path))).pieces())


def test_rows_keep_their_own_fields_and_texts(tmp_path: Path) -> None:
    """A field that only a late row has, and texts that look like dates."""
    rows = [{"text": "2024-01-01"}] * 12_000 + [{"text": "x" * 1000}] * 11_000 + [{"text": "end", "more": {"a": 1}}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [piece.text for piece in find(DataConfig(path=str(tmp_path / "x.jsonl"))).pieces()]
    assert (texts[0], texts[-1], len(texts)) == ("2024-01-01", "end", len(rows))


def test_what_cannot_be_decompressed_is_named(tmp_path: Path) -> None:
    for content in (FILES["rows.jsonl.gz"][:-20], b"no gzip"):
        path = file(tmp_path, "rows.jsonl.gz", content)
        with pytest.raises(UsageError, match=r"rows\.jsonl\.gz' cannot be read"):
            list(find(DataConfig(path=str(path))).pieces())


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_one_file_in_another_encoding_is_named(tmp_path: Path, name: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes('{"text": "Straße"}\n'.encode(encoding))
    what = "is no UTF-8 text .byte 0xdf" if encoding == "latin-1" else "has a NUL byte, and is no UTF-8 text"
    with pytest.raises(UsageError, match=f"data file '.*{name}' {what}"):
        find(DataConfig(path=str(path)))


def test_missing_and_empty_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(UsageError, match=r"does not exist.*'corpus.txt'"):
        find(DataConfig(path=str(tmp_path / "corpsu.txt")))
    with pytest.raises(UsageError, match="does not exist"):
        find(DataConfig(path=str(tmp_path / "nowhere" / "a.txt")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="without files"):
        find(DataConfig(path=str(tmp_path / "folder")))
    with pytest.raises(UsageError, match=r"data\.format chat takes JSON, JSONL, CSV, parquet"):
        find(DataConfig(format="chat"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_broken_datasets_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="no saved datasets folder"):
        list(find(DataConfig(path=str(tmp_path))).pieces())
