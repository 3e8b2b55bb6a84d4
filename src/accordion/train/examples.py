"""Examples with answers: the tokenizer, rows rendered by a chat template into tokens, and which tokens are learnt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accordion.errors import UsageError, nearest
from accordion.files import read_text
from accordion.models.language import brief
from accordion.models.stored import TOKENIZER, StoredModel, ends_of, has_tokenizer, special_ids, tokenizer_of
from accordion.train.config import Config
from accordion.train.model import check_folder
from accordion.train.sources import DataRow, Piece, Source, checked_text
from accordion.train.tokens import END_OF_TEXT, Say, Vocabulary, cached_vocabulary

ROLES = ("system", "developer", "user", "assistant", "tool")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # in a template, around text that the model is to write
Span = tuple[int, int]
Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Example = tuple[np.ndarray, np.ndarray]
"""(token ids, (tokens,) int64; mask, (tokens,) bool, True for tokens that count in the loss)"""


class Encoder:
    """Converts rows of data, chats or prompts with completions, into tokens and a mask of those that are learnt."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        """`tokenizer`: a fast tokenizer of transformers. `kind`: "chat" or "prompt"; rows have the fields of `FIELDS[kind]`."""
        self._tokenizer, self._kind = tokenizer, kind
        self._template = tokenizer.get_chat_template() if kind == "chat" else ""
        self._special = special_ids(tokenizer)

    def example(self, row: DataRow) -> Example:
        """Return (token ids, mask of the tokens that count in the loss) of `row`. In a chat whose answers all have weight 0, no
        token counts. Raises `UsageError` if `row` is invalid, or if no token is left of the answers that count."""
        if self._kind == "prompt":
            prompt, completion = (checked_text(row.values[key], f"{row.where}: field {key!r}") for key in row.values)
            example, learnt = self._of_prompt(prompt, completion, row.where), [True]
        else:
            messages, learnt = messages_of(row)
            tools = row.values.get("tools")
            try:
                tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
            except ValueError:
                raise UsageError(f"{row.where}: field 'tools' is text that is no JSON.") from None
            if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
                raise UsageError(f"{row.where}: field 'tools' is {type(tools).__name__}; it takes a list of objects.")
            example = self._of_messages(messages, learnt, without_nulls(tools) or None, row.where)
        if any(learnt) and not example[1][1:].any():
            raise UsageError(f"{row.where} has no answer left as tokens; there is nothing to learn from it.")
        return example

    def _of_prompt(self, prompt: str, completion: str, where: str) -> Example:
        if not completion:
            raise UsageError(f"{where}: field 'completion' is empty; there is nothing to learn from it.")
        before, whole = self._plain(prompt), self._plain(prompt + completion)
        answer = whole[len(before) :]
        # Tokenize the completion alone if a token would be part of prompt and completion.
        if whole[: len(before)] != before or not answer:
            answer = self._tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids = [*before, *answer, self._tokenizer.eos_token_id]
        return np.array(ids), np.arange(len(ids)) >= len(before)

    def _plain(self, text: str) -> list[int]:
        """Return the ids of `text` and of tokens that the tokenizer adds, but no end-of-text token after the others."""
        ids = list(self._tokenizer(text)["input_ids"])
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids

    def _of_messages(self, messages: list[Message], learnt: list[bool], tools: Tools, where: str) -> Example:
        """Return the tokens of a chat, and a mask of those that count in the loss. `learnt`: for each assistant message, True
        if it counts. `where`: name of the row. Raises `UsageError` if the template fails or answers cannot be located."""
        marked = MARKS.search(self._template) is not None
        if marked:
            text, spans = self._render_marked(messages, tools, where)
        else:
            text = self._render(messages, tools, where)
            spans = self._by_prefixes(messages, tools, text, where)
        if len(spans) != len(learnt) and not all(learnt):
            raise UsageError(
                f"{where} has {len(learnt)} messages of the assistant, some with weight 0, and the chat template marks "
                f"{len(spans)} answers; mark one for each message."
            )
        spans = spans if all(learnt) else [span for span, flag in zip(spans, learnt, strict=True) if flag]
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, ends = np.array(encoding["input_ids"]), np.array([end for _, end in encoding["offset_mapping"]])
        # Start of each token, (tokens,): tokenizers exclude leading blanks from its span.
        before = np.maximum.accumulate([0, *ends])[:-1]
        starts = np.minimum([start for start, _ in encoding["offset_mapping"]], before).astype(np.int64)
        answers = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            # Include a token that starts with a blank before the answer, as transformers and TRL do.
            answers |= (np.maximum(starts + 1, ends) > start) & (starts < end)
            if not marked:
                answers &= ~self._blanks_after_an_end(text, ids, starts, (start, end))
        return ids, answers

    def _blanks_after_an_end(self, text: str, ids: np.ndarray, starts: np.ndarray, span: Span) -> np.ndarray:
        """Return a bool mask, (tokens,), of the tokens after the last special token of the answer at `span`, if their text is
        blank: they are not learnt. Else the mask is False everywhere. `starts`: index in `text` at which each token begins."""
        inside = np.flatnonzero((starts >= span[0]) & (starts < span[1]))
        last = next((i for i in reversed(inside) if ids[i] in self._special), None)
        mask = np.zeros(len(ids), dtype=bool)
        if last is not None:
            after = inside[inside > last]
            if len(after) and not text[starts[after[0]] : span[1]].strip():
                mask[after] = True
        return mask

    def _render_marked(self, messages: list[Message], tools: Tools, where: str) -> tuple[str, list[Span]]:
        """Return (rendered chat, [(start, end)] of marked answers). Raises `UsageError` if the template fails or marks none."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program of its own
            raise UsageError(f"{where}: the chat template fails: {brief(error)}") from None
        if not spans[0]:
            raise UsageError(f"{where}: the chat template marks no answer in it; there is nothing to learn from it.")
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]

    def _render(self, messages: list[Message], tools: Tools, where: str, *, prompt: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except Exception as error:  # as above
            raise UsageError(f"{where}: the chat template fails: {brief(error)}") from None

    def _by_prefixes(self, messages: list[Message], tools: Tools, text: str, where: str) -> list[Span]:
        """Return (start, end) of each answer in `text`, the rendered conversation. An answer begins after the rendering of the
        messages before it and the template's prompt for an answer, and ends with the text that the template puts after it (such
        as an end token). `where`: the row, for errors. Raises `UsageError` if the template fails or an answer is not found."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            until = self._render(messages[: i + 1], tools, where)
            content = str(message.get("content") or "").strip()
            if i:
                before = self._render(messages[:i], tools, where, prompt=True)
            else:
                # transformers renders no prompt without messages, so the end of another prompt shows where the answer begins.
                question = [{"role": "user", "content": "?"}]
                prompt = self._render(question, tools, where, prompt=True)
                begins = prompt.removeprefix(self._render(question, tools, where))
                at = until.find(begins) if begins else -1
                before = until[: at + len(begins)] if at >= 0 else until.rpartition(content)[0] if content else ""
            # Without text (tool calls alone), only a prompt shows where the answer begins.
            if (content or before) and text.startswith(until) and until.startswith(before):
                spans.append((len(before), len(until)))
                continue
            # Some templates render an answer differently if messages follow, for example without its thoughts.
            closing = until.rpartition(content)[2] if content else ""
            if not (content and text.startswith(before + content + closing)):
                raise UsageError(
                    f"{where}: message {i + 1} cannot be found in the rendered conversation; mark answers in the chat template "
                    "with {% generation %}, and give it as data.chat_template."
                )
            spans.append((len(before), len(before) + len(content + closing)))
        return spans


def without_nulls(value: Any) -> Any:
    """Return JSON data without null fields of objects, at every level. Arrow adds them for fields that only other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def messages_of(row: DataRow) -> tuple[list[Message], list[bool]]:
    """Return (messages of `row`, without null fields and without the keys `weight` and `train`; for each message of the
    assistant, True if it counts in the loss). Raises `UsageError` if a message is invalid, or if none is of the assistant."""
    messages = without_nulls(row.values["messages"])
    if not isinstance(messages, list) or not messages:
        what = "empty" if messages == [] else f"{type(messages).__name__}"
        raise UsageError(f"{row.where}: field 'messages' is {what}; it takes a list of objects with role and content.")
    checked = [_message(message, f"{row.where}: message {i}") for i, message in enumerate(messages, 1)]
    if not any(message["role"] == "assistant" for message in checked):
        raise UsageError(f"{row.where} has no message of the assistant; there is nothing to learn from it.")
    learnt = []
    for i, message in enumerate(checked, 1):
        flags = {key: message.pop(key) for key in ("weight", "train") if key in message}
        for key, flag in flags.items():
            if flag not in (0, 1):
                raise UsageError(f"{row.where}: message {i} has {key} {flag!r}; it takes 0 or 1, false or true.")
        if message["role"] == "assistant":
            learnt.append(all(flags.values()))
    return checked, learnt


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f"{where} is {type(message).__name__}; it takes an object with role and content.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise UsageError(f"{where} has no role; it takes one of {', '.join(ROLES)}.")
    if role not in ROLES:
        raise UsageError(f"{where} has role {role!r}; {nearest(role, list(ROLES))}")
    calls = bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls):
        what = "no content" if content is None else f"content that is {type(content).__name__}"
        raise UsageError(f"{where}, of the {role}, has {what}; it takes text.")
    if role == "assistant" and not calls and not str(content).strip():
        raise UsageError(f"{where}, of the assistant, is empty; there is nothing to learn from it.")
    checked_text(content or "", where)
    return dict(message)


