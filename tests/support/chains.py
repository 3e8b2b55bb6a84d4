"""`Chain`: a model of a layer, units and a layer, whose units a test can call in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.devices import device
from tests.support.compare import Case, Pair, check_step, rest

WIDTH = 7
FEW = (2, 3)  # where more ranks can add nothing but time


def numbers(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*(shape or (3, WIDTH)), requires_grad=grad, device=device())


def mean_square(out: Tensor) -> Tensor:
    loss = out.square().mean()
    loss.backward()
    return loss.detach()


def plain_run(model: nn.Module, step: int) -> Tensor:
    return mean_square(model(numbers()))


class Chain(nn.Module):
    """A layer, `count` units and a layer. `call(model, x)`: returns the output of the units; None: they are called in order."""

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
    """Return the `Case` of a `Chain` of two units. `more`: fields of the case."""
    more.setdefault("run", plain_run)
    units = more.pop("units", lambda name, module: name.startswith("units.") and name.count(".") == 1)
    return Case(build=lambda: Chain(kind, call=call), units=units, **more)


def steps_again(mesh, model: nn.Module, plain: nn.Module, run: Callable[..., Any] = plain_run) -> None:
    """Check two steps that change no weight, after steps that failed: the first clears what those left, the second is normal."""
    for step in range(2):
        check_step(mesh, model, plain, run, step)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    rest(model)


class Plain:
    """A plain object with tensors in attributes, as no tree function of torch visits."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.inner = {"twice": x * 2}


def around_each(model: Chain, x: Tensor, reentrant: bool) -> Tensor:
    for unit in model.units:
        x = checkpoint(unit, x, use_reentrant=reentrant)
    return x
