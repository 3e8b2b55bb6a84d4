"""What programs written for unsharded models do to a sharded one: right, or refused in a sentence that names the place."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

import accordion as acc
from tests.world.checks import assert_close


class Net(nn.Module):
    """Two layers in a row."""

    def __init__(self, layer: type[nn.Module] = nn.Linear, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer(*(sizes or (8, 8))) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


# -- a model that was compiled as a whole


def compiled(mesh) -> None:
    warnings.filterwarnings("ignore", ".*grad attribute of a Tensor")  # Dynamo asks all the same, and shows none
    plain = Net()
    model = acc.shard(torch.compile(Net(), backend="eager"), mesh=mesh, units={nn.Linear})
    assert list(model.state_dict()) == [f"_orig_mod.{name}" for name in plain.state_dict()]
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(inputs()).square().sum().backward()
        found = {name.removeprefix("_orig_mod."): p.grad.full_tensor() for name, p in model.named_parameters()}
        assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-6)


def test_a_model_compiled_before_it_is_sharded(world):
    world.run(2, compiled)
