"""Parameters that are frozen within a step: gradients of earlier micro-batches stay, later ones are not taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from tests.devices import device
from tests.support.checks import assert_at_rest, assert_close, mean_grads
from tests.support.ranked import on_strategy
from tests.support.reference import grads_of
from tests.support.sample import sampled, turns

Sync = Callable[[bool], AbstractContextManager[None]]
"""Context in which backwards communicate, or add up on their rank."""


class Pair(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def inputs(mesh, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + mesh.get_rank())
    return torch.randn(4, 5, generator=generator).to(device())  # (batch, features)


def alternating(mesh, pair: Pair, sync: Sync) -> None:
    """Two micro-batches, in each of which generator and critic take turns, the other one frozen."""
    for micro in range(2):
        with sync(micro == 1):
            x, real = inputs(mesh, micro), inputs(mesh, micro + 5)
            pair.generator.requires_grad_(True), pair.critic.requires_grad_(False)
            (-pair.critic(pair.generator(x)).mean()).backward()
            pair.generator.requires_grad_(False), pair.critic.requires_grad_(True)
            (pair.critic(pair.generator(x)) - pair.critic(real)).square().mean().backward()


def frozen_after_a_micro_batch(mesh, pair: Pair, sync: Sync) -> None:
    """A layer is trained by the first two micro-batches alone, and frozen in the one that communicates."""
    for micro in range(3):
        pair.critic[0].requires_grad_(micro < 2)
        pair.generator[2].bias.requires_grad_(micro != 1)
        with sync(micro == 2):
            pair.critic(pair.generator(inputs(mesh, micro))).square().mean().backward()
    pair.critic[0].requires_grad_(True)


def frozen_before_backward(mesh, pair: Pair, sync: Sync) -> None:
    """Layers are frozen between a forward and its backward, in a micro-batch without and in one with communication."""
    for micro in range(3):
        pair.requires_grad_(True)
        with sync(micro > 0):
            loss = pair.critic(pair.generator(inputs(mesh, micro))).square().mean()
            pair.generator[0].requires_grad_(micro == 1)
            pair.critic[2].bias.requires_grad_(micro == 0)
            loss.backward()
    pair.requires_grad_(True)


def with_hooks(mesh, pair: Pair, sync: Sync) -> None:
    """As before, with a hook on a parameter, which autograd calls with its sum over ranks."""
    handles = [p.register_hook(lambda grad: grad * 2) for p in (pair.critic[2].bias, pair.generator[0].weight)]
    frozen_before_backward(mesh, pair, lambda communicates: sync(True))
    for handle in handles:
        handle.remove()


def with_anomaly_mode(mesh, pair: Pair, sync: Sync) -> None:
    """As before, where autograd accumulates gradients itself."""
    with torch.autograd.set_detect_anomaly(True):
        frozen_before_backward(mesh, pair, sync)


PROGRAMS = (alternating, frozen_after_a_micro_batch, frozen_before_backward, with_hooks, with_anomaly_mode)


ROWS = list(itertools.product(STRATEGIES, PROGRAMS, (False, True)))
SHOWN = {("full_shard", *row) for row in turns(PROGRAMS, (False, True)) | {(alternating, True)}}
SHOWN |= {("hybrid_shard", program, False) for program in (alternating, frozen_before_backward)}


@pytest.mark.parametrize(("strategy", "program", "together"), sampled(ROWS, lambda *row: row in SHOWN))
@on_strategy
def test_gradients_are_those_of_the_unsharded_models(
    mesh, strategy: str, program: Callable[..., None], together: bool
) -> None:
    """`together`: generator and critic are sharded as one model, and not as one each."""
    plain, pair = Pair().to(device()), Pair().to(device())
    for part in (pair,) if together else (pair.generator, pair.critic):
        acc.shard(part, mesh=mesh, strategy=strategy, units={nn.Linear})

    @contextmanager
    def sync(communicates: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for part in () if communicates else (pair.generator, pair.critic):
                stack.enter_context(acc.no_sync(part))
            yield

    for _ in range(2):
        program(mesh, plain, lambda communicates: nullcontext())
        program(mesh, pair, sync)
        assert_close(grads_of(pair), mean_grads(mesh, plain), 2e-6)
        for part in (pair.generator, pair.critic) if not together else (pair,):
            assert_at_rest(part)
        plain.zero_grad()
        pair.zero_grad()
