"""Measure what `acc.observe` adds to a step, in turns: torchrun --nproc-per-node 2 benchmarks/observe.py [rounds]

The model is the GPT of `accordion bench`. The step in which allocations are counted (on CPU) is left out.
"""

import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import accordion as acc
from accordion.bench.model import GPT

VOCAB, WIDTH, BLOCKS, SEQ = 4096, 384, 6, 128


def main(rounds: int = 20) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = acc.shard(GPT(vocab=VOCAB, width=WIDTH, blocks=BLOCKS, heads=6))
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    tokens = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(dist.get_rank()))

    def seconds() -> float:
        dist.barrier()
        start = time.perf_counter()
        cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    ratios = []
    for number in range(rounds + 2):
        times = {}
        for name in ("off", "on") if number % 2 else ("on", "off"):
            with acc.observe(model, steps=2) if name == "on" else nullcontext():
                seconds()
                times[name] = min(seconds(), seconds())
        ratios.append(times["on"] / times["off"])
    if dist.get_rank() == 0:
        low, middle, high = statistics.quantiles(ratios[2:], n=4)
        print(f"an observed step over one that is not: {middle:.3f} (quartiles {low:.3f}-{high:.3f}, {rounds} rounds)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
