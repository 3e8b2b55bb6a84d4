"""Average the weights, and evaluate and export the average: torchrun --nproc-per-node 2 examples/ema.py [folder]"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc

device = acc.init()
torch.manual_seed(0)
model = acc.shard(nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1)))
optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-2))
ema = acc.EMA(model, decay=[0.9, 0.98], place="host")  # two averages in host memory, each rank's rows alone


def batch(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (256, 16) and what the model shall learn of them (256, 1)."""
    own = torch.Generator().manual_seed(seed)
    inputs, errors = torch.randn(256, 16, generator=own), torch.randn(256, 1, generator=own)
    return inputs.to(device), (inputs[:, :4].prod(1, keepdim=True) + noise * errors).to(device)


def error() -> float:
    """Return the error on inputs that no rank has trained on, without noise."""
    inputs, wanted = batch(seed=1_000_000, noise=0.0)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), wanted))


for step in range(300):
    inputs, noisy = batch(seed=step * dist.get_world_size() + dist.get_rank(), noise=0.5)
    nn.functional.mse_loss(model(inputs), noisy).backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()  # no communication

errors = {"weights": error()}
for decay in (0.9, 0.98):
    with ema.applied(decay):
        errors[f"average of {decay}"] = error()

folder = sys.argv[1] if len(sys.argv) > 1 else f"{tempfile.gettempdir()}/accordion-ema"
acc.save(folder, model, optimizer, state={"ema": ema})  # any number of ranks may load it
acc.load(folder, model, optimizer, state={"ema": ema})
with ema.applied(0.98):
    weights = acc.full_state_dict(model)  # the whole average, on the first rank

if dist.get_rank() == 0:
    print("\n".join(f"{name}: error {value:.4f}" for name, value in errors.items()))
    sharded = sum(unit.parameter_bytes for unit in acc.describe(model).units)
    print(f"bytes on this rank: parameters {sharded}, both averages {ema.num_bytes}")
    print("exported:", {name: tuple(weight.shape) for name, weight in weights.items()})
