"""Whose rows the states of an optimizer are: a mark on each tensor, which pickles and copies of it keep, and DCP does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced
from accordion.errors import UsageError

MARK = "_accordion_rows"  # attribute of a state
BITS = 20  # of a rank, where one number tells three
Mark: TypeAlias = tuple[int, int, tuple[int, ...], tuple[tuple[str, int, int], ...]]
"""(rank, number of ranks, shape of its rows, (placement, which of how many) on each axis that cuts): plain values, so that a
mark passes `torch.load(weights_only=True)`. It is on the tensors and not beside them because DCP joins and cuts rows itself,
and would give one rank's word on them to all.
"""


def mark_rows(optimizer: Optimizer) -> None:
    """Mark the states of sharded parameters as those of this rank's rows: all but numbers, and tables that several share."""
    states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]
    count = Counter(id(value) for state in states for value in state.values())
    for p, mark in _marks(optimizer):
        for value in optimizer.state[p].values() if mark is not None and p in optimizer.state else ():
            if isinstance(value, Tensor) and value.dim() and count[id(value)] == 1:
                setattr(value, MARK, mark)


def refuse_other_rows(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `UsageError` on every rank where one of them was given states of other rows than its own; a collective.

    States without a mark are taken: helpers of torch and others cut them for the rank that asks.
    """
    found = _other_rows(optimizer, state_dict)
    if not dist.is_initialized():
        return
    # One number for each rank, of which the largest is told: the rank, counted from 1, whose states it was given, of how many.
    rank, theirs, num_ranks = (0, 0, 0) if found is None else (dist.get_rank() + 1, *found[:2])
    for mesh in dict.fromkeys(p.device_mesh for p in _params(optimizer) if isinstance(p, DTensor)):
        device = torch.device(mesh.device_type)
        links = [link for link in (Communicator(group, device) for group in mesh.get_all_groups()) if not link.is_fake]
        packed = torch.tensor((rank << 2 * BITS) + (theirs << BITS) + num_ranks, device=device)
        told = int(reduced(packed, links, dist.ReduceOp.MAX).item())
        rank, theirs, num_ranks = (told >> shift & (1 << BITS) - 1 for shift in (2 * BITS, BITS, 0))
    if rank:
        raise UsageError(
            f"rank {rank - 1} was given the optimizer's states of rank {theirs} of {num_ranks}, which are of other rows than its "
            "own; the state dict of an optimizer on shards is one rank's: let every rank write its own and load it on as many "
            "ranks, or use acc.save and acc.load."
        )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _marks(optimizer: Optimizer) -> Iterator[tuple[Tensor, Mark | None]]:
    """Each parameter and the mark of its rows on this rank, None where it is not sharded."""
    for p in _params(optimizer):
        yield p, _mark(p) if isinstance(p, DTensor) else None


def _mark(p: DTensor) -> Mark:
    mesh = p.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or [0] * mesh.ndim
    axes = zip(p.placements, coordinate, mesh.shape, strict=True)
    cut = tuple((str(how), i, n) for how, i, n in axes if not isinstance(how, Replicate) and n > 1)
    return dist.get_rank(), mesh.size(), tuple(_torch.local_of(p).shape), cut


def _other_rows(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Mark | None:
    """The first mark in `state_dict` that is of other rows than the parameter's here."""
    try:
        indices = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        states = state_dict["state"]
    except (KeyError, TypeError):
        return None  # `load_state_dict` says what is wrong
    for index, (_, mark) in zip(indices, _marks(optimizer), strict=False):
        state = states.get(index)
        for value in state.values() if isinstance(state, Mapping) and mark is not None else ():
            given = getattr(value, MARK, None) if isinstance(value, Tensor) else None
            if given is not None and mark is not None and given[2:] != mark[2:]:
                return given  # type: ignore[no-any-return]
    return None
