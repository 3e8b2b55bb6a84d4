"""Ranks that diverge get an error with both units on every rank within seconds: no hang, and no values of another unit."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from accordion.config import STRATEGIES
from accordion.safety import divergence
from tests.devices import device
from tests.support import models
from tests.support.checks import PlantedError, everyone, leave_together, mesh_of, one_loss, under
from tests.support.ranked import on_mesh, on_world, under_strategies

SOON_S = 20.0
IN_STREAMS = pytest.mark.cpu(
    "ranks that wait in streams cannot be asked: debug='order' tells, and `DivergenceMonitor` says so in the log"
)


def impatient(lost_s: float = divergence.LOST_S) -> Any:
    """Context manager: ranks report a wait after half a second instead of four."""
    return mock.patch.multiple(divergence, REPORT_AFTER_S=0.5, POLL_S=0.2, LOST_S=lost_s)


# What rank 1 does while the others train, and what its message or theirs names.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "calls_a_block": ("unit 2 (blocks.1) in its forward", "unit 0 (root)"),
    "trains_less": ("training 0 of 6", "training 6 of "),
    "forwards_again": ("rank 1 begins a forward", "rank 0 "),
}


def one_step(model: nn.Module, step: int, how: str = "") -> None:
    """Run a step in which this rank diverges as `how` says; "": it does not."""
    if how == "calls_a_block":
        model.blocks[1](torch.ones(2, 3, 32, requires_grad=True, device=device())).sum().backward()
        return
    if how == "trains_less":
        model.blocks[1].requires_grad_(False)
    loss = one_loss(model, step)
    if how == "forwards_again":
        loss = one_loss(model, step)
    loss.backward()


def diverge(model: nn.Module, how: str) -> None:
    for step in range(3):  # if the first step does not raise, a later one does
        one_step(model, step, how)


def diverged(mesh, strategy: acc.Strategy, how: str, steps: int, **options: Any) -> str:
    """Return this rank's error if rank 1 diverges after `steps` correct steps."""
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, units={models.Block}, **options)
    for step in range(steps):
        one_step(model, step)
    start = time.monotonic()
    with impatient(), pytest.raises(acc.DivergenceError) as caught:
        diverge(model, how if dist.get_rank() == 1 else "")
    assert time.monotonic() - start < SOON_S
    return str(caught.value)


def assert_named(texts: list[str], how: str) -> None:
    """Assert that every error names a rank, and that one of them names what rank 1 and what another rank does."""
    assert all("rank" in text for text in texts), texts
    assert any(all(part in text for part in ELSEWHERE[how]) for text in texts), texts


# In the first step ranks agree on each unit. Later they do not, and streams cannot be asked.
@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=IN_STREAMS)])
@pytest.mark.parametrize(("how", "num_ranks"), [(how, 2 + i % 2) for i, how in enumerate(ELSEWHERE)])
def test_divergence_names_the_units_on_every_rank(alone, how, num_ranks, steps):
    assert_named(alone.run(num_ranks, diverged, acc.FULL_SHARD, how, steps), how)


@IN_STREAMS
@under("hybrid_shard")
def test_divergence_in_a_later_step_is_named_with_every_strategy(alone, strategy):
    texts = alone.run_mesh(*mesh_of(STRATEGIES[strategy]), diverged, STRATEGIES[strategy], "calls_a_block", 2)
    assert all("unit" in text for text in texts), texts


@under("no_shard")
def test_debug_order_names_divergence_in_any_step(alone, strategy):
    strategy = STRATEGIES[strategy]
    texts = alone.run_mesh(*mesh_of(strategy), diverged, strategy, "forwards_again", 2, debug="order")
    assert all("rank 0" in text and "rank 1" in text for text in texts), texts


@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=IN_STREAMS)])
@on_mesh((3,), pool="alone")
def test_a_rank_that_raises_alone_is_named_on_the_others(mesh, steps: int) -> None:
    """Rank 1 raises in its forward, and the others wait for it."""
    model = acc.shard(models.plain(), mesh=mesh)
    for step in range(steps):
        one_loss(model, step).backward()
    error, text = acc.DivergenceError, "rank 1 failed.*missing"
    if dist.get_rank() == 1:
        model.blocks[1].register_forward_pre_hook(lambda module, args: {}["missing"])
        error, text = KeyError, "missing"
    with impatient(), pytest.raises(error, match=text):
        one_loss(model).backward()
    leave_together(mesh)  # rank 1 does not end before the others have raised


@on_world(2)
def test_a_late_rank_is_no_error(mesh) -> None:
    """A rank that joins late raises no error."""
    model = acc.shard(models.plain(), mesh=mesh)
    with impatient():
        for step in range(2):
            time.sleep(0.9 if dist.get_rank() == step else 0)
            one_loss(model, step).backward()


# -- NaN and inf


def spoil_gradient(module: nn.Module, args: Any, out: Tensor) -> None:
    out.register_hook(lambda grad: grad * float("inf"))


SPOILED = {"parameters": "in its parameters", "forward": "its forward returned", "backward": "gradients"}


@pytest.mark.parametrize("where", SPOILED)
@under_strategies("full_shard", "hybrid_shard")
def test_nan_and_inf_are_reported_with_the_first_unit_and_phase(mesh, strategy: acc.Strategy, where: str) -> None:
    """The last rank alone computes NaN or inf in the second step."""
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, debug="finite")
    one_loss(model, 0).backward()
    block = model.blocks[1]
    if where == "parameters":
        with torch.no_grad():
            block.up.weight.to_local().view(-1)[:1] = float("nan")
    elif dist.get_rank() == mesh.size() - 1:
        if where == "forward":
            block.down.register_forward_hook(lambda module, args, out: out.log())
        else:
            block.norm.register_forward_hook(spoil_gradient)
    with pytest.raises(acc.NonFiniteError, match=r"blocks\.1") as caught:
        one_loss(model, 1).backward()
    assert SPOILED[where] in str(caught.value)
    assert set(everyone(mesh, str(caught.value))) == {str(caught.value)}


@on_world(2)
def test_values_of_a_forward_that_failed_are_not_reported_later(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh, debug="finite")

    def spoil_and_fail(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if module is model.blocks[1]:
            raise PlantedError
        return out * float("nan")

    hooks = [block.register_forward_hook(spoil_and_fail) for block in model.blocks]
    with pytest.raises(PlantedError):
        one_loss(model, 0)
    for hook in hooks:
        hook.remove()
    one_loss(model, 1).backward()
