"""Reads prompts from a flag or a file, tokenizes them, and checks that the model can take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion.errors import UsageError
from accordion.files import read_text
from accordion.generate.options import MANY, GenerateOptions
from accordion.models.language import brief

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as text, for output, and as token ids, for the model."""

    text: str  # as the user gave it; of a chat, the last message
    ids: tuple[int, ...]  # with the chat template, if --chat is given


def read_prompts(options: GenerateOptions, tokenizer: Any, config: Any) -> list[Prompt]:
    """Read the prompts that --prompt or --prompts give, tokenize them, and return them in order. `config`: configuration of the
    model. Raises `UsageError` if the file cannot be read, if there is no prompt, if one is empty, too long or has a token that
    the model lacks, or if --chat finds no chat template."""
    prompts: list[tuple[str, str | list[Message]]] = []  # name in messages; text, or messages of a chat
    if options.prompt is not None:
        prompts = [("--prompt", options.prompt)]
    else:
        assert options.prompts is not None
        path = Path(options.prompts)
        try:
            lines = read_text(path).splitlines()
        except OSError as error:
            raise UsageError(f"--prompts {options.prompts!r} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--prompts {options.prompts!r} is no text in UTF-8: {error.reason}.") from None
        for i, line in enumerate(lines, 1):
            if line.strip():
                where = f"line {i} of --prompts"
                prompts.append((where, _of_json(where, line, options.chat) if path.suffix == ".jsonl" else line))
        if not prompts:
            raise UsageError(f"--prompts {options.prompts!r} holds no prompt; write one on each line.")
    if options.chat and not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "--chat needs the chat template of a tokenizer, and this model's has none; leave it out, or put the tokenizer of a "
            "chat model next to the weights."
        )
    return [_as_tokens(where, prompt, options, tokenizer, config) for where, prompt in prompts]


def positions_of(config: Any) -> int | None:
    """Return the number of tokens of the longest sequence that a model takes; None if its `config` names no limit."""
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def num_new(options: GenerateOptions, prompts: Sequence[Prompt], config: Any) -> int:
    """Return the largest number of tokens to generate for each prompt: `options.max_new_tokens`. If that is None, 128, or fewer
    if the longest prompt leaves fewer of the model's positions. `config`: configuration of the model."""
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    longest = positions_of(config)
    return MANY if longest is None else min(MANY, longest - max(len(prompt.ids) for prompt in prompts))


def _of_json(where: str, line: str, chat: bool) -> str | list[Message]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is no JSON: {error}.") from None
    keys = ("prompt", "messages") if chat else ("prompt",)
    key = next((key for key in keys if isinstance(content, dict) and key in content), None)
    if key is None:
        more = "; --chat takes `messages` too" if not chat else ""
        raise UsageError(f"{where} is no object with {' or '.join(keys)}{more}.")
    value = content[key]
    if key == "prompt":
        if not isinstance(value, str):
            raise UsageError(f"{where}: prompt is no text.")
        return value
    try:
        messages = [{key: message[key] for key in ("role", "content")} for message in value]
    except (TypeError, KeyError):
        messages = []
    if not messages or not all(isinstance(text, str) for message in messages for text in message.values()):
        raise UsageError(f"{where}: messages is no list of objects with the texts role and content.")
    return messages


def _as_tokens(
    where: str, prompt: str | list[Message], options: GenerateOptions, tokenizer: Any, config: Any
) -> Prompt:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    try:
        if options.chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(shown, add_special_tokens=False)["input_ids"]  # the template adds special tokens
        else:
            ids = tokenizer(prompt)["input_ids"]
    except Exception as error:  # a chat template is code, which can raise any error
        raise UsageError(f"{where} cannot be made into tokens: {brief(error)}") from None
    if not ids:
        raise UsageError(f"{where} is empty, and the tokenizer has no token to begin a text with; write something.")
    rows = getattr(config, "vocab_size", None)
    if isinstance(rows, int) and max(ids) >= rows:
        raise UsageError(
            f"{where} has token {max(ids)}, and the model has {rows} tokens; put the tokenizer that belongs to the model next "
            "to its weights."
        )
    longest, new = positions_of(config), options.max_new_tokens or 1
    if longest is not None and len(ids) + new > longest:
        raise UsageError(
            f"{where} has {len(ids)} tokens, which with {new} new ones are {len(ids) + new}, and the model has {longest} "
            "positions; lower --max-new-tokens, or shorten it."
        )
    return Prompt(text=text, ids=tuple(ids))
