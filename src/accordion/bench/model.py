"""The models that are trained: a GPT in plain torch, models of transformers, and a net of tiny units for host time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion.errors import UsageError, nearest
from accordion.models.llama import TRAINED
from accordion.train.config import DataConfig, ModelConfig


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, width)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, seq, head)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 with an output layer of its own (not tied to the embedding) and no dropout. The forward takes tokens (batch, seq)
    and returns logits (batch, seq, vocab)."""

    def __init__(self, *, vocab: int, width: int, blocks: int, heads: int, positions: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class NineBlock(nn.Module):
    """A block of nine parameters, two vectors and seven matrices, with almost no arithmetic."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(rows)), nn.Parameter(torch.zeros(rows))
        self.matrices = nn.ParameterList(torch.randn(rows, width) / rows for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        a, b, c, d, e, f, g = self.matrices
        y = (x @ a.t()) * (x @ b.t()) + (x @ c.t()) * (x @ d.t()) + (x @ e.t()) * (x @ f.t())  # (batch, rows)
        return x + (y * self.scale + self.shift) @ g  # type: ignore[no-any-return]


class NineNet(nn.Module):
    """A net of `blocks` units of nine parameters with `rows` rows each."""

    def __init__(self, rows: int, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(NineBlock(rows, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModel:
    """A model to measure. `make`: returns a new one with random weights. `vocab`: number of its tokens. `batch`, `seq`: default
    shape of a batch."""

    make: Callable[[], nn.Module]
    vocab: int
    batch: int = 2
    seq: int = 128


GPTS = {
    "gpt-30m": BenchModel(make=partial(GPT, vocab=4096, width=512, blocks=8, heads=8), vocab=4096),
    # Few tokens for its weights, so that communication takes most of a step.
    "gpt-98m": BenchModel(make=partial(GPT, vocab=8192, width=768, blocks=12, heads=12), vocab=8192, batch=1, seq=64),
    "gpt-tiny": BenchModel(make=partial(GPT, vocab=64, width=32, blocks=2, heads=2), vocab=64, batch=1, seq=16),
}


def shape_of(name: str) -> BenchModel:
    """Return the `BenchModel` for `name`: a key of `GPTS`, a preset of `accordion train`, or a folder with a transformers
    config.json, whose weights are not read. Raises `UsageError` for any other name, or a config.json of no language model."""
    if name in GPTS:
        return GPTS[name]
    if name not in TRAINED and not Path(name).is_dir():
        raise UsageError(f"model {name!r} is neither a folder nor a preset; {nearest(name, [*GPTS, *TRAINED])}")
    from accordion.models.language import language_model
    from accordion.train.model import configuration

    choice = ModelConfig(preset=name) if name in TRAINED else ModelConfig(path=name)
    config: Any = configuration(choice, DataConfig())
    language_model(config, f"model {name!r}")

    def make() -> nn.Module:
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model

    return BenchModel(make=make, vocab=config.vocab_size)


def batch_of(step: int, rank: int, shape: tuple[int, int], vocab: int) -> tuple[Tensor, Tensor]:
    """Return random (tokens, next tokens as targets), each of `shape` (batch, seq), on the CPU, seeded by `step` and `rank`."""
    generator = torch.Generator().manual_seed(1 + 100_000 * step + rank)
    tokens = torch.randint(vocab, (shape[0], shape[1] + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def batches_of(rank: int, shape: tuple[int, int], vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, targets), each of shape `shape` (batch, seq), of one rank for steps 0, 1, 2, ..., without end."""
    for step in count():
        yield batch_of(step, rank, shape, vocab)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in float32, as a 0-d tensor. `output`: logits (batch, seq, vocab), or a transformers output
    that has `logits`. `targets`: token numbers (batch, seq)."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
