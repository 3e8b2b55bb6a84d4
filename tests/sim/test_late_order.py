"""A rank that leaves the order of the last passes: the others are in collectives of their device, where nobody can ask them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion.safety import divergence
from tests.devices import device
from tests.support.checks import logged

pytestmark = pytest.mark.sim


class Skips(nn.Module):
    """Three units, the second of which a rank may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.leaves_out = False

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if not (self.leaves_out and i == 1):
                x = block(x)
        return x


def leaves_late(mesh) -> None:
    model, x = acc.shard(Skips(), mesh, units={nn.Sequential}), torch.randn(2, 16, device=device())
    for _ in range(6):
        model(x).square().mean().backward()
        model.zero_grad()
    torch.accelerator.synchronize()
    model.leaves_out = mesh.get_local_rank() == 0
    with mock.patch.multiple(divergence, PATIENCE_S=0.1, POLL_S=0.05, LOST_S=6.0), logged() as said:
        try:
            model(x).square().mean().backward()
        except acc.DivergenceError as error:
            raise AssertionError("; ".join([*said, str(error)])) from None


def test_the_rank_that_waits_says_what_it_does_and_that_the_others_cannot_be_asked(world):
    with pytest.raises(AssertionError, match=r"nothing is heard of rank 1: .* ranks have come to nothing new") as found:
        world.run(2, leaves_late)
    assert divergence.UNHEARD in str(found.value)
