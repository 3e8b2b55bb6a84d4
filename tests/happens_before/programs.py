"""Programs for the checker of stream order: models, and one rank's steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion.bench.model import GPT, batch_of, loss_of
from tests.happens_before.checker import Checker, Stream
from tests.happens_before.stand_ins import checked
from tests.support.checks import PlantedError

VOCAB = 512


class Small(GPT):
    """A GPT of three blocks, or of three other modules that `block` creates. Subclasses call blocks, or compute the output, in
    their own way."""

    def __init__(self, block: Callable[[], nn.Module] | None = None, width: int = 256) -> None:
        super().__init__(vocab=VOCAB, width=width, blocks=3, heads=4)
        if block is not None:
            self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for i in range(3):
            x = self.call(i, x)
        return self.output(self.norm(x))

    def call(self, i: int, x: Tensor) -> Tensor:
        return self.blocks[i](x)

    def output(self, x: Tensor) -> Tensor:
        return self.head(x)


class Recomputed(Small):
    """A model whose blocks are recomputed in the backward by torch's own checkpoint."""

    def call(self, i: int, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[i], x, use_reentrant=False)


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class ReadsOutside(Small):
    """A model that uses the weight of its head without calling the head."""

    def output(self, x: Tensor) -> Tensor:
        return x @ self.head.weight.t()


class Experts(nn.Module):
    """Three experts in one parameter, which is sharded on another dim since it has few rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, width, 2048) / 8)
        self.down = nn.Parameter(torch.randn(3, 2048, width) / 40)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + sum(torch.relu(y @ self.up[i]) @ self.down[i] for i in range(3))


class Router(nn.Module):
    """Experts that are modules; two of them get no token on this rank, and so no gradient."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.experts[0](y) + self.experts[2](y)


def fail() -> None:
    raise PlantedError


class Odd(Small):
    """A model that can raise before or after its second block, and can run that block on the stream `side`."""

    backward_raises = forward_raises = False
    side: Stream | None = None

    def call(self, i: int, x: Tensor) -> Tensor:
        if i != 1:
            return super().call(i, x)
        if self.backward_raises:
            x = x.view_as(x)  # a node of its own, so that the block's hooks run later
            x.register_hook(lambda grad: fail())
        with on_side(self.side):
            x = super().call(i, x)
        if self.forward_raises:
            fail()
        return x


@contextlib.contextmanager
def on_side(stream: Stream | None) -> Iterator[None]:
    """Context manager on another stream, with waits between it and the current one at both ends; None changes nothing."""
    if stream is None:
        yield
        return
    checker = stream._checker
    stream.wait_stream(checker.current)
    with checker.entered(stream):
        yield
    checker.current.wait_stream(stream)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A model and the steps of one rank. `options`: for `shard`. `trained`: parts of the names of trained parameters."""

    build: Callable[[], nn.Module] = Small
    num_ranks: int = 4
    num_steps: int = 3
    micros: int = 1
    no_sync: bool = False
    trained: tuple[str, ...] = ("",)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Run:
    """A sharded model on a device that is stood in for, its optimizer and its checker."""

    checker: Checker
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def loss(self) -> Tensor:
        tokens, targets = batch_of(0, 0, (1, 16), VOCAB)
        return loss_of(self.model(tokens), targets)

    def step(self) -> None:
        self.loss().backward()
        self.end()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def begun(steps: Steps) -> Iterator[Run]:
    """Context manager that shards the model of `steps`."""
    with checked(steps.num_ranks) as checker:
        torch.manual_seed(0)
        model = steps.build()
        for name, p in model.named_parameters():
            p.requires_grad_(any(part in name for part in steps.trained))
        hybrid = steps.options.get("strategy", acc.FULL_SHARD).hybrid
        shape = (2, steps.num_ranks // 2) if hybrid else (steps.num_ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = acc.shard(model, mesh, **steps.options)
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        yield Run(checker=checker, model=model, optimizer=optimizer)


def trained(steps: Steps) -> Checker:
    """Run the steps of a rank and an evaluation, and return the checker, whose `waits` are those of the last step."""
    with begun(steps) as run:
        for step in range(steps.num_steps):
            if step == steps.num_steps - 1:
                run.checker.waits.clear()
            for micro in range(steps.micros):
                waits = steps.no_sync and micro < steps.micros - 1
                with acc.no_sync(run.model) if waits else contextlib.nullcontext():
                    run.loss().backward()
            acc.clip_grad_norm_(run.model, 1.0)
            run.end()
        waits = run.checker.waits.copy()
        with torch.no_grad():
            run.loss()
        acc.synchronize(run.model)
        run.checker.waits = waits
        return run.checker
