"""A model that fully_shard shards: torchrun --nproc-per-node 2 examples/migrate/fsdp2_after.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from accordion.compat.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCAB, WIDTH, MICRO_BATCHES = 256, 64, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # (batch, seq)
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # (batch, seq, vocab)


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
mesh = init_device_mesh(device, (dist.get_world_size(),))
torch.manual_seed(0)
model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device == "cuda" else None, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
fully_shard(model, mesh=mesh, mp_policy=policy)
assert isinstance(model, FSDPModule)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
texts = torch.Generator().manual_seed(dist.get_rank())

for step in range(20):
    for micro in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
        text = torch.randint(0, VOCAB // 8, (8, 32), generator=texts).to(device)
        loss = nn.functional.cross_entropy(model(text).flatten(0, 1).float(), text.flatten()) / MICRO_BATCHES
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {MICRO_BATCHES * loss.item():.3f} norm {norm.item():.2f}")
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    print(f"{len(state)} tensors, sum {sum(t.double().sum().item() for t in state.values()):.1f}")
dist.destroy_process_group()
