"""Report the bytes that a sharded model takes on this rank: parameters, gradients and optimizer state of each unit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from accordion.engine.unit import Unit
from accordion.state import sharded_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """One unit of a `Report`: a module whose parameters are gathered together. Bytes are those of this rank.

    `kind`: class of the module. `num_params`: elements of all ranks. `optimizer_bytes`: of two states per trainable element, as
    Adam has. `full_bytes`: of full parameters, while the unit is gathered. `inner_shard_bytes`: of the second shards that
    `hybrid_shard_optim` always keeps. `secondary_bytes`: of this rank's shard of the copy that `secondary=` keeps.
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
    """Sizes of a sharded model. `world`: number of ranks. `unsharded_bytes`: bytes of all parameters and, for trained ones, of
    gradients and two optimizer states."""

    strategy: str
    world: int
    total_params: int
    unsharded_bytes: int
    units: tuple[UnitReport, ...]


def describe(model: nn.Module) -> Report:
    """Return a `Report` on the units of a sharded model and their bytes, without communication.

    Raises `UsageError` if `model` is not sharded.
    """
    engine = sharded_engine(model, "describe")
    copies = [4 if param.sharded.requires_grad else 1 for param in engine.params]
    return Report(
        strategy=engine.strategy.name,
        world=engine.context.num_ranks,
        total_params=sum(param.sharded.numel() for param in engine.params),
        unsharded_bytes=sum(
            p.sharded.numel() * p.dtype.itemsize * n for p, n in zip(engine.params, copies, strict=True)
        ),
        units=tuple(map(_unit_report, engine.units)),
    )


def _unit_report(unit: Unit) -> UnitReport:
    local = [(v, p) for g in unit.groups for v, p in zip(g.shard_buffer.locals, g.params, strict=True)]
    trained = [(v, p) for v, p in local if p.sharded.requires_grad]
    return UnitReport(
        name=unit.name or "(root)",
        kind=type(unit.module()).__name__,
        num_params=sum(p.sharded.numel() for p in unit.params),
        parameter_bytes=sum(v.nbytes for v, _ in local),
        gradient_bytes=sum(v.numel() * p.grad_like.dtype.itemsize for v, p in trained),
        optimizer_bytes=2 * sum(v.nbytes for v, _ in trained),
        full_bytes=unit.full_bytes,
        inner_shard_bytes=sum(g.inner_shard_bytes for g in unit.groups),
        secondary_bytes=sum(g.secondary_bytes for g in unit.groups),
    )
