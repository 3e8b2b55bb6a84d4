"""Jacobians of inputs, batched gradients and transforms of torch.func: as without sharding, or one sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional

import accordion as acc
from tests.devices import device
from tests.support.checks import assert_close
from tests.support.compare import seeded
from tests.support.ranked import on_world
from tests.support.reference import grads_of


class Unit(nn.Module):
    """The last node of its tangent reads a weight, before any node of its output runs in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def pair(mesh) -> list[nn.Module]:
    """A model of four units, without sharding and with it."""
    with warnings.catch_warnings():  # torch warns once a process, of another class in each version
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))
    made = [seeded(lambda: nn.Sequential(*[Unit() for _ in range(4)])) for _ in range(2)]
    acc.shard(made[1], mesh=mesh, units={Unit})
    return made


def numbers(seed: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)).to(device())


def squares(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def batched(model: nn.Module) -> Tensor:
    x = numbers(1).requires_grad_()
    return torch.autograd.grad(model(x).sum(0), x, torch.eye(5, device=device()), is_grads_batched=True)[0]


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
    "batched gradients of inputs": batched,
}
IN_FULL: dict[str, Callable[[nn.Module], Any]] = {
    "jvp": lambda m: torch.func.jvp(m, (numbers(1),), (numbers(2),))[1],
    "vmap": lambda m: torch.func.vmap(m)(numbers(1)),
    "hessian": lambda m: torch.func.hessian(squares(m))(numbers(1)),
}


@on_world(2)
def test_jacobians_of_inputs_and_transforms_inside_of_full_params(mesh) -> None:
    plain, model = pair(mesh)
    for use in ALIKE.values():
        assert torch.allclose(use(plain), use(model), atol=1e-6)
    with acc.full_params(model):
        for use in IN_FULL.values():
            assert torch.allclose(use(plain), use(model), atol=1e-6)
