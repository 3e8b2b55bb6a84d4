"""`Wrapper`, base class of `FullyShardedDataParallel`: build one engine for nested wrappers at their first use."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings

from accordion import state
from accordion.compat.fsdp1.arguments import Arguments
from accordion.config import Offload, Precision
from accordion.engine.engine import Engine
from accordion.errors import DivergenceError, UsageError
from accordion.shard.api import shard
from accordion.units import has_params
from accordion.weights.initialise import initialise

log = logging.getLogger("accordion")
FIRST_USE = (
    "The first use of a model that was wrapped by hand (its parameters, state, summon_full_params or forward) builds the engine, "
    "which needs all ranks; use it on every rank first, for example by list(model.parameters()), or pass auto_wrap_policy."
)
INNER = "_fsdp_wrapped_module."
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so a wrapper of one would never gather
PREFIXES = (INNER, "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """Return the qualified name `name` without the parts that wrappers add, such as "_fsdp_wrapped_module."."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


class Wrapper(nn.Module):
    """Base class of `FullyShardedDataParallel`, which sets the attributes. `_ready` builds one engine for nested wrappers."""

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
        """Build one engine for the outermost wrapper and all wrappers inside it (collective), unless there is one already."""
        if self._built:
            return
        top = self._outermost()
        wrappers = [(n, m) for n, m in walk(top) if isinstance(m, Wrapper)]
        for _, wrapper in wrappers:
            wrapper._built = True  # the engine lists modules, which would call this method again
        try:
            top._own_dtypes = {n: b.dtype for n, b in top.named_buffers()}
            _build([(n, m) for n, m in wrappers if not isinstance(m._fsdp_wrapped_module, CONTAINERS)])
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
        """Raise `UsageError`, which begins with `what`, if this wrapper is inside another. Else build a missing engine."""
        if not self.check_is_root():
            raise UsageError(
                f"{what} was called on a FullyShardedDataParallel inside another; call it on the outermost."
            )
        self._engine(what)

    def check_is_root(self) -> bool:
        return self._outer is None or self._outer() is None


