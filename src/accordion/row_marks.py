"""Refuse tensors from a file that have another rank's rows of a sharded parameter.

For a DTensor, the mesh keeps the coordinate of the rank that pickled it. Plain tensors in an optimizer's state get an attribute
that names their rows; pickles and copies keep it, torch's distributed checkpoint (DCP) does not.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.communicator import Communicator, reduced
from accordion.errors import UsageError
from accordion.offload.step.optimizer_copy import leaves

MARK = "_accordion_rows"  # attribute of a tensor in an optimizer's state: a `Mark`
MADE = "_accordion_made"  # attribute of a mesh: (process, address) at which it was created
BITS = 20  # for a rank, since one int64 carries three
Mark: TypeAlias = tuple[int, int, tuple[int, ...], tuple[tuple[str, int, int], ...]]
"""The rows of a rank: (position on the mesh, number of ranks, local shape, sharding). The last has an entry for each mesh dim
that shards: (placement, index of the chunk, number of chunks).
"""
# Plain values, so that a mark passes `torch.load(weights_only=True)`. It is an attribute of tensors and not a value next to
# them, because DCP reshards tensors itself and would give one rank's value to all ranks.


def mark_rows(optimizer: Optimizer) -> None:
    """Set the attribute `MARK`, which names this rank's rows, on the state tensors of sharded parameters.

    0-d tensors and tensors that several parameters share are left out.
    """
    states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]
    count = Counter(id(value) for state in states for value in state.values())
    for p in _params(optimizer):
        if isinstance(p, DTensor) and p in optimizer.state:
            mark = _mark(p)
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor) and value.dim() and count[id(value)] == 1:
                    setattr(value, MARK, mark)


def refuse_other_rows(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `UsageError` on every rank if any rank's `state_dict` of `optimizer` has another rank's rows. Collective.

    Plain states without the attribute `MARK` are accepted, because helpers of torch and other libraries shard them correctly.
    """
    if dist.is_initialized():
        marks = _marks_of_others(optimizer, state_dict)
        _refuse_on_all(next(marks, None), _params(optimizer), "the optimizer's states")


def mark_meshes(params: Iterable[Tensor]) -> None:
    """Set the attribute `MADE` on the mesh of each sharded parameter, so that copies of it from files can be recognized."""
    # Identity is not enough: the result of a DTensor operator may have another, equal mesh, the first that DTensor saw.
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        vars(mesh)[MADE] = os.getpid(), id(mesh)


def refuse_rows_of_others(pairs: Iterable[tuple[object, Tensor]], what: str) -> None:
    """Raise `UsageError` on every rank if one of them loaded another rank's rows, as from a file that `torch.save` wrote.

    Collective if any DTensor is from a file; other pairs are compared on this rank alone.

    Args:
        pairs: (loaded value, sharded tensor of this model that it replaces); pairs without two DTensors are ignored.
        what: name of the loaded tensors, for the message.
    """
    sharded = [(a, b) for a, b in pairs if isinstance(a, DTensor) and isinstance(b, DTensor)]
    of_other_meshes = ((a, b) for a, b in sharded if a.device_mesh is not b.device_mesh)
    mark = next((_mark(loaded) for loaded, target in of_other_meshes if _is_elsewhere(loaded, target)), None)
    _refuse_on_all(mark, (target for loaded, target in sharded if _is_copy(loaded.device_mesh)), what)


def refuse_states_of_others(optimizer: Optimizer) -> None:
    """Raise `UsageError` on every rank if any rank's `optimizer`, not wrapped, has loaded states of another rank's rows."""
    states = ((value, p) for p in _params(optimizer) for value in optimizer.state.get(p, {}).values())
    refuse_rows_of_others(states, "the optimizer's states")


def _is_copy(mesh: DeviceMesh) -> bool:
    """Return True if `mesh` was unpickled from a mesh that `mark_meshes` has marked, here or in another process."""
    this = os.getpid(), id(mesh)
    return bool(vars(mesh).get(MADE, this) != this)


