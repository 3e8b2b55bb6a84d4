"""Hooks of a sharded module: state dicts show shards, loads take full tensors too, inputs come to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.compat.cutting import rows_of
from accordion.compat.fsdp2.module import fsdp_part
from accordion.engine.layout import Cut
from accordion.engine.tree import map_tensors
from accordion.shard import device_of


def inputs_to_device(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The outermost module takes inputs from anywhere."""
    part = fsdp_part(module)
    if part.outermost() is not part:
        return None
    device = device_of(part.mesh)
    return map_tensors(lambda t: t.to(device), args), {
        key: map_tensors(lambda t: t.to(device), value) for key, value in kwargs.items()
    }


def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    fsdp_part(module).lease.end()


def before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Take plain full tensors too, of which each rank keeps its rows; what is assigned becomes the shard itself."""
    part = fsdp_part(module)
    part.lease.end()
    if metadata.get("assign_to_params_buffers") and part.tree is not None:
        part.tree.dissolve()
    for name, param in _own_parameters(module, prefix):
        given = state.get(name)
        if (
            isinstance(given, Tensor)
            and not isinstance(given, DTensor)
            and given.shape == param.shape
            and param.device_mesh == part.mesh
        ):
            inner: Any = param.placements[-1]
            num_ranks = part.mesh.size(part.mesh.ndim - 1)
            c = Cut(tuple(param.shape), getattr(inner, "dim", None), num_ranks)
            rows = rows_of(given.detach(), c, part.mesh.get_local_rank(part.mesh.ndim - 1))
            local = _torch.local_of(param)
            rows = rows.contiguous() if param.is_meta else rows.to(local.device, copy=True)
            state[name] = _torch.as_dtensor(rows.contiguous(), param)


def _own_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor]]:
    places = fsdp_part(module).places
    for path, child in module.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        for attr, param in child._parameters.items():
            if isinstance(param, DTensor) and (id(child), attr) in places:
                yield f"{path}.{attr}" if path else attr, param
