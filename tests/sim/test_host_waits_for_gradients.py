"""For gradients the host waits once a backward at most, and only where this rank lacked some."""

from __future__ import annotations

import pytest
import torch

import accordion as acc
from tests.devices import device
from tests.engine.test_absent_gradients import Mixture, Routed

pytestmark = pytest.mark.sim
STEPS = 6


def waits_of_backwards(mesh, chosen: tuple[tuple[int, ...], ...]) -> list[list[str]]:
    """Of each step but the first ones, in which all is new."""
    rank = torch.distributed.get_rank()
    model = acc.shard(Mixture(), mesh, units={Routed})
    found = []
    for _ in range(STEPS):
        told: list[str] = []
        loss = model(torch.randn(4, 16, device=device()), chosen[rank]).square().mean()
        torch.sim.tell_waits(lambda why, stream, told=told: told.append(why))
        loss.backward()
        torch.sim.tell_waits(None)
        model.zero_grad()
        found.append(told)
    return found[3:]


@pytest.mark.parametrize("chosen", [((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), ((0, 2), (0, 1, 2, 3, 4)), ((0,), (3,))])
def test_a_backward_lets_the_host_wait_once_where_gradients_are_absent(world, chosen):
    for mine, steps in zip(chosen, world.run(2, waits_of_backwards, chosen), strict=True):
        assert [len(told) for told in steps] == [int(len(mine) < 5)] * len(steps), steps


def waits_of_steps(mesh, mixture: bool, chosen: tuple[tuple[int, ...], ...]) -> list[list[str]]:
    """Of whole steps: forward, backward, clipping, the optimizer."""
    mine = chosen[torch.distributed.get_rank()]
    dense = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)))
    model = acc.shard(Mixture(), mesh, units={Routed}) if mixture else acc.shard(dense, mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    found = []
    for _ in range(STEPS):
        told: list[str] = []
        x = torch.randn(4, 16, device=device())
        torch.sim.tell_waits(lambda why, stream, told=told: told.append(why))
        (model(x, mine) if mixture else model(x)).square().mean().backward()
        acc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.sim.tell_waits(None)
        found.append(told)
    return found[3:]


@pytest.mark.parametrize(
    ("mixture", "chosen", "waits"),
    [
        (False, ((), ()), (0, 0)),
        (True, ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), (0, 0)),
        (True, ((0, 2), (0, 1, 2, 3, 4)), (1, 0)),  # where gradients are absent, for which ones
    ],
)
def test_a_step_lets_the_host_run_ahead(world, mixture, chosen, waits):
    for allowed, steps in zip(waits, world.run(2, waits_of_steps, mixture, chosen), strict=True):
        assert [len(told) for told in steps] == [allowed] * len(steps), steps
