"""Report the bytes that a sharded model takes on this rank: parameters, gradients and optimizer state of each unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from accordion.config import STRATEGIES, Place
from accordion.engine.unit import Unit
from accordion.state import sharded_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReport:
    """One unit of a `Report`: a module whose parameters are gathered together. Bytes are those of this rank.

    `kind`: name of the module's class. `num_params`: elements of all ranks. `optimizer_bytes`: an estimate, for two states per
    trainable element, as Adam has. `full_bytes`: of full parameters, while the unit is gathered. `inner_shard_bytes`: of second
    shards that `hybrid_shard_optim` always keeps. `secondary_bytes`: of this rank's shard of the copy that `secondary=` keeps.
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
    """Sizes of a sharded model, as `describe` returns them; `print` shows a table. `world`: number of ranks. `device`: that of
    this rank. `unsharded_bytes`: without sharding, of parameters and, for trained ones, gradients and two optimizer states."""

    strategy: str
    world: int
    device: str
    total_params: int
    unsharded_bytes: int
    units: tuple[UnitReport, ...]

    def __str__(self) -> str:
        """Return a table of bytes on this rank: a row for each run of equal units, one for all units, one without sharding."""
        strategy = STRATEGIES.get(self.strategy)
        resident = strategy is not None and strategy.params is Place.REPLICATE
        # Bytes on a rank: parameters, gradients, optimizer, permanent copies, and the gathered unit.
        rows = list[tuple[UnitReport, tuple[int, ...]]]()
        for unit in (unit for unit in self.units if unit.num_params):
            always = unit.inner_shard_bytes + unit.secondary_bytes + (unit.full_bytes if resident else 0)
            stored = (unit.parameter_bytes, unit.gradient_bytes, unit.optimizer_bytes, always)
            rows.append((unit, (*stored, 0 if resident else unit.full_bytes)))
        copies = ["copies"] * any(row[3] for _, row in rows)
        table: list[tuple[str, int, list[tuple[int, ...]]]] = []
        for _, run in groupby(rows, key=lambda pair: (pair[0].kind, pair[1])):
            equal = list(run)
            first, last = equal[0][0].name, equal[-1][0].name.rpartition(".")[2]
            name = first if len(equal) == 1 else f"{first}-{last}"
            table.append((name, sum(unit.num_params for unit, _ in equal), [row for _, row in equal]))
        quarter = self.unsharded_bytes // 4  # parameters, gradients and two states of AdamW have equal bytes
        table.append(("all units", self.total_params, [row for _, row in rows]))
        table.append(("without sharding", self.total_params, [(quarter, quarter, 2 * quarter, 0, 0)]))
        lines = [["unit", "size", "weights", "gradients", "optimizer", *copies, "total", "gathered"]]
        lines += [_cells(*entry, with_copies=bool(copies)) for entry in table]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = [" ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
        rule = "-" * max(map(len, texts))
        title = f"{self.strategy} over {self.world} rank{'s' * (self.world > 1)}, this one on {self.device}: bytes on each rank"
        return "\n".join([title, texts[0], rule, *texts[1:-2], rule, *texts[-2:]])


def human(num_bytes: float) -> str:
    """Return `num_bytes` as text with a binary unit: 1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _cells(name: str, num_params: int, several: Sequence[tuple[int, ...]], *, with_copies: bool) -> list[str]:
    """Return the cells of one row of the table: `name`, `num_params`, the bytes of weights, gradients, optimizer and, with
    `with_copies`, copies, each summed over the units, the total of all four, and the largest gathered bytes. `several`: for
    each unit a tuple of its bytes (weights, gradients, optimizer, copies, gathered)."""
    *stored, _ = map(sum, zip(*several, strict=True))
    gathered = max(row[-1] for row in several)
    size = f"{num_params:,}" if num_params < 1e5 else f"{num_params / 1e6:,.2f} M"
    size = size if num_params < 1e9 else f"{num_params / 1e9:,.2f} B"
    amounts = [human(n) for n in [*stored[: 3 + with_copies], sum(stored)]]
    return [name, size, *amounts, human(gathered) if gathered else ""]


def describe(model: nn.Module) -> Report:
    """Return a `Report` on the units of a sharded model and their bytes, without communication; `print` shows it as a table.
    Raises `UsageError` if `model` is not sharded."""
    engine = sharded_engine(model, "describe")
    return Report(
        strategy=engine.strategy.name,
        world=engine.context.num_ranks,
        device=str(engine.context.device),
        total_params=sum(param.sharded.numel() for param in engine.params),
        unsharded_bytes=sum(
            param.sharded.numel() * param.dtype.itemsize * (4 if param.sharded.requires_grad else 1)
            for param in engine.params
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
