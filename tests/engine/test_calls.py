"""Kinds of calls: what may go into a unit and come out of it, as without sharding."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.devices import device
from tests.support.chains import WIDTH, Chain, Plain, chain, numbers, plain_run
from tests.support.compare import Case, Pair, compare_poisoned, on_its_ranks, seeded
from tests.support.ranked import on_worlds


def unit_with(forward: Callable[..., Any]) -> type[Pair]:
    """Return a subclass of `Pair` whose method `forward` is the given function."""
    return type("Unit", (Pair,), {"forward": forward})


def by_unit(kind: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor], **more: Any) -> Case:
    """Return the `Case` of a `Chain` of units of class `kind`; `call(unit, x)` calls one and returns the next one's `x`."""
    return chain(kind, call=lambda model, x: functools.reduce(lambda x, unit: call(unit, x), model.units, x), **more)


# -- how often, and which parameters


def loops(model: Chain, x: Tensor) -> Tensor:
    """Another number of rounds in each step, over another number of units."""
    for _ in range((1, 3, 2, 0, 2)[model.step]):
        for unit in model.units[: 1 + model.step % 2]:
            x = torch.tanh(unit(x))
    return x


def loop_run(model: nn.Module, step: int) -> Tensor:
    model.step = step
    return plain_run(model, step)


class Some(Pair):
    """Uses one parameter on odd ranks only, one on no rank, one with a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.randn(5))
        self.nothing = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + 0.0 * self.nothing
        return self.odd(x) if dist.get_rank() % 2 else x


def drop_on_some_ranks(model: Chain, x: Tensor) -> Tensor:
    """All ranks call all units; the odd ones leave the result of the first out of the loss."""
    y = model.units[0](x)
    return model.units[1](x if dist.get_rank() % 2 else y)


OFTEN_CASES = {
    "loops of another length in each step": chain(call=loops, run=loop_run, steps=5, exact=False, tolerance=3e-6),
    "parameters unused on some ranks or on all": chain(Some),
    "a unit that one rank passes by from inside": chain(
        unit_with(lambda unit, x: Pair.forward(unit, x) if dist.get_rank() else x)
    ),
    "a unit whose result some ranks drop": chain(call=drop_on_some_ranks),
}


# -- what goes in and comes out


class Point(NamedTuple):
    x: Tensor
    y: Tensor | None


@dataclass
class State:
    x: Tensor
    note: str
    more: Any = None


KEEP: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    # how two tensors are put together, and how they become one again
    "containers of every kind": (
        lambda x, y: (
            State(x, "a", [{"y": (y, Point(x, None)), 3: None}]),
            collections.OrderedDict(b=x, a=y),
            None,
            3,
            "text",
        ),
        lambda t: t[0].x + t[0].more[0]["y"][0] + t[0].more[0]["y"][1].x + t[1]["a"] + t[1]["b"],
    ),
    "the same tensor twice": (lambda x, y: [x, (x, y)], lambda t: t[0] + t[1][0] * t[1][1]),
    "object": (lambda x, y: Plain(x + y), lambda t: t.x + t.inner["twice"]),
    "ModelOutput": (
        lambda x, y: import_module("transformers.modeling_outputs").BaseModelOutput(
            last_hidden_state=x, hidden_states=(x, y)
        ),
        lambda t: t.last_hidden_state + t["hidden_states"][1] + t[0],
    ),
}


def structures(kind: str) -> Case:
    """Return the `Case` of units that take a structure, as an argument or by keyword, and return one of the same kind."""
    pack, unpack = KEEP[kind]

    def forward(unit: Pair, structure: Any) -> Any:
        x = unpack(structure)
        return pack(Pair.forward(unit, x), unit.a(x) * 0.5)

    def call(model: Chain, x: Tensor) -> Tensor:
        structure = pack(x, x * 0.5)
        for i, unit in enumerate(model.units):
            structure = unit(structure=structure) if i % 2 else unit(structure)
        return unpack(structure)

    return chain(unit_with(forward), call=call, exact=False, tolerance=2e-6)


class NoGrad(Pair):
    """Outputs that carry no gradient: detached, integer, boolean, none at all, numbers, text."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.detach(), y.argmax(-1), y > 0, None, 1.5, "text", y


def use_no_grad(unit: nn.Module, x: Tensor) -> Tensor:
    detached, index, mask, nothing, number, text, y = unit(x)
    assert (nothing, number, text) == (None, 1.5, "text")
    assert not detached.requires_grad
    assert index.dtype == torch.long
    return (y + detached) * mask + index.unsqueeze(-1)


class Nothing(Pair):
    """Returns nothing; what it computes stays in an attribute."""

    def forward(self, x: Tensor) -> None:
        self.kept = super().forward(x)


def use_nothing(unit: nn.Module, x: Tensor) -> Tensor:
    assert unit(x) is None
    return unit.__dict__.pop("kept")


def mixed_inputs(model: Chain, x: Tensor) -> Tensor:
    """Inputs of which some need gradients, others not, in any place."""
    one, two = model.units
    y = one(numbers(), scale=x)
    return two(y.detach(), scale=numbers()) + y


