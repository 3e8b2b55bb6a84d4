"""Rows of tensors that come from a file: refuse those that another rank wrote.

A mesh keeps its coordinate when it is pickled. Plain states of an optimizer get a mark, which pickles and copies of them keep,
and DCP does not.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
MADE = "_accordion_made"  # attribute of a mesh: the process and the address at which it was made
BITS = 20  # of a rank, where one number tells three
Mark: TypeAlias = tuple[int, int, tuple[int, ...], tuple[tuple[str, int, int], ...]]
"""(position on the mesh, number of ranks, shape of its rows, (placement, which of how many) on each axis that cuts): plain
values, so that a mark passes `torch.load(weights_only=True)`. It is on the tensors and not beside them because DCP joins and
cuts rows itself, and would give one rank's word on them to all.
"""


def mark_rows(optimizer: Optimizer) -> None:
    """Mark the states of sharded parameters as those of this rank's rows: all but numbers, and tables that several share."""
    states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]
    count = Counter(id(value) for state in states for value in state.values())
    for p in _params(optimizer):
        if isinstance(p, DTensor) and p in optimizer.state:
            mark = _mark(p)
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor) and value.dim() and count[id(value)] == 1:
                    setattr(value, MARK, mark)


def refuse_other_rows(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `UsageError` on every rank where one of them was given states of other rows than its own; a collective.

    States without a mark are taken: helpers of torch and others cut them for the rank that asks.
    """
    if dist.is_initialized():
        marks = _marks_of_others(optimizer, state_dict)
        _refuse_on_all(next(marks, None), _params(optimizer), "the optimizer's states")


def mark_meshes(params: Iterable[Tensor]) -> None:
    """Mark the mesh of each sharded parameter, so that a copy of it from a file is known as one.

    Identity does not tell: DTensor gives the result of an operator the equal mesh that it met first.
    """
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        vars(mesh)[MADE] = os.getpid(), id(mesh)


def refuse_rows_of_others(pairs: Iterable[tuple[object, Tensor]], what: str) -> None:
    """Raise `UsageError` on every rank if one of them was given rows of another rank, as in a file that `torch.save` wrote.

    Collective if there are tensors from a file; tensors of this process are compared with their targets on this rank alone.

    Args:
        pairs: each given value with the tensor of this model that it is for.
        what: names the given tensors in the message.
    """
    sharded = [(given, own) for given, own in pairs if isinstance(given, DTensor) and isinstance(own, DTensor)]
    here = os.getpid()
    from_file = []
    for given, own in sharded:
        mesh = given.device_mesh
        if vars(mesh).get(MADE, (here, id(mesh))) != (here, id(mesh)):
            from_file.append((given, own))
    if from_file:
        marks = (_mark(given) for given, own in from_file if _is_elsewhere(given, own))
        _refuse_on_all(next(marks, None), (own for _, own in from_file), what)
    others = (pair for pair in sharded if pair[0].device_mesh is not pair[1].device_mesh)
    _refuse_on_all(next((_mark(given) for given, own in others if _is_elsewhere(given, own)), None), (), what)


def refuse_states_of_others(optimizer: Optimizer) -> None:
    """Raise `UsageError` on every rank if the states of a plain optimizer are those of other rows on one of them."""
    states = ((value, p) for p in _params(optimizer) for value in optimizer.state.get(p, {}).values())
    refuse_rows_of_others(states, "the optimizer's states")


def _is_elsewhere(given: DTensor, own: DTensor) -> bool:
    """Return whether this rank has another coordinate on the mesh of `given` than the rank that holds these rows."""
    mesh, coordinate = given.device_mesh, given.device_mesh.get_coordinate()
    cut = [axis for axis, how in enumerate(given.placements) if not how.is_replicate() and mesh.size(axis) > 1]
    if mesh == own.device_mesh:
        here = own.device_mesh.get_coordinate()
        return coordinate != here and any(coordinate is None or here is None or coordinate[i] != here[i] for i in cut)
    for axis in cut:
        try:
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        except (RuntimeError, ValueError, KeyError):  # this process has no such group
            return True
        if coordinate is None or len(ranks) != mesh.size(axis) or ranks[coordinate[axis]] != dist.get_rank():
            return True
    return False


def _refuse_on_all(other: Mark | None, tensors: Iterable[Tensor], what: str) -> None:
    """Raise `UsageError` on the ranks of the meshes of `tensors` if one of them has a mark of other rows. Collective."""
    # One number for each rank, of which the largest is told: the rank, counted from 1, whose rows it was given, of how many.
    rank, theirs, num_ranks = (0, 0, 0) if other is None else (dist.get_rank() + 1, *other[:2])
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        device = torch.device(mesh.device_type)
        every = [Communicator(group, device) for group in mesh.get_all_groups()]
        communicators = [communicator for communicator in every if not communicator.is_fake]
        packed = torch.tensor((rank << 2 * BITS) + (theirs << BITS) + num_ranks, device=device)
        told = int(reduced(packed, communicators, dist.ReduceOp.MAX).item())
        rank, theirs, num_ranks = (told >> shift & (1 << BITS) - 1 for shift in (2 * BITS, BITS, 0))
    if rank:
        raise UsageError(
            f"rank {rank - 1} was given {what} of rank {theirs} of {num_ranks}, which are of other rows than its own: torch.save "
            "writes the rows of one rank. Write what acc.full_state_dict(model) gives, or use acc.save and acc.load, or let "
            "every rank load what it wrote itself, on as many ranks."
        )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _mark(p: DTensor) -> Mark:
    mesh = p.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or [0] * mesh.ndim
    axes = zip(p.placements, coordinate, mesh.shape, strict=True)
    cut = tuple((str(how), i, n) for how, i, n in axes if not isinstance(how, Replicate) and n > 1)
    # The coordinate is that of the rank that wrote a tensor of a file.
    rank = sum(i * math.prod(mesh.shape[axis + 1 :]) for axis, i in enumerate(coordinate))
    return rank, mesh.size(), tuple(_torch.local_of(p).shape), cut


def _marks_of_others(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[Mark]:
    """The marks in `state_dict` that are of other rows than the parameter's here."""
    try:
        indices = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        states = state_dict["state"]
    except (KeyError, TypeError):
        return  # `load_state_dict` says what is wrong
    for index, p in zip(indices, _params(optimizer), strict=False):
        state = states.get(index)
        if not isinstance(p, DTensor) or not isinstance(state, Mapping):
            continue
        for value in state.values():
            mark = getattr(value, MARK, None) if isinstance(value, Tensor) else None
            if isinstance(value, DTensor) and _is_elsewhere(value, p):
                yield _mark(value)
            elif mark is not None and mark[2:] != _mark(p)[2:]:
                yield mark
