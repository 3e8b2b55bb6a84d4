"""Refuse models that cannot be sharded, and methods that cannot be entry points, before ranks communicate."""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.engine.calls import transform_error
from accordion.engine.hooks import engine_of
from accordion.errors import UsageError


def check_model(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise `UsageError` if `mesh` is no mesh, or if `model` cannot be sharded with any settings: a model without parameters,
    already sharded, with sparse or renormalized embeddings, or with integer parameters that require gradients."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"mesh is {mesh!r}, of type {type(mesh).__name__}; pass a DeviceMesh, as "
            "torch.distributed.device_mesh.init_device_mesh makes it."
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"shard() takes a torch.nn.Module, not {type(model).__name__}.")
    if _torch.transforms_active():  # possible because FSDP1's wrappers shard at their first call
        raise transform_error()
    if engine_of(model) is not None:
        raise UsageError("this model, or a part of it, is sharded already; call shard() once, on the whole model.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is nothing to shard.")
    for name, module in model.named_modules():
        attributes = vars(module)  # not getattr, which some libraries' modules override and which may then fail
        if attributes.get("sparse") is True:
            raise UsageError(
                f"module {name!r} asks for sparse gradients, which are not sharded; build it with sparse=False."
            )
        if attributes.get("max_norm") is not None:
            raise UsageError(
                f"module {name!r} renormalises its weight in its forward, which shards would not follow; do not use max_norm."
            )
    for name, param in model.named_parameters():
        if not param.dtype.is_floating_point and param.requires_grad:
            raise UsageError(
                f"parameter {name!r} is {param.dtype} and requires gradients; only floating ones are trained."
            )


def check_entry_point(module: nn.Module, name: str) -> None:
    """Raise `UsageError` if `module` has no method `name`, or if that method is a generator or coroutine function, whose body
    runs after the call has returned."""
    method = getattr(type(module), name, None)
    if not callable(method):
        raise UsageError(f"{type(module).__name__} has no method {name!r}; name one that its class defines.")
    checks = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(check(method) for check in checks):
        raise UsageError(
            f"{type(module).__name__}.{name} is a generator or coroutine, which runs after its call returns, when full "
            "parameters are freed; make the methods that it calls entry points instead, and loop over them outside."
        )