def walk(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for `module` and all its submodules, each once. Unlike `named_modules` of a wrapper, this does not
    build an engine. `prefix`: the name of `module`. `seen`: ids of modules to leave out; those of yielded modules are added."""
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
    """Return all wrappers in `module`, including itself. Raise `UsageError`, which begins with `what`, if there are none."""
    wrappers = wrappers_in(module)
    if not wrappers:
        raise UsageError(f"{what} needs a FullyShardedDataParallel, but this {type(module).__name__} contains none.")
    return wrappers


def _put_prefix(module: nn.Module, loaded: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Pre-hook of `load_state_dict` of a wrapper: insert "_fsdp_wrapped_module." after `prefix` in the keys of `loaded`."""
    for name in [name for name in loaded if name.startswith(prefix)]:
        loaded[f"{prefix}{INNER}{name.removeprefix(prefix)}"] = loaded.pop(name)


# -- building the engine


def _build(wrappers: Sequence[tuple[str, Wrapper]]) -> None:
    """Shard the outermost of nested `wrappers` in place, with one engine for all, and initialise modules on the meta device.
    Collective. `wrappers`: (name in the outermost wrapper, wrapper), the outermost first.

    Sets the current device to the outermost wrapper's `device_id`. If ranks built different values, the first rank's are used,
    and a warning is logged unless a wrapper asks for `sync_module_states`. Raises `UsageError` if one engine cannot serve all
    arguments, and `DivergenceError` if models differ in more than values.
    """
    (_, root), inner = wrappers[0], wrappers[1:]
    arguments = root._arguments
    for name, wrapper in inner:
        _check_alike(name, wrapper._arguments, arguments)
    arguments.use_device()
    ignored = {id(p) for _, wrapper in wrappers for p in wrapper._arguments.ignored}
    units = {id(wrapper) for _, wrapper in inner}
    with _hidden(root, ignored):
        master = _master(root)
        precision = arguments.precision(master, root=True)
        own_arguments = [(name, wrapper._arguments) for name, wrapper in inner if has_params(wrapper)]
        overrides: dict[Any, Precision] = {n: theirs.precision(master, root=False) for n, theirs in own_arguments}
        places: dict[Any, Offload] = {n: theirs.offload for n, theirs in own_arguments}
        on_meta = {
            id(module)
            for module in root.modules()
            if any(t is not None and t.is_meta for t in (*module._parameters.values(), *module._buffers.values()))
        }
        make = partial(
            shard,
            root,
            arguments.mesh(),
            units=lambda name, module: id(module) in units,
            strategy=arguments.strategy,
            precision=dataclasses.replace(precision, overrides=overrides),
            offload=dataclasses.replace(arguments.offload, overrides=places),
        )
        asked = any(wrapper._arguments.sync_module_states for _, wrapper in wrappers)
        try:
            make(sync=asked)
        except DivergenceError:
            if asked:
                raise
            # Raised on every rank before anything was sharded. With sync=True it is raised again unless only values differ.
            make(sync=True)
            log.warning(
                "ranks built different parameter values: the first rank's are used (torch's class mixes rows of all ranks)"
            )
    if on_meta:
        _materialise(root, on_meta, [wrapper for _, wrapper in wrappers])


def _check_alike(name: str, theirs: Arguments, root: Arguments) -> None:
    for what in ("strategy", "process_group", "device_mesh"):
        outer, inner = getattr(root, what), getattr(theirs, what)
        if inner is not None and outer != inner:
            raise UsageError(
                f"wrapper {name!r} has the {what} {getattr(inner, 'name', inner)}, but the outermost wrapper has "
                f"{getattr(outer, 'name', outer)}; pass the same to all."
            )


def _master(root: nn.Module) -> torch.dtype:
    """Return the narrowest dtype of the parameters that require gradients; float32 without any. As `Precision.master` it casts
    none of them, because wider ones keep their dtype. Raises `UsageError` if two dtypes tie, such as bfloat16 and float16."""
    dtypes = {p.dtype for p in root.parameters() if p.is_floating_point() and p.requires_grad}
    if not dtypes:
        return torch.float32
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    narrow = [dtype for dtype in dtypes if dtype.itemsize == narrowest.itemsize]
    if len(narrow) > 1:
        raise UsageError(f"parameters have the dtypes {' and '.join(map(str, narrow))}; use one before wrapping.")
    return narrowest


@contextmanager
def _hidden(root: nn.Module, ignored: set[int]) -> Iterator[None]:
    """Context manager that removes parameters with ids in `ignored` from modules of `root`; the exit puts them back."""
    before = [(m, dict(m._parameters)) for m in root.modules() if any(id(p) in ignored for p in m._parameters.values())]
    for module, params in before:
        for name in [name for name, p in params.items() if id(p) in ignored]:
            del module._parameters[name]
    try:
        yield
    finally:
        for module, params in before:
            current = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: current.get(name, p) for name, p in params.items()})


def _materialise(root: nn.Module, on_meta: set[int], wrappers: Sequence[Wrapper]) -> None:
    """Initialise the modules of the sharded `root` whose ids are in `on_meta`. Collective. If all modules with parameters are
    on the meta device and no wrapper has a `param_init_fn`, call `initialise(root)`. Otherwise call for each module the
    `param_init_fn` of its nearest wrapper or, if None, its own `reset_parameters`. Raises `UsageError` if there is neither."""
    # Inner wrappers come later in the list, so theirs replaces that of outer ones.
    functions = {id(m): wrapper._arguments.param_init_fn for wrapper in wrappers for m in wrapper.modules()}
    owners = [m for m in root.modules() if any(True for _ in m.parameters(recurse=False))]
    if not any(functions.values()) and all(id(m) in on_meta for m in owners):
        initialise(root)
        return

    def init(module: nn.Module) -> None:
        if id(module) not in on_meta:
            return
        function = functions[id(module)]
        if function is not None:
            function(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise UsageError(
                f"{type(module).__name__} is on the meta device and has no reset_parameters(); pass param_init_fn to its wrapper."
            )

    initialise(root, init)
