"""Kinds of calls: what may go into a unit, come out of it and happen around it, as without sharding."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import accordion as acc
from accordion.config import STRATEGIES
from tests.world.checks import PlantedError, units_of
from tests.world.compare import (
    RANKS,
    Case,
    Pair,
    assert_alike,
    check_grads,
    compare,
    poisoned,
    rest,
    run_on_all,
    seed_of,
    seeded,
)

WIDTH = 7
FEW = (2, 3)  # where more ranks can add nothing but time


def run_case(mesh, name: str) -> None:
    compare(mesh, poisoned(mesh, CASES[name]))


def numbers(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), requires_grad=grad)


def mean_square(out: Tensor) -> Tensor:
    loss = out.square().mean()
    loss.backward()
    return loss.detach()


def plain_run(model: nn.Module, step: int) -> Tensor:
    return mean_square(model(numbers()))


class Chain(nn.Module):
    """A layer, units, a layer. `call(self, x)`: how the units are called."""

    def __init__(self, kind: Callable[[], nn.Module] = Pair, count: int = 2, call: Callable[..., Any] | None = None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(kind() for _ in range(count))
        self.last = nn.Linear(WIDTH, 3)
        self.call = call
        self.step = 0

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x = self.first(x)
        if self.call is not None:
            x = self.call(self, x, **kwargs)
        else:
            for unit in self.units:
                x = unit(x)
        return self.last(x)


def chain(kind: Callable[[], nn.Module] = Pair, call: Callable[..., Any] | None = None, **more: Any) -> Case:
    """A case of a `Chain`; every kind of unit here is named by its class."""
    more.setdefault("run", plain_run)
    units = more.pop("units", lambda name, module: name.startswith("units.") and name.count(".") == 1)
    return Case(build=lambda: Chain(kind, call=call), units=units, **more)


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


class FirstRank(Pair):
    """On the first rank alone the input comes out as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() else x


class Dropped(Chain):
    """All ranks call all units; the odd ones leave the result of the first out of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.units[0](x)
        return self.last(self.units[1](x if dist.get_rank() % 2 else y))


OFTEN_CASES = {
    "loops of another length in each step": chain(call=loops, run=loop_run, steps=5, exact=False, tolerance=3e-6),
    "parameters unused on some ranks or on all": chain(Some),
    "a unit that one rank passes by from inside": chain(FirstRank),
    "a unit whose result some ranks drop": Case(build=Dropped, run=plain_run, units={Pair}),
}


@pytest.mark.parametrize("name", OFTEN_CASES)
def test_units_and_parameters_may_be_used_any_number_of_times(world, name):
    run_on_all(world, run_case, name)


# -- what goes in and comes out


class Point(NamedTuple):
    x: Tensor
    y: Tensor | None


@dataclass
class State:
    x: Tensor
    note: str
    more: Any = None


class Plain:
    """No container that anybody knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.inner = {"twice": x * 2}


def output_class() -> type:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput


KEEP: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    # how two tensors are put together, and how they become one again
    "tuple": (lambda x, y: (x, y), lambda t: t[0] + t[1]),
    "list": (lambda x, y: [x, y, None], lambda t: t[0] + t[1]),
    "dict": (lambda x, y: {"x": x, 3: y, "none": None}, lambda t: t["x"] + t[3]),
    "ordered dict": (lambda x, y: collections.OrderedDict(b=x, a=y), lambda t: t["a"] + t["b"]),
    "namedtuple": (lambda x, y: Point(x, y), lambda t: t.x + t.y),
    "namedtuple with None": (lambda x, y: Point(x + y, None), lambda t: t.x * 2),
    "dataclass": (lambda x, y: State(x, "note", y), lambda t: t.x + t.more),
    "nested": (
        lambda x, y: (State(x, "a", [{"y": (y, Point(x, None))}]), None, 3, "text"),
        lambda t: t[0].x + t[0].more[0]["y"][0] + t[0].more[0]["y"][1].x,
    ),
    "the same tensor twice": (lambda x, y: [x, (x, y)], lambda t: t[0] + t[1][0] * t[1][1]),
    "object": (lambda x, y: Plain(x + y), lambda t: t.x + t.inner["twice"]),
    "ModelOutput": (
        lambda x, y: output_class()(last_hidden_state=x, hidden_states=(x, y)),
        lambda t: t.last_hidden_state + t["hidden_states"][1] + t[0],
    ),
}


class Packs(Pair):
    """Takes a structure, as an argument or by keyword, and returns one of the same kind."""

    kind = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ((given,),) = ((args or tuple(kwargs.values())),)
        pack, unpack = KEEP[self.kind]
        x = unpack(given)
        return pack(super().forward(x), self.a(x) * 0.5)


def pack_run(model: Chain, step: int) -> Any:
    out: list[Any] = []
    model.out = out
    return mean_square(model(numbers())), out


def pass_structures(model: Chain, x: Tensor, kind: str) -> Tensor:
    pack, unpack = KEEP[kind]
    state = pack(x, x * 0.5)
    for i, unit in enumerate(model.units):
        state = unit(given=state) if i % 2 else unit(state)
        model.__dict__["out"].append(unpack(state).detach())
    return unpack(state)


def structures(kind: str) -> Case:
    def build() -> Chain:
        packs = type("Packs", (Packs,), {"kind": kind})
        return Chain(packs, call=functools.partial(pass_structures, kind=kind))

    return Case(build=build, run=pack_run, units=["Packs"], exact=False, tolerance=2e-6)


