"""Tokens of the data as Arrow files in the cache, which ranks memory-map: text as one stream of tokens, examples as rows."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accordion.errors import UsageError
from accordion.files import write_whole
from accordion.train.examples import Encoder
from accordion.train.sources import Piece, Source, Split
from accordion.train.tokens import Say, Vocabulary, key_of

if TYPE_CHECKING:
    from pyarrow import ChunkedArray

SPLITS: tuple[Split, Split] = ("train", "validation")
TAIL_SHARE = 20  # if nothing is for validation, the last 1/20 of the tokens or examples is
BATCH_CHARS = 4 << 20  # characters encoded at once, by the threads of the tokenizers library
BLOCK_TOKENS = 1 << 16  # tokens of text in a row of its table
ROWS_AT_ONCE = 64  # rows of a table written at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """Paths of the Arrow files with the tokens of the data. `text` or `examples` opens them, memory-mapped, and returns a
    split. `num_train`, `num_validation`: number of tokens if the data is text, else of examples. `digest`: hash of the tokens,
    equal on ranks that read equal data. `tokenizer_digest`: hash of the tokenizer."""

    files: tuple[str, ...]
    num_train: int
    num_validation: int
    num_documents: int
    digest: str
    tokenizer_digest: str

    def text(self, split: Split) -> ChunkedArray:
        return _streams(_table(self.files))[split]

    def examples(self, split: Split) -> Examples:
        return _parts(_table(self.files))[split]


# -- text


def cached_tokens(source: Source, vocabulary: Vocabulary, cache: Path, say: Say) -> TokenFiles:
    """Return the files with the tokens of the text in `source`. If the folder `cache` does not have them, tokenizes the text,
    writes the files, and reports that to `say`. Raises `UsageError` if there is no text, or if the cache is damaged."""
    kind = _dtype(vocabulary.size)

    def rows() -> Iterator[dict[str, Any]]:
        say(f"tokenizing {source.label} (once; kept in {cache / 'tokens'})")
        num_documents = 0
        for row in _blocks(_encoded(source.pieces(), vocabulary), np.dtype(kind)):
            num_documents += row["documents"]
            yield row
        if num_documents == 0:
            raise UsageError(f"{source.label!r} has no text.")

    columns = {"held_out": "bool", "ids": [kind], "documents": "int32"}
    return _cached(source, rows, columns, cache / "tokens", vocabulary.digest, _streams)


def _encoded(pieces: Iterable[Piece], vocabulary: Vocabulary) -> Iterator[tuple[Split, list[int], bool]]:
    """Yield (split, tokens, True if a document ends) for each of `pieces`, with special tokens before and after documents."""
    tokenizer, (before, after), begins = vocabulary.tokenizer(), vocabulary.around(), True
    for batch in _batches(pieces):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield piece.split, before * begins + encoding.ids + after * piece.ends, piece.ends
            begins = piece.ends


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _blocks(encoded: Iterable[tuple[Split, list[int], bool]], dtype: np.dtype[Any]) -> Iterator[dict[str, Any]]:
    """Yield table rows with the keys `held_out` (True for validation), `ids` (about `BLOCK_TOKENS` tokens of one split) and
    `documents` (number of documents that end in `ids`). `encoded`: (split, tokens, True if a document ends)."""
    ids, documents = {split: list[int]() for split in SPLITS}, dict.fromkeys(SPLITS, 0)

    def row(split: Split) -> dict[str, Any]:
        tokens, count = np.array(ids[split], dtype), documents[split]
        ids[split], documents[split] = [], 0
        return {"held_out": split == "validation", "ids": tokens, "documents": count}

    for split, tokens, ends in encoded:
        ids[split] += tokens
        documents[split] += ends
        if len(ids[split]) >= BLOCK_TOKENS:
            yield row(split)
    yield from (row(split) for split in SPLITS if ids[split])


def _streams(table: Any) -> dict[Split, ChunkedArray]:
    """Return split -> its tokens in `table`, not copied. If a split is empty, the last 1/20 of the other is for validation."""
    import pyarrow as pa

    ids, held_out = table["ids"], table["held_out"].to_numpy()
    train, validation = (
        pa.chunked_array([ids[int(i)].values for i in np.flatnonzero(held_out == flag)], ids.type.value_type)
        for flag in (False, True)
    )
    if not len(train):
        train, validation = validation, train
    if not len(validation):
        at = len(train) - len(train) // TAIL_SHARE
        train, validation = train[:at], train[at:]
    return {"train": train, "validation": validation}


# -- examples


class Examples:
    """Examples of one split. `examples[i]` is (token ids, mask: True for tokens of answers), each of shape (tokens,)."""

    def __init__(self, table: Any, numbers: np.ndarray) -> None:
        """`table`: Arrow table with columns `ids`, `answers` and `num_answers`. `numbers`: indices of the split's rows."""
        self._ids, self._answers, self._numbers = table["ids"], table["answers"], numbers
        from pyarrow import compute

        self.lengths = compute.list_value_length(self._ids).to_numpy().astype(np.int64)[numbers]  # (examples,) tokens
        self.num_answers = int(table["num_answers"].to_numpy()[numbers].sum())  # tokens

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        at = int(self._numbers[index])
        return self._ids[at].values.to_numpy(), self._answers[at].values.to_numpy(zero_copy_only=False)


