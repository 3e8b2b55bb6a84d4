"""Losses that the outermost call's outputs do not lead to: in attributes, arguments, globals and objects.

A router's loss that a forward left in an attribute of a module, or in a list that it was given, is found at the end of the call,
and a hook on it begins the call in a backward. To a loss in a global or in an object nothing of the model leads: there the
call begins when autograd reads a full parameter that it has saved.
"""

from __future__ import annotations

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

_PLAIN = frozenset(
    {bool, float, int, str, type(None), torch.dtype, torch.device}
)  # of most attributes: no tensor in them
OF_MODULES = frozenset(nn.Module().__dict__)  # attributes that torch gives every module


class SavedParam(NamedTuple):
    """A full parameter that autograd saves, and what must be done before it is read."""

    begin: Callable[[], None]
    tensor: Tensor


class HiddenLosses(Observer):
    """Owns, for each unit, the modules in which a loss may be left, and whether its backwards begin at reads of saved tensors.

    Each saved tensor costs two calls of Python. So tensors are looked at only until the first backward has come to a unit by
    a pre-backward node or an output, and after that only if one did not. Where others have such hooks (checkpointing, offload),
    theirs are left to work.
    """

    def __init__(self) -> None:
        self._begins_at_reads: dict[int, bool] = {}  # by unit, once a backward has come
        self._watches: dict[int, torch.autograd.graph.saved_tensors_hooks] = {}  # by id of their call
        self._packs: list[Callable[[Tensor], Any]] = []  # of calls under way
        # By unit: attributes of each module, where its own begin, and how many there are as long as none can hold a loss.
        self._inside: dict[int, list[tuple[dict[str, Any], int, int]]] = {}

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """Let a backward begin this call when it reads a full parameter, if nothing else has begun it."""
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
        """Let a backward begin this call when it comes to a tensor that the forward has left elsewhere."""
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
        """A node of the call is about to read a full parameter."""
        if call.may_come_back:  # in its own forward
            return
        if not call.has_begun():
            self._begins_at_reads[call.unit.index] = True
        call.begin_for_read(fulls)

    def _end(self, watch: torch.autograd.graph.saved_tensors_hooks) -> None:
        self._packs.pop()
        watch.__exit__()

    def _left_in_attributes(self, unit: Unit) -> list[Tensor]:
        """Tensors in attributes of the unit's modules, such as a router's loss."""
        inside = self._inside.get(unit.index)
        if inside is None:
            root = unit.module()
            inside = (
                [(m.__dict__, _first_own(m), _num_plain(m)) for m in _modules_inside(root)] if root is not None else []
            )
            self._inside[unit.index] = inside
        found: list[Tensor] = []
        for attributes, start, num_plain in inside:
            if len(attributes) == num_plain:
                continue
            for value in islice(attributes.values(), start, None):
                kind = type(value)
                if kind in _PLAIN:
                    continue
                if Tensor in kind.__mro__:  # isinstance would ask its metaclass
                    found.append(value)
                elif kind is list or kind is tuple:
                    found += [v for v in value if isinstance(v, Tensor)]
                elif kind is dict:
                    found += [v for v in value.values() if isinstance(v, Tensor)]
        return found


def read(saved: Any) -> Tensor:
    if isinstance(saved, SavedParam):
        saved.begin()
        return saved.tensor
    return cast(Tensor, saved)


def _first_own(module: nn.Module) -> int:
    """Where a module's own attributes begin: behind torch's, unless some were set before `super().__init__()`."""
    return len(OF_MODULES) if set(list(module.__dict__)[: len(OF_MODULES)]) == OF_MODULES else 0


def _num_plain(module: nn.Module) -> int:
    """Return how many attributes a module of torch's own has, none of which its forward assigns; -1 for other modules."""
    return len(module.__dict__) if type(module).__module__.startswith("torch.nn.modules.") else -1


def _modules_inside(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and the modules below it that are in no unit below it."""
    yield root
    for child in root.children():
        if ATTACHED not in child.__dict__:
            yield from _modules_inside(child)
