"""What nested wrappers share: who is around whom, and the engine that is made for the outermost one."""

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
from accordion.compat.fsdp1.meeting import meet, ranks_of
from accordion.engine.engine import Engine
from accordion.errors import UsageError

INNER = "_fsdp_wrapped_module."
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward, so a wrapper around one gathers nothing
PREFIXES = (INNER, "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """A qualified name without what wrappers put into it."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


class Wrapper(nn.Module):
    """Owns the arguments of one wrapper, and on the outermost one what the engine was made from."""

    _arguments: Arguments
    _outer: weakref.ref[Wrapper] | None
    _built: bool
    _settings: StateDictSettings
    _own_dtypes: dict[str, torch.dtype]  # of buffers, before mixed precision cast them

    def _outermost(self) -> Wrapper:
        top = self
        while top._outer is not None and (above := top._outer()) is not None:
            top = above
        return top

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo cannot trace what communicates
    def _ready(self) -> None:
        """Build the engine of the outermost wrapper, once."""
        if self._built:
            return
        top = self._outermost()
        wrappers = [(n, m) for n, m in named(top, "", set()) if isinstance(m, Wrapper)]
        for _, wrapper in wrappers:
            wrapper._built = True  # asking for modules, as the engine does, must not begin again
        try:
            meet(ranks_of(top._arguments))
            top._own_dtypes = {n: b.dtype for n, b in top.named_buffers()}
            build(
                [
                    (name, wrapper, wrapper._arguments)
                    for name, wrapper in wrappers
                    if not isinstance(wrapper._fsdp_wrapped_module, CONTAINERS)
                ]
            )
        except BaseException:
            for _, wrapper in wrappers:
                wrapper._built = False
            raise
        for _, wrapper in wrappers:
            wrapper.register_load_state_dict_pre_hook(put_prefix)  # type: ignore[no-untyped-call]

    def _engine(self, what: str) -> Engine:
        self._ready()
        return state.sharded_engine(self, what)

    def _root_engine(self, what: str) -> Engine:
        if not self.check_is_root():
            raise UsageError(f"{what} is for the outermost FullyShardedDataParallel, and this one is inside another.")
        return self._engine(what)

    def check_is_root(self) -> bool:
        """Whether no other wrapper is around this one."""
        return self._outer is None or self._outer() is None


def walk(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and all below it, without asking a wrapper for its modules, which would make an engine."""
    return (found for _, found in named(module, "", set()))


def named(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from named(child, f"{prefix}.{name}" if prefix else name, seen)


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    """All wrappers in `module`, itself included."""
    return [m for m in walk(module) if isinstance(m, Wrapper)]


def some_wrappers(module: nn.Module, what: str) -> list[Wrapper]:
    """As `wrappers_in`; raises `UsageError` where there is none."""
    found = wrappers_in(module)
    if not found:
        raise UsageError(
            f"{what} takes a model with FullyShardedDataParallel in it; this {type(module).__name__} has none."
        )
    return found


def engines_of(model: nn.Module, what: str) -> list[Engine]:
    """The engine of each outermost wrapper around or in `model`."""
    tops = {id(w): w for w in (m._outermost() for m in some_wrappers(model, what))}
    return [top._engine(what) for top in tops.values()]


def put_prefix(module: nn.Module, found: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: names as the modules below a wrapper look for them."""
    for name in [name for name in found if name.startswith(prefix)]:
        found[f"{prefix}{INNER}{name.removeprefix(prefix)}"] = found.pop(name)
