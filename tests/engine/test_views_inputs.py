"""How the end of a backward is noticed where an accelerator's thread runs beside the CPU's: through views of a call's inputs.

Only units with frozen parameters beside trained ones do so, and only on accelerators; here the CPU is told to.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion.engine.tree import map_tensors
from tests.devices import here
from tests.inside import units_of
from tests.support.chains import WIDTH, Chain, plain_run
from tests.support.compare import check_step
from tests.support.ranked import on_world
from tests.support.sample import sampled, turns


class Adapted(nn.Module):
    """A layer with an adapter beside it, or merged into its weight."""

    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 8), nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.merges = merges

    def forward(self, x: Tensor) -> Tensor:
        if self.merges:
            return x @ (self.w + self.b @ self.a).t()
        return x @ self.w.t() + (x @ self.a.t()) @ self.b.t()


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.layer, self.how = nn.LayerNorm(WIDTH), Adapted("merged" in how), how

    def body(self, x: Tensor, memory: Tensor | None = None, more: list[Tensor] | None = None) -> Tensor:
        y = self.layer(self.norm(x))
        if memory is not None:
            y = y + torch.tanh(memory) * y
        return x + torch.relu(y if more is None else y + more[0])

    def forward(self, x: Tensor, memory: Tensor | None = None, more: list[Tensor] | None = None) -> Tensor:
        if "in place" in self.how:
            x += 0.5
        if "inside" in self.how:
            return checkpoint(self.body, x, memory, more, use_reentrant="reentrant" in self.how)
        y = self.body(x, memory, more)
        return y + self.layer(x.detach()) if "detached" in self.how else y


def through(model: Chain, x: Tensor, how: str) -> Tensor:
    memory = torch.sin(x) if "encoder" in how else None
    x = x if x.requires_grad else x.requires_grad_()
    for block in model.units:
        given: dict[str, Any] = {} if memory is None else {"memory": memory}
        if "list" in how:
            given["more"] = [x * 0.1]
        if "in place" in how:
            x = x.clone()
        reentrant = "reentrant" in how
        x = checkpoint(block, x, use_reentrant=reentrant) if "outside" in how else block(x, **given)
    return x


TRAINED = {
    "adapters": lambda name: name.endswith((".a", ".b")),
    "all but a block's layer": lambda name: "units.1.layer.w" not in name,
    "all but the first norm and layer": lambda name: not name.startswith(("first", "units.0.norm")),
}
WAYS = [
    *("plain", "merged", "in place", "encoder", "list", "detached", "encoder merged inside"),
    *("inside", "inside reentrant", "outside", "outside reentrant", "full", "selective"),
]


ROWS = [(how, trained) for how in WAYS for trained in TRAINED]
USUAL = turns(WAYS, TRAINED)


@pytest.mark.parametrize(("how", "trained"), sampled(ROWS, lambda *row: row in USUAL))
@on_world(2)
def test_gradients_are_those_without_sharding_and_every_lease_ends(mesh, how: str, trained: str) -> None:
    torch.manual_seed(0)
    alone = here(Chain(functools.partial(Block, how), count=3, call=functools.partial(through, how=how)))
    for name, p in alone.named_parameters():
        p.requires_grad_(TRAINED[trained](name))
    options = {"checkpoint_activations": how} if how in ("full", "selective") else {}
    model = acc.shard(copy.deepcopy(alone), mesh, units={Block}, debug="streams", **options)
    for unit in units_of(model):  # as on a device
        unit.views_inputs = len(unit.trained.indices) < len(unit.params)
    assert any(unit.views_inputs and unit.trained.indices for unit in units_of(model))

    for step in range(3):
        check_step(mesh, model, alone, plain_run, step, exact=False, tolerance=5e-6)
    assert [unit.name for unit in units_of(model) if unit.leases] == []


def test_a_container_that_a_unit_may_modify_is_passed_on_without_views() -> None:
    """A container with views would be a copy, and the caller would not see what the unit writes into it."""
    state_class, x = dataclasses.make_dataclass("State", ["hidden", "history"]), torch.ones(2)
    args = [x], {"x": x}, state_class(x, [x])
    assert map_tensors(Tensor.detach, args, in_mutable=lambda tensor: tensor) is args
