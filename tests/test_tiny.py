"""The whole library in one file, to be read first: shard, step, save, and resume on another number of ranks.

The fixture `world` has rank processes: `world.run(2, function, ...)` calls `function(mesh, ...)` on two of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from tests import devices
from tests.pool import Pool

GLOBAL_BATCH, FEATURES = 12, 6


def build() -> tuple[nn.Module, torch.Tensor]:
    """Return the same model and data on every rank: a stack of units, and inputs of shape (GLOBAL_BATCH, FEATURES)."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, FEATURES)) for _ in range(3)]
    return nn.Sequential(*blocks).to(devices.device()), torch.randn(GLOBAL_BATCH, FEATURES, device=devices.device())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    (model(inputs) - inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def unsharded_weights(steps: int) -> dict[str, Tensor]:
    model, inputs = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        step(model, optimizer, inputs)
    return dict(model.state_dict())


def train(mesh, strategy: acc.Strategy, steps: int, resume: Path | None = None, save: Path | None = None) -> None:
    """Each rank trains on its own rows of the batch, and ends with the weights of the unsharded model."""
    model, inputs = build()
    num_steps_before = 0
    acc.shard(model, mesh, strategy=strategy, units={nn.Sequential})
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if resume is not None:
        num_steps_before = acc.load(resume, model, optimizer)["step"]

    own_inputs = inputs.chunk(mesh.size())[mesh.get_rank()]
    for _ in range(steps):
        step(model, optimizer, own_inputs)

    expected = unsharded_weights(num_steps_before + steps)
    for name, weight in acc.full_state_dict(model, rank0_only=False).items():
        torch.testing.assert_close(weight, expected[name].cpu(), msg=name)
    if save is not None:
        acc.save(save, model, optimizer, extra={"step": num_steps_before + steps})


@pytest.mark.parametrize("strategy", [acc.FULL_SHARD, acc.SHARD_GRAD_OP, acc.SHARD_OPTIM, acc.NO_SHARD])
def test_a_sharded_model_trains_as_the_unsharded_one(world: Pool, strategy: acc.Strategy) -> None:
    world.run(2, train, strategy, 4)


def test_a_checkpoint_resumes_on_another_number_of_ranks(world: Pool, tmp_path: Path) -> None:
    world.run(2, train, acc.FULL_SHARD, 3, None, tmp_path / "first")
    world.run(3, train, acc.SHARD_OPTIM, 3, tmp_path / "first", tmp_path / "second")
    world.run(1, train, acc.NO_SHARD, 3, tmp_path / "second")
