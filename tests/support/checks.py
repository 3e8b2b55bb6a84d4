"""Helpers for tests on several ranks: meshes of a strategy, reduced gradients of unsharded models, comparisons."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion import _torch
from accordion.config import STRATEGIES
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.gathered import gathered
from tests.support.reference import assert_close as assert_close
from tests.support.sample import sampled

FLAT, HYBRID = ("shard",), ("replicate", "shard")


def mesh_of(strategy: acc.Strategy, num_ranks: int = 2) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return ((2, 2), HYBRID) if strategy.hybrid else ((num_ranks,), FLAT)


def run_all(world, fn, num_ranks: int = 2, but: Sequence[str] = ()) -> None:
    """Run `fn(mesh, strategy)` on ranks of the pool `world` under every strategy whose name is not in `but`."""
    for strategy in (strategy for name, strategy in STRATEGIES.items() if name not in but):
        world.run_mesh(*mesh_of(strategy, num_ranks), fn, strategy)


def under(*names: str) -> pytest.MarkDecorator:
    """Return a decorator that parametrizes a test's `strategy`, a name: with `names` in `make test`, all in `make test-all`."""
    return pytest.mark.parametrize("strategy", sampled(STRATEGIES, names.__contains__))


def run_under(world, strategy: str, fn: Callable[..., Any], num_ranks: int = 2) -> None:
    """Run `fn(mesh, strategy)` on ranks of the pool `world` under the strategy of this name."""
    world.run_mesh(*mesh_of(STRATEGIES[strategy], num_ranks), fn, STRATEGIES[strategy])


@contextmanager
def logged() -> Iterator[list[str]]:
    """Context manager that yields a list, which gets the messages that the library logs in this process, from INFO on."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("accordion")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in units_of(model)]


def assert_at_rest(model: nn.Module) -> None:
    """Assert that no unit is in use (has a lease), and that all parameters of modules are sharded."""
    held = {unit.name: unit.leases for unit in units_of(model) if unit.leases}
    assert not held, f"leases at rest: {held}, {engine_in(model).strategy.name}"
    for module in model.modules():
        assert all(isinstance(p, DTensor) for p in module._parameters.values() if p is not None), (
            "full parameters shown"
        )


def batch(model: nn.Module, step: int = 0) -> tuple[Tensor, Tensor]:
    return models.batch(step, 0, dist.get_rank(), vocab=model.embed.num_embeddings)


def one_loss(model: nn.Module, step: int = 0) -> Tensor:
    tokens, targets = batch(model, step)
    return models.loss_of(model(tokens), targets)


def everyone(mesh: Any, value: Any) -> list[Any]:
    """Return `value` of every rank of the mesh, in rank order. Collective."""
    values = [value]
    for axis in reversed(range(mesh.ndim)):
        values = [one for part in gathered(values, mesh.get_group(axis)) for one in part]
    return values


def sums_over_ranks(mesh: Any, grads: Mapping[str, Tensor | None]) -> tuple[dict[str, Tensor | None], dict[str, float]]:
    """Return (name -> sum of gradients over ranks, in rank order and at least float32, or None if no rank has one; name ->
    largest absolute value that a rank has). Collective.

    Gradients may cancel, so the error of a sum in another order is relative to these largest values.
    """
    ranks = everyone(mesh, dict(grads))
    sums: dict[str, Tensor | None] = {}
    largest: dict[str, float] = {}
    for name in grads:
        some = [part[name] for part in ranks if part[name] is not None]
        sums[name] = sum(g.float() if g.itemsize < 4 else g for g in some) if some else None
        largest[name] = max((g.double().abs().max().item() for g in some if g.numel()), default=0.0)
    return sums, largest


def mean_grads(mesh: Any, model: nn.Module) -> dict[str, Tensor | None]:
    """Return name -> mean over ranks of the gradients of an unsharded model; None if no rank has one. Collective."""
    params = dict(model.named_parameters())
    sums, _ = sums_over_ranks(mesh, {name: p.grad for name, p in params.items()})
    return {name: None if s is None else (s / mesh.size()).to(params[name].dtype) for name, s in sums.items()}


def assert_as_exact(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Fail unless all tensors are float64 and the norm of each error is at most `tolerance` times the norm of the wanted
    tensor. Only another order of sums passes."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert found[name].dtype == expected.dtype == torch.float64, name
        off = torch.linalg.vector_norm(found[name].cpu() - expected.cpu())
        assert off <= tolerance * torch.linalg.vector_norm(expected.cpu()), f"{name} differs by {off}"


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name in wanted if not torch.equal(found[name].cpu(), wanted[name].cpu())]


def leave_together(mesh) -> None:
    """Wait until all ranks of the mesh have called this. Uses the job's store, since the engine would notice a collective."""
    store, size = _torch.default_store(), mesh.size()
    arrived = store.add(f"leave_together/{size}", 1)
    while store.add(f"leave_together/{size}", 0) < -(-arrived // size) * size:
        time.sleep(0.05)


class PlantedError(RuntimeError):
    pass


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train with the batch of each number in `steps`: forward, backward, optimizer step."""
    for step in steps:
        one_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict of a sharded model on every rank. Collective."""
    return acc.full_state_dict(model, rank0_only=False)


def step_all(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Step each optimizer and clear its gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
