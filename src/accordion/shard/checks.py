"""Models that cannot be sharded, and methods that cannot be entry points: refused before ranks are asked."""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.engine.calls import transform_error
from accordion.engine.hooks import engine_of
from accordion.errors import UsageError


def check_model(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise `UsageError` for a model or a mesh that `shard` cannot take, whatever else it is given."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh is {mesh!r}, of type {type(mesh).__name__}; pass a DeviceMesh, as "
            "torch.distributed.device_mesh.init_device_mesh makes it."
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"shard() takes a torch.nn.Module, not {type(model).__name__}.")
    if _torch.transforms_active():  # FSDP1's wrappers shard at their first call
        raise transform_error()
    if engine_of(model) is not None:
        raise UsageError("this model, or a part of it, is sharded already; call shard() once, on the whole model.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to shard.")
    for name, module in model.named_modules():
        own = vars(module)  # libraries' modules answer for attributes that they do not have, and may fail at it
        if own.get("sparse") is True:
            raise UsageError(
                f"module {name!r} asks for sparse gradients, which are not sharded; build it with sparse=False."
            )
        if own.get("max_norm") is not None:
            raise UsageError(
                f"module {name!r} renormalises its weight in its forward (max_norm), which shards would not follow."
            )
    for name, param in model.named_parameters():
        if not param.dtype.is_floating_point and param.requires_grad:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} and requires gradients; only floating ones are trained."
            )


def check_entry_point(module: nn.Module, name: str) -> None:
    """Raise `UsageError` unless the method `name` of `module` has done all when it returns."""
    method = getattr(type(module), name, None)
    if not callable(method):
        raise UsageError(f"{type(module).__name__} has no method {name!r}; name one that its class defines.")
    checks = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(check(method) for check in checks):
        raise UsageError(
            f"{type(module).__name__}.{name} computes after the call that makes its generator or coroutine, when full parameters "
            "are let go again; make entry points of the methods that it calls and that return, and loop over these outside."
        )
