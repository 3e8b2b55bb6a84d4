"""Unshard a layer that is a unit when code outside of the layer reads its weight, as in `x @ self.embed.weight.T`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import map_tensors


class ListeningParameters(dict[str, Any]):
    """Copy of the dict `parameters`, in place of `module._parameters`, that calls `read()` before `module.weight` returns, but
    not when `parameters()` or a state dict iterates over the items."""

    __slots__ = ("_read",)

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)


class WeightReads(Observer):
    """Observer that unshards a layer when code of another unit reads a parameter of the layer, until the call of that other
    unit ends. The read begins a call of the layer, as the layer's forward does, so that the backward unshards it too. Attach
    the observer, and call `listen` for each such layer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: list[tuple[int, Hooks, nn.Module]] = []  # (depth, hooks, layer) of calls in progress

    def listen(self, hooks: Hooks, module: nn.Module) -> None:
        """Replace `module._parameters`, so that a read in a forward unshards `module`, a layer of the unit of `hooks`."""
        read = partial(self._begin, hooks, weakref.ref(module))
        module.__dict__["_parameters"] = ListeningParameters(module._parameters, read)

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._begun.clear()

    def interrupted(self) -> None:
        self._begun.clear()

    def _begin(self, hooks: Hooks, reference: weakref.ref[nn.Module]) -> None:
        """Begin a call of the layer in `reference` if a forward of the model runs and the layer is not unsharded yet."""
        engine, module = self._engine, reference()
        if engine.depth == 0 or engine.suspended or module is None or hooks.unit.module_params.is_shown:
            return
        torch.compiler.disable(hooks.before)(module, (), {}, by_read=True)
        self._begun.append((engine.depth, hooks, module))

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """When the forward of `call` ends, end the calls of layers that began in it because a weight was read, innermost first.
        Returns `out`, with copies of views of full parameters that are freed here; for a dummy call, `out` itself. `error`: the
        exception that ended the forward. If some calls fail to end, raises the last of their errors after all have ended."""
        if not self._begun or call.is_dummy:
            return out
        depth = self._engine.depth
        ending: list[tuple[Hooks, nn.Module]] = []
        while self._begun and self._begun[-1][0] == depth - len(ending):
            ending.append(self._begun.pop()[1:])
        for hooks, _ in ending:
            out = map_tensors(hooks.own_memory, out)
        with ExitStack() as stack:  # if one call fails to end, the others end too
            for hooks, module in reversed(ending):
                stack.callback(hooks.after, module, (), {}, None if error is not None else ())
        return out
