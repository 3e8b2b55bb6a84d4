"""Seconds of `stream_weights` and of `full_state_dict`, in turns.

    torchrun --nproc-per-node 2 benchmarks/stream.py [MIB] [ROUNDS]

Each rank reads the first element of every tensor. MIB: size of the model in float32, 1,024 by default.
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

WIDTH = 1024


def main(mib: int, rounds: int) -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib * 2**20 // (4 * WIDTH * WIDTH))]
    model = acc.shard(nn.Sequential(*[nn.Sequential(layer) for layer in layers]), units={nn.Linear})
    first = acc.stream_weights(model, changed_since="start")
    for _ in first:
        pass

    def stream(**options: Any) -> None:
        for _, tensor in acc.stream_weights(model, **options):
            tensor.view(-1)[0].item()

    calls: dict[str, Callable[[], object]] = {
        "full_state_dict, first rank": lambda: acc.full_state_dict(model),
        "full_state_dict, all ranks, on the device": lambda: acc.full_state_dict(model, rank0_only=False, cpu=False),
        "stream_weights": stream,
        "stream_weights, first rank": lambda: stream(ranks="first"),
        "stream_weights, bfloat16": lambda: stream(dtype=torch.bfloat16),
        "stream_weights, nothing changed": lambda: stream(changed_since=first),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            call()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print(f"{mib} MiB, {dist.get_world_size()} ranks, {rounds} rounds: median seconds (least, most)")
        for name, each in seconds.items():
            print(f"{name:45}{statistics.median(each):8.2f}  ({min(each):.2f}, {max(each):.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    words = [int(word) for word in sys.argv[1:]]
    main(*words, *[1024, 5][len(words) :])
