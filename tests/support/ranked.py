"""Tests written as the program of one rank: `@on_world(2)` has each of two ranks call the function."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest

from accordion.config import STRATEGIES
from tests.support.checks import mesh_of
from tests.support.sample import sampled

Mesh = tuple[tuple[int, ...], tuple[str, ...]]  # numbers of ranks and names of its axes


def on_mesh(
    shape: tuple[int, ...] | Callable[[dict[str, Any]], Mesh],
    names: tuple[str, ...] = ("shard",),
    pool: str = "world",
    takes: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that takes a mesh first: each rank of a pool calls it with the mesh of this shape.

    `pool`: the fixture, `world` or `ranks`. The function's other parameters are fixtures and parametrized arguments, which
    travel to the ranks. `shape` may be a function of the arguments, from which it may take those named in `takes`.
    """

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            ranks, mesh = given.pop(pool), shape(given) if callable(shape) else (shape, names)
            ranks = ranks(math.prod(mesh[0])) if pool == "ranks" else ranks
            ranks.run_mesh(*mesh, _call, program.__module__, program.__qualname__, given)

        taken = list(inspect.signature(program).parameters.values())[1:]
        fixtures = [pool, *takes, *(parameter.name for parameter in taken)]
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


def on_num_ranks(program: Callable[..., None]) -> Callable[..., None]:
    """`on_mesh` for so many ranks of `world` as the parametrized argument `num_ranks` says."""
    return on_mesh(lambda given: ((given.pop("num_ranks"),), ("shard",)), takes=("num_ranks",))(program)


def on_worlds(program: Callable[..., None]) -> Callable[..., None]:
    """`on_mesh` for three ranks, which divide no rows; under `make test-all` also for two, compared bit for bit, and four."""
    return pytest.mark.parametrize("num_ranks", sampled([2, 3, 4], (3).__eq__))(on_num_ranks(program))


def on_strategy(program: Callable[..., None]) -> Callable[..., None]:
    """`on_mesh` for a program that takes the name of a strategy: two ranks, or two by two."""
    return on_mesh(lambda given: mesh_of(STRATEGIES[given["strategy"]]))(program)


def on_job(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`on_mesh` for a job of so many ranks, which libraries take for all that there are."""
    return on_mesh((num_ranks,), pool="ranks")


def under_strategies(
    *usual: str, num_ranks: int = 2, but: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function (mesh, strategy) under the `usual` strategies, and under all `but` some with `make test-all`."""

    def mesh(arguments: dict[str, Any]) -> Mesh:
        arguments["strategy"] = STRATEGIES[arguments["strategy"]]
        return mesh_of(arguments["strategy"], num_ranks)

    names = sampled([name for name in STRATEGIES if name not in but], usual.__contains__)
    return lambda program: pytest.mark.parametrize("strategy", names)(on_mesh(mesh)(program))
