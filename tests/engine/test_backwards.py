"""Ways into a backward, what is asked of it, and recomputation by the caller, as without sharding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import accordion as acc
from tests.devices import device
from tests.support.chains import FEW, WIDTH, Chain, around_each, chain, numbers, plain_run, steps_again
from tests.support.compare import (
    Case,
    Pair,
    compare_poisoned,
    on_its_ranks,
    rest,
    seeded,
)
from tests.support.ranked import on_num_ranks, on_worlds
from tests.support.sample import sampled

# -- ways into the backward


def explicit(model: nn.Module, step: int) -> Any:
    out = model(numbers())
    out.backward(torch.arange(out.numel(), device=device()).view(out.shape) / 10.0)
    one, two = model(numbers()), model(numbers())
    torch.autograd.backward([one, two.sum()], [torch.ones_like(one), torch.tensor(0.5, device=device())])
    return out


def several(model: nn.Module, step: int) -> Any:
    """Three forwards; two of them in one backward, the one between them later."""
    one, two, three = (model(numbers()) for _ in range(3))
    (one * three).mean().backward()
    two.mean().backward()
    return one, two, three


def twice_retained(model: nn.Module, step: int) -> Any:
    out = model(numbers())
    out.mean().backward(retain_graph=True)
    out.square().mean().backward(retain_graph=True)
    out.mean().backward()
    return out


def of_inputs(model: nn.Module, step: int) -> Any:
    """autograd.grad of inputs, activations and some parameters, then a backward."""
    x = numbers(grad=True)
    out = model(x)
    grads = torch.autograd.grad(out.sum(), [x], retain_graph=True)
    nothing = torch.autograd.grad(out.sum(), [model.units[0].a.weight, x], retain_graph=True)[1]
    out.square().mean().backward()
    return out, grads, nothing, x.grad


def only_inputs(model: nn.Module, step: int) -> Any:
    """`backward(inputs=...)` accumulates into what is named and nowhere else."""
    x = numbers(grad=True)
    model(x).square().mean().backward(inputs=[x, model.units[1].b.weight, model.last.bias])
    return x.grad


class Leaves(Pair):
    """A second loss leaves the unit in the list or dict `losses`, or without that argument in an attribute."""

    def forward(self, x: Tensor, losses: Any = None) -> Tensor:
        y, loss = super().forward(x), self.b(self.a(x)).square().mean()
        if losses is None:
            self.losses = [loss]
        elif isinstance(losses, list):
            losses.append(loss)
        else:
            losses[len(losses)] = loss
        return y


def leaving(kind: type | None) -> Case:
    """Return the `Case` of losses that leave each unit in an argument of type `kind`, or for None in an attribute."""

    def run(model: Chain, step: int) -> Any:
        losses = None if kind is None else kind()
        out = model(numbers(), losses=losses)
        if losses is None:
            losses = [unit.__dict__.pop("losses")[0] for unit in model.units]
        assert len(losses) == 2
        loss = losses[0] + losses[1]
        loss = loss + out.square().mean() if step else loss  # in the first step no loss but these
        loss.backward()
        return loss.detach()

    def call(model: Chain, x: Tensor, losses: Any) -> Tensor:
        return functools.reduce(lambda y, unit: unit(y, losses), model.units, x)

    return chain(Leaves, call=call, run=run, exact=False, tolerance=2e-6)


@on_worlds
def test_a_double_backward_is_refused_by_name(mesh) -> None:
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    for _ in range(2):
        x = numbers(grad=True)
        with pytest.raises(acc.UsageError, match="double backward"):
            torch.autograd.grad(model(x).sum(), [x], create_graph=True)
        with pytest.raises(acc.UsageError, match="double backward"):
            model(x).sum().backward(create_graph=True)
        steps_again(mesh, model, plain)


class Forces(nn.Module):
    """Energies and their derivatives by the input, both of which are trained: a double backward inside of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = torch.tanh(self.pairs[1](self.pairs[0](x))).sum()
        (force,) = torch.autograd.grad(energy, [x], create_graph=True)
        return energy, force


def force_run(model: nn.Module, step: int) -> Any:
    energy, force = model(numbers())
    (energy.square() + force.square().sum()).backward()
    return energy, force


