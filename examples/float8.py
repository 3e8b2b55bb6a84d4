"""Train in float8 with torchao, all-gathers of one byte an element: torchrun --nproc-per-node 2 examples/float8.py [fsdp2|acc]

`acc` (the default) shards with acc.shard, `fsdp2` with accordion.compat.fsdp2. Needs torchao.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

import accordion as acc
from accordion.compat.fsdp2 import fully_shard

device = acc.init()
torch.manual_seed(0)  # every rank builds the same model
block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
layers = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(256, 64), layers, nn.Linear(64, 256))

# Each weight that torchao converts is cast to float8 before it is gathered. `emulate`: for devices without float8 products.
emulate = not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9))
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "linear" in name)

if "fsdp2" in sys.argv[1:]:
    for layer in layers.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
else:
    model = acc.shard(model)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

for step in range(20):
    own = torch.Generator().manual_seed(dist.get_rank())  # each rank has a batch of its own
    text = torch.randint(0, 256, (8, 32), generator=own).to(device)
    loss = nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for the scales of all weights
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")
