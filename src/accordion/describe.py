"""What a sharded model takes on each rank: bytes by unit and kind, as laid out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from accordion.engine.unit import Unit
from accordion.state import sharded_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """One unit. Bytes are those of this rank; `optimizer_bytes` counts two states of each trainable element, as Adam keeps.

    `full_bytes`: what the unit takes beside that while it is gathered. `inner_shard_bytes`: what its inner shards take beside
    that, always, with `hybrid_shard_optim`. `secondary_bytes`: what the copy that several ranks share takes from its forward to
    its backward.
    """

    name: str
    kind: str
    num_params: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    full_bytes: int
    inner_shard_bytes: int
    secondary_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A model as it lies over ranks. `unsharded_bytes`: parameters, gradients and two states on one rank without sharding."""

    strategy: str
    world: int
    total_params: int
    unsharded_bytes: int
    units: tuple[UnitReport, ...]


def describe(model: nn.Module) -> Report:
    """Report what `shard` decided; no communication."""
    engine = sharded_engine(model, "describe")
    unsharded = 0
    for unit in engine.units:
        for p in unit.params:
            unsharded += p.sharded.numel() * p.dtype.itemsize * (4 if p.sharded.requires_grad else 1)
    return Report(
        strategy=engine.strategy.name,
        world=engine.context.num_ranks,
        total_params=sum(p.sharded.numel() for u in engine.units for p in u.params),
        unsharded_bytes=unsharded,
        units=tuple(_unit_report(u) for u in engine.units),
    )


def _unit_report(unit: Unit) -> UnitReport:
    local = [(v, p) for g in unit.groups for v, p in zip(g.shard_buffer.locals, g.params, strict=True)]
    trained = sum(v.numel() * v.itemsize for v, p in local if p.sharded.requires_grad)
    grads = sum(v.numel() * p.grad_like.dtype.itemsize for v, p in local if p.sharded.requires_grad)
    return UnitReport(
        name=unit.name or "(root)",
        kind=type(unit.module()).__name__,
        num_params=sum(p.sharded.numel() for p in unit.params),
        parameter_bytes=sum(v.numel() * v.itemsize for v, _ in local),
        gradient_bytes=grads,
        optimizer_bytes=2 * trained,
        full_bytes=unit.full_bytes,
        inner_shard_bytes=sum(g.inner_shard_bytes for g in unit.groups),
        secondary_bytes=sum(g.secondary_bytes for g in unit.groups),
    )
