"""Time a step of Muon on shards and on one rank: torchrun --nproc-per-node 2 benchmarks/muon.py [layers width rounds]

Steps are interleaved; the time of each is that of the slowest rank, which computes with one thread.
"""

import copy
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion.engine.communicator import Communicator

sent = {"bytes": 0}


def count_bytes() -> None:
    exchange = Communicator.exchange

    def counting(self: Communicator, sends: Any) -> Any:
        sent["bytes"] += sum((sum(to) - to[self.rank]) * message.itemsize for _, message, _, to in sends)
        return exchange(self, sends)

    Communicator.exchange = counting  # type: ignore[method-assign]


def seconds(optimizer: torch.optim.Optimizer) -> float:
    dist.barrier()
    start = time.perf_counter()
    optimizer.step()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main(layers: int = 4, width: int = 128, rounds: int = 15) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    sharded, on_dtensors = (acc.shard(copy.deepcopy(plain)) for _ in range(2))
    times: dict[str, list[float]] = {"unsharded": [], "wrapped": [], "on DTensors": []}
    optimizers = [torch.optim.Muon(m.parameters()) for m in (plain, sharded, on_dtensors)]
    acc.wrap_optimizer(optimizers[1])
    for model in (plain, sharded, on_dtensors):
        model(torch.randn(8, width)).square().mean().backward()
    count_bytes()
    for _ in range(rounds + 2):
        for name, optimizer in zip(times, optimizers, strict=True):
            times[name].append(seconds(optimizer))
    if dist.get_rank() == 0:
        for name, values in times.items():
            ratios = [a / b for a, b in zip(values[2:], times["unsharded"][2:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{name}: {statistics.median(values[2:]):.4f} s; of unsharded {middle:.2f} ({low:.2f}-{high:.2f})")
        rows = layers * width * width // dist.get_world_size()
        print(
            f"bytes sent in a step by a rank, for each element of its rows: {sent['bytes'] / (rounds + 2) / rows:.2f}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
