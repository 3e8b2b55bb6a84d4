"""Calls of a layer that somebody begins by reading its weight, as `x @ self.embed.weight.T` does."""

from __future__ import annotations

import ast
import contextlib
import linecache
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import map_tensors
from accordion.engine.unit import Unit
from accordion.errors import UsageError


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
        depth = self._engine.depth
        ending: list[tuple[Hooks, nn.Module]] = []
        while self._begun and self._begun[-1][0] == depth - len(ending):
            ending.append(self._begun.pop()[1:])
        for hooks, _ in ending:
            out = map_tensors(hooks.own_memory, out)
        failed = None
        for hooks, module in ending:
            try:
                hooks.after(module, (), {}, None if error is not None else ())
            except Exception as caught:  # the others end too
                failed = caught
        if failed is not None:
            raise failed
        return out


def read_outside(error: BaseException, units: Iterable[Unit]) -> UsageError:
    """What to raise for an error of torch over shards in a forward, naming those that were read: what the code that failed
    says of them in the innermost frame that says anything, or all of that frame's module."""
    units = list(units)
    names = ", ".join(unit.name or "(root)" for unit in units)
    places = [(ref(), attr, p.name, unit) for unit in units for p in unit.params for ref, attr in p.places]
    shards = {id(p.sharded): (p.name, unit) for unit in units for p in unit.params}
    read = ""
    tb = error.__traceback__
    for (frame, _), summary in zip(traceback.walk_tb(tb), traceback.extract_tb(tb), strict=False):
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        module = frame.f_locals.get(arguments[0]) if arguments else None
        values = _values_in(_expression(summary), frame.f_locals)
        mine = [shards[key] for key in dict.fromkeys(id(value) for value in values) if key in shards]
        if not mine and isinstance(module, nn.Module):
            mine = [(name, unit) for m, attr, name, unit in places if m is module and is_shard(m, attr)]
        if mine:
            read = f" ({', '.join(name for name, _ in mine)} of unit {mine[0][1].name!r})"
    return UsageError(
        f"the forward read a parameter of a unit{read} outside of that unit's own forward, where it is a shard; choose `units` "
        f"so that one holds all that read it, or name the method in entry_point. The units are: {names}."
    )


def _expression(place: traceback.FrameSummary) -> ast.AST:
    """The part of a source line that failed; an empty module where the source is not there."""
    lines = [linecache.getline(place.filename, n) for n in range(place.lineno or 0, (place.end_lineno or -1) + 1)]
    if not all(lines) or not lines or place.colno is None or place.end_colno is None:
        return ast.Module([], [])
    rows = [line.encode() for line in lines]  # columns are of bytes
    rows[-1] = rows[-1][: place.end_colno]
    rows[0] = rows[0][place.colno :]
    text = b"".join(rows).decode(errors="replace")
    for source in (f"(\n{text}\n)", text):  # an expression may run over lines, a statement may not stand in brackets
        with contextlib.suppress(SyntaxError, ValueError):
            return ast.parse(source)
    return ast.Module([], [])


def _values_in(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[Any]:
    """What names, attributes of modules and items of containers in an expression stand for; no code of the model's runs."""
    for node in ast.walk(tree):
        value = _value(node, names)
        if value is not None:
            yield value


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        held = vars(owner) if isinstance(owner, nn.Module) else {}
        for kind in ("_modules", "_parameters"):
            found: dict[str, Any] = held.get(kind, {})
            if node.attr in found:
                return dict.get(found, node.attr)  # not told to `ListeningParameters`
        return held.get(node.attr)
    if isinstance(node, ast.Subscript):
        owner, key = _value(node.value, names), _value(node.slice, names)
        if type(owner) in (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, list, tuple, dict):
            with contextlib.suppress(LookupError, TypeError):
                return owner[key]
    return None


def is_shard(module: nn.Module, attr: str) -> bool:
    params: dict[str, Any] = module._parameters
    return isinstance(params.get(attr), DTensor)
