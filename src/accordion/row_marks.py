"""Refuse DTensors from a file that have another rank's rows of a parameter: their mesh tells which rank pickled them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion.engine.communicator import Communicator, reduced
from accordion.errors import UsageError
from accordion.offload.step.optimizer_copy import leaves

MADE = "_accordion_made"  # attribute of a mesh: (process, address) at which it was created


def refuse_other_rows(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise `UsageError` on every rank if the `state_dict` of any rank for `optimizer` has DTensors with another rank's rows,
    or with other placements than their parameter. Plain tensors pass, because helpers of torch and other libraries shard them.
    Collective; does nothing without process groups."""
    if dist.is_initialized():
        sharded = [(value, p) for value, p in _states(optimizer, state_dict) if isinstance(value, DTensor)]
        is_cut_otherwise = any(value.shape == p.shape and value.placements != p.placements for value, p in sharded)
        is_other = is_cut_otherwise or any(_is_elsewhere(value, p) for value, p in sharded)
        _refuse_on_all(is_other, params_of(optimizer), "the optimizer's states")


def mark_meshes(params: Iterable[Tensor]) -> None:
    """Set the attribute `MADE` on the mesh of each sharded parameter, so that copies of the mesh from files can be recognized."""
    # Identity is not enough: the result of a DTensor operator may have another, equal mesh, the first that DTensor saw.
    for mesh in {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}.values():
        vars(mesh)[MADE] = os.getpid(), id(mesh)


def refuse_rows_of_others(pairs: Iterable[tuple[object, Tensor]], what: str) -> None:
    """Raise `UsageError` if another rank's rows were loaded. If loaded DTensors are from a file that `torch.save` wrote,
    this is a collective that raises on every rank if any rank has wrong rows; otherwise nothing is sent, and only a rank with
    wrong rows raises. `pairs`: (loaded value, sharded tensor that it replaces); only pairs of two DTensors count. `what`: name
    of the loaded tensors, for the message."""
    sharded = [(a, b) for a, b in pairs if isinstance(a, DTensor) and isinstance(b, DTensor)]
    is_other = any(a.device_mesh is not b.device_mesh and _is_elsewhere(a, b) for a, b in sharded)
    # A mesh that `mark_meshes` marked, here or in another process, keeps its mark when it is unpickled.
    marks = [(vars(a.device_mesh).get(MADE), (os.getpid(), id(a.device_mesh)), b) for a, b in sharded]
    _refuse_on_all(is_other, (b for mark, own, b in marks if mark not in (None, own)), what)


def refuse_states_of_others(optimizer: Optimizer) -> None:
    """Raise `UsageError` if `optimizer`, which is not wrapped by `wrap_optimizer`, has loaded states of another rank's rows. If
    states are DTensors from a file that `torch.save` wrote, this is a collective that raises on every rank if any has wrong
    states; otherwise nothing is sent, and only a rank with wrong states raises."""
    states = ((value, p) for p in params_of(optimizer) for value in optimizer.state.get(p, {}).values())
    refuse_rows_of_others(states, "the optimizer's states")


def _is_elsewhere(loaded: DTensor, target: DTensor) -> bool:
    """Return True if `loaded`, from a file, has other rows of `target` than this rank. Compares the coordinates of the rank
    that wrote `loaded` with this rank's. If the meshes differ, returns True if either tensor is sharded over several ranks."""
    mesh, target_mesh = loaded.device_mesh, target.device_mesh
    axes = sharded_axes(loaded)
    if mesh != target_mesh:
        return bool(axes or sharded_axes(target))
    theirs, this = mesh.get_coordinate(), target_mesh.get_coordinate()
    return theirs != this and any(theirs is None or this is None or theirs[i] != this[i] for i in axes)


def _refuse_on_all(is_other: bool, tensors: Iterable[Tensor], what: str) -> None:
    """Raise `UsageError` on all ranks of the meshes of `tensors` (collective) if any passes True for `is_other`: it has loaded
    another rank's rows. Without DTensors in `tensors`, only this rank raises. `what`: name of the loaded tensors."""
    rank = dist.get_rank() + 1 if is_other else 0  # counted from 1
    for mesh in dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        device = torch.device(mesh.device_type)
        every = [Communicator(group, device) for group in mesh.get_all_groups()]
        communicators = [communicator for communicator in every if not communicator.is_fake]
        rank = int(reduced(torch.tensor(rank, device=device), communicators, dist.ReduceOp.MAX))
    if rank:
        raise UsageError(
            f"rank {rank - 1} was given {what} of another rank, which are of other rows than its own: torch.save writes the rows "
            "of one rank. Write the result of acc.full_state_dict(model), or use acc.save and acc.load, or let every rank load "
            "its own file, on as many ranks."
        )


def sharded_axes(tensor: DTensor) -> list[int]:
    """Return the mesh axes of more than one rank over which `tensor` is sharded."""
    axes = enumerate(zip(tensor.placements, tensor.device_mesh.shape, strict=True))
    return [axis for axis, (how, num) in axes if num > 1 and not how.is_replicate()]


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all param groups of `optimizer`, in order."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _states(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, DTensor]]:
    """Yield (value, parameter) for each state of a sharded parameter in `state_dict`; nothing if `state_dict` is malformed."""
    try:
        indices = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        states = state_dict["state"]
    except (KeyError, TypeError):
        return  # `load_state_dict` raises an error
    for index, p in zip(indices, params_of(optimizer), strict=False):
        state = states.get(index)
        if isinstance(p, DTensor) and isinstance(state, Mapping):
            yield from ((value, p) for value in leaves(list(state.values())))
