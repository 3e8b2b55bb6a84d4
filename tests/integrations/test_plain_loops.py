"""Training loops with `shard` alone learn as the unsharded run over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion as acc
from tests.integrations.jobs import needs, torchrun_job
from tests.support.ranked import on_job

pytestmark = pytest.mark.cpu("batches are drawn and compared there")
STEPS, WIDTH = 4, 8
Prepare = Callable[[nn.Module], nn.Module]


def net(seed: int, out: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()), nn.Linear(16, out))


def drawn(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def descend(optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> float:
    """Make a step down the mean loss of this process's batches, and return the mean."""
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def gan(prepare: Prepare, ranks: list[int]) -> list[float]:
    """Train a generator and a discriminator; gradients of the generator's loss for the discriminator are not used."""
    generator, critic = prepare(net(0, WIDTH)), prepare(net(1, 1))
    first, second = optimizer_of(generator), optimizer_of(critic)
    found = []
    for step in range(STEPS):
        noise, real = ([drawn(rank, 2 * step + kind) for rank in ranks] for kind in (0, 1))
        judged = [(critic(x), critic(generator(z).detach())) for x, z in zip(real, noise, strict=True)]
        found.append(descend(second, [F.softplus(-good).mean() + F.softplus(bad).mean() for good, bad in judged]))
        found.append(descend(first, [F.softplus(-critic(generator(z))).mean() for z in noise]))
        second.zero_grad()
    return found


def alike(found: list[float], expected: list[float]) -> None:
    """Compare the mean over ranks of the losses with those of the unsharded run."""
    mean = torch.tensor(found)
    dist.all_reduce(mean)
    assert (mean / dist.get_world_size()).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len({round(loss, 3) for loss in expected}) > 1, "it learned something"


@on_job(2)
def test_a_plain_loop_of_two_models_learns_as_unsharded(mesh: Any) -> None:
    alike(gan(lambda model: acc.shard(model, mesh), [mesh.get_local_rank()]), gan(lambda model: model, [0, 1]))


def regress(model: nn.Module, optimizer: Any, ranks: list[int], backward: Callable[[Tensor], None]) -> list[float]:
    found = []
    for step in range(STEPS):
        losses = [F.mse_loss(model(x := drawn(rank, step)), x.flip(1)) for rank in ranks]
        loss = torch.stack(losses).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@needs("lightning")
@on_job(2)
def test_fabrics_own_strategy_takes_a_plain_shard(mesh: Any) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    plain = net(0, WIDTH)
    expected = regress(plain, optimizer_of(plain), [0, 1], lambda loss: loss.backward())
    with torchrun_job():
        strategy = ModelParallelStrategy(
            lambda model, meshes: acc.shard(model, meshes["data_parallel"]),
            data_parallel_size=2,
            tensor_parallel_size=1,
        )
        one = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        one.launch()
        model = one.setup_module(net(0, WIDTH))
        optimizer = one.setup_optimizers(optimizer_of(model))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        alike(regress(model, optimizer, [dist.get_rank()], one.backward), expected)
