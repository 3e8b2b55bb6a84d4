"""A page: a result as plain data, tables of text and numbers, to be shown on the screen or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from accordion.errors import UsageError
from accordion.pages.stats import Spread

FOLDER = Path("runs/bench")
"""Folder for all results of benchmarks, relative to the current folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A result to show: tables, and notes below them. `data`: content of the JSON file that `write` creates, any value that
    `plain_data` takes. `name`: name of that file without suffix."""

    name: str
    notes: Sequence[str]
    tables: Sequence[Table]
    data: Mapping[str, Any] = field(default_factory=dict)


def spread(s: Spread, scale: float = 1.0, digits: int = 1) -> str:
    """Return a spread as text "median (low-high)", for example "1.5 (1.2-1.9)". Each number is multiplied by `scale`."""
    return f"{s.median * scale:,.{digits}f} ({s.low * scale:,.{digits}f}-{s.high * scale:,.{digits}f})"


def mebi(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def check_folder(folder: Path) -> Path:
    """Create `folder` and its parents if they are missing; return `folder`. Raises `UsageError` if it cannot be created, or no
    file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            f"nothing can be written to {str(folder)!r}: {error.strerror}; run in another folder."
        ) from None


def write(page: Page, folder: Path) -> Path:
    """Write `page.data` as JSON to `<page.name>.json` in the existing `folder`, and return the path. Replaces an older file."""
    path = folder / f"{page.name}.json"
    path.write_text(json.dumps(plain_data(page.data), indent=1) + "\n", encoding="utf-8")
    return path


def plain_data(value: Any) -> Any:
    """Return a copy of nested `value` for `json.dumps`: dataclasses become dicts, tuples become lists, and keys become text. A
    key that is a tuple of names, such as ("a", "b"), becomes "a / b"."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    if isinstance(value, Mapping):
        return {" / ".join(k) if isinstance(k, tuple) else str(k): plain_data(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(v) for v in value]
    return value


def as_text(table: Table) -> str:
    """Return `table` as text: a line with its title, one with the names of the columns, and one for each row, aligned."""
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (table.columns, *table.rows)
    ]
    return "\n".join([table.title, *lines])


def as_markdown(page: Page, about: str) -> str:
    """Return `page` as Markdown: a fixed heading, the text `about`, the machine if it is in `page.data`, tables, and notes."""
    data = plain_data(page.data)
    machine = data.get("machine") or data.get("comparison", {}).get("machine", {})
    lines = ["# Figures of this machine", "", about, ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    for table in page.tables:
        rows = [table.columns, ["---", *("---:" for _ in table.columns[1:])], *table.rows]
        lines += ["", f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in page.notes), ""])
