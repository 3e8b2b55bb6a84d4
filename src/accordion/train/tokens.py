"""Text to token files: the tokenizer, and packed tokens in a cache that is made whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from accordion.errors import UsageError
from accordion.files import NOT_REGULAR
from accordion.train.rows import Split
from accordion.train.sources import Piece, Source, split_of

FORMAT = 3  # of the cache; a change of the code below that changes tokens takes the next number
END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARS = 64 << 20  # more text hardly changes the merges
LONGEST_WORD = 1024  # letters, or blanks, or signs without any other between them; longer ones are data, not words
ONE_KIND = re.compile(r"[^\W_]*|(?:[^\w\s]|_)*|\s*")  # what the tokenizer never parts: letters, signs, blanks
BATCH_CHARS = 4 << 20  # encoded at once, by the threads of the tokenizers library
EVERY_S = 10.0  # between lines about how far it is
SPOOL_BYTES = 256 << 20  # held in memory until the data is known to be usable
TAIL_SHARE = 20  # where no document falls to validation, the last 1/20 of the tokens does
Files = dict[Split, IO[bytes]]
Say = Callable[[str], None]
"""Takes a line about what goes on."""
SPLITS: tuple[Split, Split] = ("train", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as data: `spec` is its tokenizer.json, `size` the rows that a model needs, one more than its largest id.

    `special_as_text`: "<|endoftext|>" in a document is letters.
    """

    spec: str
    size: int
    end_id: int
    special_as_text: bool = False

    @property
    def digest(self) -> str:
        more = " special_as_text" if self.special_as_text else ""
        return hashlib.sha256(f"{self.end_id} {self.spec}{more}".encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer for whole documents, as transformers calls it: without truncation and padding."""
        tokenizer = Tokenizer.from_str(self.spec)
        tokenizer.encode_special_tokens = self.special_as_text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def around(self) -> tuple[list[int], list[int]]:
        """Return the tokens before and after a document: those that tokenizer.json adds to a text, and the end of text."""
        whole = self.tokenizer().encode("a")
        added = "".join(map(str, whole.special_tokens_mask))  # as in "1100001"
        first = len(added) - len(added.lstrip("1"))
        before, after = whole.ids[:first], whole.ids[max(first, len(added.rstrip("1"))) :]
        return before, after if self.end_id in after else [*after, self.end_id]

    @property
    def cuts(self) -> bool:
        """Whether its tokenizer.json asks for truncation or padding."""
        spec = json.loads(self.spec)
        return bool(spec.get("truncation") or spec.get("padding"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """Packed tokens on disk. `digest` is of the tokens themselves: equal on ranks that read equal data."""

    folder: str
    dtype: str
    num_train: int
    num_validation: int
    num_documents: int
    end_id: int
    digest: str
    tokenizer_digest: str

    def read(self, split: Split) -> np.ndarray:
        """The tokens of a split, mapped: (num_tokens,)."""
        return np.memmap(Path(self.folder, f"{split}.bin"), dtype=self.dtype, mode="r")

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(Path(self.folder, "tokenizer.json")))


class Told:
    """Says now and then how far something is that takes long: a thread of its own does, as libraries hold the caller's."""

    def __init__(self, what: str, say: Say) -> None:
        """`what` goes on, for the line. Whoever reads text counts its characters in `chars`."""
        self.what, self.chars, self._say = what, 0, say
        self._ended, self._began = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._tell, daemon=True, name="accordion-told")

    def __enter__(self) -> Told:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._ended.wait(EVERY_S):
            seconds = time.monotonic() - self._began
            self._say(f"{self.what}: {self.chars / 1e6:,.1f} million characters read, {seconds:.0f} s")

    def counted(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self.chars += len(piece.text)
            yield piece


class Texts(Protocol):
    """Documents in a fixed order. `stamp`: another one where they are others."""

    @property
    def label(self) -> str: ...
    @property
    def stamp(self) -> str: ...
    def pieces(self) -> Iterator[Piece]: ...


def train_vocabulary(source: Texts, size: int, say: Say) -> Vocabulary:
    """A byte-level BPE tokenizer trained on the training split. Raises `UsageError` where there is no text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with Told("training the tokenizer", say) as told:
        texts = _training_text(told.counted(source.pieces()))
        tokenizer.train_from_iterator((part for text in texts for part in _parted(text)), trainer)
    return Vocabulary(spec=tokenizer.to_str(), size=tokenizer.get_vocab_size(), end_id=0)


def _training_text(pieces: Iterator[Piece]) -> Iterator[str]:
    """The training split up to a limit; all of a small source that has only validation by its hash."""
    chars, spare = 0, []
    for piece in pieces:
        if split_of(piece) == "train":
            yield piece.text
            chars += len(piece.text)
        elif chars == 0:
            spare.append(piece.text)
        if chars > TRAINING_CHARS:
            return
    if chars == 0:
        yield from spare


def _parted(text: str) -> Iterator[str]:
    """`text` in parts, cut only inside runs of one kind that are longer than `LONGEST_WORD`.

    A run of letters is one word to the trainer, whose time goes with the square of the longest one. Ordinary text stays whole.
    """
    start, half = 0, LONGEST_WORD // 2
    for at in range(LONGEST_WORD, len(text) - half, LONGEST_WORD):
        if ONE_KIND.fullmatch(text, at - half, at + half + 1):
            yield text[start:at]
            start = at
    yield text[start:]


def folder_vocabulary(folder: Path, end_id: int | list[int] | None) -> Vocabulary | None:
    """The tokenizer of a model's folder, None where it has none. `end_id`: what its config.json says."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    if not path.is_file():
        raise UsageError(f"{str(path)!r} is no tokenizer: {NOT_REGULAR}.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"{str(path)!r} is no tokenizer: {error}") from None
    end = end_id[0] if isinstance(end_id, list) and end_id else end_id
    if not isinstance(end, int):
        found = (tokenizer.token_to_id(word) for word in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>"))
        end = next((number for number in found if number is not None), None)
    if end is None:
        raise UsageError(f"{str(folder)!r} names no end-of-text token; set eos_token_id in its config.json.")
    size = 1 + max(tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
    return Vocabulary(spec=tokenizer.to_str(), size=max(size, end + 1), end_id=end)


def cached_vocabulary(source: Texts, size: int, cache: Path, say: Say) -> tuple[Vocabulary, Callable[[], None]]:
    """The tokenizer for `source` from the cache, else trained; the second part writes it there."""
    path = cache / "tokenizers" / f"{_key(source.stamp, str(size))}.json"
    try:
        held = Vocabulary(**json.loads(path.read_text(encoding="utf-8")))
        held.tokenizer()
    except Exception:  # absent, damaged or of another version: trained again
        say(f"training a tokenizer on {source.label} (once; kept in {path.parent})")
        vocabulary = train_vocabulary(source, size, say)
        return vocabulary, lambda: write_whole(path, json.dumps(asdict(vocabulary)))
    return held, lambda: None


def cached_tokens(
    source: Source, vocabulary: Vocabulary, cache: Path, accept: Callable[[int, int], None], say: Say
) -> TokenFiles:
    """The token files of `source`, from the cache or put there.

    `accept` is called with the numbers of training and validation tokens and may raise: then nothing was written.
    """
    folder = cache / "tokens" / _key(source.stamp, vocabulary.digest)
    try:
        held = TokenFiles(**json.loads((folder / "meta.json").read_text(encoding="utf-8")) | {"folder": str(folder)})
        sizes = [held.num_train, held.num_validation]
        if [held.read(split).size for split in SPLITS] != sizes:
            raise ValueError(f"token files in {folder} do not have {sizes} tokens")
    except (OSError, ValueError, TypeError):  # absent or damaged: made again
        say(f"tokenizing {source.label} (once; kept in {folder.parent})")
        with Told("tokenizing", say) as told:
            return _tokenize(source, told.counted(source.pieces()), vocabulary, folder, accept)
    accept(held.num_train, held.num_validation)
    return held


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join([str(FORMAT), *parts]).encode()).hexdigest()[:24]


def _tokenize(
    source: Source,
    pieces: Iterator[Piece],
    vocabulary: Vocabulary,
    folder: Path,
    accept: Callable[[int, int], None],
) -> TokenFiles:
    """Encode into unnamed files on the cache's own file system, cut the tail if need be, count, and publish."""
    dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.uint32)
    near = str(place_for(folder))
    num_documents = 0
    with SpooledTemporaryFile(SPOOL_BYTES, dir=near) as train, SpooledTemporaryFile(SPOOL_BYTES, dir=near) as held_out:
        files: Files = {"train": train, "validation": held_out}
        for split, ids, ends in _encoded(pieces, vocabulary):
            files[split].write(np.asarray(ids, dtype).tobytes())
            num_documents += ends
        if num_documents == 0:
            raise UsageError(f"{source.label!r} holds no text.")
        _balance(files, dtype.itemsize)
        num_train, num_validation = (files[split].seek(0, os.SEEK_END) // dtype.itemsize for split in SPLITS)
        accept(num_train, num_validation)
        made = TokenFiles(
            folder=str(folder),
            dtype=dtype.name,
            num_train=num_train,
            num_validation=num_validation,
            num_documents=num_documents,
            end_id=vocabulary.end_id,
            digest=_digest(files),
            tokenizer_digest=vocabulary.digest,
        )
        with published(folder) as draft:
            for split in SPLITS:
                files[split].seek(0)
                with (draft / f"{split}.bin").open("wb") as target:
                    shutil.copyfileobj(files[split], target)
            (draft / "tokenizer.json").write_text(vocabulary.spec, encoding="utf-8")
            (draft / "meta.json").write_text(json.dumps(asdict(made)), encoding="utf-8")
    return made


def place_for(folder: Path) -> Path:
    """The nearest folder above that exists. Raises `OSError` where nothing can be made in it, before anything else is made."""
    near = next(place for place in folder.absolute().parents if place.exists())
    for wrong, code in ((not near.is_dir(), errno.ENOTDIR), (not os.access(near, os.W_OK | os.X_OK), errno.EACCES)):
        if wrong:
            raise OSError(code, os.strerror(code), str(near))
    return near


def _encoded(pieces: Iterator[Piece], vocabulary: Vocabulary) -> Iterator[tuple[Split, list[int], bool]]:
    tokenizer, (before, after), begins = vocabulary.tokenizer(), vocabulary.around(), True
    for batch in _batches(pieces):
        encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            yield split_of(piece), before * begins + encoding.ids + after * piece.ends, piece.ends
            begins = piece.ends


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, chars = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _balance(files: Files, itemsize: int) -> None:
    """Where one split has no document, it is cut off the other: the last part of the tokens is validation."""
    train, validation = (files[split] for split in SPLITS)
    if train.tell() == 0:
        files["train"], files["validation"] = validation, train
        train, validation = validation, train
    if validation.tell() == 0:
        total = train.tell() // itemsize
        keep = (total - total // TAIL_SHARE) * itemsize
        train.seek(keep)
        shutil.copyfileobj(train, validation)
        train.truncate(keep)


def _digest(files: Files) -> str:
    digest = hashlib.sha256()
    for split in SPLITS:
        files[split].seek(0)
        while chunk := files[split].read(1 << 20):
            digest.update(chunk)
        digest.update(split.encode())
    return digest.hexdigest()


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Give a folder to write to and rename it to `folder` at the end: another process finds all of it or nothing."""
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        yield draft
        if folder.exists():  # damaged, or another process was quicker: its files are the same as these
            shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader finds the old one, the new one, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def check_fits(vocabulary: Vocabulary, model_vocab: int, where: str) -> None:
    """A model cannot look up a token that it has no row for."""
    if vocabulary.size > model_vocab:
        raise UsageError(
            f"the tokenizer of {where} has ids up to {vocabulary.size - 1}, the model rows for {model_vocab}; take the tokenizer "
            "that belongs to the model, or set vocab_size in config.json."
        )
