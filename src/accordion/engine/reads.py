"""Calls of a layer that somebody begins by reading its weight, as `x @ self.embed.weight.T` does."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accordion.engine.tree import map_tensors
from accordion.errors import UsageError

if TYPE_CHECKING:
    from accordion.engine.hooks import Hooks
    from accordion.engine.unit import Unit


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


class WeightReads:
    """Owns the calls under way that a read began, with their depth; each ends with the call inside of which it began."""

    def __init__(self) -> None:
        self._begun: list[tuple[int, Hooks, nn.Module]] = []

    def clear(self) -> None:
        self._begun.clear()

    def begin(self, hooks: Hooks, reference: weakref.ref[nn.Module]) -> None:
        """A parameter of a layer is read. In a forward, outside of the layer's own calls, one of them begins."""
        engine, module = hooks.engine, reference()
        if engine.depth == 0 or engine.suspended or module is None or hooks.unit.window.is_shown:
            return
        torch.compiler.disable(hooks.before)(module, (), {}, reads=True)
        self._begun.append((engine.depth, hooks, module))

    def end(self, depth: int, out: Any) -> Any:
        """The innermost call of a module ends, with the output `out`, None where it failed. What reads began inside ends first.

        Gives the output with memory of its own in place of parameters that are let go.
        """
        if not self._begun:
            return out
        ending: list[tuple[Hooks, nn.Module]] = []
        while self._begun and self._begun[-1][0] == depth - len(ending):
            ending.append(self._begun.pop()[1:])
        for hooks, _ in ending:
            out = map_tensors(hooks.own_memory, out)
        failed = None
        for hooks, module in ending:
            try:
                hooks.after(module, (), {}, None if out is None else ())
            except Exception as error:  # the others end too
                failed = error
        if failed is not None:
            raise failed
        return out


def read_outside(error: BaseException, units: Iterable[Unit]) -> UsageError:
    """What to raise for an error of torch over shards in a forward: the innermost module in its frames has read them."""
    names = ", ".join(unit.name or "(root)" for unit in units)
    places = [(ref(), attr, p.name, unit) for unit in units for p in unit.params for ref, attr in p.places]
    read = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        module = frame.f_locals.get(arguments[0]) if arguments else None
        if isinstance(module, nn.Module):
            mine = [(name, unit) for m, attr, name, unit in places if m is module and is_shard(m, attr)]
            read = f" ({', '.join(name for name, _ in mine)} of unit {mine[0][1].name!r})" if mine else ""
    return UsageError(
        f"the forward read a parameter of a unit{read} outside of that unit's own forward, where it is a shard; choose `units` "
        f"so that one holds all that read it, or name the method in entry_point. The units are: {names}."
    )


def is_shard(module: nn.Module, attr: str) -> bool:
    params: dict[str, Any] = module._parameters
    return isinstance(params.get(attr), DTensor)
