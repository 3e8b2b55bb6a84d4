"""Count the peak of three losses beside the planned one: torchrun --nproc-per-node 2 benchmarks/loss_peak.py [tokens words width]

The plain loss is counted at an eighth and at a quarter of the tokens, and the line through both gives its peak.
"""

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc
from accordion.observe.allocations import Allocations
from accordion.plan.replay.peak import peak_of

MIB = 2**20
SHARDING = acc.Sharding(units=[nn.Linear], precision=acc.Precision(params=torch.bfloat16))
LOSSES = ("plain", "chunked", "head_rows")


def loss_of(model: Any, batch: Any, loss: str) -> Tensor:
    hidden, head = torch.tanh(model[0](batch[0])), model[1]
    if loss == "plain":
        return F.cross_entropy(head(hidden).float(), batch[1])
    return acc.linear_cross_entropy(hidden, head, batch[1], head_rows=loss == "head_rows")


def counted(whole: nn.Sequential, loss: str, tokens: int) -> float:
    """Shard a copy of `whole`, run two steps with `loss`, and return the peak of the second in MiB, without the shards."""
    model = acc.shard(copy.deepcopy(whole), sharding=SHARDING)
    head: Any = whole[1]
    for num_tokens in (2, tokens):  # the first step learns the order of units
        model.zero_grad()
        batch = torch.randn(num_tokens, head.in_features), torch.randint(head.out_features, (num_tokens,))
        with Allocations() as memory:
            memory.mark("begin")
            loss_of(model, batch, loss).backward()
            memory.mark("end")
    return float(memory.peak("begin", "end")) / MIB


def planned(loss: str, tokens: int, words: int, width: int) -> float:
    """Return the planned peak of a step in MiB, without the memory that is in use between steps. Call it before
    `init_process_group`: a plan needs a process without a process group."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, words, bias=False))
        batch = torch.empty(tokens, width), torch.empty(tokens, dtype=torch.int64)
    workload = acc.Workload(model, lambda model, batch: loss_of(model, batch, loss), batch)
    peak = peak_of(acc.plan(workload, acc.Cluster(gpus=[int(os.environ["WORLD_SIZE"])]), SHARDING).log)
    return (peak.num_bytes - peak.held_bytes) / MIB


def main(tokens: int = 8192, words: int = 128256, width: int = 64) -> None:
    is_first = os.environ["RANK"] == "0"
    plans = {loss: planned(loss, tokens, words, width) for loss in LOSSES if is_first}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(width, width), nn.Linear(width, words, bias=False))
    torch.manual_seed(dist.get_rank())
    few, more = (counted(whole, "plain", tokens // part) for part in (8, 4))
    peaks = {"plain": more + 6 * (more - few)}  # a step of tokens // 8 adds the same each time
    for loss in LOSSES[1:]:
        peaks[loss] = counted(whole, loss, tokens)
    if is_first:
        print(f"{tokens:,} tokens, {words:,} words, width {width}, bf16, {dist.get_world_size()} ranks; MiB on each")
        print("| loss | planned | counted | of plain |\n|---|---|---|---|")
        for loss, peak in peaks.items():
            print(f"| `{loss}` | {plans[loss]:,.1f} | {peak:,.1f} | {peak / peaks['plain']:.3f} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