def _is_elsewhere(loaded: DTensor, target: DTensor) -> bool:
    """Return True if `loaded`, from a file, has other rows of `target` than this rank, by the meshes of both."""
    mesh, coordinate = loaded.device_mesh, loaded.device_mesh.get_coordinate()
    axes = [axis for axis, how in enumerate(loaded.placements) if not how.is_replicate() and mesh.size(axis) > 1]
    if mesh == target.device_mesh:
        this = target.device_mesh.get_coordinate()
        return coordinate != this and any(coordinate is None or this is None or coordinate[i] != this[i] for i in axes)
    targets = zip(target.device_mesh.shape, target.placements, strict=True)
    if math.prod(mesh.size(axis) for axis in axes) != math.prod(n for n, how in targets if not how.is_replicate()):
        return True
    for axis in axes:
        try:
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        except (RuntimeError, ValueError, KeyError):  # this process has no such group
            return True
        if coordinate is None or len(ranks) != mesh.size(axis) or ranks[coordinate[axis]] != dist.get_rank():
            return True
    return False


def _refuse_on_all(other: Mark | None, tensors: Iterable[Tensor], what: str) -> None:
    """Raise `UsageError` on all ranks of the meshes of `tensors` if any rank passes a mark as `other`. Collective.

    `other`: mark of another rank's rows that this rank has loaded, or None. `what`: name of these tensors, for the message.
    """
    # All-reduces the maximum of a number that packs this rank (counted from 1), the rank of the mark and its number of ranks.
    rank, source, num_ranks = (0, 0, 0) if other is None else (dist.get_rank() + 1, *other[:2])
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        device = torch.device(mesh.device_type)
        every = [Communicator(group, device) for group in mesh.get_all_groups()]
        communicators = [communicator for communicator in every if not communicator.is_fake]
        packed = torch.tensor((rank << 2 * BITS) + (source << BITS) + num_ranks, device=device)
        largest = int(reduced(packed, communicators, dist.ReduceOp.MAX).item())
        rank, source, num_ranks = (largest >> shift & (1 << BITS) - 1 for shift in (2 * BITS, BITS, 0))
    if rank:
        raise UsageError(
            f"rank {rank - 1} was given {what} of rank {source} of {num_ranks}, which are of other rows than its own: torch.save "
            "writes the rows of one rank. Write the result of acc.full_state_dict(model), or use acc.save and acc.load, or let "
            "every rank load its own file, on as many ranks."
        )


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _mark(p: DTensor) -> Mark:
    mesh = p.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or [0] * mesh.ndim
    axes = zip(p.placements, coordinate, mesh.shape, strict=True)
    cut = tuple((str(how), i, n) for how, i, n in axes if not isinstance(how, Replicate) and n > 1)
    # For a tensor from a file, the coordinate is that of the rank that wrote it.
    rank = sum(i * math.prod(mesh.shape[axis + 1 :]) for axis, i in enumerate(coordinate))
    return rank, mesh.size(), tuple(_torch.local_of(p).shape), cut


def _marks_of_others(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[Mark]:
    """Yield the mark of each state in `state_dict` that is not of this rank's rows of its parameter."""
    try:
        indices = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        states = state_dict["state"]
    except (KeyError, TypeError):
        return  # `load_state_dict` raises an error
    for index, p in zip(indices, _params(optimizer), strict=False):
        state = states.get(index)
        if not isinstance(p, DTensor) or not isinstance(state, Mapping):
            continue
        for value in leaves(list(state.values())):
            mark = getattr(value, MARK, None) if isinstance(value, Tensor) else None
            if isinstance(value, DTensor) and _is_elsewhere(value, p):
                yield _mark(value)
            elif mark is not None and mark[2:] != _mark(p)[2:]:
                yield mark
