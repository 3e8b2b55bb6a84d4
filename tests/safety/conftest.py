"""A pool of ranks for tests that make it unusable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def alone(world: Any) -> Iterator[Any]:
    """Return the pool, which restarts after the test: messages that diverged ranks left would reach the next test."""
    yield world
    world.close()
