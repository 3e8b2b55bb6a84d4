"""Tests written as the program of one rank: `@on_world(2)` has each of two ranks call the function."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any


def on_mesh(
    shape: tuple[int, ...], names: tuple[str, ...] = ("shard",), pool: str = "world"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that takes a mesh first: each rank of a pool calls it with the mesh of this shape.

    `pool`: the fixture, `world` or `ranks`. The function's other parameters are fixtures and parametrized arguments, which
    travel to the ranks.
    """

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            ranks = given.pop(pool)
            ranks = ranks(math.prod(shape)) if pool == "ranks" else ranks
            ranks.run_mesh(shape, names, _call, program.__module__, program.__qualname__, given)

        taken = list(inspect.signature(program).parameters.values())[1:]
        fixtures = [pool, *(parameter.name for parameter in taken)]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _call(mesh: Any, module: str, name: str, given: dict[str, Any]) -> None:
    """Call the program of a test, which travels by name: the name is that of the test."""
    getattr(importlib.import_module(module), name).__wrapped__(mesh, **given)


def on_world(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`on_mesh` for so many ranks of `world`."""
    return on_mesh((num_ranks,))


def on_job(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`on_mesh` for a job of so many ranks, which libraries take for all that there are."""
    return on_mesh((num_ranks,), pool="ranks")
