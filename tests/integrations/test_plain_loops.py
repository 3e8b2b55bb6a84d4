"""`shard` without a trainer's integration: plain loops learn as unsharded, common uses of a library's model work or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from tests.integrations.jobs import library_job, mean, needs
from tests.support.ranked import on_job

pytestmark = pytest.mark.cpu("plain tensors lie there, batches are drawn and compared there")
STEPS, WIDTH = 4, 8


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


def gan(prepare: Callable[[nn.Module], nn.Module], ranks: list[int]) -> list[float]:
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
    assert mean(found) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len({round(loss, 3) for loss in expected}) > 1, "it learned something"


@on_job(2)
def test_a_plain_loop_of_two_models_learns_as_unsharded(mesh: Any) -> None:
    alike(gan(lambda model: acc.shard(model, mesh), [mesh.get_local_rank()]), gan(lambda model: model, [0, 1]))


# -- a library's loop


@needs("accelerate")
@on_job(2)
def test_a_sharded_model_in_accelerates_prepare(mesh: Any) -> None:
    import accelerate

    with library_job():
        model = acc.shard(nn.Linear(8, 8), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = accelerate.Accelerator(cpu=True)
        with pytest.raises(
            acc.UsageError, match=r"this model is sharded, and DistributedDataParallel.*accordion.integr"
        ):
            theirs.prepare(model, optimizer)
    with library_job():
        from accordion.integrations.accelerate import Accelerator

        one = Accelerator(cpu=True)
        model, optimizer = one.prepare(model, optimizer)
        one.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
