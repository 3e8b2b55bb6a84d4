"""The one way in which tests look inside of a sharded model: a rename in the engine costs this file."""

from __future__ import annotations

from typing import Any

from torch import nn

from accordion.engine.hooks import attached_to


def hooks_in(module: nn.Module) -> Any:
    """The hooks of the unit that is this module's own."""
    hooks = attached_to(module)
    assert hooks is not None, f"{type(module).__name__} is no unit"
    return hooks


def engine_in(model: nn.Module) -> Any:
    """The engine of a sharded model, or of one of its units' modules."""
    return hooks_in(model).engine


def unit_in(module: nn.Module) -> Any:
    """The unit that is this module's own."""
    return hooks_in(module).unit


def units_of(model: nn.Module) -> list[Any]:
    """All units of a sharded model."""
    return engine_in(model).units
