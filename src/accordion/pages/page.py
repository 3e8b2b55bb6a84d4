"""What a result looks like, as plain data: tables of text, charts of numbers; for the screen, JSON and HTML alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal

from accordion.pages.stats import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`kind`: bars, `lines` over numbers of ranks, `curves` over steps.

    `series`: name -> (label or number on the x axis -> value)."""

    title: str
    unit: str
    kind: Literal["stacked", "grouped", "lines", "curves"]
    series: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A whole result. `name`: of its files. `data`: all numbers, what JSON holds."""

    name: str
    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


def spread(s: Spread, scale: float = 1.0, digits: int = 1) -> str:
    """`median (low-high)`, scaled."""
    return f"{s.median * scale:,.{digits}f} ({s.low * scale:,.{digits}f}-{s.high * scale:,.{digits}f})"


def mebi(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def plain_data(value: Any) -> Any:
    """`value` as JSON takes it: dataclasses as mappings, tuples of names as `a / b`."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    if isinstance(value, Mapping):
        return {" / ".join(k) if isinstance(k, tuple) else str(k): plain_data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(v) for v in value]
    return value


def as_text(table: Table) -> str:
    """The table in columns of characters."""
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (table.columns, *table.rows)
    ]
    return "\n".join([table.title, *lines])
