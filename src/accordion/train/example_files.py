"""Examples in a cache: their tokens, which of them are answers, and where each ends; made whole or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np

from accordion.errors import UsageError
from accordion.train.examples import Encoder
from accordion.train.rows import Split
from accordion.train.sources import Source
from accordion.train.tokens import SPLITS, SPOOL_BYTES, TAIL_SHARE, Say, Told, place_for, published

FORMAT = 2  # of the cache; a change of code that changes examples takes the next number
LENGTH = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Examples:
    """Of one split, mapped. `ends`: (examples,), where each ends in `tokens` and `answers`, both (all tokens,)."""

    tokens: np.ndarray
    answers: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return int(self.ends.size)

    @property
    def lengths(self) -> np.ndarray:
        """(examples,) tokens."""
        return np.diff(self.ends, prepend=0)

    def span(self, index: int) -> slice:
        return slice(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFiles:
    """Examples on disk. `digest` is of all that they hold: equal on ranks that read equal data. `unread`: fields left out."""

    folder: str
    dtype: str
    num_train: int
    num_validation: int
    digest: str
    tokenizer_digest: str
    unread: list[str]

    def read(self, split: Split) -> Examples:
        folder = Path(self.folder)
        held = [
            np.memmap(folder / f"{split}.{name}", dtype=dtype, mode="r")
            for name, dtype in (("tokens", self.dtype), ("answers", np.bool_), ("ends", LENGTH))
        ]
        return Examples(*held)


@dataclass(slots=True)
class _Part:
    """One split as it is written."""

    tokens: IO[bytes]
    answers: IO[bytes]
    lengths: array[int] = field(default_factory=lambda: array("q"))

    def add(self, ids: np.ndarray, answers: np.ndarray) -> None:
        self.tokens.write(ids.tobytes())
        self.answers.write(answers.tobytes())
        self.lengths.append(len(ids))


def cached_examples(
    source: Source,
    encoder: Encoder,
    tokenizer_digest: str,
    size: int,
    cache: Path,
    say: Say,
    accept: Callable[[ExampleFiles, dict[Split, Examples]], None],
) -> ExampleFiles:
    """The examples of `source`, from the cache or put there. `size`: of the vocabulary.

    `accept` is called with what was found and may raise: then nothing was written under the cache's names.
    """
    key = hashlib.sha256("\n".join([str(FORMAT), source.stamp, tokenizer_digest]).encode()).hexdigest()
    folder = cache / "examples" / key[:24]
    try:
        held = ExampleFiles(**json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {"folder": str(folder)})
        parts = {split: held.read(split) for split in SPLITS}
        if [len(parts[split]) for split in SPLITS] != [held.num_train, held.num_validation]:
            raise ValueError(f"files in {folder} do not have as many examples")
    except (OSError, ValueError, TypeError):  # absent or damaged: made again
        say(f"tokenizing {source.label} (once; kept in {folder.parent})")
        return _made(source, encoder, tokenizer_digest, size, folder, say, accept)
    accept(held, parts)
    return held


def _made(
    source: Source,
    encoder: Encoder,
    tokenizer_digest: str,
    size: int,
    folder: Path,
    say: Say,
    accept: Callable[[ExampleFiles, dict[Split, Examples]], None],
) -> ExampleFiles:
    dtype = np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)
    near = str(place_for(folder))
    with (
        SpooledTemporaryFile(SPOOL_BYTES, dir=near) as a,
        SpooledTemporaryFile(SPOOL_BYTES, dir=near) as b,
        SpooledTemporaryFile(SPOOL_BYTES, dir=near) as c,
        SpooledTemporaryFile(SPOOL_BYTES, dir=near) as d,
    ):
        parts: dict[Split, _Part] = {"train": _Part(a, b), "validation": _Part(c, d)}
        with Told("tokenizing", say) as told:
            for row in source.rows():
                made = encoder.example(row)
                told.chars += sum(len(str(value)) for value in row.values.values())
                parts[row.split].add(made.ids.astype(dtype), made.answers)
        _balance(parts, dtype.itemsize, source.label)
        digest = hashlib.sha256()
        arrays = dict[Split, Examples]()
        for split, part in parts.items():
            ends = np.cumsum(np.frombuffer(part.lengths, dtype=LENGTH))
            held = []
            for file, kind in ((part.tokens, dtype), (part.answers, np.dtype(np.bool_))):
                file.flush()
                held.append(np.memmap(file, dtype=kind, mode="r"))
                digest.update(held[-1].data)
            digest.update(ends.tobytes())
            arrays[split] = Examples(held[0], held[1], ends)
        found = ExampleFiles(
            folder=str(folder),
            dtype=dtype.name,
            num_train=len(arrays["train"]),
            num_validation=len(arrays["validation"]),
            digest=digest.hexdigest(),
            tokenizer_digest=tokenizer_digest,
            unread=sorted(encoder.unread),
        )
        accept(found, arrays)
        with published(folder) as draft:
            for split, examples in arrays.items():
                for name in ("tokens", "answers", "ends"):
                    getattr(examples, name).tofile(draft / f"{split}.{name}")
            (draft / "meta.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


def _balance(parts: dict[Split, _Part], itemsize: int, label: str) -> None:
    """Where one split has no example, the last of the other are it."""
    if not parts["train"].lengths:
        parts["train"], parts["validation"] = parts["validation"], parts["train"]
    train, held_out = parts["train"], parts["validation"]
    if len(train.lengths) + len(held_out.lengths) < 2:
        what = "one example" if train.lengths else "no example"
        raise UsageError(f"{label!r} holds {what}; give two at least, one to train on and one to validate on.")
    if held_out.lengths:
        return
    count = max(1, len(train.lengths) // TAIL_SHARE)
    held_out.lengths.extend(train.lengths[-count:])
    del train.lengths[-count:]
    for name, size in (("tokens", itemsize), ("answers", 1)):
        file: IO[bytes] = getattr(train, name)
        file.seek(sum(train.lengths) * size)
        shutil.copyfileobj(file, getattr(held_out, name))
        file.truncate(sum(train.lengths) * size)


def digest_of_tokenizer(tokenizer: Any, kind: str) -> str:
    """Of all that decides what examples become."""
    parts = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.eos_token_id), kind]
    parts += (
        [str(tokenizer.get_chat_template()), json.dumps(tokenizer.special_tokens_map, default=str)]
        if kind == "chat"
        else []
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
