"""Train a small model sharded over two ranks, on GPUs if there are some: torchrun --nproc-per-node 2 examples/train_tiny.py"""

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc

device = acc.init()
torch.manual_seed(0)  # every rank builds the same model; shard() checks that
block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = nn.Sequential(
    nn.Embedding(256, 64), nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Linear(64, 256)
)

model = acc.shard(model)  # each rank keeps its rows of every parameter, as DTensors
optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

for step in range(20):
    own = torch.Generator().manual_seed(dist.get_rank())  # each rank has a batch of its own
    text = torch.randint(0, 256, (8, 32), generator=own).to(device)
    loss = nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    loss.backward()  # the reduce of each unit runs under the backward of the one before
    acc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")