def cached_examples(
    source: Source, encoder: Encoder, tokenizer_digest: str, size: int, cache: Path, say: Say
) -> TokenFiles:
    """Return the files with the examples of `source`. If the folder `cache` does not have them, tokenizes the examples, writes
    the files, and reports that to `say`. `size`: number of tokens in the vocabulary. Raises `UsageError` if a row is no valid
    example, if there are fewer than two examples, or if the cache is damaged."""
    kind = _dtype(size)

    def rows() -> Iterator[dict[str, Any]]:
        say(f"tokenizing {source.label} (once; kept in {cache / 'examples'})")
        count = 0
        for row in source.rows():
            ids, answers = encoder.example(row)
            count += 1
            yield {
                "held_out": row.split == "validation",
                "ids": ids.astype(kind),
                "answers": answers,
                "num_answers": int(answers.sum()),
                "documents": 1,
            }
        if count < 2:
            what = "one example" if count else "no example"
            raise UsageError(f"{source.label!r} has {what}; give at least two, one to train on and one to validate on.")

    columns = {"held_out": "bool", "ids": [kind], "answers": ["bool"], "num_answers": "int32", "documents": "int32"}
    return _cached(source, rows, columns, cache / "examples", tokenizer_digest, _parts)


def _parts(table: Any) -> dict[Split, Examples]:
    """Return split -> its examples in `table`. If a split is empty, the last 1/20 of the other is for validation."""
    held_out = table["held_out"].to_numpy()
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if not len(train):
        train, validation = validation, train
    if not len(validation):
        train, validation = np.split(train, [-max(1, len(train) // TAIL_SHARE)])
    return {"train": Examples(table, train), "validation": Examples(table, validation)}


# -- the cache


def _dtype(vocabulary_size: int) -> str:
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def _cached(
    source: Source,
    rows: Callable[[], Iterator[dict[str, Any]]],
    columns: Mapping[str, str | Sequence[str]],
    cache: Path,
    tokenizer_digest: str,
    splits_of: Callable[[Any], Mapping[Split, Any]],
) -> TokenFiles:
    """Return the files in the folder `cache` with the tokens of `source`; if they do not exist, write the table rows (column ->
    value) of `rows()` first. `columns`: name -> dtype, or [dtype] for lists. `splits_of(table)`: split -> its tokens or
    examples, to count them. Raises `UsageError` if the cache is damaged."""
    import datasets
    import pyarrow as pa
    from datasets.exceptions import DatasetGenerationError

    kinds = {
        name: datasets.Value(kind) if isinstance(kind, str) else datasets.List(datasets.Value(kind[0]))
        for name, kind in columns.items()
    }
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        dataset = datasets.Dataset.from_generator(
            rows,
            features=datasets.Features(kinds),
            cache_dir=str(cache),
            fingerprint=key_of(source.stamp, tokenizer_digest),
            writer_batch_size=ROWS_AT_ONCE,
        )
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None
    except pa.ArrowInvalid as error:
        raise UsageError(f"the cache of tokens in {str(cache)!r} is damaged ({error}); remove it.") from None
    files = tuple(file["filename"] for file in dataset.cache_files)
    path = Path(files[0]).with_name("summary.json")
    try:
        summary = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        table = _table(files)
        summary = {f"num_{split}": len(part) for split, part in splits_of(table).items()}
        summary |= {"num_documents": int(table["documents"].to_numpy().sum()), "digest": _digest(table)}
        write_whole(path, json.dumps(summary))
    return TokenFiles(files=files, tokenizer_digest=tokenizer_digest, **summary)


def _table(files: Sequence[str]) -> Any:
    import pyarrow as pa  # and not `datasets`, which takes seconds to import

    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(file)).read_all() for file in files])


def _digest(table: Any) -> str:
    digest = hashlib.sha256()
    for column in table.itercolumns():
        for buffer in (buffer for chunk in column.chunks for buffer in chunk.buffers() if buffer is not None):
            digest.update(buffer)
    return digest.hexdigest()
