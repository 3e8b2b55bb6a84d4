"""Tokens decode to the text, documents stay separate, and the cache is complete or absent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from accordion.errors import UsageError
from accordion.train import sources, token_tables
from accordion.train.config import Config, DataConfig, ModelConfig
from accordion.train.examples import run_tokenizer, vocabulary_of
from accordion.train.sources import Source, find
from accordion.train.token_tables import TokenFiles, cached_tokens
from accordion.train.tokens import (
    END_OF_TEXT,
    LONGEST_WORD,
    Vocabulary,
    _parts,
    cached_vocabulary,
    train_vocabulary,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Sixty documents."""
    place = tmp_path / "corpus"
    place.mkdir()
    for i in range(60):
        text = f"the {i}th document is about number {i}, naïve café \U0001f600 {END_OF_TEXT}\n"
        (place / f"{i}.txt").write_text(text)
    return find(DataConfig(path=str(place)))


def quiet(*_: object) -> None:
    pass


def make(source: Source, cache: Path, size: int = 300) -> tuple[TokenFiles, Vocabulary]:
    vocabulary = cached_vocabulary(source, source.pieces(), size, cache, quiet)
    return cached_tokens(source, vocabulary, cache, quiet), vocabulary


def ids_of(files: TokenFiles, split: sources.Split) -> list[int]:
    return files.text(split).to_pylist()


def test_tokens_decode_to_the_documents(source: Source, tmp_path: Path) -> None:
    """Also if documents contain the text of the end-of-text token, which is read as ordinary text."""
    vocabulary = replace(train_vocabulary(source.pieces(), 300), special_as_text=True)
    files = cached_tokens(source, vocabulary, tmp_path / "cache", quiet)
    tokenizer, texts = vocabulary.tokenizer(), []
    for split in token_tables.SPLITS:
        ids = ids_of(files, split)
        assert ids[-1] == vocabulary.end_id
        ends = [i for i, token in enumerate(ids) if token == vocabulary.end_id]
        starts = [0, *(end + 1 for end in ends)]
        texts += [tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=False)]
    assert sorted(texts) == sorted(piece.text for piece in source.pieces())
    assert files.num_documents == len(texts) == 60


def with_around(vocabulary: Vocabulary, template: str) -> Tokenizer:
    """Return a tokenizer that puts tokens around a text, and was saved with truncation and padding."""
    own = Tokenizer.from_str(vocabulary.spec)
    special = [(word, own.token_to_id(word)) for word in ("b", "e", END_OF_TEXT)]
    own.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    own.enable_truncation(max_length=8)
    own.enable_padding(length=16)
    return own


@pytest.mark.parametrize(("template", "ends"), [("b $A", [0]), ("b b $A e", [0]), (f"$A {END_OF_TEXT}", [])])
def test_documents_are_tokenized_as_transformers_does(
    source: Source, tmp_path: Path, template: str, ends: list[int]
) -> None:
    """Special tokens are read as such, and tokens are put around each document; nothing is truncated or padded."""
    from transformers import PreTrainedTokenizerFast

    own = with_around(train_vocabulary(source.pieces(), 300), template)
    vocabulary = Vocabulary(spec=own.to_str(), size=300, end_id=0)
    files = cached_tokens(source, vocabulary, tmp_path / "cache", quiet)
    theirs = PreTrainedTokenizerFast(tokenizer_object=own)
    for split in token_tables.SPLITS:
        texts = [piece.text for piece in source.pieces() if piece.split == split]
        wanted = [number for text in texts for number in [*theirs(text)["input_ids"], *ends]]
        assert ids_of(files, split) == wanted


def test_a_document_in_parts_has_one_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.txt").write_text("one\ntwo\nthree\n" * 20)
    source = find(DataConfig(path=str(tmp_path / "long.txt")))
    spec = with_around(train_vocabulary(source.pieces(), 300), f"{END_OF_TEXT} $A").to_str()
    monkeypatch.setattr(sources, "PIECE_CHARS", 1)
    files = cached_tokens(source, Vocabulary(spec=spec, size=300, end_id=0), tmp_path / "cache", quiet)
    ids = [*ids_of(files, "train"), *ids_of(files, "validation")]
    assert [at for at, number in enumerate(ids) if number == 0] == [0, len(ids) - 1]


