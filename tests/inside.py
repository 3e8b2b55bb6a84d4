"""Access to the engine and units of a sharded model. Tests use only these functions for it, so that a rename changes one file."""

from __future__ import annotations

from typing import Any

from torch import nn

from accordion.engine.hooks import attached_to


def hooks_in(module: nn.Module) -> Any:
    """Return the hooks of the unit whose module is `module`; fail if `module` is no unit."""
    hooks = attached_to(module)
    assert hooks is not None, f"{type(module).__name__} is no unit"
    return hooks


def engine_in(model: nn.Module) -> Any:
    """Return the engine of a sharded model. `model`: the model itself, or the module of one of its units."""
    return hooks_in(model).engine


def unit_in(module: nn.Module) -> Any:
    """Return the unit whose module is `module`; fail if `module` is no unit."""
    return hooks_in(module).unit


def units_of(model: nn.Module) -> list[Any]:
    """Return all units of a sharded model, the root first."""
    return engine_in(model).units
