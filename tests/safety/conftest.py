"""A pool of ranks for tests after which it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def alone(world: Any) -> Iterator[Any]:
    """The pool, started anew afterwards: what diverged ranks have left in their groups would meet the next test."""
    yield world
    world.close()