class NoGrad(Pair):
    """Outputs that carry no gradient: detached, integer, boolean, none at all, numbers, text."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.detach(), y.argmax(-1), y > 0, None, 1.5, "text", y


def use_no_grad(model: Chain, x: Tensor) -> Tensor:
    for unit in model.units:
        detached, index, mask, nothing, number, text, y = unit(x)
        assert (nothing, number, text) == (None, 1.5, "text")
        assert not detached.requires_grad
        assert index.dtype == torch.long
        x = (y + detached) * mask + index.unsqueeze(-1)
    return x


class Nothing(Pair):
    """Returns nothing; what it computes stays in an attribute."""

    def forward(self, x: Tensor) -> None:
        self.kept = super().forward(x)


def use_nothing(model: Chain, x: Tensor) -> Tensor:
    for unit in model.units:
        assert unit(x) is None
        x = unit.__dict__.pop("kept")
    return x


class OnlyDetached(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


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


class Source(Pair):
    """A unit without inputs."""

    def forward(self) -> Tensor:
        return super().forward(torch.ones(1, WIDTH))


OUTPUT_CASES = {
    **{kind: structures(kind) for kind in KEEP},
    "outputs without gradients": chain(NoGrad, call=use_no_grad),
    "no output": chain(Nothing, call=use_nothing),
    "no output with a gradient": chain(OnlyDetached),
    "inputs of which some need gradients": chain(Scaled, call=mixed_inputs),
    "no inputs": chain(Source, call=no_input),
}


@pytest.mark.parametrize("name", OUTPUT_CASES)
def test_anything_may_go_into_a_unit_and_come_out(world, name):
    if name == "ModelOutput":
        pytest.importorskip("transformers")
    run_on_all(world, run_case, name, ranks=FEW if name in KEEP else RANKS)


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


def in_place_inputs(model: Chain, x: Tensor) -> Tensor:
    """What the caller sees of it is the same too."""
    for unit in model.units:
        y = x * 1.0
        x = unit(y) + y
    return x


class ViewOut(Pair):
    """An output that is a view of something inside."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.view(-1).view(y.shape), y[:1]


def in_place_views(model: Chain, x: Tensor, both: bool = False) -> Tensor:
    for unit in model.units:
        y, row = unit(x)
        y.mul_(2.0)
        x = torch.tanh(y + row if both else y)
    return x


class Same(Pair):
    """Returns its input as it is, and uses nothing of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class AlsoSame(Pair):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, super().forward(x)


def same_and_more(model: Chain, x: Tensor) -> Tensor:
    for unit in model.units:
        same, y = unit(x)
        x = torch.tanh(same * y + x)
    return x


class WrittenSame(Pair):
    """Adds to its input in place and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.b(torch.tanh(self.a.bias))
        return x


def written_same(model: Chain, x: Tensor, both: bool) -> Tensor:
    for unit in model.units:
        x = x * 1.0
        y = unit(x)
        x = torch.tanh(x + y if both else y)
    return x


def same_written(model: Chain, x: Tensor) -> Tensor:
    """What is written into an output that is the input is in the input too."""
    for unit in model.units:
        x = x * 1.0
        unit(x).mul_(2.0)
        x = torch.tanh(x)
    return x


