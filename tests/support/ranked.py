"""Decorators that make a test of the program of one rank: under `@on_world(2)`, each of two ranks calls the function."""

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
    """Return a decorator that makes a test of `program(mesh, ...)`: each rank of a pool calls it with a mesh of `shape` and
    `names`.

    `pool`: the fixture of the ranks, "world" or "ranks". The program's other parameters are fixtures and parametrized arguments,
    which are pickled for the ranks. `shape` may be a function that gets the dict of arguments and returns (shape, names); it may
    remove arguments, which `takes` names, that the program does not have.
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
    """Call, on a rank, the program that the test `name` of `module` wraps. It is found by name, since it cannot be pickled."""
    getattr(importlib.import_module(module), name).__wrapped__(mesh, **given)


def on_world(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: each of `num_ranks` ranks of the pool `world` calls the program with a 1-D mesh."""
    return on_mesh((num_ranks,))


def on_num_ranks(program: Callable[..., None]) -> Callable[..., None]:
    """Decorator: as many ranks of the pool `world` as the test's argument `num_ranks` says call the program with a 1-D mesh."""
    return on_mesh(lambda given: ((given.pop("num_ranks"),), ("shard",)), takes=("num_ranks",))(program)


def on_worlds(program: Callable[..., None]) -> Callable[..., None]:
    """Decorator: three ranks, which divide no rows evenly, call the program with a 1-D mesh. `make test-all` runs the test also
    on two and on four ranks."""
    return pytest.mark.parametrize("num_ranks", sampled([2, 3, 4], (3).__eq__))(on_num_ranks(program))


def on_strategy(program: Callable[..., None]) -> Callable[..., None]:
    """Decorator for a program with an argument `strategy`, a name: runs it on two ranks, or if it is hybrid on two by two."""
    return on_mesh(lambda given: mesh_of(STRATEGIES[given["strategy"]]))(program)


def on_job(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator: each rank of a job of exactly `num_ranks` ranks calls the program. For libraries that use all ranks."""
    return on_mesh((num_ranks,), pool="ranks")


def under_strategies(
    *usual: str, num_ranks: int = 2, but: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a test of `program(mesh, strategy)` for each strategy not in `but`. `make test` runs the
    `usual` ones, `make test-all` all. The mesh has `num_ranks` ranks, or for hybrid strategies two by two."""

    def mesh(arguments: dict[str, Any]) -> Mesh:
        arguments["strategy"] = STRATEGIES[arguments["strategy"]]
        return mesh_of(arguments["strategy"], num_ranks)

    names = sampled([name for name in STRATEGIES if name not in but], usual.__contains__)
    return lambda program: pytest.mark.parametrize("strategy", names)(on_mesh(mesh)(program))
