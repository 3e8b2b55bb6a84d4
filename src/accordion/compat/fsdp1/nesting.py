"""What nested wrappers share: who is around whom, and the engine that is made for the outermost one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import StateDictSettings

from accordion import _torch, state
from accordion.compat.fsdp1.arguments import Arguments
from accordion.compat.fsdp1.building import build
from accordion.engine.engine import Engine
from accordion.errors import UsageError
from accordion.safety.liveness.arrivals import Arrivals
from accordion.safety.liveness.polling import once_after, poll

log = logging.getLogger("accordion")
PATIENCE_S = 10.0  # a wait for other ranks beyond it is logged
LIMIT_S = 300.0  # the longest that one rank may be ahead of the others
ADVICE = (
    "the first use of a model that was wrapped by hand (its parameters, state, summon_full_params or forward) makes the engine, "
    "for which all ranks are needed; do that first on every rank, list(model.parameters()) for example, or give auto_wrap_policy"
)
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
            _wait_for_all(top._arguments)
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
            wrapper.register_load_state_dict_pre_hook(_put_prefix)  # type: ignore[no-untyped-call]

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


def _wait_for_all(arguments: Arguments) -> None:
    """Wait until all ranks of a model have come to its first use. Raises `UsageError` naming those that do not come."""
    if arguments.device_mesh is not None:
        ranks = [int(rank) for rank in arguments.device_mesh.mesh.flatten()]
    else:
        group = arguments.process_group
        ranks = sorted(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))
    if len(ranks) < 2 or dist.get_backend() == "fake":
        return
    name, mine = f"accordion/first_use/{','.join(map(str, ranks))}", dist.get_rank()
    arrivals = Arrivals(_torch.default_store(), name, ranks)
    arrivals.come(mine)

    def missing() -> str:
        absent = arrivals.missing()
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"

    warn = once_after(PATIENCE_S, lambda: log.warning("waiting for %s: %s.", missing(), ADVICE))
    if not poll(arrivals.all_came, LIMIT_S, warn):
        absent = missing()
        if arrivals.withdraw(mine):
            raise UsageError(f"rank {mine} has waited {LIMIT_S:.0f} s for {absent}: {ADVICE}.")


def engines_of(model: nn.Module, what: str) -> list[Engine]:
    """The engine of each outermost wrapper around or in `model`."""
    tops = {id(w): w for w in (m._outermost() for m in some_wrappers(model, what))}
    return [top._engine(what) for top in tops.values()]


def _put_prefix(module: nn.Module, found: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: names as the modules below a wrapper look for them."""
    for name in [name for name in found if name.startswith(prefix)]:
        found[f"{prefix}{INNER}{name.removeprefix(prefix)}"] = found.pop(name)
