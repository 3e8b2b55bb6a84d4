"""State dicts of full tensors, as a library's own checkpoint file has them, from shards and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.errors import UsageError
from accordion.optim import inner_of


def whole(value: Any, keep: bool) -> Any:
    """`value` with each sharded tensor in it, at any depth of dicts, lists and tuples, gathered to the host; other tensors as
    they are. `keep`: whether this rank wants it; else such tensors are None. Called by all ranks together, of trees alike.
    """
    if isinstance(value, DTensor):
        with torch.no_grad():
            detached: Any = value.detach()
            full = detached.full_tensor()
        return full.cpu() if keep else None
    if isinstance(value, Mapping):
        done = {key: whole(part, keep) for key, part in value.items()}
        return value if all(done[key] is part for key, part in value.items()) else done
    if isinstance(value, (list, tuple)):
        found = [whole(part, keep) for part in value]
        return value if all(a is b for a, b in zip(found, value, strict=True)) else type(value)(found)
    return value


def state_for_all(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, of sharded tensors; raises `UsageError` for states that are one rank's alone."""
    state: dict[str, Any] = optimizer.state_dict()
    for index, param in _numbered(optimizer, state):
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            continue
        for name, one in state["state"].get(index, {}).items():
            if isinstance(one, Tensor) and not isinstance(one, DTensor) and one.ndim:
                raise UsageError(
                    f"{type(inner_of(optimizer)).__name__} keeps {name!r} of shape {tuple(one.shape)} for the rows of each rank "
                    'by itself, which no full checkpoint can hold; pass state_dict_type="sharded".'
                )
    return state


def load_whole(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict` of full states: each rank keeps its rows. Called by all ranks together."""
    mine = {index: dict(one) for index, one in state["state"].items()}
    for index, param in _numbered(optimizer, state):
        if isinstance(param, DTensor) and index in mine:
            mine[index] = {name: _placed(one, param) for name, one in mine[index].items()}
    optimizer.load_state_dict({**state, "state": mine})


def _numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    indices = chain.from_iterable(group["params"] for group in state["param_groups"])
    return list(zip(indices, chain.from_iterable(group["params"] for group in optimizer.param_groups), strict=False))


def _placed(one: Any, param: DTensor) -> Any:
    """A state as the parameter lies, where it is of its shape; else on every rank."""
    if not isinstance(one, Tensor) or isinstance(one, DTensor) or not one.ndim:
        return one
    alike = one.shape == param.shape
    placements = param.placements if alike else [Replicate()] * param.device_mesh.ndim
    cut = distribute_tensor(one.to(param.device), param.device_mesh, placements, src_data_rank=None)
    assert not alike or _torch.local_of(cut).shape == _torch.local_of(param).shape, (
        "rows lie as distribute_tensor cuts them"
    )
    return cut
