"""Sequence parallelism in a trace: a model whose attention exchanges heads, and the first rank's part of a batch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from accordion.errors import UsageError
from accordion.sequence.parallel import sequence_parallel

LEAST_TOKENS = 4096  # of a rank's part of a sequence, in a search: activations of fewer tokens seldom decide what fits


def check_sequence(model: nn.Module, tokens: int, num_ranks: int) -> None:
    """Raise `UsageError` if `num_ranks` ranks cannot share sequences of `tokens` tokens in `model`, a model of transformers."""
    from accordion.sequence.registry import checked

    if tokens % num_ranks:
        raise UsageError(
            f"sequence is {num_ranks}, which does not divide the {tokens} tokens of --seq; take a divisor."
        )
    checked(model, num_ranks)


def sequences_for(model: nn.Module, tokens: int) -> list[int]:
    """Return the numbers of ranks that can share each sequence of `tokens` tokens in `model`, so that each rank has
    `LEAST_TOKENS` tokens or more. They are powers of two, in ascending order, for example [2, 4]; [] if there are none."""
    sequences = list[int]()
    for num_ranks in (2**i for i in range(1, tokens.bit_length()) if tokens >> i >= LEAST_TOKENS):
        with suppress(UsageError):
            check_sequence(model, tokens, num_ranks)
            sequences.append(num_ranks)
    return sequences


def share_sequences(model: nn.Module, num_ranks: int) -> None:
    """Let the first `num_ranks` ranks share each sequence in the attention of `model`, in place. Creates a process group of
    these ranks. Does nothing if `num_ranks` is 1. Raises `UsageError` if this attention cannot run over several ranks."""
    if num_ranks > 1:
        sequence_parallel(model, DeviceMesh.from_group(dist.new_group(range(num_ranks)), "cpu"))


def part_of(batch: Any, num_ranks: int) -> Any:
    """Return a copy of the nested `batch`, in which each tensor is split over its dim 1, the tokens, into `num_ranks` equal
    parts, and replaced by a copy of the first part. Return `batch` itself if `num_ranks` is 1."""
    if num_ranks == 1:
        return batch

    def part(x: Tensor) -> Tensor:
        return x.narrow(1, 0, x.shape[1] // num_ranks).clone()  # a copy, which does not keep the whole alive

    return tree_map_only(Tensor, part, batch)
