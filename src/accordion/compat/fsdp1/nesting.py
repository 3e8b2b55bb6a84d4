"""`Wrapper`, base class of `FullyShardedDataParallel`: finds the outermost wrapper, and builds its engine at the first use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings

from accordion import state
from accordion.compat.fsdp1.arguments import Arguments
from accordion.compat.fsdp1.building import build
from accordion.engine.engine import Engine
from accordion.errors import DivergenceError, UsageError

FIRST_USE = (
    "The first use of a model that was wrapped by hand (its parameters, state, summon_full_params or forward) builds the engine, "
    "which needs all ranks; use it on every rank first, for example by list(model.parameters()), or pass auto_wrap_policy."
)
INNER = "_fsdp_wrapped_module."
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so a wrapper of one would never gather
PREFIXES = (INNER, "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """Return the qualified name `name` without the parts that wrappers for FSDP and activation checkpointing add."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


class Wrapper(nn.Module):
    """Base class of `FullyShardedDataParallel`: stores the arguments of one wrapper, and builds the engine of nested wrappers."""

    _arguments: Arguments
    _outer: weakref.ref[Wrapper] | None
    _built: bool
    _settings: StateDictSettings
    _own_dtypes: dict[str, torch.dtype]  # of buffers, before mixed precision casts them; on the outermost wrapper

    def _outermost(self) -> Wrapper:
        top = self
        while top._outer is not None and (above := top._outer()) is not None:
            top = above
        return top

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo cannot trace collectives
    def _ready(self) -> None:
        """Build one engine for the outermost wrapper and all wrappers inside it. Collective. Does nothing if the engine
        exists."""
        if self._built:
            return
        top = self._outermost()
        wrappers = [(n, m) for n, m in walk(top) if isinstance(m, Wrapper)]
        for _, wrapper in wrappers:
            wrapper._built = True  # the engine lists modules, which would call this method again
        try:
            top._own_dtypes = {n: b.dtype for n, b in top.named_buffers()}
            build(
                [
                    (name, wrapper, wrapper._arguments)
                    for name, wrapper in wrappers
                    if not isinstance(wrapper._fsdp_wrapped_module, CONTAINERS)
                ]
            )
        except BaseException as error:
            for _, wrapper in wrappers:
                wrapper._built = False
            if isinstance(error, DivergenceError):
                error.add_note(FIRST_USE)
            raise
        for _, wrapper in wrappers:
            wrapper.register_load_state_dict_pre_hook(_put_prefix)  # type: ignore[no-untyped-call]

    def _engine(self, what: str) -> Engine:
        self._ready()
        return state.sharded_engine(self, what)

    def _require_root(self, what: str) -> None:
        """Raise `UsageError`, which begins with `what`, if this wrapper is inside another. Otherwise build a missing engine."""
        if not self.check_is_root():
            raise UsageError(
                f"{what} was called on a FullyShardedDataParallel inside another; call it on the outermost."
            )
        self._engine(what)

    def check_is_root(self) -> bool:
        return self._outer is None or self._outer() is None


def walk(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for `module` and all its submodules, each once. Unlike `named_modules` of a wrapper, it builds no
    engine. `prefix`: the name of `module`. `seen`: ids of modules to skip; those of the modules that are yielded are added."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{prefix}.{name}" if prefix else name, seen)


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    return [m for _, m in walk(module) if isinstance(m, Wrapper)]


def some_wrappers(module: nn.Module, what: str) -> list[Wrapper]:
    """Return all wrappers in `module`, including itself. Raises `UsageError` if there are none; `what` begins its message."""
    wrappers = wrappers_in(module)
    if not wrappers:
        raise UsageError(f"{what} needs a FullyShardedDataParallel, but this {type(module).__name__} contains none.")
    return wrappers


def _put_prefix(module: nn.Module, loaded: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-hook of `load_state_dict`: insert `INNER` after `prefix` in the keys of `loaded`, because `module` is a wrapper."""
    for name in [name for name in loaded if name.startswith(prefix)]:
        loaded[f"{prefix}{INNER}{name.removeprefix(prefix)}"] = loaded.pop(name)
