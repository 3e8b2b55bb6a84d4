"""From nested wrappers to one engine: the outermost wrapper is the model, each wrapper inside it a unit."""

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
    """Shard the first of `wrappers`, in which the others are; (name in it, wrapper, its arguments).

    Raises `UsageError` where an inner wrapper asks for what one engine cannot do, `DivergenceError` where ranks hold
    models of different structure.
    """
    (_, root, arguments), inner = wrappers[0], wrappers[1:]
    for name, _, theirs in inner:
        _check_alike(name, theirs, arguments)
    arguments.use_device()
    ignored = {id(p) for _, _, given in wrappers for p in given.ignored}
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
        asked = any(given.sync_module_states for _, _, given in wrappers)
        try:
            make(sync=asked)
        except DivergenceError:  # on every rank, before anything was done
            if asked:
                raise
            make(sync=True)  # raises again unless values are all that differs
            log.warning(
                "ranks built different parameters: the first rank's are taken (torch's class keeps rows of each rank's)"
            )
    if on_meta:
        _materialise(root, on_meta, [(wrapper, given) for _, wrapper, given in wrappers])


def _check_alike(name: str, theirs: Arguments, root: Arguments) -> None:
    for what in ("strategy", "process_group", "device_mesh"):
        mine, other = getattr(root, what), getattr(theirs, what)
        if other is not None and mine != other:
            raise UsageError(
                f"wrapper {name!r} has {what} {getattr(other, 'name', other)} and the outermost {getattr(mine, 'name', mine)}; "
                "give all the same."
            )


def _master(root: nn.Module) -> torch.dtype:
    """The dtype under which every trained parameter keeps its own: the narrowest there is."""
    dtypes = {p.dtype for p in root.parameters() if p.is_floating_point() and p.requires_grad}
    if not dtypes:
        return torch.float32
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    alike = [dtype for dtype in dtypes if dtype.itemsize == narrowest.itemsize]
    if len(alike) > 1:
        raise UsageError(
            f"parameters are {' and '.join(map(str, alike))} in one model; make them one dtype before wrapping."
        )
    return narrowest


@contextmanager
def _hidden(root: nn.Module, ignored: set[int]) -> Iterator[None]:
    """Without the ignored parameters, which afterwards stand where they were, in the order in which they were."""
    kept: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = []
    for module in root.modules() if ignored else ():
        if any(id(p) in ignored for p in module._parameters.values()):
            kept.append((module, dict(module._parameters)))
            for name in [name for name, p in module._parameters.items() if id(p) in ignored]:
                del module._parameters[name]
    try:
        yield
    finally:
        for module, before in kept:
            now = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({name: now.get(name, p) for name, p in before.items()})


def _materialise(root: nn.Module, on_meta: set[int], wrappers: Sequence[tuple[nn.Module, Arguments]]) -> None:
    """Give values to the modules with ids in `on_meta`, which had something on the meta device.

    They come from the `param_init_fn` of the nearest wrapper, else from `reset_parameters`.
    """
    # Inner wrappers come later, and win.
    functions = {id(module): given.param_init_fn for wrapper, given in wrappers for module in wrapper.modules()}
    own = [m for m in root.modules() if any(True for _ in m.parameters(recurse=False))]
    if not any(functions.values()) and all(id(m) in on_meta for m in own):
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
                f"{type(module).__name__} is on the meta device and has no reset_parameters(); give the wrapper a param_init_fn."
            )

    initialise(root, init)
