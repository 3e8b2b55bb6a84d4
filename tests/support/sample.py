"""Choose the part of a parameter grid that `make test` runs; `make test-all` runs all of it."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(rows: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """`rows` for `parametrize`: tuples, or single values; those of which `usual` is false are marked `slow`."""
    found = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        found.append(row if usual(*values) else pytest.param(*values, marks=pytest.mark.slow))
    return found


def drawn(rows: Iterable[tuple[Any, ...]], count: int, group: Callable[..., Any]) -> set[tuple[Any, ...]]:
    """`count` rows of each group, the same in every run."""
    groups: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        groups[group(*row)].append(row)
    draw = random.Random(0)
    return {row for found in groups.values() for row in draw.sample(found, min(count, len(found)))}


def turns(rows: Iterable[Any], columns: Iterable[Any], count: int = 1) -> set[tuple[Any, Any]]:
    """Each row with `count` columns in turn, so that every column comes about as often as any other."""
    cycle = itertools.cycle(columns)
    return {(row, next(cycle)) for row in rows for _ in range(count)}
