"""Forward-mode differentiation, batched gradients and transforms of torch.func: as without sharding, or one sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, functional

import accordion as acc
from tests.devices import device
from tests.support.checks import assert_at_rest, assert_close
from tests.support.compare import seeded
from tests.support.ranked import on_strategy, on_world
from tests.support.reference import grads_of
from tests.support.sample import sampled


class Unit(nn.Module):
    """The last node of its tangent reads a weight, before any node of its output runs in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def pair(mesh, strategy: str = "full_shard") -> list[nn.Module]:
    """A model of four units, without sharding and with it."""
    with warnings.catch_warnings():  # torch warns once a process, of another class in each version
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
    made = [seeded(lambda: nn.Sequential(*[Unit() for _ in range(4)])) for _ in range(2)]
    acc.shard(made[1], mesh=mesh, strategy=strategy, units={Unit})
    return made


def numbers(seed: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).to(device())


def dual(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The output and its tangent."""
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(numbers(1), numbers(2))))
    assert out.tangent is not None
    return out.primal, out.tangent


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "output": lambda out, tangent: out.square().mean(),
    "tangent": lambda out, tangent: tangent.square().mean(),
    "both": lambda out, tangent: (out - tangent).square().mean(),
}


@pytest.mark.parametrize("strategy", sampled(["full_shard", "no_shard", "hybrid_shard"], "hybrid_shard".__ne__))
@on_strategy
def test_tangents_by_forward_mode_and_their_gradients(mesh, strategy: str) -> None:
    models = pair(mesh, strategy)
    for model in models:  # the sharded one learns how backwards come
        for _ in range(2):
            model(numbers(0)).mean().backward()
    for loss in LOSSES.values():
        found: list[Any] = []
        for model in models:
            model.zero_grad()
            out, tangent = dual(model)
            loss(out, tangent).backward()
            found.append((out.detach(), tangent.detach(), grads_of(model)))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
        assert torch.allclose(found[0][1], found[1][1], atol=1e-6)
        assert_close(found[1][2], found[0][2], 1e-5)
        with torch.no_grad():
            assert all(torch.equal(a, b) for a, b in zip(dual(models[1]), found[1][:2], strict=True))
    assert_at_rest(models[1])


def squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def batched(model: nn.Module, of: str) -> tuple[Tensor, ...]:
    x = numbers(1).requires_grad_()
    out = model(x).sum(0)
    wanted = [x] if of == "inputs" else list(model.parameters())
    return torch.autograd.grad(out, wanted, torch.eye(5, device=device()), is_grads_batched=True)


def of_params(model: nn.Module) -> Any:
    params = dict(model.named_parameters())
    ones = {name: torch.ones_like(p) for name, p in params.items()}
    return torch.func.jvp(lambda own: torch.func.functional_call(model, own, (numbers(1),)), (params,), (ones,))


def with_plain_params(model: nn.Module) -> Any:
    params = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, params, (numbers(1),))


REFUSED: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "jvp": ("inside a transform", lambda m: torch.func.jvp(m, (numbers(1),), (numbers(2),))),
    "jvp of a unit": ("inside a transform", lambda m: torch.func.jvp(m[1], (numbers(1),), (numbers(2),))),
    "vmap": ("inside a transform", lambda m: torch.func.vmap(m)(numbers(1))),
    "grad": ("inside a transform", lambda m: torch.func.grad(squares(m))(numbers(1))),
    "jacrev": ("inside a transform", lambda m: torch.func.jacrev(m)(numbers(1))),
    "jacfwd": ("inside a transform", lambda m: torch.func.jacfwd(m)(numbers(1))),
    "linearize": ("inside a transform", lambda m: torch.func.linearize(m, numbers(1))),
    "hessian": ("inside a transform", lambda m: torch.func.hessian(squares(m))(numbers(1))),
    "batched tangents": (
        "batched tangents",
        lambda m: functional.jacobian(m, numbers(1), vectorize=True, strategy="forward-mode"),
    ),
    "batched gradients": ("one batched backward", lambda m: batched(m, "parameters")),
    "hvp": ("double backward", lambda m: functional.hvp(squares(m), numbers(1), numbers(2))),
    "tangents of parameters": ("sharded tensor got a tangent", of_params),
    "plain parameters": ("functional_call", with_plain_params),
}


@on_world(2)
def test_what_is_not_supported_is_one_sentence(mesh) -> None:
    plain, model = pair(mesh)
    for match, use in REFUSED.values():
        for train in (True, False):
            with pytest.raises(acc.UsageError, match=match):
                use(model.train(train))
        for m in (plain, model):  # a refusal leaves nothing behind
            m.zero_grad()
            m(numbers(1)).mean().backward()
        assert_close(grads_of(model), grads_of(plain), 1e-5)
    for name in ("jvp", "vmap", "grad"):
        with torch.no_grad(), pytest.raises(acc.UsageError, match="inside a transform"):
            REFUSED[name][1](model)


ALIKE: dict[str, Callable[[nn.Module], Any]] = {
    "jacobian": lambda m: functional.jacobian(m, numbers(1)),
    "jacobian at once": lambda m: functional.jacobian(m, numbers(1), vectorize=True),
    "batched gradients of inputs": lambda m: batched(m, "inputs")[0],
}


@on_world(2)
def test_jacobians_of_inputs_and_transforms_inside_of_full_params(mesh) -> None:
    plain, model = pair(mesh)
    for use in ALIKE.values():
        assert torch.allclose(use(plain), use(model), atol=1e-6)
    with acc.full_params(model):
        for name in ("jvp", "vmap", "hessian"):
            _, use = REFUSED[name]  # outside of full_params
            torch.testing.assert_close(use(model), use(plain), rtol=1e-5, atol=1e-6)
