"""A small transformer, trained by a ds_config.json; run it with torchrun --nproc-per-node 2."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from accordion.compat import deepspeed

VOCAB, WIDTH = 64, 32
CONFIG = str(Path(__file__).with_name("ds_config.json"))


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


def train(steps=20, device="cpu", config=CONFIG):
    torch.manual_seed(0)
    net = Model()
    model, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    texts, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        for _ in range(model.gradient_accumulation_steps()):
            loss = loss_of(model, texts, device)
            model.backward(loss)
            model.step()
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
