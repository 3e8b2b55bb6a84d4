"""Calls of a layer that somebody begins by reading its weight, as `x @ self.embed.weight.T` does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import map_tensors


class ListeningParameters(dict[str, Any]):
    """The `_parameters` of a module: a look at one of them is told first.

    `module.weight` looks here; `parameters()` and state dicts go through the items and are not heard.
    """

    __slots__ = ("_read",)

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)


class WeightReads(Observer):
    """Owns the calls under way that a read began, with their depth; each ends with the call inside of which it began."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: list[tuple[int, Hooks, nn.Module]] = []

    def listen(self, hooks: Hooks, module: nn.Module) -> None:
        """Have a read of a parameter of `module`, a layer that is a unit, begin a call of it."""
        read = partial(self._begin, hooks, weakref.ref(module))
        module.__dict__["_parameters"] = ListeningParameters(module._parameters, read)

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._begun.clear()

    def interrupted(self) -> None:
        self._begun.clear()

    def _begin(self, hooks: Hooks, reference: weakref.ref[nn.Module]) -> None:
        """A parameter of a layer is read. In a forward, outside of the layer's own calls, one of them begins."""
        engine, module = self._engine, reference()
        if engine.depth == 0 or engine.suspended or module is None or hooks.unit.module_params.is_shown:
            return
        torch.compiler.disable(hooks.before)(module, (), {}, by_read=True)
        self._begun.append((engine.depth, hooks, module))

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """What reads began inside of the call ends first.

        Gives the output with memory of its own in place of parameters that are let go.
        """
        if not self._begun or call.is_dummy:
            return out
        depth, failed = self._engine.depth, None
        ending: list[tuple[Hooks, nn.Module]] = []
        while self._begun and self._begun[-1][0] == depth - len(ending):
            ending.append(self._begun.pop()[1:])
        for hooks, _ in ending:
            out = map_tensors(hooks.own_memory, out)
        for hooks, module in ending:
            try:
                hooks.after(module, (), {}, None if error is not None else ())
            except Exception as caught:  # the others end too
                failed = caught
        if failed is not None:
            raise failed
        return out
