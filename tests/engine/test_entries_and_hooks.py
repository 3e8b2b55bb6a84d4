"""Methods beside forward, hooks and anomaly detection: each sees what it sees unsharded."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from tests.support.chains import Chain, mean_square, numbers, plain_run, steps_again
from tests.support.checks import PlantedError
from tests.support.compare import (
    Pair,
    assert_alike,
    check_step,
    rest,
    seed_of,
    seeded,
)
from tests.support.ranked import on_strategy, on_worlds
from tests.support.sample import sampled

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


ENTRIES: dict[str, Callable[[Entered, Tensor], Any]] = {
    "encode": lambda model, x: model.encode(x, times=2)["x"],
    "generate": lambda model, x: model.generate(x, count=2),
    "of a unit": lambda model, x: sum(model.units[1].encode(x)),
    "all": lambda model, x: (
        model(x) @ model.encode(x)["x"].t()[:3] + model.units[0].encode(model.generate(x, 1)[0])[0].sum()
    ),
}


def enter(model: Entered, step: int, name: str, mode: Any = torch.enable_grad) -> Any:
    with mode():
        return ENTRIES[name](model, numbers())


@on_worlds
def test_methods_beside_forward_use_full_parameters(mesh) -> None:
    plain, model = seeded(Entered), acc.shard(seeded(Entered), mesh=mesh, units={Encodes})
    for name in ("encode", "generate", "raises"):
        acc.entry_point(model, name)
    for unit in model.units:
        acc.entry_point(unit, "encode")
    for mode, name in itertools.product((torch.no_grad, torch.inference_mode, torch.enable_grad), ENTRIES):
        check_step(mesh, model, plain, functools.partial(enter, name=name, mode=mode), 7)
    for name in ENTRIES:
        run = functools.partial(lambda m, step, name: mean_square(enter(m, step, name)), name=name)
        check_step(mesh, model, plain, run, 8, exact=False, tolerance=2e-6)
        with pytest.raises(PlantedError):
            model.raises(numbers())
    for mode in (torch.no_grad, torch.inference_mode):  # after training
        check_step(mesh, model, plain, functools.partial(enter, name="all", mode=mode), 9)
    steps_again(mesh, model, plain)
    with pytest.raises(acc.UsageError, match="Linear is no unit"):
        acc.entry_point(model.first, "forward")
    with pytest.raises(acc.UsageError, match="is no unit"):
        acc.entry_point(Entered(), "encode")


# -- hooks


Seen = list[tuple[str, list[Tensor | None]]]


def note(seen: Seen, what: str, *trees: Any) -> None:
    flat: list[Tensor | None] = []
    for tree in trees:
        for t in tree if isinstance(tree, (tuple, list)) else (tree,):
            flat.append(t.detach().clone() if isinstance(t, Tensor) else None)  # noqa: PERF401
    seen.append((what, flat))


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weights that a hook of a unit reads, as for norms in a log: full ones."""
    return [module.a.weight] if isinstance(module, Pair) else []


