"""For gradients the host waits once a backward at most, and only where this rank lacked some."""

from __future__ import annotations

import pytest
import torch

import accordion as acc
from tests.devices import device
from tests.world.test_absent_gradients import Mixture, Routed

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
