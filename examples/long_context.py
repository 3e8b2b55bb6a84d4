"""Learn what only whole sequences show, on parts of them: torchrun --nproc-per-node 2 examples/long_context.py [tokens]"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import accordion as acc

TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
WORDS, WIDTH, HEADS = 16, 64, 4


class Block(nn.Module):
    """Attention and a feed-forward layer. Attention is all that a long sequence needs of other ranks."""

    def __init__(self, sequence: DeviceMesh) -> None:
        super().__init__()
        self.sequence, self.qkv, self.out = sequence, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.feed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens of this rank, width)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = acc.sequence_attention(q, k, v, self.sequence, is_causal=True)  # (batch, heads, tokens, head dim)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.feed(F.gelu(x))


class Language(nn.Module):
    def __init__(self, sequence: DeviceMesh) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(sequence), Block(sequence)), nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor
    ) -> Tensor:
        x = self.blocks(self.words(input_ids) + self.places(position_ids))
        total = F.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return total / num_items_in_batch


device = acc.init()
num_sequence_ranks = 2
mesh = init_device_mesh(
    device.type, (dist.get_world_size() // num_sequence_ranks, num_sequence_ranks), mesh_dim_names=("dp", "sp")
)
torch.manual_seed(0)
model = acc.shard(Language(mesh["sp"]).to(device))  # over all ranks, those that share sequences too
optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

for step in range(101):
    # The ranks of one sequence group draw the same batch: half of each text is random, and the other half repeats it.
    random = torch.Generator().manual_seed(step * mesh["dp"].size() + mesh["dp"].get_local_rank())
    half = torch.randint(WORDS, (16, TOKENS // 2), generator=random).to(device)
    text = torch.cat([half, half], 1)
    labels = text.clone()
    labels[:, : TOKENS // 2] = -100  # what is random cannot be learned
    parts = acc.split_sequence({"input_ids": text, "labels": labels}, mesh["sp"])
    del parts["labels"]  # this model takes the shifted ones
    loss = model(**parts)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        dist.all_reduce(loss := loss.detach())  # each rank has the loss of its tokens; their mean is that of the batch
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {loss / dist.get_world_size():.3f}, {parts['input_ids'].shape[1]} of {TOKENS} tokens a rank"
            )
