"""Training of a causal language model on packed text."""

from __future__ import annotations

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
from accordion.train.evaluate import token_losses, validation_loss
from accordion.train.language_work import LanguageWork, validated
from accordion.train.screen import Screen
from accordion.train.token_tables import TokenFiles
from accordion.train.work import Validation

PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(LanguageWork):
    """A language model on text."""

    files: TokenFiles
    unit: str = "training tokens"

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        sequences = Sequences(self.files.read("train"), self.config.data.seq_len)
        return OrderedBatches(sequences, share, seed, None, pins=pins)

    def notes(self, share: Share) -> list[str]:
        count = num_sequences(self.files.num_train, self.config.data.seq_len)
        return GlobalOrder(count, share, 0).notes(f"sequences of {self.config.data.seq_len} tokens")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean of a token; every micro-batch has equally many."""
        return token_losses(model, batch) / (batch.shape[0] * self.config.data.seq_len)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        return share.global_batch * self.config.data.seq_len

    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation:
        tokens, seq_len = self.files.read("validation"), self.config.data.seq_len
        count = num_windows(tokens.size, seq_len)
        order = validation_order(count, self.config.train.validation_rows)
        loss = validation_loss(model, validation_batches(tokens, seq_len, share, order), device)
        return validated(loss, "", rows_read(order, count))

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """A sample of text."""
        prompt = [int(token) for token in self.files.read("validation")[:PROMPT_TOKENS]]
        self._show_sample(model, device, prompt, seed, screen)
