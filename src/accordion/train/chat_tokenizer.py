"""The tokenizer of examples: a folder's or a file's, or one trained on them, with its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accordion.errors import UsageError
from accordion.files import read_text
from accordion.models.language import brief
from accordion.models.stored import TOKENIZER, StoredModel, has_tokenizer, tokenizer_of
from accordion.train.config import Config
from accordion.train.examples import messages_of
from accordion.train.sources import Piece, Source
from accordion.train.tokens import END_OF_TEXT, Say, cached_vocabulary


def chat_tokenizer(config: Config, source: Source, model_vocab: int, cache: Path, say: Say) -> Any:
    """Return a fast tokenizer of transformers. Raises `UsageError` if there is none, or it has no chat template for chats."""
    found = _tokenizer(config, source, model_vocab, cache, say)
    if not getattr(found, "is_fast", False):
        raise UsageError(
            f"the tokenizer {type(found).__name__} is written in Python and does not tell where its tokens lie in the text; take "
            "a fast one, which has a tokenizer.json."
        )
    if found.eos_token_id is None:
        raise UsageError("the tokenizer names no end-of-text token; set eos_token in its tokenizer_config.json.")
    if config.data.chat_template is not None:
        try:
            found.chat_template = read_text(Path(config.data.chat_template))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"data.chat_template {config.data.chat_template!r} cannot be read: {why}.") from None
    if config.data.format == "chat":
        try:
            found.get_chat_template()
        except ValueError as error:
            several = brief(error) if getattr(found, "chat_template", None) else "the tokenizer has no chat template"
            raise UsageError(
                f"data.format is 'chat', and {several.rstrip('.')}; give one with --data.chat_template FILE, or --data.tokenizer "
                "the folder of a chat model."
            ) from None
    return found


def _tokenizer(config: Config, source: Source, model_vocab: int, cache: Path, say: Say) -> Any:
    named, folder = config.data.tokenizer, config.model.path
    if named is not None:
        path = Path(named)
        if not path.is_file() and not has_tokenizer(path):
            raise UsageError(f"data.tokenizer {named!r} is neither a {TOKENIZER} nor a folder with a tokenizer.")
    elif folder is not None and has_tokenizer(Path(folder)):
        named = folder
    elif folder is not None and config.model.init == "pretrained":
        raise UsageError(
            f"model.path {folder!r} has no tokenizer, without which its weights mean nothing; give --data.tokenizer."
        )
    if named is not None:
        return tokenizer_of(StoredModel(kind="folder", path=named, config={}, tokenizer=named))
    from transformers import PreTrainedTokenizerFast

    vocabulary = cached_vocabulary(source, _pieces(source), model_vocab, cache, say)
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary.tokenizer(), eos_token=END_OF_TEXT)


def _pieces(source: Source) -> Iterator[Piece]:
    """Yield what is in rows as text that a tokenizer can be trained on."""
    for row in source.rows():
        if "messages" in row.values:
            texts = [str(message.get("content") or "") for message in messages_of(row)[0]]
        else:
            texts = [value for value in row.values.values() if isinstance(value, str)]
        yield Piece(row.where, "\n".join(texts), split="train")
