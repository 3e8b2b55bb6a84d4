"""A small transformer, sharded by fully_shard; run it with torchrun --nproc-per-node 2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from accordion.compat.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCAB, WIDTH, MICRO_BATCHES = 64, 32, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, text):  # (batch, seq)
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # (batch, seq, vocab)


def loss_of(model, texts, device):
    text = torch.randint(0, VOCAB // 8, (8, 16), generator=texts).to(device)
    return nn.functional.cross_entropy(model(text).flatten(0, 1).float(), text.flatten())


def train(steps=20, device="cpu"):
    torch.manual_seed(0)
    model, mesh = Model(), init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device != "cpu" else None, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            loss = loss_of(model, texts, device)
            (loss / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    losses = train(device=f"cuda:{torch.cuda.current_device()}" if gpus else "cpu")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()
