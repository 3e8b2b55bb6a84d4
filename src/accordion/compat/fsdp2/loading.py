"""Hooks of a sharded module: state dicts show shards, loads take full tensors too, inputs come to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.compat.fsdp2.cutting import rows_of
from accordion.compat.fsdp2.lazy import parts_below
from accordion.compat.fsdp2.module import fsdp_part
from accordion.engine.tree import map_tensors
from accordion.safety.divergence import monitor_of
from accordion.shard.layouts import Layout
from accordion.shard.subclasses import is_extended
from accordion.shard.topology import device_of
from accordion.state import is_sharded_alike, refuse_others, settle, take_own_rows


def inputs_to_device(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The outermost module takes inputs from anywhere."""
    part = fsdp_part(module)
    if not part.is_outermost():
        return None
    device = device_of(part.asked.mesh)
    return map_tensors(lambda t: t.to(device), args), {
        key: map_tensors(lambda t: t.to(device), value) for key, value in kwargs.items()
    }


def before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    fsdp_part(module).settle()


def before_load(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Take plain full tensors too, of which each rank keeps its rows; what is assigned becomes the shard itself.

    It is called for the outermost module first, and cuts what those below it are given too: ranks agree on all of it before
    anything changes, as `state.attach_state_dict_hooks` says, and what is cut needs no word any more.
    """
    part = fsdp_part(module)
    for each in parts_below([module]):
        each.settle()
    wanted = list(_cut_parameters(module, prefix))
    take_own_rows(state, {name: param for name, param, _ in wanted})
    if not all(is_sharded_alike(state.get(name), param) for name, param, _ in wanted):
        if part.unit is not None:
            settle(part.engine(), "loads full tensors (load_state_dict)")
        monitor = monitor_of(part.outermost().wired())
        refuse_others({name: given for name, given in state.items() if name.startswith(prefix)}, monitor)
    if metadata.get("assign_to_params_buffers"):
        part.dissolve()
    for name, param, layout in wanted:
        given = state.get(name)
        if (
            isinstance(given, Tensor)
            and not isinstance(given, DTensor)
            and given.shape == param.shape
            and not is_extended(param)
        ):
            own = given.detach() if layout.around is None else layout.around.part_of(given)
            rows = rows_of(own, layout.cut, layout.rank)
            local = _torch.local_of(param)
            rows = rows.contiguous() if param.is_meta else rows.to(local.device, copy=True)
            state[name] = _torch.as_dtensor(rows.contiguous(), param)


def _cut_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor, Layout]]:
    """Those in `module` and in what was sharded below it."""
    layouts = {place: layout for part in parts_below([module]) for place, layout in part.layouts.items()}
    for path, child in module.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        for attr, param in child._parameters.items():
            layout = layouts.get((id(child), attr))
            if isinstance(param, DTensor) and layout is not None:
                yield f"{path}.{attr}" if path else attr, param, layout
