"""Writes to parameters that no version counter sees take effect, or are refused with advice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
import accordion.compat.fsdp2 as compat
from accordion.safety.forward_writes import ForwardWrites
from tests.devices import device, here
from tests.inside import engine_in, units_of
from tests.support.checks import run_under, under
from tests.support.ranked import on_num_ranks, on_world, under_strategies
from tests.support.sample import sampled

LOST = "modified a parameter in its forward, and the change would be lost"


def normalise(weight: Tensor) -> None:
    weight.data.copy_(F.normalize(weight.data, dim=-1))


def flip(weight: Tensor) -> None:
    with torch.no_grad():
        weight.data.copy_(weight.data.flip(0))


def nothing(weight: Tensor) -> None:
    pass


class Layer(nn.Linear):
    """Layer that writes into its weight in each training forward."""

    write: Callable[[Tensor], None] = staticmethod(nothing)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(self.weight)
        return super().forward(x)


class Net(nn.Sequential):
    """Layers, some of which a forward may skip."""

    def __init__(self, write: Callable[[Tensor], None] = nothing) -> None:
        torch.manual_seed(0)
        super().__init__(*[here(Layer(6, 6)) for _ in range(3)])
        self[1].write = write

    def forward(self, x: Tensor, chosen: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for i in chosen:
            x = self[i](x)
        return x


def step(model: nn.Module, chosen: tuple[int, ...] = (0, 1, 2)) -> None:
    model(torch.ones(2, 6, device=device()), chosen).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad)
            p.grad = None


def full(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


# -- in a forward


def written(mesh, strategy: acc.Strategy, options: dict[str, Any]) -> None:
    """A write raises with the unit's name if full parameters are freed, and takes effect if shards are the full parameters."""
    for write, is_frozen in ((normalise, False), (flip, True)):
        plain, model = Net(write), Net(write)
        for m in (plain, model):
            m[1].weight.requires_grad_(not is_frozen)
        acc.shard(model, mesh=mesh, units={Layer}, strategy=strategy, **options)
        if all(group.full_buffer is None for unit in units_of(model) for group in unit.groups):
            for _ in range(2):
                step(plain)
                step(model)
            torch.testing.assert_close(full(model), [p.detach() for p in plain.parameters()])
            continue
        with pytest.raises(acc.UsageError, match=f"unit '1' {LOST}"):
            step(model)
        model.eval()
        with torch.no_grad():  # nobody writes there
            model(torch.ones(2, 6, device=device()))


BF16 = acc.Precision(params=torch.bfloat16)


@under("no_shard", "hybrid_shard")
@pytest.mark.parametrize(
    "options",
    sampled([{"checkpoint_activations": "full"}, {}, {"precision": BF16}], {"checkpoint_activations": "full"}.__eq__),
)
def test_a_write_through_data_is_refused_or_takes_effect(world, strategy, options):
    run_under(world, strategy, partial(written, options=options))


def test_a_write_through_data_on_one_rank_alone_raises(world):
    world.run(1, written, acc.FULL_SHARD, {})


@on_world(2)
def test_a_write_through_data_raises_under_fully_shard(mesh) -> None:
    model = Net(normalise)
    for layer in model:
        compat.fully_shard(layer, mesh=mesh)
    compat.fully_shard(model, mesh=mesh)
    with pytest.raises(acc.UsageError, match=f"unit '1' {LOST}"):
        step(model)


@on_world(2)
def test_each_unit_is_checked_in_its_first_step(mesh) -> None:
    model = acc.shard(Net(), mesh=mesh, units={Layer})
    model.eval()
    for _ in range(3):  # counts as no step
        with torch.no_grad():
            model(torch.ones(2, 6, device=device()))
    model.train()
    step(model, (0, 2))
    model[0].write = normalise  # which has been checked in a step
    step(model, (0, 2))
    model[1].write = normalise  # first used now
    with pytest.raises(acc.UsageError, match=f"unit '1' {LOST}"):
        step(model)
    model[0].write = model[1].write = nothing
    step(model)
    assert engine_in(model).observers.find(ForwardWrites) is None


@on_world(2)
def test_debug_checks_every_step(mesh) -> None:
    model = acc.shard(Net(), mesh=mesh, units={Layer}, debug="order")
    for _ in range(3):
        step(model)
    model[2].write = flip
    with pytest.raises(acc.UsageError, match=f"unit '2' {LOST}"):
        step(model)


# -- between steps


@under_strategies("full_shard", "no_shard")
def test_data_assigned_between_steps_is_refused_at_the_next_use(mesh, strategy: acc.Strategy) -> None:
    model = acc.shard(Net(), mesh=mesh, units={Layer}, strategy=strategy)
    step(model)
    weight = model[0].weight
    weight.data = weight.data  # no change
    step(model)
    kept = weight.data
    weight.data = kept * 0.5
    for use in (step, Net.state_dict, acc.full_state_dict):
        with pytest.raises(acc.UsageError, match=r"the data of parameter '0.weight' was assigned after shard\(\)"):
            use(model)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_num_ranks
def test_data_of_another_kind_is_refused(mesh) -> None:
    changes = [lambda p: p.data.double()]
    # On the device of an extension, such as the simulated one, torch itself refuses a plain tensor.
    if device().type == "cpu":
        changes.append(lambda p: torch.zeros(p.shape))
    for change in changes:
        for is_frozen in (False, True):
            model = acc.shard(Net().requires_grad_(not is_frozen), mesh=mesh, units={Layer})
            model[2].bias.data = change(model[2].bias)
            with pytest.raises(acc.UsageError, match=r"'2.bias' was assigned .* convert dtypes before shard\(\)"):
                model(torch.ones(2, 6, device=device()))


WRITES: list[Callable[[Tensor], object]] = [
    lambda data: data.zero_(),
    lambda data: data.copy_(data * 2),
    lambda data: data.mul_(2),
    lambda data: data.clamp_(-0.1, 0.1),
    lambda data: data.lerp_(data * 2, 0.5),
]
OFFLOADS = [
    {},
    {"precision": BF16},
    {"offload": acc.Offload(optimizer="host")},
    {"offload": acc.Offload(params="host", optimizer="host"), "precision": BF16},
]


@pytest.mark.parametrize("options", sampled(OFFLOADS, lambda options: options in (OFFLOADS[0], OFFLOADS[3])))
@under_strategies("no_shard", "shard_grad_op")
def test_writes_through_data_in_place_take_effect(mesh, strategy: acc.Strategy, options: dict[str, Any]) -> None:
    """Full parameters that stay in memory must follow, as if averages replace weights for an evaluation."""
    plain, model = Net(), acc.shard(Net(), mesh=mesh, units={Layer}, strategy=strategy, **options)
    x = torch.ones(2, 6, device=device())
    tolerance = 0.05 if "precision" in options else 1e-6
    for write in (None, *reversed(WRITES)):
        for m in (plain, model):
            for p in m.parameters() if write is not None else ():
                write(p.data)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(x).float(), plain(x), rtol=tolerance, atol=tolerance)
