"""Small models with properties of real ones: blocks, tied, frozen and unused parameters, rows that ranks do not divide evenly."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.devices import device, here


class Block(nn.Module):
    """A residual block. `spare`: add a parameter used only with `use_sometimes=True`, and one that is never used.

    `experts`: number of additional two-layer networks in one parameter (experts, hidden, width), which are all used.
    """

    def __init__(self, width: int, hidden: int, spare: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.sometimes = nn.Parameter(torch.randn(width)) if spare else None
        self.never = nn.Parameter(torch.randn(width)) if spare else None
        self.experts = nn.Parameter(torch.randn(experts, hidden, width) / width) if experts else None

    def forward(self, x: Tensor, use_sometimes: bool = False) -> Tensor:  # (batch, seq, width)
        y = self.down(F.gelu(self.up(self.norm(x))))
        if use_sometimes:
            y = y * self.sometimes
        if self.experts is not None:
            h = F.gelu(torch.einsum("bsd,ehd->bseh", x, self.experts))
            y = y + torch.einsum("bseh,ehd->bsd", h, self.experts)
        return x + y


class Tiny(nn.Module):
    """A language model without attention. `scalar`: add a 0-d parameter before all others. `tied`: tie embedding and head.
    `spare`, `experts`: of each `Block`."""

    def __init__(
        self,
        *,
        vocab: int = 48,
        width: int = 32,
        hidden: int = 64,
        num_blocks: int = 3,
        tied: bool = False,
        scalar: bool = False,
        spare: bool = False,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25)) if scalar else None
        self.shift = nn.Parameter(torch.full((1, width), 0.1)) if scalar else None
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden, spare, experts) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, skip: Iterable[int] = (), use_sometimes: bool = False) -> Tensor:
        x = self.embed(tokens)  # (batch, seq, width)
        if self.gain is not None:
            x = x * self.gain + self.shift
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x, use_sometimes)
        return self.head(self.norm(x))  # (batch, seq, vocab)


def seeded(seed: int = 0, **options: int) -> Tiny:
    """Return a `Tiny` with the same random weights on every rank, on the device of the tests. Random states stay unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return here(Tiny(**options))


def plain() -> Tiny:
    return seeded()


def wide() -> Tiny:
    """Return a model with parameters above the packing limit of 256 KiB, in bf16 too, which three ranks do not divide evenly."""
    return seeded(width=64, hidden=2112, num_blocks=2)


def frozen() -> Tiny:
    """Return a model with a frozen embedding, a frozen block, and a frozen weight in another block."""
    model = seeded()
    model.embed.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


def uneven() -> Tiny:
    """Return a model with rows that neither two, three nor four ranks divide evenly, a single row, and a 0-d first parameter."""
    return seeded(vocab=19, width=10, hidden=7, scalar=True)


def narrow() -> Tiny:
    """Return a model with rows that no number of ranks divides evenly, and fewer rows than ranks, without a 0-d parameter."""
    return seeded(vocab=19, width=10, hidden=3)


def tied() -> Tiny:
    return seeded(vocab=19, tied=True)


def spare() -> Tiny:
    return seeded(spare=True)


def experts() -> Tiny:
    """Return a model with parameters of one row, too large to pad to one row per rank, so that another dim is sharded."""
    return seeded(width=64, hidden=520, num_blocks=2, experts=1)


def batch(step: int, micro: int, rank: int, *, vocab: int, shape: tuple[int, int] = (2, 8)) -> tuple[Tensor, Tensor]:
    """Return random (tokens, targets), each of `shape`, of one micro-batch of one rank; equal for equal arguments."""
    generator = torch.Generator().manual_seed(1 + step * 10_000 + micro * 100 + rank)
    tokens = torch.randint(vocab, (shape[0], shape[1] + 1), generator=generator).to(device())
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