def digest_of_tokenizer(tokenizer: Any, kind: str) -> str:
    """Return a hash of `tokenizer`, and if `kind` is "chat", of its chat template: equal hashes mean equal tokens."""
    parts = [tokenizer.backend_tokenizer.to_str(), str(tokenizer.eos_token_id), kind]
    if kind == "chat":
        parts += [str(tokenizer.get_chat_template()), json.dumps(tokenizer.special_tokens_map, default=str)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# -- the tokenizer


def run_tokenizer(config: Config, source: Source, model_vocab: int, cache: Path, say: Say) -> Any:
    """Return the run's tokenizer, a fast one of transformers: that of `data.tokenizer`, or else that in the model's folder.
    Without either, train one on `source` with up to `model_vocab` tokens, store it in `cache`, and tell `say`.
    `data.chat_template` replaces its template. Raises `UsageError` if it is unreadable, not fast, missing next to pretrained
    weights, or lacks the template for chats."""
    tokenizer = _tokenizer(config, source, model_vocab, cache, say)
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"the tokenizer {type(tokenizer).__name__} is written in Python and returns no positions of tokens in the text; "
            "take a fast one, which has a tokenizer.json."
        )
    if config.data.chat_template is not None:
        try:
            tokenizer.chat_template = read_text(Path(config.data.chat_template))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"data.chat_template {config.data.chat_template!r} cannot be read: {why}.") from None
    if config.data.format == "chat" and not tokenizer.chat_template:
        raise UsageError(
            "data.format is 'chat', and the tokenizer has no chat template; give one with --data.chat_template FILE, or "
            "--data.tokenizer the folder of a chat model."
        )
    return tokenizer


