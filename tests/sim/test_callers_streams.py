"""A part of a model that computes on a stream of the caller's own, with the caller's own waits around it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests.support.models import Block
from tests.support.ranked import on_world

pytestmark = pytest.mark.sim
WIDTH = 64


def sleep(module: nn.Module, args: tuple[Tensor]) -> None:
    """Forward pre-hook of a layer whose weight is read late on an accelerator."""
    if args[0].device.type != "cpu":
        torch.get_device_module(args[0].device)._sleep(10_000_000)


class Beside(nn.Module):
    """A model whose tower computes on the stream `aside` while its blocks compute on the caller's, as a vision tower may."""

    def __init__(self, num_in_tower: int) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(num_in_tower))
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)
        self.aside = None
        for block in self.tower:
            block.down.register_forward_pre_hook(sleep)

    def forward(self, x: Tensor) -> Tensor:
        if self.aside is None:
            y = self.through(self.tower, x)
            return self.head(self.through(self.blocks, x) + y)
        main = torch.accelerator.current_stream()
        self.aside.wait_stream(main)
        with torch.get_device_module(x.device).stream(self.aside):
            y = self.through(self.tower, x)
        z = self.through(self.blocks, x)
        main.wait_stream(self.aside)
        y.record_stream(main)
        x.record_stream(self.aside)
        # Times one: of `z + y` both would have one gradient, to which torch adds in place on one stream while the other reads.
        return self.head(z + 1.0 * y)

    def through(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    ("num_in_tower", "frozen", "shared"),
    [(1, False, False), (1, True, False), (3, False, False), (3, True, False), (1, False, True)],
)
@on_world(2)
def test_a_tower_on_a_stream_of_its_own_trains_as_without_sharding(
    mesh, num_in_tower: int, frozen: bool, shared: bool, strategy: str
) -> None:
    """`frozen`: the tower is. `shared`: its first block is also the first of the others, so both streams read its weights."""
    device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    torch.manual_seed(0)
    alone = Beside(num_in_tower)
    if shared:
        alone.blocks[0] = alone.tower[0]
    alone.tower.requires_grad_(not frozen)
    model = acc.shard(copy.deepcopy(alone), mesh, units={Block}, strategy=getattr(acc, strategy))
    model.aside = torch.get_device_module(device).Stream()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((alone, model), optimizers, strict=True):
            m(x.to(device) if m is model else x).square().mean().backward()
            optimizer.step()
            # Else strict mode fills the gradients of the tower, on its stream, while the step reads them.
            if m is model:
                model.aside.wait_stream(torch.accelerator.current_stream())
            optimizer.zero_grad()
        with torch.no_grad():
            model(x.to(device))
    torch.accelerator.synchronize()
    for (name, own), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor().cpu(), want, msg=lambda text, name=name: f"{name}: {text}")
