"""Memory and messages of three losses on each rank: torchrun --nproc-per-node 2 examples/losses.py [tokens words width]"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import accordion as acc
from accordion.bench.meters import Wire
from accordion.observe.allocations import Allocations

MIB = 2**20


class Tail(nn.Module):
    """The end of a language model: (tokens, width) and labels (tokens,) to their mean loss."""

    def __init__(self, words, width):
        super().__init__()
        self.last = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x, labels, loss):
        hidden = torch.tanh(self.last(x))
        if loss == "plain":
            return F.cross_entropy(self.head(hidden).float(), labels)
        return acc.linear_cross_entropy(hidden, self.head, labels, head_rows=loss == "head_rows")


def main(tokens=2048, words=128256, width=64):
    acc.init("cpu")
    mesh, bf16 = init_device_mesh("cpu", (dist.get_world_size(),)), acc.Precision(params=torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    x, labels = torch.randn(tokens, width), torch.randint(words, (tokens,))
    torch.manual_seed(0)
    whole, table = Tail(words, width), []
    for name in ("plain", "chunked", "head_rows"):
        model = acc.shard(copy.deepcopy(whole), mesh, units={nn.Linear}, precision=bf16)
        for _ in range(2):  # the first step learns the order of units, the second is counted
            model.zero_grad()
            with Allocations() as memory, Wire() as wire:
                memory.mark("begin")
                loss = model(x, labels, name)
                loss.backward()
                memory.mark("end")
        beside = memory.peak("begin", "end") - memory.live("end")  # the sharded gradients stay
        table.append((loss.item(), beside / MIB, sum(wire.num_bytes.values()) / MIB, name))
    if dist.get_rank() == 0:
        print(f"{tokens:,} tokens, {words:,} words, width {width}, bf16, {mesh.size()} ranks; MiB on each rank")
        print("| loss | value | peak beside shards and gradients | sent |\n|---|---|---|---|")
        for value, beside, sent, name in table:
            print(f"| `{name}` | {value:.6f} | {beside:,.1f} | {sent:,.1f} |")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
