"""Memory and messages of three losses on each rank: torchrun --nproc-per-node 2 examples/losses.py [tokens words width]"""

import copy
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import accordion as acc
from accordion.bench.meters import Allocations, Wire

MIB = 2**20


class Tail(nn.Module):
    """The end of a language model: (tokens, width) to the hidden states that its head takes."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x, labels=None):
        hidden = torch.tanh(self.last(x))
        return hidden if labels is None else F.cross_entropy(self.head(hidden).float(), labels)


def main(tokens: int = 2048, words: int = 128256, width: int = 64) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = Tail(words, width)
    x, labels = torch.randn(tokens, width), torch.randint(words, (tokens,))
    rows = []
    for name in ("plain", "chunked", "head_rows"):
        model = acc.shard(copy.deepcopy(whole), mesh, units={nn.Linear}, precision=acc.Precision(params=torch.bfloat16))
        loss_of = partial(acc.linear_cross_entropy, head=model.head, labels=labels, head_rows=name == "head_rows")
        (
            loss_of(model(x)) if name != "plain" else model(x, labels)
        ).backward()  # the first step learns the order of units
        model.zero_grad()
        with Allocations() as memory, Wire() as wire:
            memory.mark("begin")
            loss = loss_of(model(x)) if name != "plain" else model(x, labels)
            loss.backward()
            memory.mark("end")
        beside = memory.peak("begin", "end") - memory.live("end")  # the sharded gradients stay
        rows.append((name, loss.item(), beside / MIB, sum(wire.num_bytes.values()) / MIB))
    if dist.get_rank() == 0:
        print(f"{tokens:,} tokens, {words:,} words, width {width}, bf16, {mesh.size()} ranks; MiB on each rank")
        print("| loss | value | peak beside shards and gradients | sent |\n|---|---|---|---|")
        for name, value, *numbers in rows:
            print(f"| `{name}` | {value:.6f} | " + " | ".join(f"{n:,.1f}" for n in numbers) + " |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
