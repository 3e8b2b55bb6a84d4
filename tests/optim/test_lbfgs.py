"""LBFGS on sharded parameters, wrapped by the caller or at its first step, equals the unsharded one with uneven rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from tests.devices import device, here
from tests.support.checks import assert_close, run_all
from tests.support.offloads import disk
from tests.support.reference import params_of

ROWS = 7


def net() -> nn.Module:
    """Return a model in float64, as a line search may decide differently for another order of sums."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return here(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double())


def data(ranks: range) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, ROWS, n, generator=g, dtype=torch.float64) for n in (5, 3))
    chosen = list(ranks)
    return x[chosen].flatten(0, 1).to(device()), y[chosen].flatten(0, 1).to(device())


def losses_of(model: nn.Module, optimizer: Any, ranks: range, steps: int = 2) -> list[float]:
    x, y = data(ranks)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def made(model: nn.Module, search: str | None) -> torch.optim.LBFGS:
    lr = 0.2 if search is None else 1.0
    return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4, history_size=3, line_search_fn=search)


def steps_as_unsharded(mesh, strategy: acc.Strategy = acc.FULL_SHARD) -> None:
    own, everyone = range(dist.get_rank(), dist.get_rank() + 1), range(mesh.size())
    for search in (None, "strong_wolfe"):
        plain = net()
        losses = losses_of(plain, made(plain, search), everyone)
        for wraps in (False, True):
            model = acc.shard(net(), mesh=mesh, strategy=strategy)
            optimizer = made(model, search)
            if wraps:
                assert acc.wrap_optimizer(optimizer) is optimizer
            assert losses_of(model, optimizer, own) == pytest.approx(losses, rel=1e-6)
            assert isinstance(optimizer, torch.optim.LBFGS)
            assert_close(params_of(model), dict(plain.named_parameters()), 1e-6)


def test_lbfgs_steps_as_unsharded_under_every_strategy(world):
    run_all(world, steps_as_unsharded)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_lbfgs_steps_as_unsharded_on_any_number_of_ranks(world, num_ranks):
    world.run(num_ranks, steps_as_unsharded)


def saves(mesh, path: Path) -> None:
    model = acc.shard(net(), mesh=mesh)
    optimizer = made(model, "strong_wolfe")
    losses_of(model, optimizer, range(dist.get_rank(), dist.get_rank() + 1))
    acc.save(path, model, optimizer)


def loads(mesh, path: Path) -> None:
    plain = net()
    losses = losses_of(plain, made(plain, "strong_wolfe"), range(2), 4)
    model = acc.shard(net(), mesh=mesh)
    optimizer = made(model, "strong_wolfe")
    acc.load(path, model, optimizer)
    assert losses_of(model, optimizer, range(2)) == pytest.approx(losses[2:], rel=1e-6)
    assert_close(params_of(model), dict(plain.named_parameters()), 1e-6)


def test_lbfgs_history_loads_on_another_number_of_ranks(world, tmp_path):
    world.run(2, saves, tmp_path / "c")
    world.run(3, loads, tmp_path / "c")


def refused(mesh, path: Path) -> None:
    model = acc.shard(net(), mesh=mesh, offload=disk(path))
    with pytest.raises(acc.UsageError, match="LBFGS steps whole vectors"):
        acc.wrap_optimizer(made(model, None))


def test_lbfgs_with_states_on_disk_is_refused(world, tmp_path):
    world.run(2, refused, tmp_path)
