"""Sums under no_sync belong to the gradients that the caller sees: whoever clears these gives up those, however it is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import accordion as acc
from accordion.config import STRATEGIES
from tests.support import models
from tests.support.checks import assert_close, mean_grads, one_loss
from tests.support.ranked import on_strategy, on_world
from tests.support.reference import grads_of
from tests.support.sample import sampled

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


@on_world(2)
def test_a_gradient_that_is_scaled_is_not_cleared(mesh) -> None:
    """What was reduced is scaled, what adds up is not there yet."""
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh)
    accumulate(model, "sl!s", ACTS["scaled"], is_sharded=True)
    first = {name: grad.clone() for name, grad in grads_of(model).items()}
    # The same sum by hand: half of the first, and the other two.
    for number, factor in ((0, 0.5), (1, 1.0), (3, 1.0)):
        (one_loss(plain, number) * factor).backward()
    assert_close(first, mean_grads(mesh, plain), 2e-6)
