"""Gradients that add up over backwards, under no_sync and while parameters are frozen: what is kept, and what is cleared."""

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
from tests.support import models
from tests.support.checks import assert_at_rest, assert_close, mean_grads, one_loss
from tests.support.ranked import on_strategy, on_world
from tests.support.reference import grads_of
from tests.support.sample import sampled, turns

# -- sums under no_sync belong to the gradients that the caller sees, however these are cleared

ACTS: dict[str, Callable[[nn.Module], object]] = {
    "set to None": lambda model: model.zero_grad(),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "scaled": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "nothing": lambda model: None,
}


def accumulate(model: nn.Module, order: str, act: Callable[[nn.Module], object], *, is_sharded: bool) -> None:
    """`order`: a letter for each backward: "l" locally, under no_sync, "s" with a reduce; "!" is the act."""
    for number, letter in enumerate(order):
        if letter == "!":
            act(model)
        elif letter == "l" and is_sharded:
            with acc.no_sync(model):
                one_loss(model, number).backward()
        else:
            one_loss(model, number).backward()


ORDERS = ("l!s", "l!ls", "l!lls", "ll!l!ls", "sl!ls", "sl!s", "s!lls")
ROWS = [
    (strategy, order, act)
    for strategy in STRATEGIES
    for order in ORDERS
    for act in ("set to None", "zeroed", "nothing")
]
USUAL = {("full_shard", order, "zeroed") for order in ORDERS}
USUAL |= {
    ("full_shard", "l!ls", "set to None"),
    ("full_shard", "s!lls", "nothing"),
    ("hybrid_shard", "sl!ls", "zeroed"),
}


@pytest.mark.parametrize(
    ("strategy", "order", "act"), sampled(ROWS, lambda *row: row in USUAL), ids=["-".join(row) for row in ROWS]
)
@on_strategy
def test_cleared_gradients_take_what_was_added_up_with_them(mesh, strategy: str, order: str, act: str) -> None:
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    for _ in range(2):
        accumulate(plain, order, ACTS[act], is_sharded=False)
        accumulate(model, order, ACTS[act], is_sharded=True)
        assert_close(grads_of(model), mean_grads(mesh, plain), 2e-6)
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
@on_strategy
def test_a_gradient_that_is_no_dtensor_is_not_lost(mesh, strategy: str) -> None:
    model = acc.shard(models.plain(), mesh, strategy=strategy)
    for p in model.parameters():
        p.grad = torch.zeros(p.shape, device=device())
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        one_loss(model).backward()


@on_world(2)
def test_a_gradient_that_is_scaled_is_not_cleared(mesh) -> None:
    """Reduced gradients are scaled; local sums under no_sync have no gradient yet."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    accumulate(model, "sl!s", ACTS["scaled"], is_sharded=True)
    first = {name: grad.clone() for name, grad in grads_of(model).items()}
    # The same sum by hand: half of the first, and the other two.
    for number, factor in ((0, 0.5), (1, 1.0), (3, 1.0)):
        (one_loss(plain, number) * factor).backward()
    assert_close(first, mean_grads(mesh, plain), 2e-6)


# -- parameters that are frozen within a step: gradients of earlier micro-batches stay, later ones are not taken

Sync = Callable[[bool], AbstractContextManager[None]]
"""Context in which backwards communicate, or add up on their rank."""


class Gan(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def inputs(mesh, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + mesh.get_rank())
    return torch.randn(4, 5, generator=generator).to(device())  # (batch, features)


def alternating(mesh, pair: Gan, sync: Sync) -> None:
    """Two micro-batches, in each of which generator and critic take turns, the other one frozen."""
    for micro in range(2):
        with sync(micro == 1):
            x, real = inputs(mesh, micro), inputs(mesh, micro + 5)
            pair.generator.requires_grad_(True), pair.critic.requires_grad_(False)
            (-pair.critic(pair.generator(x)).mean()).backward()
            pair.generator.requires_grad_(False), pair.critic.requires_grad_(True)
            (pair.critic(pair.generator(x)) - pair.critic(real)).square().mean().backward()


def frozen_after_a_micro_batch(mesh, pair: Gan, sync: Sync) -> None:
    """A layer is trained by the first two micro-batches alone, and frozen in the one that communicates."""
    for micro in range(3):
        pair.critic[0].requires_grad_(micro < 2)
        pair.generator[2].bias.requires_grad_(micro != 1)
        with sync(micro == 2):
            pair.critic(pair.generator(inputs(mesh, micro))).square().mean().backward()
    pair.critic[0].requires_grad_(True)


def frozen_before_backward(mesh, pair: Gan, sync: Sync) -> None:
    """Layers are frozen between a forward and its backward, in a micro-batch without and in one with communication."""
    for micro in range(3):
        pair.requires_grad_(True)
        with sync(micro > 0):
            loss = pair.critic(pair.generator(inputs(mesh, micro))).square().mean()
            pair.generator[0].requires_grad_(micro == 1)
            pair.critic[2].bias.requires_grad_(micro == 0)
            loss.backward()
    pair.requires_grad_(True)


def with_hooks(mesh, pair: Gan, sync: Sync) -> None:
    """As before, with a hook on a parameter, which autograd calls with its sum over ranks."""
    handles = [p.register_hook(lambda grad: grad * 2) for p in (pair.critic[2].bias, pair.generator[0].weight)]
    frozen_before_backward(mesh, pair, lambda communicates: sync(True))
    for handle in handles:
        handle.remove()


def with_anomaly_mode(mesh, pair: Gan, sync: Sync) -> None:
    """As before, where autograd accumulates gradients itself."""
    with torch.autograd.set_detect_anomaly(True):
        frozen_before_backward(mesh, pair, sync)


PROGRAMS = (alternating, frozen_after_a_micro_batch, frozen_before_backward, with_hooks, with_anomaly_mode)


FREEZING_ROWS = list(itertools.product(STRATEGIES, PROGRAMS, (False, True)))
FREEZING_SHOWN = {("full_shard", *row) for row in turns(PROGRAMS, (False, True)) | {(alternating, True)}}
FREEZING_SHOWN |= {("hybrid_shard", program, False) for program in (alternating, frozen_before_backward)}


@pytest.mark.parametrize(
    ("strategy", "program", "together"), sampled(FREEZING_ROWS, lambda *row: row in FREEZING_SHOWN)
)
@on_strategy
def test_gradients_are_those_of_the_unsharded_models(
    mesh, strategy: str, program: Callable[..., None], together: bool
) -> None:
    """`together`: generator and critic are sharded as one model, and not as one each."""
    plain, pair = Gan().to(device()), Gan().to(device())
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
