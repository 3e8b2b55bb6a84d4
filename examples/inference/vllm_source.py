"""A sharded model as the source of vLLM's weight transfer: the stand-in sender asks for what vLLM's trainer engines ask for.

    torchrun --nproc-per-node 2 examples/inference/vllm_source.py

With vLLM, `Source` derives from `vllm.distributed.weight_transfer.base.WeightSource`, and `WeightTransferTrainerFactory` makes
the sender, whose `send_weights()` is called on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from receiver import Receiver
from torch import Tensor, nn

import accordion as acc


class ParamMeta(NamedTuple):  # of vllm.distributed.weight_transfer.base
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """vLLM's `WeightSource`: shapes without a gather, and a new stream for each round of updates."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype

    def metadata(self) -> list[ParamMeta]:
        named = self.model.named_parameters()
        return [ParamMeta(name, self.dtype, tuple(param.shape)) for name, param in named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        # The first rank alone talks to vLLM; the others take part in the gathers and get nothing.
        yield from acc.stream_weights(self.model, ranks="first", dtype=self.dtype)


class Sender:
    """A stand-in for vLLM's trainer engine: it announces the tensors of `source`, then sends each one when it comes."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def send_weights(self) -> list[str]:
        """Send all weights once; return their names, [] on ranks that are not the first."""
        announced = {meta.name: meta for meta in self.source.metadata()}
        if dist.get_rank():
            assert list(self.source) == []
            return []
        most = max(meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in announced.values())
        with Receiver(most) as receiver:
            for name, tensor in self.source:
                assert (tensor.dtype, tuple(tensor.shape)) == announced[name][1:], name
                receiver.receive(name, tensor)
            return receiver.names


def train(steps: int = 2) -> list[list[str]]:
    """Train a small model; return the names that arrive after each step."""
    torch.manual_seed(0)
    model = acc.shard(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)))
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    sender, arrived = Sender(Source(model, torch.bfloat16)), []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        arrived.append(sender.send_weights())
    return arrived


if __name__ == "__main__":
    acc.init("cpu")
    print(dist.get_rank(), train())
