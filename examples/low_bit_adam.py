"""Adam with low-bit states on shards: torchrun --nproc-per-node 2 examples/low_bit_adam.py FOLDER

Prints the bytes of the states of torchao's optimizers on each rank, planned and counted, and the loss. Start it again on any
number of ranks, and it resumes from FOLDER. Needs torchao.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

import accordion as acc

WIDTH, LAYERS = 512, 4
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adamw_8bit": AdamW8bit, "fp8": AdamWFp8, "adamw_4bit": AdamW4bit}
PLANNED = [name for name in OPTIMIZERS if name.startswith("adamw")]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def planned_bytes(optimizer: str, num_ranks: int) -> int:
    """Return the bytes of states on a rank by `acc.plan`, which runs in a process without a process group."""
    workload = acc.Workload(build(), loss_of, torch.randn(8, WIDTH), optimizer=optimizer)
    cluster, search = acc.Cluster(gpu="h100", gpus=[num_ranks]), acc.Search(micro_batches=[8])
    plan = acc.plan(workload, cluster, acc.Sharding(precision="fp32", units="Sequential"), search)
    return plan.as_dict()["breakdown_bytes"]["optimizer"]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of codes, scales and other states that have more than one element, on this rank."""
    total = 0
    for state in optimizer.state.values():
        for value in state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
            total += sum(t.nbytes for t in [getattr(local, name) for name in names] or [local] if t.dim())
    return total


def main(folder: str) -> None:
    num_ranks, is_first = int(os.environ["WORLD_SIZE"]), os.environ["RANK"] == "0"
    planned = {name: planned_bytes(name, num_ranks) for name in PLANNED} if is_first else {}
    acc.init("cpu")
    torch.compiler.set_stance("force_eager")  # on a GPU leave this out: torchao compiles its step
    for name, kind in OPTIMIZERS.items():
        model = acc.shard(build(), state_block=256)
        optimizer = acc.wrap_optimizer(kind(model.parameters(), lr=1e-3))
        path = f"{folder}/{name}"
        start = acc.load(path, model, optimizer) if os.path.exists(path) else 0
        for step in range(start, start + 3):
            torch.manual_seed(1000 * step + dist.get_rank())
            loss = loss_of(model, torch.randn(8, WIDTH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        acc.save(path, model, optimizer, extra=start + 3)
        if is_first:
            counted, num_elements = state_bytes(optimizer), sum(p.numel() for p in model.parameters()) / num_ranks
            words = f"{planned[name]:,} bytes planned, " if name in planned else ""
            print(f"{name}: {words}{counted:,} counted, {counted / num_elements:.3f} an element; loss {loss:.5f}")


if __name__ == "__main__":
    main(sys.argv[1])
