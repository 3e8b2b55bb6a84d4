"""Training of a causal language model on packed text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion.state import Only
from accordion.tasks.loaded import made_optimizer, optimizer_of
from accordion.train.adapters import fill_trained, kept_of, said_of, trained_model
from accordion.train.batches import OrderedBatches
from accordion.train.config import Config, model_name
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
from accordion.train.screen import Screen
from accordion.train.tokens import TokenFiles
from accordion.train.work import Validation

PROMPT_TOKENS, SAMPLE_TOKENS = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A language model of `config` on `tokens`."""

    config: Config
    tokens: TokenFiles
    counted: str = "tokens"

    @property
    def name(self) -> str:
        return model_name(self.config.model)

    def agreed(self) -> dict[str, str]:
        tokens = self.tokens
        return {
            "training tokens": f"{tokens.num_train:,} ({tokens.digest[:12]})",
            "a tokenizer": tokens.tokenizer_digest[:12],
        }

    def model(self, seed: int) -> nn.Module:
        return trained_model(self.config)

    def units(self) -> None:
        return None

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        fill_trained(model, self.config, seed)

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        make = optimizer_of(self.config.parts)
        return None if make is None else made_optimizer(make, model)

    def scheduler(self, optimizer: Optimizer) -> None:
        return None

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        sequences = Sequences(self.tokens.read("train"), self.config.data.seq_len)
        return OrderedBatches(sequences, share, seed, None, pins=pins)

    def notes(self, share: Share) -> list[str]:
        order = GlobalOrder(num_sequences(self.tokens.num_train, self.config.data.seq_len), share, 0)
        sizes = f"{share.world} ranks x {share.micro_batch} x {share.accumulate}"
        uneven = f"; {order.num_dropped} more are left out, so that ranks stay even" if order.num_dropped else ""
        return [
            f"a step is {share.global_batch} sequences of {self.config.data.seq_len} tokens: {sizes}",
            f"an epoch is {order.steps_per_epoch:,} steps{uneven}",
        ]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """The mean of a token; every micro-batch has equally many."""
        return token_losses(model, batch) / (batch.shape[0] * self.config.data.seq_len)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        return share.global_batch * self.config.data.seq_len

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {
            "model_config": json.loads(model.config.to_json_string(use_diff=False)),  # type: ignore[operator, union-attr]
            "data": self.tokens.digest,
            **said_of(self.config),
            "tokenizer": self.tokens.tokenizer_digest,
        }

    def kept(self) -> Only:
        return kept_of(self.config)

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra["data"] == self.tokens.digest)

    def state(self) -> dict[str, Any]:
        return {}

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
        written = sample(model, device, prompt, SAMPLE_TOKENS, self.config.data.seq_len, seed)
        tokenizer = self.tokens.tokenizer()
        screen.sample(tokenizer.decode(prompt), tokenizer.decode(written))
