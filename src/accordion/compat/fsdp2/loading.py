"""Hooks of a sharded module, run before its state dict, its `load_state_dict` and its forward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from accordion.compat.fsdp2.lazy import parts_below
from accordion.compat.fsdp2.module import fsdp_part
from accordion.engine.tree import map_tensors
from accordion.shard.topology import device_of
from accordion.state import take_own_rows


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
    """Hook of `load_state_dict`: wait for steps in progress, and with assign=True remove the engine of the old parameters."""
    for part in parts_below([module]):
        part.settle()
    named = module.named_parameters(remove_duplicate=False)
    take_own_rows(state, {prefix + name: param for name, param in named if isinstance(param, DTensor)})
    if metadata.get("assign_to_params_buffers"):
        fsdp_part(module).dissolve()
