"""Muon on sharded matrices equals the unsharded optimizer, bit for bit, and its work is divided over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import accordion as acc
from accordion.config import STRATEGIES
from accordion.engine.communicator import Communicator
from tests import devices
from tests.support.ranked import on_world, under_strategies
from tests.support.reference import assert_close, params_of, whole

SHAPES = [(12, 8), (8, 24), (5, 7), (16, 16), (1, 6), (3, 40), (9, 9)]  # not all divide by 2, 3 or 4


class Matrices(nn.Module):
    """A weight of each shape, and a bias; gradients are set by the tests."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(columns, rows, bias=rows == 16) for rows, columns in SHAPES)
        self.to(devices.device(), dtype)

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in self.layers:
            total = total + layer(x[:, : layer.in_features]).square().sum(1)
        return total.mean()


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return (the matrices, the other parameters)."""
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def muon(model: nn.Module, **options: Any) -> torch.optim.Muon:
    tall, rest = split(model)[0][:2], split(model)[0][2:]
    groups = [{"params": tall, "lr": 0.3, "adjust_lr_fn": "match_rms_adamw"}, {"params": rest, "ns_steps": 3}]
    return torch.optim.Muon(groups, **{"lr": 0.02, "weight_decay": 0.1, **options})


def inputs(step: int) -> Tensor:
    """Return the batch of a step, the same on every rank, so that the mean of gradients does not round."""
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).to(devices.device())


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: Iterator[int] | range) -> None:
    for step in steps:
        model(inputs(step).to(next(model.parameters()).dtype)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


FORMS: dict[str, dict[str, Any]] = {"plain": {}, "no nesterov": {"nesterov": False, "lr": torch.tensor(0.05)}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_it_equals_the_unsharded_optimizer(world, num_ranks: int, form: str) -> None:
    for name, strategy in STRATEGIES.items():
        shape = (2, 2) if strategy.hybrid else (num_ranks,)
        if not strategy.hybrid or num_ranks == 4:
            world.run_mesh(shape, ("replicate", "shard")[-len(shape) :], _equals, name, form)


def _equals(mesh: Any, strategy: str, form: str) -> None:
    expected, model = Matrices(), acc.shard(Matrices(), mesh=mesh, strategy=STRATEGIES[strategy])
    optimizer = acc.wrap_optimizer(muon(model, **FORMS[form]))
    train(expected, [muon(expected, **FORMS[form])], range(4))
    train(model, [optimizer], range(4))
    assert_close(params_of(model), dict(expected.named_parameters()), 0.0)
