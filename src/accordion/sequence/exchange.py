"""The all-to-all of sequence parallelism: a part of each sequence with all heads becomes whole sequences with some heads."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from accordion.engine.communicator import Communicator, gathered_rows
from accordion.errors import UsageError

log = logging.getLogger("accordion")


def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention,
    **options: Any,
) -> Tensor:
    """Return the attention of `q` over `k` and `v`, of which each rank of `mesh` passes its part of every sequence.

    Call it in the attention of a model of your own, on all ranks of `mesh` together. One all-to-all gives each rank whole
    sequences of some of the heads, with which `kernel` runs. A second one returns the rank's part of the result with all heads.
    The backward sends the gradients the opposite way, by all-to-alls too.

    Args:
        q: (batch, heads, tokens of this rank, head dim). The number of heads must be a multiple of the ranks of `mesh`.
        k: as `q`, with the number of key/value heads, which divides the number of heads. If it is no multiple of the number of
            ranks, each key/value head is sent to several ranks, which the first rank logs once.
        v: as `k`; it may have another head dim.
        mesh: 1-D, the ranks that share each sequence, in the order of their parts.
        kernel: called as `kernel(q, k, v, **options)` with (batch, heads of this rank, all tokens, head dim).
        options: arguments of `kernel`, for whole sequences: `is_causal=True`, `enable_gqa=True` for grouped heads, or an
            `attn_mask` (..., all tokens, all tokens). With a `dropout_p`, the ranks draw different random numbers.

    Returns: (batch, heads, tokens of this rank, head dim of `v`).

    Raises `UsageError` if the ranks do not divide the heads, if `q` and `k` differ in tokens, or if `mesh` is not 1-D.
    """
    group = group_of(mesh)
    q, k, v = whole_sequences(q, k, v, group)
    with numbers_of_rank(group, q.device) if options.get("dropout_p") else nullcontext():
        out = kernel(q, k, v, **options)
    return exchange(out, group, split=2, join=1)


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a 1-D `mesh`; any other mesh raises `UsageError`."""
    if mesh.ndim != 1:
        raise UsageError(
            f"the ranks that share each sequence are a 1-D mesh, and this one has the axes {mesh.mesh_dim_names}; pass a slice "
            'of it, such as mesh["sp"].'
        )
    return mesh.get_group()


def whole_sequences(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, v) of whole sequences and of this rank's heads, by one all-to-all; by two if `v` has a head dim of its own.

    `q`, `k` and `v` are (batch, all heads, tokens of this rank, head dim); results are (batch, heads of this rank, all tokens,
    head dim). Raises `UsageError` if the ranks do not divide the heads of `q`, or if `q` and `k` differ in tokens.
    """
    if k.shape[2] != q.shape[2]:
        raise UsageError(
            f"sequence parallelism got {q.shape[2]} queries and {k.shape[2]} keys on this rank; key/value caches and cross "
            "attention are not supported, so pass use_cache=False."
        )
    num_ranks = dist.get_world_size(group)
    check_heads(q.shape[1], num_ranks)
    times = num_ranks // math.gcd(k.shape[1], num_ranks)  # how often each key/value head is sent
    if times > 1:
        if dist.get_rank(group) == 0 and not torch.compiler.is_compiling():
            _log_repeated(k.shape[1], num_ranks, times)
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    wholes = list[Tensor]()
    for bundle in [(q, k, v)] if v.shape[-1] == q.shape[-1] else [(q, k), (v,)]:
        # By rank: its heads of q, then of k, then of v.
        by_rank = torch.cat([heads.unflatten(1, (num_ranks, -1)) for heads in bundle], 2)
        whole = exchange(by_rank.flatten(1, 2), group, split=1, join=2)
        wholes += whole.split([heads.shape[1] // num_ranks for heads in bundle], 1)
    return wholes[0], wholes[1], wholes[2]


def check_heads(num_heads: int, num_ranks: int) -> None:
    """Raise `UsageError` if `num_heads`, of attention, is no multiple of `num_ranks`, the ranks that share each sequence."""
    if num_heads % num_ranks:
        raise UsageError(
            f"{num_heads} attention heads cannot be divided over the {num_ranks} ranks of a sequence; choose a number of ranks "
            f"that divides {num_heads}."
        )


@cache
def _log_repeated(num_heads: int, num_ranks: int, times: int) -> None:
    log.info("%d key/value heads over %d sequence ranks: each is sent to %d ranks", num_heads, num_ranks, times)


@contextmanager
def numbers_of_rank(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Context manager in which the ranks of `group` draw different random numbers on `device`, also if their seeds are equal.

    The start seeds the generator of `device` with a number drawn from the CPU generator, plus the rank; the end restores the
    generator of `device`. Activation checkpointing restores the CPU generator first, so a recomputation draws the same numbers.
    """
    # Drawn before the fork, so that the next layer draws others.
    seed = int(torch.randint(2**62, (), device="cpu")) + dist.get_rank(group)
    on_host = device.type == "cpu"
    with torch.random.fork_rng([] if on_host else [device], device_type="cpu" if on_host else device.type):
        (torch.default_generator if on_host else torch.get_device_module(device)).manual_seed(seed)
        yield


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    """Split `x` along dim `split` into one part per rank of `group`, and send each part to its rank. Return the parts that this
    rank received, joined in rank order along dim `join`. One all-to-all, and the opposite one in the backward; none if `group`
    has one rank."""
    if dist.get_world_size(group) == 1:
        return x
    out: Tensor = _Exchange.apply(x, group, split, join)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Autograd function of `exchange` for several ranks. The backward swaps `split` and `join`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _exchanged(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, ctx.group, ctx.join, ctx.split), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    # For one sequence this copies no heads on the way out: a batch dim of 1 leaves them contiguous.
    sent = x.unflatten(split, (dist.get_world_size(group), -1)).movedim(split, 0).contiguous()  # (ranks, ...)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


def gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the `part` of each rank, (rows, tokens of a rank), joined in rank order to (rows, all tokens). A collective."""
    parts = gathered_rows(part.flatten(), Communicator(group, part.device))  # (ranks, rows * tokens of a rank)
    return parts.view(-1, *part.shape).movedim(0, 1).flatten(1)
