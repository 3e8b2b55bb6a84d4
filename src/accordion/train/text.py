"""Training of a causal language model on packed text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accordion.train.batches import OrderedBatches
from accordion.train.data import (
    GlobalOrder,
    Sequences,
    Share,
    num_sequences,
    num_windows,
    rows_read,
    validation_batches,
    validation_order,
)
from accordion.train.evaluate import sample, token_losses, validation_loss
from accordion.train.language_work import LanguageWork
from accordion.train.screen import Screen
from accordion.train.tokens import TokenFiles
from accordion.train.work import Validation

PROMPT_TOKENS, SAMPLE_TOKENS = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(LanguageWork):
    """A language model on `tokens`."""

    tokens: TokenFiles

    def agreed(self) -> dict[str, str]:
        tokens = self.tokens
        return {
            "training tokens": f"{tokens.num_train:,} ({tokens.digest[:12]})",
            "a tokenizer": tokens.tokenizer_digest[:12],
        }

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        sequences = Sequences(self.tokens.read("train"), self.config.data.seq_len)
        return OrderedBatches(sequences, share, seed, None, pins=pins)

    def notes(self, share: Share) -> list[str]:
        count = num_sequences(self.tokens.num_train, self.config.data.seq_len)
        return GlobalOrder(count, share, 0).notes(f"sequences of {self.config.data.seq_len} tokens")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean of a token; every micro-batch has equally many."""
        return token_losses(model, batch) / (batch.shape[0] * self.config.data.seq_len)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        return share.global_batch * self.config.data.seq_len

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {
            **self.described(model),
            "data": self.tokens.digest,
            "tokenizer": self.tokens.tokenizer_digest,
        }

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra["data"] == self.tokens.digest)

    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation:
        tokens, seq_len = self.tokens.read("validation"), self.config.data.seq_len
        count = num_windows(tokens, seq_len)
        order = validation_order(count, self.config.train.validation_rows)
        loss = validation_loss(model, validation_batches(tokens, seq_len, share, order), device)
        perplexity = math.exp(min(loss, 700.0))
        return Validation(loss=loss, words=f" (perplexity {perplexity:,.1f}; {rows_read(order, count)})")

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """A sample of text."""
        prompt = [int(token) for token in self.tokens.read("validation")[:PROMPT_TOKENS]]
        ends = self.generation["eos_token_id"]
        written = sample(model, device, prompt, SAMPLE_TOKENS, self.config.data.seq_len, seed, ends)
        tokenizer = self.tokens.tokenizer()
        screen.sample(tokenizer.decode(prompt), tokenizer.decode(written))
