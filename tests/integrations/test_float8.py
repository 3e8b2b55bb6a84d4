"""float8 training with torchao: all-gathers of one byte an element, and the losses of DDP bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion as acc
from accordion.bench.meters import Wire
from accordion.compat import fsdp2

WIDTH, LAYERS = 64, 3


def float8_net(*, sharded: bool = True) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True)
    return convert_to_float8_training(model, config=config)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, mesh) -> tuple[list[torch.Tensor], int]:
    """Train three steps; return (losses, bytes that this rank sent in all-gathers of the last one)."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_rank())
        with Wire() as wire:
            loss = model(torch.randn(16, WIDTH, generator=generator)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not isinstance(model, DistributedDataParallel):
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.detach())
    return losses, sum(count for name, count in wire.num_bytes.items() if "allgather" in name)


def in_one_byte(mesh) -> None:
    compat = float8_net()
    for module in (*compat, compat):
        fsdp2.fully_shard(module, mesh=mesh)
    models = {  # torch's FSDP2 is not among them: gloo gathers no float8, and there FSDP2 sends it as it is
        "ddp": DistributedDataParallel(float8_net(sharded=False), process_group=mesh.get_group()),
        "compat": compat,
        "acc": acc.shard(float8_net(), mesh, units={nn.Linear}),
    }
    results = {name: trained(m, torch.optim.SGD(m.parameters(), lr=0.1), mesh) for name, m in models.items()}
    for name in ("compat", "acc"):
        losses, gathered = results[name]
        assert all(map(torch.equal, losses, results["ddp"][0])), name
        # A forward gathers each layer; a backward the middle ones, since the last stays and the first needs no weight.
        assert gathered == (LAYERS + LAYERS - 2) * WIDTH * WIDTH // 2, "half of a weight is sent, one byte an element"


def test_float8_weights_are_gathered_in_one_byte_an_element(world):
    pytest.importorskip("torchao")
    world.run(2, in_one_byte)
