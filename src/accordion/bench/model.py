"""The models that are trained: a GPT and a Llama in plain torch, and a net of tiny units that is all host time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accordion.errors import UsageError, nearest
from accordion.models.llama import TRAINED, LlamaShape
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
    """GPT-2's shape without ties or dropout: (batch, seq) tokens to (batch, seq, vocab) logits."""

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


class LlamaBlock(nn.Module):
    def __init__(self, p: LlamaShape) -> None:
        super().__init__()
        head = p.hidden // p.heads
        self.head, linear = head, partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(p.hidden, eps=1e-5), nn.RMSNorm(p.hidden, eps=1e-5)
        self.q, self.o = linear(p.hidden, p.hidden), linear(p.hidden, p.hidden)
        self.k, self.v = linear(p.hidden, p.kv_heads * head), linear(p.hidden, p.kv_heads * head)
        self.gate, self.up, self.down = linear(p.hidden, p.mlp), linear(p.hidden, p.mlp), linear(p.mlp, p.hidden)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # (batch, seq, hidden), (2, seq, head)
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + y  # type: ignore[no-any-return]


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: `x` (batch, heads, seq, head), `turn` (2, seq, head) cosines and sines."""
    a, b = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-b, a), -1) * turn[1]


class Llama(nn.Module):
    """Llama's shape. `recompute`: each block's activations are recomputed in the backward, by torch's own checkpoint."""

    def __init__(self, p: LlamaShape, *, recompute: bool = False) -> None:
        super().__init__()
        self.head_dim, self.recompute = p.hidden // p.heads, recompute
        self.tokens = nn.Embedding(p.vocab, p.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(p) for _ in range(p.layers))
        self.norm, self.head = nn.RMSNorm(p.hidden, eps=1e-5), nn.Linear(p.hidden, p.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seq) -> (batch, seq, vocab)
        x = self.tokens(tokens)
        turn = self._turn(tokens.shape[1], x)
        for block in self.blocks:
            x = checkpoint(block, x, turn, use_reentrant=False) if self.recompute else block(x, turn)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def _turn(self, seq: int, like: Tensor) -> Tensor:
        half = torch.arange(0, self.head_dim, 2, device=like.device)
        angles = torch.arange(seq, device=like.device)[:, None] * 500_000.0 ** (-half / self.head_dim)
        return torch.stack((angles.cos(), angles.sin())).repeat(1, 1, 2).to(like.dtype)


class NineBlock(nn.Module):
    """Nine parameters, two vectors and seven matrices, and next to no arithmetic."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(rows)), nn.Parameter(torch.zeros(rows))
        self.matrices = nn.ParameterList(torch.randn(rows, width) / rows for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:  # (batch, width)
        a, b, c, d, e, f, g = self.matrices
        y = (x @ a.t()) * (x @ b.t()) + (x @ c.t()) * (x @ d.t()) + (x @ e.t()) * (x @ f.t())  # (batch, rows)
        return x + (y * self.scale + self.shift) @ g  # type: ignore[no-any-return]


class NineNet(nn.Module):
    """Units of nine parameters of `rows` rows each."""

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
    """A model by name: how it is made, its vocabulary, and the batch with which it is measured unless another is asked for."""

    make: Callable[[], nn.Module]
    vocab: int
    batch: int
    seq: int


BENCH_MODELS = {
    "gpt-30m": BenchModel(make=partial(GPT, vocab=4096, width=512, blocks=8, heads=8), vocab=4096, batch=2, seq=128),
    "gpt-100m": BenchModel(make=partial(GPT, vocab=4096, width=768, blocks=14, heads=12), vocab=4096, batch=2, seq=128),
    "gpt-tiny": BenchModel(make=partial(GPT, vocab=64, width=32, blocks=2, heads=2), vocab=64, batch=1, seq=16),
} | {name: BenchModel(make=partial(Llama, p), vocab=p.vocab, batch=2, seq=128) for name, p in TRAINED.items()}


def shape_of(name: str) -> BenchModel:
    """The model of that name, or the transformers model that the folder `name` describes, from fresh weights.

    Raises `UsageError` where there is neither.
    """
    if name in BENCH_MODELS:
        return BENCH_MODELS[name]
    if not Path(name).is_dir():
        raise UsageError(f"model {name!r} is no folder and no preset; {nearest(name, BENCH_MODELS)}")
    from accordion.models.language import language_model
    from accordion.train.model import check_folder, configuration

    check_folder(name)
    config = configuration(ModelConfig(path=name), DataConfig())
    language_model(config, f"model {name!r}")
    return BenchModel(make=partial(_fresh, config), vocab=config.vocab_size, batch=2, seq=128)


def _fresh(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def batch_of(step: int, rank: int, shape: tuple[int, int], vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (batch, seq) of one rank in one step, on the CPU; the same for every contender."""
    generator = torch.Generator().manual_seed(1 + 100_000 * step + rank)
    tokens = torch.randint(vocab, (shape[0], shape[1] + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in float32 of logits, or of the `logits` of a transformers output."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
