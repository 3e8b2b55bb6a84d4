"""Seconds and peak bytes of `stream_weights` and of `full_state_dict`, in turns.

    torchrun --nproc-per-node 2 benchmarks/stream.py [MIB] [ROUNDS]

Each rank reads the first element of every tensor that it gets. MIB: size of the model in float32, 1,024 by default. Peak bytes
are those of one more round that is not timed: the most that was allocated besides the shards, on the rank that needs most.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion.observe.allocations import Allocations

WIDTH = 1024


def main(mib: int, rounds: int) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib * 2**20 // (4 * WIDTH * WIDTH))]
    model = acc.shard(nn.Sequential(*[nn.Sequential(layer) for layer in layers]), units={nn.Linear})
    before = acc.stream_weights(model, changed_since="start")
    for _ in before:
        pass

    def stream(**options: Any) -> None:
        for _, tensor in acc.stream_weights(model, **options):
            tensor.view(-1)[0].item()
            del tensor

    def full(**options: Any) -> None:
        for tensor in acc.full_state_dict(model, **options).values():
            tensor.view(-1)[0].item()

    calls: dict[str, Callable[[], None]] = {
        "full_state_dict, all ranks": lambda: full(rank0_only=False, cpu=False),
        "stream_weights, all ranks": stream,
        "full_state_dict, first rank": full,
        "stream_weights, first rank": lambda: stream(ranks="first"),
        "stream_weights, all ranks, bfloat16": lambda: stream(dtype=torch.bfloat16),
        "stream_weights, nothing changed": lambda: stream(changed_since=before),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            begun_s = time.perf_counter()
            call()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun_s)
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    if dist.get_rank() == 0:
        print(f"{mib} MiB, {dist.get_world_size()} ranks, {rounds} rounds: median seconds (least, most), peak MiB")
        for name, each in seconds.items():
            spread = f"({min(each):.2f}, {max(each):.2f})"
            print(f"{name:36}{statistics.median(each):8.2f}  {spread:15}{peaks[name] / 2**20:8.0f}")
    dist.destroy_process_group()


def peak_bytes(call: Callable[[], None]) -> int:
    """Run `call`, and return the largest number of bytes that it had allocated at once on any rank. Collective."""
    with Allocations() as memory:
        memory.mark("begin")
        call()
        memory.mark("end")
    peak = torch.tensor(memory.peak("begin", "end") - memory.live("begin"))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    main(*words, *[1024, 5][len(words) :])