class Scaled(Pair):
    def forward(self, x: Tensor, *, scale: Tensor, unused: Tensor | None = None) -> Tensor:
        return super().forward(x) * scale


def no_input(model: Chain, x: Tensor) -> Tensor:
    return x + model.units[0]() * model.units[1]()


OUTPUT_CASES = {
    **{kind: structures(kind) for kind in KEEP},
    "outputs without gradients": by_unit(NoGrad, use_no_grad),
    "no output": by_unit(Nothing, use_nothing),
    "no output with a gradient": chain(unit_with(lambda unit, x: Pair.forward(unit, x).detach())),
    "inputs of which some need gradients": chain(Scaled, call=mixed_inputs),
    "no inputs": chain(
        unit_with(lambda unit: Pair.forward(unit, torch.ones(1, WIDTH, device=device()))), call=no_input
    ),
}


# -- in-place operators, and outputs that are inputs or parameters


def in_place_outputs(model: Chain, x: Tensor) -> Tensor:
    residual = x
    for unit in model.units:
        y = unit(x)
        y += residual
        y[:, 0] = 0.5
        x = y.mul_(0.5).relu_()
    return x


class InPlace(Pair):
    """Writes into its input before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        x.tanh_()
        return self.b(nn.functional.relu(self.a(x), inplace=True)).add_(x)


def in_place_inputs(unit: nn.Module, x: Tensor) -> Tensor:
    """What the caller sees of it is the same too."""
    y = x * 1.0
    return unit(y) + y


class ViewOut(Pair):
    """An output that is a view of something inside."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.view(-1).view(y.shape), y[:1]


def in_place_views(unit: nn.Module, x: Tensor) -> Tensor:
    y, row = unit(x)
    y.mul_(2.0)
    return torch.tanh(y + row)


def same_and_more(unit: nn.Module, x: Tensor) -> Tensor:
    same, y = unit(x)
    return torch.tanh(same * y + x)


class WrittenSame(Pair):
    """Adds to its input in place and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.b(torch.tanh(self.a.bias))
        return x


def written_same(unit: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.0
    y = unit(x)
    return torch.tanh(x + y)


def same_written(unit: nn.Module, x: Tensor) -> Tensor:
    """What is written into an output that is the input is in the input too."""
    x = x * 1.0
    unit(x).mul_(2.0)
    return torch.tanh(x)


class Own(Pair):
    """Returns parameters of its own, and views of them."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.a.weight, self.b.weight[2:5], self.a.weight.t(), self.b.bias.view(1, -1)


def own_parameters(unit: nn.Module, x: Tensor) -> Tensor:
    y, weight, rows, transposed, bias = unit(x)
    return torch.tanh(y @ weight + (rows.sum(0) * 0.1) + y @ transposed + bias)


class OnlyOwn(nn.Module):
    """Learned positions: a view of a parameter and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(11, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.positions[: x.shape[0]]


MEMORY_CASES = {
    "in-place operators on outputs": chain(call=in_place_outputs, exact=False),
    "in-place operators on inputs": by_unit(InPlace, in_place_inputs, exact=False),
    "in-place operators on one of two outputs over one memory": by_unit(ViewOut, in_place_views),
    "a unit that returns its input": chain(unit_with(lambda unit, x: x)),
    "a unit that returns its input and more": by_unit(
        unit_with(lambda unit, x: (x, Pair.forward(unit, x))), same_and_more, exact=False, tolerance=2e-6
    ),
    "a unit that returns its input, into which the caller writes": by_unit(unit_with(lambda unit, x: x), same_written),
    "a unit that writes into its input and returns it": by_unit(WrittenSame, written_same, exact=False),
    "a unit that returns its parameters and views of them": by_unit(Own, own_parameters, exact=False, tolerance=2e-6),
    "a unit that returns a view of its parameter alone": by_unit(OnlyOwn, lambda unit, x: x + unit(x)),
}

CASES = {**OFTEN_CASES, **OUTPUT_CASES, **MEMORY_CASES}


@on_its_ranks(CASES)
def test_a_unit_trains_whatever_goes_in_and_comes_out_and_however_often(mesh, name: str) -> None:
    compare_poisoned(mesh, CASES[name])


class SharesChild(Pair):
    """Units with one child in common, which is no unit or one itself."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.child(x))


def shares_child() -> Chain:
    child = nn.Linear(WIDTH, WIDTH)
    return Chain(lambda: SharesChild(child), count=3)


@pytest.mark.parametrize("child", ["no unit", "a unit itself"])
@on_worlds
def test_a_module_that_two_units_share(mesh, child: str) -> None:
    units = {SharesChild} if child == "no unit" else {SharesChild, nn.Linear}
    case = Case(build=shares_child, run=plain_run, units=units, exact=False, tolerance=2e-6)
    model = compare_poisoned(mesh, case)
    assert model.units[0].child.weight is model.units[2].child.weight
    names = [n for n, _ in model.named_parameters()]
    assert names == [n for n, _ in seeded(shares_child).named_parameters()]