def attach_hooks(model: Chain, seen: Seen, change: bool) -> None:
    """Hooks of every kind on the root, units, and modules inside; with `change` they also change what passes."""
    modules = {"root": model, "unit 0": model.units[0], "unit 1": model.units[1], "inside": model.units[1].a}
    for name, module in modules.items():

        def pre(m: nn.Module, args: Any, name: str = name) -> Any:
            note(seen, f"pre {name}", args)
            note(seen, f"weights of {name}", weights_of(m))
            return (args[0] * 1.5,) if change else None

        def pre_kw(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> Any:
            note(seen, f"pre with kwargs {name}", args)
            return (args, kwargs) if change else None

        def post(m: nn.Module, args: Any, out: Tensor, name: str = name) -> Any:
            note(seen, f"post {name}", args, out)
            note(seen, f"weights of {name}", weights_of(m))
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


@pytest.mark.parametrize(
    ("when", "change"),
    sampled(itertools.product(("after", "before"), (True, False)), lambda when, change: change == (when == "after")),
)
@on_worlds
def test_hooks_of_modules_and_activations_see_what_they_see_unsharded(mesh, when: str, change: bool) -> None:
    seen: dict[int, Seen] = defaultdict(list)
    build = functools.partial(Chain, call=functools.partial(watch_activations, seen=seen))
    plain, model = seeded(build), seeded(build)
    if when == "after":
        acc.shard(model, mesh=mesh, units={Pair})
    for m in (plain, model):
        attach_hooks(m, seen[id(m)], change)
    if when == "before":
        acc.shard(model, mesh=mesh, units={Pair})

    def run(m: nn.Module, step: int) -> None:
        seen[id(m)].clear()
        x = numbers(grad=True)
        mean_square(m(x))
        note(seen[id(m)], "input", x.grad)
        for i in range(2):
            note(seen[id(m)], f"retained {i}", m.__dict__.pop(f"kept {i}").grad)

    for step in range(2):
        check_step(mesh, model, plain, run, step)
        assert [what for what, _ in seen[id(model)]] == [what for what, _ in seen[id(plain)]]
        assert len({what for what, _ in seen[id(plain)]}) > 20
        for (what, mine), (_, theirs) in zip(seen[id(model)], seen[id(plain)], strict=True):
            is_exact = mesh.size() == 2 or what.startswith("weights")  # a sum of two has one order
            assert_alike(mine, theirs, 0.0 if is_exact else 1e-6)
        rest(model)


@on_worlds
def test_hooks_of_parameters_see_the_sharded_gradient_once(mesh) -> None:
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
        check_step(mesh, model, plain, plain_run, step)
        assert sorted(order["sharded"]) == sorted(order["plain"])
        assert len(set(order["plain"])) == 2 * len(list(plain.parameters())) == len(order["plain"])
        for kind in order:
            for name, _ in plain.named_parameters():
                assert order[kind].index(f"grad {name}") < order[kind].index(f"acc {name}")
            order[kind].clear()
        assert len(sharded) == step + 1
        assert isinstance(sharded[-1], DTensor)
        assert sharded[-1] is model.first.weight.grad
        rest(model)
    with acc.no_sync(model):
        plain_run(model, 0)
    assert order["sharded"] == [], "nothing is accumulated without communication"


@pytest.mark.parametrize("of", ["parameter", "node"])
@on_worlds
def test_an_optimizer_may_step_in_the_hooks_of_parameters(mesh, of: str) -> None:
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


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_strategy
def test_anomaly_detection_around_a_step(mesh, strategy: str) -> None:
    plain, model = seeded(Chain), acc.shard(seeded(Chain), mesh=mesh, units={Pair}, strategy=strategy)
    with torch.autograd.set_detect_anomaly(True):
        steps_again(mesh, model, plain)
        with pytest.raises(RuntimeError, match="returned nan values"):  # and it finds what it is for
            (model(numbers() * float("nan"))).square().mean().backward()
    for _ in range(4):  # what waits for a backward that never came is let go after some calls
        with torch.no_grad():
            model(numbers())
    steps_again(mesh, model, plain)


@on_worlds
def test_attributes_of_parameters_survive(mesh) -> None:
    """Attributes of parameters are read by optimizers and schedulers (muP, `no_weight_decay`, `sequence_parallel`)."""
    model = seeded(Chain)
    twin = nn.Parameter(model.first.weight.data)
    twin.of_twin = True  # two objects over one memory become one parameter, with the pre-backward nodes of both
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


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@on_worlds
def test_hooks_set_on_a_parameter_before_and_their_handles_go_on(mesh, kind: str) -> None:
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
            seen[m].clear()
            for handle in handles[m][: 6 - num_left]:
                handle.remove()
        check_step(mesh, model, plain, plain_run, num_left)
        assert len(seen[model]) == num_left
        assert sorted(seen[model]) == sorted(seen[plain])
