"""Muon for the matrices of a model, AdamW for the rest: torchrun --nproc-per-node 2 examples/muon.py [folder]

Run again, on any number of ranks, it goes on from the checkpoint in `folder`.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc

STEPS, WIDTH, BATCH = 20, 64, 48


def main(folder: str = "runs/muon") -> None:
    acc.init("cpu")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = acc.shard(nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)), units={nn.Sequential})

    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon = acc.wrap_optimizer(torch.optim.Muon(matrices, lr=0.02))
    adamw = acc.wrap_optimizer(torch.optim.AdamW(others, lr=1e-3))

    start, checkpoint = 0, acc.latest(folder)
    if checkpoint is not None:
        start = acc.load(checkpoint, model, [muon, adamw])["step"]

    inputs = torch.randn(BATCH, WIDTH)
    own_inputs = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    for step in range(start, start + STEPS):
        loss = (model(own_inputs) - own_inputs.flip(1)).square().mean()
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    acc.save(Path(folder) / f"step-{start + STEPS}", model, [muon, adamw], extra={"step": start + STEPS})


if __name__ == "__main__":
    main(*sys.argv[1:])
