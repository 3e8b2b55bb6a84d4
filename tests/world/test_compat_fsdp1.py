"""FullyShardedDataParallel of compat.fsdp1: what torch's users write, against the unsharded model and torch's own class."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.compat import fsdp1
from accordion.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedGradScaler,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP
from accordion.compat.fsdp1 import wrap as wrapping
from accordion.errors import UsageError
from tests.world.checks import assert_at_rest

BF16, FP16 = torch.bfloat16, torch.float16


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class Net(nn.Module):
    """Blocks between two layers; a buffer that training moves."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.shape[0]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def seeded(make: Any = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def unsharded_steps(num_ranks: int, steps: int = 3, make: Any = Net, clip: float | None = None, **kind: Any) -> Any:
    """The model trained on all ranks' batches, its losses of each rank and step, and its gradients of the last step."""
    model = seeded(make)
    optimizer = kind.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        each = [model(batch(step, rank)).pow(2).mean() for rank in range(num_ranks)]
        (sum(each) / num_ranks).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        losses.append([float(loss.detach()) for loss in each])
        optimizer.step()
    return model, losses, optimizer


def train(model: nn.Module, rank: int, steps: int = 3, clip: float | None = None, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step, rank)).pow(2).mean()
        loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


SIZE = functools.partial(wrapping.size_based_auto_wrap_policy, min_num_params=200)
POLICIES: dict[str, Any] = {
    "none": None,
    "size": SIZE,
    "transformer": functools.partial(wrapping.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "always": wrapping.always_wrap_policy,
    "lambda": functools.partial(wrapping.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "module": wrapping.ModuleWrapPolicy({Block}),
    "custom": wrapping.CustomPolicy(lambda m: isinstance(m, (Block, nn.Linear))),
}
UNITS = {"none": 1, "size": 3, "transformer": 3, "always": None, "lambda": 3, "module": 3, "custom": 9}


def trains_as_unsharded(mesh: DeviceMesh, policy: str, strategy: str) -> str:
    rank, num_ranks = dist.get_rank(), mesh.size()
    shared: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy[strategy]}
    net = seeded()
    if policy == "always":  # a list has no forward: it is refused, as is said below
        net.blocks = nn.Sequential(*net.blocks)
    model = FSDP(net, auto_wrap_policy=POLICIES[policy], **shared)
    expected, losses, _ = unsharded_steps(num_ranks, clip=0.5)
    assert train(model, rank, clip=0.5) == pytest.approx([step[rank] for step in losses], abs=1e-5)
    assert_same_state({k: v for k, v in model.state_dict().items() if k != "seen"},
                      {k: v for k, v in expected.state_dict().items() if k != "seen"}, 1e-5)  # fmt: skip
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    assert_at_rest(model)
    return repr(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_make_units_and_train_as_unsharded(world, policy):
    shown = world.run(2, trains_as_unsharded, policy, "FULL_SHARD")[0]
    assert UNITS[policy] is None or shown.count("FullyShardedDataParallel(") == UNITS[policy]


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_strategies(world, strategy):
    world.run(4, trains_as_unsharded, "transformer", strategy)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_hybrid_strategies(world, strategy):
    world.run_mesh((2, 2), ("replicate", "shard"), trains_as_unsharded, "transformer", strategy)
