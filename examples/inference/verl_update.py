"""A sharded model behind verl's per-tensor update of a rollout engine, with the tensors that changed alone.

    torchrun --nproc-per-node 2 examples/inference/verl_update.py

With verl, the engine's method that returns the generator of (name, tensor) for `rollout.update_weights(...)` returns the stream.
The stand-in rollout, one on each rank, packs tensors into buckets as verl's does, and hands them to a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from receiver import Receiver
from torch import Tensor, nn

import accordion as acc

BUCKET_BYTES = 2**14


def in_buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield lists of (name, tensor) of at most `BUCKET_BYTES` bytes, or one larger tensor."""
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket


class Rollout:
    """A stand-in for verl's rollout; `update_weights` takes the generator of named tensors."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Receive the tensors; return their names."""
        first = len(self.receiver.names)
        for bucket in in_buckets(tensors):
            for name, tensor in bucket:
                self.receiver.receive(name, tensor)
        return self.receiver.names[first:]


def train(steps: int = 3) -> list[list[str]]:
    """Train the head of a small model, and before the last step all of it; return the names that arrive in each update."""
    torch.manual_seed(0)
    model = acc.shard(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    arrived = []
    with Receiver(2**16) as receiver:
        rollout = Rollout(receiver)
        stream = acc.stream_weights(model, changed_since="start")
        arrived.append(rollout.update_weights(stream))
        for step in range(steps):
            model[0].requires_grad_(step == steps - 1)
            torch.manual_seed(10 * step + dist.get_rank())
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stream = acc.stream_weights(model, changed_since=stream)
            arrived.append(rollout.update_weights(stream))
    return arrived


if __name__ == "__main__":
    acc.init("cpu")
    print(dist.get_rank(), train())
