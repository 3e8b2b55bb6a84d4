"""Hooks of a sharded module, run before its state dict, its `load_state_dict` and its forward."""

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
    """Forward pre-hook that moves the inputs of the outermost module to its device."""
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
    """Hook of `load_state_dict` that replaces plain full tensors in `state` by this rank's rows, also for modules inside.

    Raises `DivergenceError` on every rank, before anything changes, if ranks load different full tensors.
    """
    # This hook runs for the outermost module first, so the hooks of inner modules get shards and compare nothing.
    part = fsdp_part(module)
    for each in parts_below([module]):
        each.settle()
    wanted = list(_cut_parameters(module, prefix))
    take_own_rows(state, {name: param for name, param, _ in wanted})
    if not all(is_sharded_alike(state.get(name), param) for name, param, _ in wanted):
        if part.unit is not None:
            settle(part.engine(), "loads full tensors (load_state_dict)")
        monitor = monitor_of(part.outermost().wired())
        refuse_others({name: value for name, value in state.items() if name.startswith(prefix)}, monitor)
    if metadata.get("assign_to_params_buffers"):
        part.dissolve()
    for name, param, layout in wanted:
        full = state.get(name)
        if (
            isinstance(full, Tensor)
            and not isinstance(full, DTensor)
            and full.shape == param.shape
            and not is_extended(param)
        ):
            local_part = full.detach() if layout.around is None else layout.around.part_of(full)
            rows = rows_of(local_part, layout.cut, layout.rank)
            local = _torch.local_of(param)
            rows = rows.contiguous() if param.is_meta else rows.to(local.device, copy=True)
            state[name] = _torch.as_dtensor(rows.contiguous(), param)


def _cut_parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor, Layout]]:
    """Yield (name, parameter, layout) of each sharded parameter in `module` and its submodules."""
    layouts = {place: layout for part in parts_below([module]) for place, layout in part.layouts.items()}
    for path, child in module.named_modules(prefix=prefix.rstrip("."), remove_duplicate=False):
        for attr, param in child._parameters.items():
            layout = layouts.get((id(child), attr))
            if isinstance(param, DTensor) and layout is not None:
                yield f"{path}.{attr}" if path else attr, param, layout