def teacher(model: Chain, x: Tensor) -> Tensor:
    """Units run without gradients between calls with them, as momentum encoders and samplers do."""
    with torch.no_grad():
        target = functools.reduce(lambda y, unit: unit(y), model.units, x)
    y = model.units[0](x)
    with torch.no_grad():
        other = model.units[0](y)
    return model.units[1](y) * target + other


CASES = {
    "explicit gradients": chain(run=explicit, exact=False, tolerance=2e-6),
    "several forwards before a backward": chain(run=several, exact=False, tolerance=2e-6),
    "a retained graph twice": chain(run=twice_retained, exact=False, tolerance=2e-6),
    "autograd.grad of inputs": chain(run=of_inputs),
    "backward into what is named": chain(run=only_inputs),
    "a loss that leaves through an attribute": leaving(None),
    "a loss that leaves through a list argument": leaving(list),
    "a loss that leaves through a dict argument": leaving(dict),
    "a derivative inside of a forward": Case(
        build=Forces, run=force_run, units=set(), exact=False, tolerance=4e-6
    ),  # autograd may add in another order
    "units without gradients between those with them": chain(call=teacher),
}


@on_its_ranks(CASES)
def test_any_way_into_the_backward_and_modes_of_autograd_inside_of_a_forward(mesh, name: str) -> None:
    compare_poisoned(mesh, CASES[name])


@on_worlds
def test_a_derivative_over_several_units_is_refused_by_name(mesh) -> None:
    model = acc.shard(seeded(Forces), mesh=mesh, units={Pair})
    for _ in range(2):
        with pytest.raises(acc.UsageError, match=r"unit 'pairs.1' was asked for a double backward"):
            model(numbers())
    for _ in range(2):  # units may be called by themselves, and leave nothing of the failed calls
        model.pairs[1](model.pairs[0](numbers())).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    rest(model)


# -- recomputation by the caller


class Drops(nn.Module):
    """Random numbers in a unit; `inside`: it recomputes its middle by itself."""

    inside = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pair = Pair()
        self.drop = nn.Dropout(0.3)

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(self.pair(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        how = self.inside
        y = self.middle(x) if how is None else checkpoint(self.middle, x, use_reentrant=how == "reentrant")
        return torch.tanh(self.drop(y)) * x


def around_all(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda x: functools.reduce(lambda y, unit: unit(y), model.units, x), x, use_reentrant=reentrant)


def nested(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda x: around_each(model, x, reentrant) + 1.0, x, use_reentrant=reentrant)


def inside(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    for unit in model.units:
        unit.inside = "reentrant" if reentrant else "not"
        x = unit(x)
    return x


def around_and_inside(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda x: inside(model, x, reentrant), x, use_reentrant=reentrant)


RECOMPUTED = {
    "each unit": around_each,
    "several units at once": around_all,
    "a checkpoint in a checkpoint": nested,
    "inside of units": inside,
    "around and inside of units": around_and_inside,
}
MANNERS = {  # use_reentrant, early stop, checkpoint_activations
    "reentrant": (True, True, "none"),
    "not reentrant": (False, True, "none"),
    "without early stop": (False, False, "none"),
    "with checkpoint_activations": (False, True, "full"),
    "reentrant with checkpoint_activations": (True, True, "full"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of the inner ones, reentrant
@pytest.mark.parametrize(
    ("name", "manner", "num_ranks"),
    sampled(  # poisoned, which three ranks are, in every manner where a unit is recomputed twice
        [(name, manner, num_ranks) for name in RECOMPUTED for manner in MANNERS for num_ranks in FEW],
        lambda name, manner, num_ranks: (
            num_ranks == 3 and (manner == "reentrant" or name == "around and inside of units")
        ),
    ),
)
@on_num_ranks
def test_recomputation_by_the_caller_with_random_numbers(mesh, name: str, manner: str) -> None:
    reentrant, early_stop, activations = MANNERS[manner]

    def run(model: nn.Module, step: int) -> Tensor:
        with set_checkpoint_early_stop(early_stop):
            return plain_run(model, step)

    call = functools.partial(RECOMPUTED[name], reentrant=reentrant)
    case = chain(Drops, call=call, run=run, options={"checkpoint_activations": activations})
    compare_poisoned(mesh, case)
