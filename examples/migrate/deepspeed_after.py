"""Train by a ds_config.json, without DeepSpeed; run it with torchrun --nproc-per-node 2.

What deepspeed.initialize did is written out: the model is sharded, the optimizer and the scheduler are made, and the loop steps
them. `accordion train --deepspeed ds_config.json` needs no program.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion.compat import deepspeed

CONFIG = Path(__file__).with_name("ds_config.json")


def train(steps=40, device_type="cpu"):
    settings = deepspeed.read(CONFIG)
    sizes = settings.batch(dist.get_world_size())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 1))
    model = acc.shard(net, settings.mesh(device_type), **settings.shard)  # was: deepspeed.initialize
    optimizer = acc.wrap_optimizer(settings.optimizer(model.parameters()))
    scheduler = settings.scheduler(optimizer)
    scaler = settings.scaler(device_type)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(sizes.accumulation):
            draw = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
            x = torch.randn(sizes.micro_batch, 8, generator=draw).to(device_type)
            loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
            scaler.scale(loss / sizes.accumulation).backward()  # was: engine.backward(loss)
            total += loss.item() / sizes.accumulation
        scaler.unscale_(optimizer)  # was, to the end of the loop: engine.step()
        if settings.clip:
            acc.clip_grad_norm_(model, settings.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    losses = train(device_type="cuda" if gpus else "cpu")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
