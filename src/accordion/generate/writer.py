"""Generates text with the `generate` of transformers, which caches keys and values; each batch has its own random seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accordion.generate.options import GenerateOptions
from accordion.models.stored import StoredModel, end_of_turn, ends_of

FIRST = 0  # padding token if neither tokenizer nor model names one: every model has it


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """A frozen record of the text generated for one prompt, which a rank sends as JSON to the rank that prints."""

    index: int  # of the prompt
    text: str
    num_tokens: int
    ended: bool  # by an end token, and not by the limit of tokens


class TextWriter:
    """Generates text with a model of transformers. The constructor replaces the model's `generation_config`. If each call of the
    model gathers its units, create `CommonSteps` before the first `write`, so that all ranks call the model equally often."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, stored: StoredModel, options: GenerateOptions, device: torch.device
    ) -> None:
        self._model: Any = model
        self._tokenizer, self._options, self._device = tokenizer, options, device
        self._settings, self._ends, self._pad = settings_of(model, tokenizer, stored, options)
        self._model.generation_config = self._settings  # `generate` would merge the model's own settings into ours

    def write(self, prompts: Mapping[int, tuple[int, ...]], streamer: Any = None) -> list[WrittenText]:
        """Generate text for `prompts` (index -> token ids) in one batch, and return the texts in the order of `prompts`. Seeds
        torch's generators with the option `seed` plus the lowest index. `streamer`: a streamer of transformers, which prints the
        text of a single prompt while it is generated."""
        longest = max(len(ids) for ids in prompts.values())
        rows = [[self._pad] * (longest - len(ids)) + list(ids) for ids in prompts.values()]
        real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts.values()]
        torch.manual_seed(self._options.seed + min(prompts))
        written = self._model.generate(
            input_ids=torch.tensor(rows, device=self._device),  # (b, tokens), padded on the left
            attention_mask=torch.tensor(real, device=self._device),
            generation_config=self._settings,
            streamer=streamer,
        )
        answers = []
        for index, row in zip(prompts, written, strict=True):
            ids = row[longest:].tolist()
            end = next((i for i, token in enumerate(ids) if token in self._ends), None)
            text = self._tokenizer.decode(ids[:end], skip_special_tokens=True)
            num_tokens = len(ids) if end is None else end + 1
            answers.append(WrittenText(index=index, text=text, num_tokens=num_tokens, ended=end is not None))
        return answers


def settings_of(
    model: nn.Module, tokenizer: Any, stored: StoredModel, options: GenerateOptions
) -> tuple[Any, frozenset[int], int]:
    """Return (GenerationConfig, ids of tokens that end a text, id of the padding token). Token ids come from the stored or the
    model's generation settings and from the tokenizer, and the sampling from `options`."""
    from transformers import GenerationConfig

    base: Any = getattr(model, "generation_config", None)
    if stored.generation is not None:
        base = GenerationConfig(**stored.generation)
    of_chat = end_of_turn(tokenizer) if options.chat else None
    ends = frozenset(ends_of(getattr(base, "eos_token_id", None), of_chat) or ends_of(tokenizer.eos_token_id))
    pad = next(
        (p for p in (tokenizer.pad_token_id, getattr(base, "pad_token_id", None), *sorted(ends)) if p is not None),
        FIRST,
    )
    draws = options.temperature > 0
    how = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if draws else {}  # 0: no limit
    settings = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=draws,
        eos_token_id=sorted(ends) or None,
        pad_token_id=pad,
        bos_token_id=getattr(base, "bos_token_id", None),
        **how,
    )
    return settings, ends, pad