def test_the_cache_is_used(source: Source, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", list[str]()
    files, vocabulary = make(source, cache)
    assert cached_vocabulary(source, source.pieces(), 300, cache, said.append) == vocabulary
    assert cached_tokens(source, vocabulary, cache, said.append) == files
    assert not said
    Path(files.files[0]).with_name("summary.json").unlink()
    assert cached_tokens(source, vocabulary, cache, said.append) == files
    assert not said
    (tmp_path / "corpus" / "0.txt").write_text("another text")
    other = cached_tokens(find(DataConfig(path=str(tmp_path / "corpus"))), vocabulary, cache, said.append)
    assert (len(said), other.digest == files.digest) == (1, False)


def test_an_invalid_row_leaves_no_table(source: Source, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n{"body": "d"}\n')
    rows, vocabulary = find(DataConfig(path=str(tmp_path / "rows.jsonl"))), train_vocabulary(source.pieces(), 300)
    for _ in range(2):
        with pytest.raises(UsageError, match="line 2 has no field 'text'"):
            cached_tokens(rows, vocabulary, tmp_path / "cache", quiet)
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_a_damaged_cache_is_named(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    files, vocabulary = make(source, cache)
    table = Path(files.files[0])
    table.write_bytes(table.read_bytes()[:100])
    with pytest.raises((UsageError, OSError), match=r"damaged|Expected"):
        cached_tokens(source, vocabulary, cache, quiet)


@pytest.mark.parametrize("block", [1, 7, 100])
def test_text_is_the_same_in_blocks_of_any_size(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    files, vocabulary = make(source, tmp_path / "cache")
    monkeypatch.setattr(token_tables, "BLOCK_TOKENS", block)
    monkeypatch.setattr(token_tables, "BATCH_CHARS", 50)
    other = cached_tokens(source, vocabulary, tmp_path / str(block), quiet)
    assert replace(other, files=files.files, digest=files.digest) == files
    assert ids_of(other, "train") == ids_of(files, "train")


def test_a_single_document_is_split_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} of the only document\n" for i in range(2000)))
    files, vocabulary = make(find(DataConfig(path=str(path))), tmp_path / "cache")
    share = files.num_validation / (files.num_train + files.num_validation)
    assert files.num_documents == 1
    assert share == pytest.approx(1 / 20, rel=0.01)
    text = vocabulary.tokenizer().decode([*ids_of(files, "train"), *ids_of(files, "validation")])
    assert text == path.read_text()


def of_folder(folder: Path, spec: str, eos: object, model_vocab: int = 70_001, **config: object) -> Vocabulary:
    (folder / "tokenizer.json").write_text(spec)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    config_of_run = Config(model=ModelConfig(path=str(folder)), data=DataConfig(**config))
    source = find(DataConfig())
    return vocabulary_of(run_tokenizer(config_of_run, source, 300, folder, quiet), config_of_run, model_vocab)


def test_a_folders_tokenizer(source: Source, tmp_path: Path) -> None:
    """The largest id, not the number of tokens, decides which model a tokenizer fits and the dtype of its tokens."""
    own = train_vocabulary(source.pieces(), 300)
    for eos, expected in ((5, 5), ([7, 8], 7)):
        found = of_folder(tmp_path, own.spec, eos)
        assert (found.size, found.end_id) == (own.size, expected)
    with pytest.raises(UsageError, match="names no end-of-text token"):
        of_folder(tmp_path, own.spec, None)
    with pytest.raises(UsageError, match="no tokenizer"):
        of_folder(tmp_path, "{}", 0)
    spec = json.loads(own.spec)
    spec["model"]["vocab"][own.tokenizer().encode("the").tokens[0]] = 70_000
    vocabulary = of_folder(tmp_path, json.dumps(spec), 0)
    with pytest.raises(UsageError, match="has ids up to 70000, but the model has a vocabulary of 70000"):
        of_folder(tmp_path, json.dumps(spec), 0, 70_000)
    files = cached_tokens(source, vocabulary, tmp_path / "cache", quiet)
    assert max(ids_of(files, "train")) == 70_000


def test_training_is_deterministic(source: Source) -> None:
    assert train_vocabulary(source.pieces(), 400) == train_vocabulary(source.pieces(), 400)


@pytest.mark.parametrize("run", ["a", "-", " ", "語", "\u0301"])
def test_the_trainer_of_tokenizers_gets_no_long_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """Its time is quadratic in the longest word. The words that it gets are counted."""
    met: list[str] = []

    def train(self: Tokenizer, texts: Iterator[str], trainer: object) -> None:
        met.extend(texts)

    text = "it is, " + run * 20000 + " and so on " * 500
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(Tokenizer, "train_from_iterator", train)
    train_vocabulary(find(DataConfig(path=str(tmp_path / "a.txt"))).pieces(), 300)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    words = [word for part in met for word, _ in split(part)]
    assert max(map(len, words)) <= 2 * LONGEST_WORD * len(run.encode())
    assert "".join(met) == text


def test_text_without_long_runs_is_not_split() -> None:
    text = "".join("a,é 1_"[i % 6] * (1 + i % LONGEST_WORD) for i in range(3000))
    assert list(_parts(text)) == [text]
    assert list(_parts("")) == [""]
