"""LBFGS on sharded parameters equals the unsharded one, also with rows that do not divide by the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from tests.devices import device, here
from tests.support.checks import assert_close
from tests.support.ranked import on_mesh, under_strategies
from tests.support.reference import params_of

ROWS = 7


def net() -> nn.Module:
    """Return a model in float64, as a line search may decide differently for another order of sums."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return here(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double())


def lbfgs(model: nn.Module, search: str | None = "strong_wolfe") -> torch.optim.LBFGS:
    lr = 0.2 if search is None else 1.0
    return torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4, history_size=3, line_search_fn=search)


def losses_of(model: nn.Module, optimizer: torch.optim.LBFGS, ranks: slice, steps: int = 2) -> list[float]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, ROWS, n, generator=g, dtype=torch.float64)[ranks].to(device()) for n in (5, 3))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


def own() -> slice:
    return slice(dist.get_rank(), dist.get_rank() + 1)


@under_strategies("full_shard", num_ranks=3)
def test_lbfgs_steps_as_unsharded(mesh, strategy: acc.Strategy) -> None:
    for search, wraps in ((None, False), ("strong_wolfe", True)):
        plain, model = net(), acc.shard(net(), mesh=mesh, strategy=strategy)
        optimizer = lbfgs(model, search)
        if wraps:
            assert acc.wrap_optimizer(optimizer) is optimizer
        losses = losses_of(plain, lbfgs(plain, search), slice(mesh.size()))
        assert losses_of(model, optimizer, own()) == pytest.approx(losses, rel=1e-6)
        assert_close(params_of(model), dict(plain.named_parameters()), 1e-6)


def saves(mesh, path: Path) -> None:
    model = acc.shard(net(), mesh=mesh)
    optimizer = lbfgs(model)
    losses_of(model, optimizer, own())
    acc.save(path, model, optimizer)


def loads(mesh, path: Path) -> None:
    plain, model = net(), acc.shard(net(), mesh=mesh)
    optimizer = lbfgs(model)
    acc.load(path, model, optimizer)
    losses = losses_of(plain, lbfgs(plain), slice(2), 4)
    assert losses_of(model, optimizer, slice(2)) == pytest.approx(losses[2:], rel=1e-6)
    assert_close(params_of(model), dict(plain.named_parameters()), 1e-6)


def test_lbfgs_history_loads_on_another_number_of_ranks(world, tmp_path):
    world.run(2, saves, tmp_path / "c")
    world.run(3, loads, tmp_path / "c")


@on_mesh((2, 2), ("rows", "columns"))
def test_lbfgs_with_a_step_by_chunks_or_several_meshes_raises(mesh) -> None:
    model = acc.shard(net(), mesh=mesh["rows"], offload=acc.Offload(optimizer="host", step="device"))
    with pytest.raises(acc.UsageError, match=r"LBFGS steps parameters of .*leave out that Offload"):
        lbfgs(model).step(float)
    both = nn.ModuleList(acc.shard(net(), mesh=mesh[name]) for name in ("rows", "columns"))
    with pytest.raises(acc.UsageError, match=r"LBFGS .* several meshes; make one optimizer for each"):
        lbfgs(both).step(float)
