"""Tokenizers as plain data (`Vocabulary`), and tokenizers that are trained on a run's data and stored in the cache."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from accordion.files import write_whole
from accordion.train.sources import Piece, Source

FORMAT = 4  # of the cache; increment it when a change of code changes tokens
END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARS = 64 << 20  # more text hardly changes the merges
LONGEST_WORD = 1024  # characters in a run of letters, blanks or signs; longer runs are data, not words
ONE_KIND = re.compile(r"[^\W_]*|(?:[^\w\s]|_)*|\s*")  # runs that the pre-tokenizer never splits: letters, signs, blanks
Say = Callable[[str], None]
"""Shows a line of progress or information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as plain data. `spec`: content of its tokenizer.json. `size`: its largest id plus one. `end_id`: id of the
    end-of-text token. `special_as_text`: read special tokens in a document, such as "<|endoftext|>", as ordinary characters."""

    spec: str
    size: int
    end_id: int
    special_as_text: bool = False

    @property
    def digest(self) -> str:
        more = " special_as_text" if self.special_as_text else ""
        return hashlib.sha256(f"{self.end_id} {self.spec}{more}".encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_str(self.spec)
        tokenizer.encode_special_tokens = self.special_as_text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def around(self) -> tuple[list[int], list[int]]:
        """Return (special tokens before each document, special tokens after it): those that tokenizer.json adds. The second
        list also has the end-of-text token, as its last one if tokenizer.json does not add it."""
        whole = self.tokenizer().encode("a")
        added = "".join(map(str, whole.special_tokens_mask))  # as in "1100001"
        first = len(added) - len(added.lstrip("1"))
        before, after = whole.ids[:first], whole.ids[max(first, len(added.rstrip("1"))) :]
        return before, after if self.end_id in after else [*after, self.end_id]


def train_vocabulary(pieces: Iterable[Piece], size: int) -> Vocabulary:
    """Train a byte-level BPE tokenizer with up to `size` tokens on `pieces`, and return the tokenizer. Of the training split,
    about the first `TRAINING_CHARS` characters are used; of the validation split all, and only if the training split is empty."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator((part for text in _training_text(pieces) for part in _parts(text)), trainer)
    return Vocabulary(spec=tokenizer.to_str(), size=tokenizer.get_vocab_size(), end_id=0)


def _training_text(pieces: Iterable[Piece]) -> Iterator[str]:
    chars, spare = 0, []
    for piece in pieces:
        if piece.split == "train":
            yield piece.text
            chars += len(piece.text)
        elif chars == 0:
            spare.append(piece.text)
        if chars > TRAINING_CHARS:
            return
    if chars == 0:
        yield from spare


def _parts(text: str) -> Iterator[str]:
    """Yield `text` in parts, split only inside runs of letters, signs or blanks that are longer than `LONGEST_WORD`."""
    # Ordinary text has no such runs. The trainer takes a run as one word, and its time is quadratic in the longest word.
    start, half = 0, LONGEST_WORD // 2
    for at in range(LONGEST_WORD, len(text) - half, LONGEST_WORD):
        if ONE_KIND.fullmatch(text, at - half, at + half + 1):
            yield text[start:at]
            start = at
    yield text[start:]


def cached_vocabulary(source: Source, pieces: Iterable[Piece], size: int, cache: Path, say: Say) -> Vocabulary:
    """Return the tokenizer for `source` from the folder `cache`. If it is not there or cannot be read, train one with up to
    `size` tokens on `pieces`, the text of `source`, store it there, and report that to `say`."""
    path = cache / "tokenizers" / f"{key_of(source.stamp, str(size))}.json"
    try:
        vocabulary = Vocabulary(**json.loads(path.read_text(encoding="utf-8")))
        vocabulary.tokenizer()
    except Exception:  # absent, damaged or of another version: trained again
        say(f"training a tokenizer on {source.label} (once; kept in {path.parent})")
        vocabulary = train_vocabulary(pieces, size)
        write_whole(path, json.dumps(asdict(vocabulary)))
    return vocabulary


def key_of(*parts: str) -> str:
    """Return the name of a cache file: a hash of `parts`, which determine its content, and of `FORMAT`."""
    return hashlib.sha256("\n".join([str(FORMAT), *parts]).encode()).hexdigest()[:24]