class Own(Pair):
    """Returns parameters of its own, and views of them."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.a.weight, self.b.weight[2:5], self.a.weight.t(), self.b.bias.view(1, -1)


def own_parameters(model: Chain, x: Tensor) -> Tensor:
    for unit in model.units:
        y, weight, rows, transposed, bias = unit(x)
        x = y @ weight + (rows.sum(0) * 0.1) + y @ transposed + bias
        x = torch.tanh(x)
    return x


class OnlyOwn(nn.Module):
    """Learned positions: a view of a parameter and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(11, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.positions[: x.shape[0]]


def positions(model: Chain, x: Tensor) -> Tensor:
    for unit in model.units:
        x = x + unit(x)
    return x


MEMORY_CASES = {
    "in-place operators on outputs": chain(call=in_place_outputs, exact=False),
    "in-place operators on inputs": chain(InPlace, call=in_place_inputs, exact=False),
    "in-place operators on outputs that are views": chain(ViewOut, call=in_place_views),
    "in-place operators on one of two outputs over one memory": chain(
        ViewOut, call=functools.partial(in_place_views, both=True)
    ),
    "a unit that returns its input": chain(Same),
    "a unit that returns its input and more": chain(AlsoSame, call=same_and_more, exact=False, tolerance=2e-6),
    "a unit that returns its input, into which the caller writes": chain(Same, call=same_written),
    "a unit that writes into its input and returns it": chain(
        WrittenSame, call=functools.partial(written_same, both=False), exact=False
    ),
    "a unit that writes into its input and returns it, both of which are used": chain(
        WrittenSame, call=functools.partial(written_same, both=True), exact=False
    ),
    "a unit that returns its parameters and views of them": chain(
        Own, call=own_parameters, exact=False, tolerance=2e-6
    ),
    "a unit that returns a view of its parameter alone": chain(OnlyOwn, call=positions),
}


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_outputs_may_be_inputs_parameters_and_written_into(world, name):
    run_on_all(world, run_case, name)


# -- ways into the backward


def explicit(model: nn.Module, step: int) -> Any:
    out = model(numbers())
    out.backward(torch.arange(out.numel()).view(out.shape) / 10.0)
    one, two = model(numbers()), model(numbers())
    torch.autograd.backward([one, two.sum()], [torch.ones_like(one), torch.tensor(0.5)])
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
    """A second loss leaves the unit in a way that is not its output."""

    how = ""

    def forward(self, x: Tensor, bag: Any = None) -> Tensor:
        y = super().forward(x)
        aux = self.b(self.a(x)).square().mean()
        if self.how == "attribute":
            self.aux = aux
        elif self.how == "list attribute":
            self.aux = [aux, "text"]
        elif self.how == "dict attribute":
            self.aux = {"loss": aux}
        elif self.how == "object attribute":
            self.aux = Plain(aux)
        elif self.how == "attribute of a child":
            self.a.aux = aux
        elif self.how == "list argument":
            bag.append(aux)
        elif self.how == "dict argument":
            bag[len(bag)] = aux
        elif self.how == "global":
            BAG.append(aux)
        return y


BAG: list[Tensor] = []


def leaving(how: str, only: bool) -> Case:
    def call(model: Chain, x: Tensor) -> Tensor:
        bag: Any = [] if how == "list argument" else {} if how == "dict argument" else None
        BAG.clear()
        found = []
        for unit in model.units:
            x = unit(x, bag) if bag is not None else unit(x)
            if how == "attribute of a child":
                found.append(unit.a.__dict__.pop("aux"))
            elif how.endswith("attribute"):
                aux = unit.__dict__.pop("aux")
                found += {
                    "attribute": lambda a: [a],
                    "list attribute": lambda a: [a[0]],
                    "dict attribute": lambda a: [a["loss"]],
                    "object attribute": lambda a: [a.x],
                }[how](aux)
        if bag is not None:
            found = list(bag.values()) if isinstance(bag, dict) else bag
        model.__dict__["found"] = found or list(BAG)
        BAG.clear()
        return x

    def run(model: Chain, step: int) -> Any:
        out = model(numbers())
        found = model.__dict__.pop("found")
        assert len(found) == 2
        loss = sum(found) if only else sum(found) + out.square().mean()
        loss.backward()
        return loss.detach()

    return Case(
        build=lambda: Chain(type("Leaves", (Leaves,), {"how": how}), call=call),
        run=run,
        units=["Leaves"],
        exact=False,
        tolerance=2e-6,
    )


WAYS = [
    "attribute", "list attribute", "dict attribute", "object attribute", "attribute of a child",
    "list argument", "dict argument", "global",
]  # fmt: skip
BACKWARD_CASES = {
    "explicit gradients": chain(run=explicit, exact=False, tolerance=2e-6),
    "several forwards before a backward": chain(run=several, exact=False, tolerance=2e-6),
    "a retained graph twice": chain(run=twice_retained, exact=False, tolerance=2e-6),
    "autograd.grad of inputs": chain(run=of_inputs),
    "backward into what is named": chain(run=only_inputs),
    **{f"a loss that leaves through a {how}": leaving(how, False) for how in WAYS},
    **{f"only a loss that leaves through a {how}": leaving(how, True) for how in WAYS},
}


@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_any_way_into_the_backward(world, name):
    run_on_all(world, run_case, name, ranks=FEW if "leaves" in name else RANKS)


def steps_again(mesh, model: nn.Module, plain: nn.Module, run: Callable[..., Any] = plain_run) -> None:
    """A step clears what failed ones left, the next one is as any other; the weights are those of before."""
    for step in range(2):
        for m in (plain, model):
            m.zero_grad()
            torch.manual_seed(seed_of(step))
            run(m, step)
        check_grads(mesh, model, plain, exact=mesh.size() == 2)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    rest(model)


def double_backward(mesh) -> None:
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    for _ in range(2):
        x = numbers(grad=True)
        with pytest.raises(acc.UsageError, match="double backward"):
            torch.autograd.grad(model(x).sum(), [x], create_graph=True)
        with pytest.raises(acc.UsageError, match="double backward"):
            model(x).sum().backward(create_graph=True)
        steps_again(mesh, model, plain)


def test_a_double_backward_is_refused_by_name(world):
    run_on_all(world, double_backward)


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


MODE_CASES = {
    "a derivative inside of a forward": Case(
        build=Forces, run=force_run, units=set(), exact=False, tolerance=4e-6
    ),  # autograd may add in another order
    "units without gradients between those with them": chain(call=teacher),
}


@pytest.mark.parametrize("name", MODE_CASES)
def test_modes_of_autograd_inside_of_a_forward(world, name):
    run_on_all(world, run_case, name)


def forces_over_units(mesh) -> None:
    model = acc.shard(seeded(Forces), mesh=mesh, units={Pair})
    for _ in range(2):
        with pytest.raises(acc.UsageError, match=r"unit 'pairs.1' was asked for a double backward"):
            model(numbers())
    for _ in range(2):  # units may be called by themselves, and leave nothing of the failed calls
        model.pairs[1](model.pairs[0](numbers())).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    rest(model)


def test_a_derivative_over_several_units_is_refused_by_name(world):
    run_on_all(world, forces_over_units)


def two_models(mesh) -> None:
    """A generator and a critic, each sharded, in one graph and with an optimizer of its own."""
    pairs = [[seeded(Chain, seed) for seed in (1, 2)] for _ in range(2)]
    for m in pairs[1]:
        m.last = nn.Identity() if m is pairs[1][0] else m.last
        acc.shard(m, mesh=mesh, units={Pair})
    pairs[0][0].last = nn.Identity()
    optimizers = [[torch.optim.SGD(m.parameters(), lr=1 / 128) for m in pair] for pair in pairs]
    for step in range(4):
        for pair in pairs:
            torch.manual_seed(seed_of(step))
            fake = pair[0](numbers())
            if step % 2:
                (pair[1](fake.detach()).square().mean() - pair[1](numbers()).square().mean()).backward()
            else:
                pair[1](fake).square().mean().backward()
        for plain, model in zip(*pairs, strict=True):
            check_grads(mesh, model, plain, exact=False, tolerance=4e-6)
        for row in optimizers:
            row[step % 2].step()
            for optimizer in row:
                optimizer.zero_grad()
    for m in pairs[1]:
        for step in range(2):  # a step ends what forwards that were not walked back have kept
            plain_run(m, step)
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        rest(m)


def test_two_sharded_models_in_one_graph(world):
    run_on_all(world, two_models)


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


def around_each(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    for unit in model.units:
        x = checkpoint(unit, x, use_reentrant=reentrant)
    return x


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


def recomputed(mesh, name: str, manner: str) -> None:
    reentrant, early_stop, activations = MANNERS[manner]

    def run(model: nn.Module, step: int) -> Tensor:
        with set_checkpoint_early_stop(early_stop):
            return plain_run(model, step)

    call = functools.partial(RECOMPUTED[name], reentrant=reentrant)
    case = chain(Drops, call=call, run=run, options={"checkpoint_activations": activations})
    compare(mesh, poisoned(mesh, case))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of the inner ones, reentrant
@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_by_the_caller_with_random_numbers(world, name, manner):
    run_on_all(world, recomputed, name, manner, ranks=FEW)


# -- entry points


class Entered(Chain):
    """Methods beside `forward` that use the weights of the root, of units, and `forward` itself."""

    def __init__(self) -> None:
        super().__init__(Encodes)

    def encode(self, x: Tensor, *, times: int = 1) -> dict[str, Tensor]:
        for _ in range(times):
            x = torch.tanh(x @ self.first.weight)
        return {"x": self.units[0](x)}

    def generate(self, x: Tensor, count: int) -> Tensor:
        out = [x]
        for _ in range(count):
            out.append(torch.tanh(self(out[-1]) @ self.last.weight))
        return torch.stack(out)

    def raises(self, x: Tensor) -> None:
        self.units[0](x)
        raise PlantedError


class Encodes(Pair):
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self(x) @ self.b.weight


def enter(model: Entered, how: str) -> Any:
    x = numbers()
    if how == "encode":
        return model.encode(x, times=2)["x"]
    if how == "generate":
        return model.generate(x, count=2)
    if how == "of a unit":
        return sum(model.units[1].encode(x))
    return model(x) @ model.encode(x)["x"].t()[:3] + model.units[0].encode(model.generate(x, 1)[0])[0].sum()


def entered(mesh) -> None:
    plain, model = seeded(Entered), acc.shard(seeded(Entered), mesh=mesh, units={Encodes})
    for name in ("encode", "generate", "raises"):
        acc.entry_point(model, name)
    for unit in model.units:
        acc.entry_point(unit, "encode")
    hows = ("encode", "generate", "of a unit", "all")
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for how in hows:
            found = []
            for m in (plain, model):
                torch.manual_seed(seed_of(7))
                with mode():
                    found.append(enter(m, how))
            assert_alike(found[1], found[0], exact=mesh.size() == 2)
    for how in hows:
        for m in (plain, model):
            m.zero_grad()
            torch.manual_seed(seed_of(8))
            mean_square(enter(m, how))
        check_grads(mesh, model, plain, exact=False, tolerance=2e-6)
        with pytest.raises(PlantedError):
            model.raises(numbers())
    for mode in (torch.no_grad, torch.inference_mode):  # after training, from inside a forward's own modes
        found = []
        for m in (plain, model):
            torch.manual_seed(seed_of(9))
            with mode():
                found.append(enter(m, "all"))
        assert_alike(found[1], found[0], exact=mesh.size() == 2)
    steps_again(mesh, model, plain)


def test_methods_beside_forward_use_full_parameters(world):
    run_on_all(world, entered)


def no_entry(mesh) -> None:
    model = acc.shard(seeded(Entered), mesh=mesh, units={Encodes})
    with pytest.raises(acc.UsageError, match="no method 'enkode'"):
        acc.entry_point(model, "enkode")
    with pytest.raises(acc.UsageError, match="Linear is no unit"):
        acc.entry_point(model.first, "forward")
    with pytest.raises(acc.UsageError, match="is no unit"):
        acc.entry_point(Entered(), "encode")


def test_what_cannot_be_an_entry_point_is_named(world):
    world.run(1, no_entry)


# -- hooks


Seen = list[tuple[str, list[Tensor | None]]]


def note(seen: Seen, what: str, *trees: Any) -> None:
    flat: list[Tensor | None] = []
    for tree in trees:
        for t in tree if isinstance(tree, (tuple, list)) else (tree,):
            flat.append(t.detach().clone() if isinstance(t, Tensor) else None)  # noqa: PERF401
    seen.append((what, flat))


def attach_hooks(model: Chain, seen: Seen, change: bool) -> None:
    """Hooks of every kind on the root, units, and modules inside; with `change` they also change what passes."""
    modules = {"root": model, "unit 0": model.units[0], "unit 1": model.units[1], "inside": model.units[1].a}
    for name, module in modules.items():

        def pre(m: nn.Module, args: Any, name: str = name) -> Any:
            note(seen, f"pre {name}", args)
            return (args[0] * 1.5,) if change else None

        def pre_kw(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> Any:
            note(seen, f"pre with kwargs {name}", args)
            return (args, kwargs) if change else None

        def post(m: nn.Module, args: Any, out: Tensor, name: str = name) -> Any:
            note(seen, f"post {name}", args, out)
            return out * 0.5 if change else None

        def backward(m: nn.Module, grad_in: Any, grad_out: Any, name: str = name) -> Any:
            note(seen, f"backward {name}", grad_in, grad_out)
            return tuple(None if g is None else g * 2.0 for g in grad_in) if change else None

        def backward_pre(m: nn.Module, grad_out: Any, name: str = name) -> Any:
            note(seen, f"backward pre {name}", grad_out)
            return tuple(g * 0.5 for g in grad_out) if change else None

        module.register_forward_pre_hook(pre)
        module.register_forward_pre_hook(pre_kw, with_kwargs=True, prepend=True)
        module.register_forward_hook(post)
        module.register_forward_hook(post, prepend=True)
        module.register_full_backward_hook(backward)
        module.register_full_backward_pre_hook(backward_pre)


def watch_activations(model: Chain, x: Tensor, seen: dict[int, Seen]) -> Tensor:
    for i, unit in enumerate(model.units):
        x = unit(x)
        x.register_hook(functools.partial(note, seen[id(model)], f"activation {i}"))
        x.register_hook(lambda g: g * 1.5)
        x.retain_grad()
        model.__dict__[f"kept {i}"] = x
    return x


def hooked(mesh, when: str, change: bool) -> None:
    seen: dict[int, Seen] = {}
    build = functools.partial(Chain, call=functools.partial(watch_activations, seen=seen))
    plain, model = seeded(build), seeded(build)
    for m in (plain, model):
        seen[id(m)] = []
        if when == "before":
            attach_hooks(m, seen[id(m)], change)
    acc.shard(model, mesh=mesh, units={Pair})
    if when == "after":
        for m in (plain, model):
            attach_hooks(m, seen[id(m)], change)
    for step in range(2):
        for m in (plain, model):
            seen[id(m)].clear()
            torch.manual_seed(seed_of(step))
            x = numbers(grad=True)
            mean_square(m(x))
            note(seen[id(m)], "input", x.grad)
            for i in range(2):
                note(seen[id(m)], f"retained {i}", m.__dict__.pop(f"kept {i}").grad)
        mine, theirs = dict_of(seen[id(model)]), dict_of(seen[id(plain)])
        assert [what for what, _ in seen[id(model)]] == [what for what, _ in seen[id(plain)]]
        assert len(mine) > 20
        for what, value in theirs.items():
            assert_alike(mine[what], value, exact=mesh.size() == 2)
        check_grads(mesh, model, plain, exact=mesh.size() == 2)
        for m in (plain, model):
            m.zero_grad()
        rest(model)


def dict_of(seen: Seen) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for what, tensors in seen:
        found.setdefault(what, []).append(tensors)
    return found


@pytest.mark.parametrize("change", [False, True], ids=["looking", "changing"])
@pytest.mark.parametrize("when", ["after", "before"])
def test_hooks_of_modules_and_activations_see_what_they_see_unsharded(world, when, change):
    run_on_all(world, hooked, when, change)


def param_hooks(mesh) -> None:
    """Each fires once a backward, with the sharded mean; what a hook returns is the gradient."""
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    order: dict[str, list[str]] = {"plain": [], "sharded": []}
    sharded: list[Tensor] = []
    for kind, m in (("plain", plain), ("sharded", model)):
        for name, p in m.named_parameters():
            p.register_hook(lambda g, kind=kind, name=name: order[kind].append(f"grad {name}"))
            p.register_hook(lambda g: g * 4.0)
            p.register_post_accumulate_grad_hook(lambda p, kind=kind, name=name: order[kind].append(f"acc {name}"))
    model.first.weight.register_post_accumulate_grad_hook(lambda p: sharded.append(p.grad))
    for step in range(2):
        for m in (plain, model):
            torch.manual_seed(seed_of(step))
            plain_run(m, step)
        assert sorted(order["sharded"]) == sorted(order["plain"])
        assert len(set(order["plain"])) == 2 * len(list(plain.parameters())) == len(order["plain"])
        for kind in order:
            for name, _ in plain.named_parameters():
                assert order[kind].index(f"grad {name}") < order[kind].index(f"acc {name}")
            order[kind].clear()
        assert len(sharded) == step + 1
        assert isinstance(sharded[-1], DTensor)
        assert sharded[-1] is model.first.weight.grad
        check_grads(mesh, model, plain, exact=mesh.size() == 2)
        for m in (plain, model):
            m.zero_grad()
        rest(model)


def test_hooks_of_parameters_see_the_sharded_gradient_once(world):
    run_on_all(world, param_hooks)


def step_in_hooks(mesh, of: str) -> None:
    """An optimizer for each parameter, stepped in its hook or its node's: the gradient is gone after the backward."""
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    optimizers = {p: torch.optim.SGD([p], lr=1 / 64) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for p, node in zip(model.parameters(), nodes, strict=True):
        if of == "parameter":
            p.register_post_accumulate_grad_hook(step_now)
        else:  # as torch's own optimizers in the backward do
            node.register_hook(lambda *_, p=p: step_now(p))
    reference = torch.optim.SGD(plain.parameters(), lr=1 / 64)
    for step in range(3):
        losses = []
        for m in (plain, model):
            torch.manual_seed(seed_of(step))
            losses.append(plain_run(m, step))
        assert torch.allclose(losses[0], losses[1], rtol=1e-5), step
        assert all(p.grad is None for p in model.parameters())
        for p in plain.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group())
            p.grad /= mesh.size()
        reference.step()
        reference.zero_grad()
        rest(model)


@pytest.mark.parametrize("of", ["parameter", "node"])
def test_an_optimizer_may_step_in_the_hooks_of_parameters(world, of):
    run_on_all(world, step_in_hooks, of)


def weight_in_hook(mesh, when: str) -> None:
    """A hook of a unit reads its weights: norms for a log, say."""
    found: dict[int, list[Tensor]] = {}

    def read(module: nn.Module, *_: Any) -> None:
        found.setdefault(id(module), []).append(module.a.weight.detach().clone())

    plain, model = seeded(Chain), seeded(Chain)
    if when == "before":
        acc.shard(model, mesh=mesh, units={Pair})
    for m in (plain, model):
        m.units[0].register_forward_pre_hook(read)
        m.units[0].register_forward_hook(read)
    if when == "after":
        acc.shard(model, mesh=mesh, units={Pair})
    for m in (plain, model):
        torch.manual_seed(seed_of(0))
        m(numbers())
    for mine, theirs in zip(found[id(model.units[0])], found[id(plain.units[0])], strict=True):
        assert type(mine) is Tensor
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_unit_read_its_full_weights_sharded_before_or_after(world, when):
    run_on_all(world, weight_in_hook, when)


# -- exceptions


class RaisesBack(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error


class Fails(Pair):
    """Raises where and what it is told."""

    where: str | None = None
    error: type[BaseException] = PlantedError

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        recomputing = torch._C._current_graph_task_id() != -1
        if self.where == "forward" or (self.where == "recomputation" and recomputing):
            raise self.error
        if self.where == "backward":
            y = RaisesBack.apply(y, self.error)
        return x + self.b(y)


def raises(*_: Any) -> None:
    raise PlantedError


def planted(model: Chain, name: str) -> list[Any]:
    """Make the second of three units fail; returns handles of hooks."""
    unit = model.units[1]
    kind, _, what = name.partition(": ")
    if kind != "hook":
        unit.where = what or kind
        unit.error = KeyboardInterrupt if kind == "interrupt" else PlantedError
        return []
    return [
        {
            "before a unit": lambda: unit.register_forward_pre_hook(raises),
            "after a unit": lambda: unit.register_forward_hook(raises),
            "inside a unit": lambda: unit.a.register_forward_hook(raises),
            "of a module's backward": lambda: unit.register_full_backward_hook(raises),
            "of a gradient": lambda: unit.a.weight.register_hook(raises),
            "of an accumulated gradient": lambda: unit.b.bias.register_post_accumulate_grad_hook(raises),
            "of the root": lambda: model.register_forward_hook(raises),
            "of an activation": lambda: unit.register_forward_hook(
                lambda m, a, out: out.register_hook(raises) and None
            ),
        }[what]()
    ]


FAILURES = [
    "forward", "backward", "recomputation", "recomputation, reentrant", "recomputation, activations",
    "interrupt: forward", "interrupt: backward", "hook: before a unit", "hook: after a unit", "hook: inside a unit",
    "hook: of a module's backward", "hook: of a gradient", "hook: of an accumulated gradient", "hook: of the root",
    "hook: of an activation",
]  # fmt: skip


def failing(name: str) -> tuple[Callable[[], Chain], dict[str, Any], str]:
    """How to build the model, options of `shard`, and what to plant."""
    what, _, how = name.partition(", ")
    call = None
    if what == "recomputation" and how != "activations":
        call = functools.partial(around_each, reentrant=how == "reentrant")
    build = functools.partial(Chain, Fails, count=3, call=call)
    return build, {"checkpoint_activations": "full" if how == "activations" else "none"}, what


def run_failing(model: Chain) -> None:
    """A step that fails; nothing of it stays but what is in the engine."""
    with pytest.raises((PlantedError, KeyboardInterrupt)):
        plain_run(model, 0)


def failure(mesh, name: str) -> None:
    build, options, what = failing(name)
    plain, model = seeded(build), acc.shard(seeded(build), mesh=mesh, units={Fails}, **options)
    for times in (2, 1):  # before any good step, and after some
        for _ in range(times):
            handles = planted(model, what)
            run_failing(model)
            for handle in handles:
                handle.remove()
            model.units[1].where = None
            with torch.no_grad(), warnings.catch_warnings():  # usable at once
                warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")  # reentrant, without
                torch.manual_seed(seed_of(5))
                found = model(numbers())
                torch.manual_seed(seed_of(5))
                assert torch.equal(found, plain(numbers()))
        steps_again(mesh, model, plain)
    with acc.full_params(model):
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("name", FAILURES)
def test_after_an_exception_the_model_is_as_before(world, name):
    run_on_all(world, failure, name, ranks=FEW)


# -- the end of a model


def watched(model: Chain) -> list[weakref.ref[Any]]:
    """What must go with the model: modules, units, the memory of shards and of full parameters."""
    found: list[Any] = [model, *model.units, model.first]
    for unit in units_of(model):
        found += [unit, *unit.groups, *(g.home for g in unit.groups)]
        found += [t for g in unit.groups for t in (*g.home.locals, *g.views)]
    return [weakref.ref(o) for o in found]


def deleted(mesh, when: str) -> None:
    build, options, what = failing("recomputation, activations" if when == "after recomputation failed" else "forward")
    model = acc.shard(seeded(build), mesh=mesh, units={Fails}, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    gc.collect()
    gc.disable()
    try:
        if when != "unused":
            for step in range(3):
                plain_run(model, step)
                optimizer.step()
                optimizer.zero_grad()
        if when == "after inference":
            with torch.no_grad():
                model(numbers())
        if when == "after a forward that nothing walks back":
            model(numbers())
        if "failed" in when:
            where = what if when == "after recomputation failed" else when.split()[1]
            planted(model, where)
            try:
                plain_run(model, 0)
            except PlantedError:
                pass
            else:
                pytest.fail("nothing was raised")
        references = watched(model)
        assert all(r() is not None for r in references)
        del model, optimizer
        if when in (
            "after backward failed",
            "after recomputation failed",
        ):  # unsharded too: autograd's queue holds nodes
            torch.ones((), requires_grad=True).backward()
        if when == "after recomputation failed":  # unsharded too: frames of checkpoint() lie in cycles
            gc.collect()
        left = [r() for r in references if r() is not None]
        assert not left, f"{len(left)} of {len(references)} live on, {[type(o).__name__ for o in left][:8]}"
    finally:
        gc.enable()


ENDS = [
    "unused", "after steps", "after inference", "after a forward that nothing walks back", "after forward failed",
    "after backward failed", "after recomputation failed",
]  # fmt: skip


@pytest.mark.parametrize("when", ENDS)
def test_a_deleted_model_lets_its_memory_go_at_once(world, when):
    run_on_all(world, deleted, when)


def deleted_between(mesh) -> None:
    model = acc.shard(seeded(chain(Pair).build), mesh=mesh, units={Pair})
    out = model(numbers())
    del model
    with pytest.raises(acc.UsageError, match="deleted between this forward and its backward"):
        out.sum().backward()


def test_a_model_deleted_before_the_backward_is_a_named_error(world):
    run_on_all(world, deleted_between, ranks=FEW)


def no_copies(mesh) -> None:
    model = acc.shard(seeded(Chain), mesh=mesh, units={Pair})
    plain_run(model, 0)
    for target in (model, model.units[0], nn.Sequential(model)):
        with pytest.raises(acc.UsageError, match=r"copied.*load_state_dict"):
            copy.deepcopy(target)
        for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(acc.UsageError, match=r"pickled.*accordion\.save.*full_state_dict"):
                dump(target)
    with pytest.raises(acc.UsageError):
        copy.copy(model)


def test_copies_and_pickles_are_refused_with_the_way_to_do_it(world):
    world.run(2, no_copies)


# -- what is being worked on


@contextmanager
def anomaly_mode() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.set_detect_anomaly(True):
            yield


def anomaly(mesh, strategy: acc.Strategy) -> None:
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair}, strategy=strategy)
    with anomaly_mode():
        steps_again(mesh, model, plain)
        with pytest.raises(RuntimeError, match="returned nan values"):  # and it finds what it is for
            (model(numbers() * float("nan"))).square().mean().backward()
    for _ in range(4):  # what waits for a backward that never came is let go after some calls
        with torch.no_grad():
            model(numbers())
    steps_again(mesh, model, plain)


def test_anomaly_detection_around_a_step(world):
    for strategy in STRATEGIES.values():
        if not strategy.hybrid:
            world.run(2, anomaly, strategy)


def anomaly_of_one(mesh) -> None:
    """Only the sum over ranks is NaN, in the first row, which the first rank owns: inf there, -inf elsewhere."""
    rank = dist.get_rank()
    model = acc.shard(seeded(lambda: nn.Linear(2, mesh.size(), bias=False)), mesh=mesh)
    factors = torch.ones(mesh.size(), 1)
    factors[0] = float("inf") if rank == 0 else float("-inf")

    class Sharpens(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * factors.t()

    loss = Sharpens.apply(model(torch.ones(1, 2))).sum()
    with anomaly_mode():
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"'StageBackward' returned nan values"):
                loss.backward()
            with pytest.raises(acc.DivergenceError, match="begins a forward"):
                model(torch.ones(1, 2))
        else:  # in its first step a rank sees to it that all others have come to the end
            with pytest.raises(acc.DivergenceError, match="ends its backward"):
                loss.backward()


def test_anomaly_detection_raises_on_the_rank_that_has_nan(world):
    run_on_all(world, anomaly_of_one, ranks=FEW)


def any_true(mesh) -> None:
    """What anomaly detection needed is for others what DTensor says: true anywhere is true on every rank."""
    acc.shard(nn.Linear(2, 2), mesh=mesh)
    for only in range(mesh.size() + 1):
        local = torch.full((2,), dist.get_rank() == only)
        whole = DTensor.from_local(local, mesh, [Shard(0)])
        found = torch.ops.aten._is_any_true(whole)
        assert isinstance(found, DTensor)
        assert bool(found.full_tensor()) == (only < mesh.size())
    handlers = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    acc.shard(nn.Linear(2, 2), mesh=mesh)
    assert handlers == before


def test_what_anomaly_detection_asks_has_its_meaning_for_other_dtensors(world):
    run_on_all(world, any_true, ranks=FEW)


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


def shared_child(mesh, units: Any) -> None:
    case = Case(build=shares_child, run=plain_run, units=units, exact=False, tolerance=2e-6)
    model = compare(mesh, poisoned(mesh, case))
    assert model.units[0].child.weight is model.units[2].child.weight
    names = [n for n, _ in model.named_parameters()]
    assert names == [n for n, _ in seeded(shares_child).named_parameters()]


@pytest.mark.parametrize("child", ["no unit", "a unit itself"])
def test_a_module_that_two_units_share(world, child):
    run_on_all(world, shared_child, {SharesChild} if child == "no unit" else {SharesChild, nn.Linear})


def marked(mesh) -> None:
    """Attributes of parameters are read by optimizers and schedulers (muP, `no_weight_decay`, `sequence_parallel`)."""
    model = seeded(Chain)
    twin = nn.Parameter(model.first.weight.data)
    twin.of_twin = True  # two objects over one memory become one parameter, with the marks of both
    model.units[0].a.weight = twin
    for name, p in model.named_parameters():
        p.my_flag = name
    acc.shard(model, mesh=mesh, units={Pair})
    for name, p in model.named_parameters():
        assert p.my_flag == name
    assert model.units[0].a.weight is model.first.weight
    assert model.first.weight.of_twin
    with acc.full_params(model):
        assert [p.my_flag for p in model.parameters()] == [n for n, _ in model.named_parameters()]


def test_attributes_of_parameters_survive(world):
    run_on_all(world, marked, ranks=FEW)


def hooks_before(mesh, kind: str) -> None:
    """Hooks set before `shard`, by the handles that the caller keeps, with one more set after it."""
    models = plain, model = seeded(Chain), seeded(Chain)
    seen: dict[nn.Module, list[str]] = {plain: [], model: []}
    handles: dict[nn.Module, list[Any]] = {plain: [], model: []}

    def attach(m: nn.Module, what: str) -> None:
        for name in ("first.weight", "units.0.a.weight", "last.bias"):
            p, text = m.get_parameter(name), f"{what} {name}"
            if kind == "register_hook":
                handles[m].append(p.register_hook(lambda g, text=text: (seen[m].append(text), g * 2.0)[1]))
            else:
                handles[m].append(p.register_post_accumulate_grad_hook(lambda p, text=text: seen[m].append(text)))

    for m in models:
        attach(m, "before")
    acc.shard(model, mesh=mesh, units={Pair})
    for m in models:
        attach(m, "after")
    for num_left in (6, 3, 0):  # those set before go first
        for m in models:
            for handle in handles[m][: 6 - num_left]:
                handle.remove()
            torch.manual_seed(seed_of(num_left))
            plain_run(m, 0)
        assert len(seen[model]) == num_left
        assert sorted(seen[model]) == sorted(seen[plain])
        check_grads(mesh, model, plain, exact=mesh.size() == 2)
        for m in models:
            m.zero_grad()
            seen[m].clear()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_set_on_a_parameter_before_and_their_handles_go_on(world, kind):
    run_on_all(world, hooks_before, kind)


def hooked_twins(mesh) -> None:
    for hooked in ("first", "last"):
        model = nn.ModuleDict({"first": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
        model["last"].weight = nn.Parameter(model["first"].weight.data)
        model[hooked].weight.register_hook(lambda g: g)
        with pytest.raises(acc.UsageError, match=r"first\.weight, last\.weight .*hook"):
            acc.shard(model, mesh=mesh)


def test_a_hook_on_one_of_two_parameters_over_one_memory_is_refused_by_name(world):
    world.run(1, hooked_twins)


def old_graph(mesh, strategy: acc.Strategy) -> None:
    """forward - step - backward of the old graph: torch refuses weights that were written since, and so must shards."""
    plain = seeded(Chain)
    model = acc.shard(seeded(Chain), mesh=mesh, units={Pair}, strategy=strategy)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        torch.manual_seed(seed_of(0))
        loss = m(numbers()).square().mean()
        plain_run(m, 0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises((RuntimeError, acc.UsageError), match=r"modified|changed"):
            loss.backward()
        m.zero_grad()
        del loss
    if strategy is acc.FULL_SHARD:
        for _ in range(2):  # and goes on
            plain_run(model, 1)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        rest(model)


@pytest.mark.parametrize("strategy", [acc.FULL_SHARD, acc.SHARD_GRAD_OP, acc.SHARD_OPTIM], ids=lambda s: s.name)
def test_the_backward_of_a_graph_older_than_the_weights_is_refused(world, strategy):
    world.run(2, old_graph, strategy)


CASES = {**OFTEN_CASES, **OUTPUT_CASES, **MEMORY_CASES, **BACKWARD_CASES, **MODE_CASES}
