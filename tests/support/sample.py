"""Choose the rows of a parameter grid that `make test` runs; `make test-all` runs all rows."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(rows: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """Return `rows`, tuples or single values, for `pytest.mark.parametrize`. Rows for which `usual(*row)` is false get the mark
    `slow`, so that only `make test-all` runs them."""
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        found.append(row if usual(*values) else pytest.param(*values, marks=pytest.mark.slow))
    return found


def drawn(rows: Iterable[tuple[Any, ...]], count: int, group: Callable[..., Any]) -> set[tuple[Any, ...]]:
    """Return up to `count` random rows of each group, equal in every run. `group(*row)`: the key of a row's group."""
    groups: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        groups[group(*row)].append(row)
    draw = random.Random(0)
    return {row for found in groups.values() for row in draw.sample(found, min(count, len(found)))}


def turns(rows: Iterable[Any], columns: Iterable[Any], count: int = 1) -> set[tuple[Any, Any]]:
    """Return (row, column) pairs: each row with the next `count` columns of a cycle, so that columns are equally frequent."""
    cycle = itertools.cycle(columns)
    return {(row, next(cycle)) for row in rows for _ in range(count)}
