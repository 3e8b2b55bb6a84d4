"""What programs written for unsharded models do to a sharded one: right, or refused in a sentence that names the place."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests.world.checks import assert_at_rest, assert_close, run_all


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


# -- a forward that assigns `weight.data`


class Assigns(nn.Linear):
    """Its forward gives its weight other memory, with other numbers where `how` says so."""

    how = "clamped"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamped":
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        elif self.how == "moved":
            self.weight.data = self.weight.data.t().contiguous().t()
        out = super().forward(x)
        if self.how == "packed":
            self.weight.data = self.weight.data.bfloat16()
        return out


def assigned(mesh, strategy: acc.Strategy) -> None:
    model, plain = acc.shard(Net(Assigns), mesh=mesh, units={Assigns}, strategy=strategy), Net()
    layer, text = model.layers[1], "unit 'layers.1' assigned other values to the data of parameter 'layers.1.weight' in its"
    model.layers[0].how = layer.how = "left"
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        for how, grad in itertools.product(("clamped", "packed"), (True, False)):
            layer.how = how
            with torch.set_grad_enabled(grad), pytest.raises(acc.UsageError, match=text):
                model(inputs())
            layer.how = "left"
            assert torch.equal(model(inputs()), plain(inputs())), "what was assigned is gone"
    layer.how = "moved"  # the same numbers elsewhere
    model.requires_grad_(True)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.allclose(model(inputs()), plain(inputs()), rtol=1e-5, atol=1e-6)
    for m in (plain, model):
        for _ in range(6):  # then the forwards above count as given up
            m.zero_grad()
            m(inputs()).square().sum().backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-5)
    assert_at_rest(model)


def test_data_assigned_in_a_forward_is_seen(world):
    run_all(world, assigned)
