"""A program of two ranks: rank 0 raises with a collective in flight that rank 1, which sleeps, never joins.

Arguments: where it raises, what else the model does, the kind of device, a folder, and RANK of this process.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc

TIMEOUT_S = 900.0  # of the process group
WIDTH = 320  # a weight is a message of its own: gloo sends it from rank to rank
AT = 1  # the block after which rank 0 raises
rank, where, mode, device, folder = int(sys.argv[1]), *sys.argv[2:6]
ends = False


def end() -> None:
    if rank:
        time.sleep(TIMEOUT_S)
    raise ValueError("this rank fails alone")


class EndsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_end: bool) -> Tensor:
        ctx.is_end = is_end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.is_end:
            end()
        return grad, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if ends and where == "backward, absent gradients":
            return x + self.a(x)
        return x + self.b(torch.relu(self.a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            # The other rank has ended one block earlier.
            if ends and where == "forward" and i == AT - rank:
                end()
            x = EndsInBackward.apply(x, ends and i == AT + rank)
        return x


def main() -> None:
    global ends
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:simccl"
    if device != "cpu":
        torch.get_device_module(device).set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    offload = {
        "host": acc.Offload(params="host", optimizer="host"),
        "disk": acc.Offload(params=f"disk:{folder}", optimizer=f"disk:{folder}"),
        "activations": acc.Offload(activations="host"),
    }.get(mode)
    model = acc.shard(
        Model().to(device),
        dist.init_device_mesh(device, (2,)),
        units=[Block],
        offload=offload,
        checkpoint_activations="full" if mode == "activations" else "none",
    )
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    x = torch.ones(4, WIDTH, device=device)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if mode == "save":
        acc.save(f"{folder}/save", model, optimizer, background=True).wait()
    dist.barrier()
    ends = True
    model(x).square().mean().backward()


main()
