"""Build one engine for nested wrappers: each wrapper is a unit, whose parameters are gathered and freed together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from accordion.compat.fsdp1.arguments import Arguments
from accordion.config import Offload, Precision
from accordion.errors import DivergenceError, UsageError
from accordion.shard.api import shard
from accordion.units import has_params
from accordion.weights.initialise import initialise

log = logging.getLogger("accordion")


def build(wrappers: Sequence[tuple[str, nn.Module, Arguments]]) -> None:
    """Shard the outermost of nested `wrappers` in place, with one engine for all. Collective.

    `wrappers`: (name in the outermost wrapper, wrapper, its arguments), the outermost first. Initialises modules on the meta
    device. If ranks built different values, the first rank's are used, and a warning is logged unless a wrapper asks for
    `sync_module_states`. Raises `UsageError` if one engine cannot serve all arguments, and `DivergenceError` if the models of
    the ranks differ in more than values.
    """
    (_, root, arguments), inner = wrappers[0], wrappers[1:]
    for name, _, theirs in inner:
        _check_alike(name, theirs, arguments)
    arguments.use_device()
    ignored = {id(p) for _, _, options in wrappers for p in options.ignored}
    units = {id(wrapper) for _, wrapper, _ in inner}
    with _hidden(root, ignored):
        master = _master(root)
        precision = arguments.precision(master, root=True)
        own_arguments = [(name, theirs) for name, wrapper, theirs in inner if has_params(wrapper)]
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
        asked = any(options.sync_module_states for _, _, options in wrappers)
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
        _materialise(root, on_meta, [(wrapper, options) for _, wrapper, options in wrappers])


def _check_alike(name: str, theirs: Arguments, root: Arguments) -> None:
    for what in ("strategy", "process_group", "device_mesh"):
        outer, inner = getattr(root, what), getattr(theirs, what)
        if inner is not None and outer != inner:
            raise UsageError(
                f"wrapper {name!r} has the {what} {getattr(inner, 'name', inner)}, but the outermost wrapper has "
                f"{getattr(outer, 'name', outer)}; pass the same to all."
            )


def _master(root: nn.Module) -> torch.dtype:
    """Return the narrowest dtype of the parameters that require gradients, float32 if there are none. As `Precision.master` this
    dtype changes no parameter, because parameters with a wider dtype keep theirs. Raises `UsageError` if two dtypes are equally
    narrow, such as bfloat16 and float16."""
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
    """Context manager that removes the parameters whose ids are in `ignored` from the modules of `root`. The exit registers them
    again, in the former order."""
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


def _materialise(root: nn.Module, on_meta: set[int], wrappers: Sequence[tuple[nn.Module, Arguments]]) -> None:
    """Initialise the modules of the sharded `root` whose ids are in `on_meta`. If all modules with parameters are on the meta
    device and no wrapper has a `param_init_fn`, call `initialise(root)`. Otherwise call for each module the `param_init_fn` of
    its nearest wrapper, or without one the module's `reset_parameters`. Raises `UsageError` if there is neither."""
    # Inner wrappers come later in the list, so theirs replaces that of outer ones.
    functions = {id(module): options.param_init_fn for wrapper, options in wrappers for module in wrapper.modules()}
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
