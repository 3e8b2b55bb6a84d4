"""Unshard a unit in a backward that reaches it from a loss outside the model's outputs: in an attribute, argument or global.

A loss that a forward leaves in an attribute of a module (such as a router's), or in a list among its inputs, is detected when the
call ends, and gets a hook that begins the call's backward. A loss in a global or in another object cannot be detected: then
the backward of the call begins when autograd reads a full parameter that it has saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.hooks import ATTACHED
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import tensors_in, written_into
from accordion.engine.unit import Unit

# Types of most attributes, which hold no tensor.
_PLAIN = frozenset({bool, float, int, str, type(None), torch.dtype, torch.device})
OF_MODULES = frozenset(nn.Module().__dict__)  # attributes that torch gives every module


class SavedParam(NamedTuple):
    """A full parameter that autograd has saved. `begin`: called before a backward reads it; begins the backward of its call."""

    begin: Callable[[], None]
    tensor: Tensor


class HiddenLosses(Observer):
    """Observer that begins the backward of a call, which unshards its unit, when a gradient reaches a loss left in the unit's
    modules, or when autograd reads a full parameter that it has saved.

    A hook on saved tensors costs two Python calls for each tensor. So a unit has one only until its first backward, and later
    only if a backward of it has begun at such a read. The hook passes other tensors to hooks of activation checkpointing or
    offload, if there are any.
    """

    def __init__(self) -> None:
        self._begins_at_reads: dict[int, bool] = {}  # by unit, after its first backward
        self._watches: dict[int, torch.autograd.graph.saved_tensors_hooks] = {}  # by id of their call
        self._packs: list[Callable[[Tensor], Any]] = []  # hooks of calls in progress
        # By unit: the results of `_watched` for its modules.
        self._inside: dict[int, list[tuple[weakref.ref[nn.Module], int, int]]] = {}

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """Install a hook for tensors that autograd saves in the forward of `call`: when a backward reads a full parameter among
        them, the backward of `call` begins, unless it has begun."""
        if self._begins_at_reads.get(call.unit.index) is False and call.needs_full_in_backward:
            return
        if call.is_dummy or not call.may_come_back:
            return
        unit, begin, outer = call.unit, partial(self._read, call, fulls), _torch.saving_hook()
        if outer is not None and outer not in self._packs:
            return

        def pack(tensor: Tensor) -> Any:
            if unit.holds(tensor):
                return SavedParam(begin, tensor)
            return tensor if outer is None else outer(tensor)

        watch = self._watches[id(call)] = torch.autograd.graph.saved_tensors_hooks(pack, read)
        self._packs.append(pack)
        watch.__enter__()

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        watch = self._watches.pop(id(call), None)
        if watch is not None:
            self._end(watch)
        return out

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        """Have the backward of `call` begin when a gradient reaches a tensor that the forward left in attributes, objects in
        `out`, or `inputs`."""
        hidden = [] if isinstance(out, Tensor) else list(tensors_in(out, opaque_depth=3))
        hidden += self._left_in_attributes(call.unit)
        hidden += written_into(inputs)
        if hidden:
            begin = partial(call.begin, fulls)
            for tensor in hidden:
                if tensor.requires_grad and tensor.grad_fn is not None:
                    _torch.on_gradient(tensor, begin)

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        if call is not None:
            self._begins_at_reads.setdefault(unit.index, False)

    def interrupted(self) -> None:
        for watch in self._watches.values():
            self._end(watch)
        self._watches.clear()

    def _read(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        if call.may_come_back:  # its own forward reads
            return
        if not call.has_begun():
            self._begins_at_reads[call.unit.index] = True
        call.begin_for_read(fulls)

    def _end(self, watch: torch.autograd.graph.saved_tensors_hooks) -> None:
        self._packs.pop()
        watch.__exit__()

    def _left_in_attributes(self, unit: Unit) -> list[Tensor]:
        """Return the tensors in attributes of the unit's modules, such as a router's loss."""
        inside = self._inside.get(unit.index)
        if inside is None:
            root = unit.module()
            inside = self._inside[unit.index] = [] if root is None else list(map(_watched, _modules_inside(root)))
        tensors: list[Tensor] = []
        for ref, start, num_plain in inside:
            module = ref()
            if module is None or len(module.__dict__) == num_plain:
                continue
            for value in islice(module.__dict__.values(), start, None):
                kind = type(value)
                if kind in _PLAIN:
                    continue
                if Tensor in kind.__mro__:  # isinstance would call its metaclass
                    tensors.append(value)
                elif kind is list or kind is tuple:
                    tensors += [v for v in value if isinstance(v, Tensor)]
                elif kind is dict:
                    tensors += [v for v in value.values() if isinstance(v, Tensor)]
        return tensors


def read(saved: Any) -> Tensor:
    if isinstance(saved, SavedParam):
        saved.begin()
        return saved.tensor
    return cast(Tensor, saved)


def _watched(module: nn.Module) -> tuple[weakref.ref[nn.Module], int, int]:
    """Return (module, index in its `__dict__` of the first attribute that torch does not set, number of its attributes).

    The number is -1 unless torch defines the class. Forwards of torch set no attributes, so while the number stays equal there
    is no loss in them. The index is 0 if attributes were set before `super().__init__()`.
    """
    start = len(OF_MODULES) if set(list(module.__dict__)[: len(OF_MODULES)]) == OF_MODULES else 0
    num = len(module.__dict__) if type(module).__module__.startswith("torch.nn.modules.") else -1
    return weakref.ref(module), start, num


def _modules_inside(root: nn.Module) -> Iterator[nn.Module]:
    """Yield `root` and the modules inside it, except modules that are units themselves and what is inside them."""
    yield root
    for child in root.children():
        if ATTACHED not in child.__dict__:
            yield from _modules_inside(child)
