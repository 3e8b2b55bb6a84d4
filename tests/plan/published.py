"""A published run to hold the planner against: a Llama as torchtitan trained it at the end of 2024."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from accordion.plan.trace.setup import Subject, TrainingSetup

SEQ, BATCH, VOCAB = 8192, 2, 128256
RESERVED_GIB, TOKENS_PER_S = 82.4, 5762  # of one GPU, of 8
"""torchtitan's docs/performance.md at 3f20451: Llama 3.1 8B, FSDP2, selective checkpointing by operator, 8 H100."""


class RMSNorm(nn.Module):
    """In float32, by hand, as then: nothing is fused."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions by complex products in float32; `x`: (batch, seq, heads, head), `angles`: (seq, head / 2)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None, :]).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, mlp: int) -> None:
        super().__init__()
        self.head, self.groups = width // heads, heads // kv_heads
        linear = partial(nn.Linear, bias=False)
        self.q, self.k, self.v = linear(width, width), *(linear(width, kv_heads * self.head) for _ in range(2))
        self.o = linear(width, width)
        self.gate, self.down, self.up = linear(width, mlp), linear(mlp, width), linear(width, mlp)
        self.norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)

    def attend(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], -1, self.head) for y in (self.q(x), self.k(x), self.v(x)))
        q, k = turned(q, angles), turned(k, angles)
        k, v = (y.repeat_interleave(self.groups, 2) for y in (k, v))
        out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        return self.o(out.transpose(1, 2).contiguous().flatten(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x), angles)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 4096)
        self.register_buffer("angles", torch.empty(SEQ, 64, dtype=torch.complex64))
        self.blocks = nn.ModuleList(Block(4096, 32, 8, 14336) for _ in range(layers))
        self.norm, self.output = RMSNorm(4096), nn.Linear(4096, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.angles)
        return self.output(self.norm(x))


def subject(layers: int = 32) -> Subject:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Llama(layers).train()

    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCAB, (2, BATCH, SEQ))
        return tokens[0], tokens[1]

    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(given[0]).flatten(0, 1).float(), given[1].flatten())

    return Subject(make=make, batch=batch, loss=loss)


def run() -> TrainingSetup:
    """As its script had it: blocks and the root; the torch of then kept the root gathered, and torchtitan the last block."""
    sharding = {
        "units": acc.only_blocks(),
        "precision": acc.Precision(params=torch.bfloat16, reduce=torch.float32),
        "checkpoint_activations": "selective",
    }
    return TrainingSetup(
        engine="fsdp2", ranks=8, optimizer="adamw_foreach", sharding=sharding, reshard_root=False, reshard_last=False
    )