def vocabulary_of(tokenizer: Any, config: Config, model_vocab: int) -> Vocabulary:
    """Return `tokenizer`, one of transformers, as plain data. Its end-of-text token is the tokenizer's; for format "text",
    rather that of the model's config.json. Raises `UsageError` if neither names one, or if an id is at least `model_vocab`."""
    end = tokenizer.eos_token_id
    if config.data.format == "text" and config.model.path is not None:
        end = next(iter(ends_of(check_folder(config.model.path).get("eos_token_id"), end)), None)
    if end is None:
        raise UsageError("the tokenizer names no end-of-text token; set eos_token in its tokenizer_config.json.")
    largest = max([*tokenizer.get_vocab().values(), end])  # ids may have gaps
    if largest >= model_vocab:
        raise UsageError(
            f"the tokenizer of {config.data.tokenizer or config.model.path or config.model.preset} has ids up to {largest}, but "
            f"the model has a vocabulary of {model_vocab}; take the model's own tokenizer, or set vocab_size in config.json."
        )
    spec, special_as_text = tokenizer.backend_tokenizer.to_str(), config.data.special_tokens == "text"
    return Vocabulary(spec=spec, size=1 + largest, end_id=end, special_as_text=special_as_text)


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
            f"model.path {folder!r} has no tokenizer, which its pretrained weights need; give --data.tokenizer."
        )
    if named is not None:
        return tokenizer_of(StoredModel(kind="folder", path=named, config={}, tokenizer=named))
    from transformers import PreTrainedTokenizerFast

    pieces = source.pieces() if config.data.format == "text" else _pieces(source)
    vocabulary = cached_vocabulary(source, pieces, model_vocab, cache, say)
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary.tokenizer(), eos_token=END_OF_TEXT)


def _pieces(source: Source) -> Iterator[Piece]:
    for row in source.rows():
        if "messages" in row.values:
            texts = [str(message.get("content") or "") for message in messages_of(row)[0]]
        else:
            texts = [value for value in row.values.values() if isinstance(value, str)]
        yield Piece("\n".join(texts), "train")
