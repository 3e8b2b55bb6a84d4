"""Rank processes for the libraries, which use every rank of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests import pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], pool.Pool]]:
    """Fixture: `ranks(n).run(n, fn, *args)` calls `fn(mesh, *args)` on each rank of a job of `n`, kept for later tests."""
    made: dict[int, pool.Pool] = {}

    def of(num_ranks: int) -> pool.Pool:
        return made.setdefault(num_ranks, pool.Pool(num_ranks))

    yield of
    for one in made.values():
        one.close()
