"""Callbacks at the moments of a training step, for code outside of the engine that watches a model, such as checks that ranks
agree. An observer overrides the callbacks it needs, and is attached with `engine.observers.attach`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from accordion.engine.unit import Unit

Kind = TypeVar("Kind")


class Purpose(Enum):
    GATHERED = "full parameters"
    GRADIENTS = "gradients"


GATHERED, GRADIENTS = Purpose  # reading through the class takes 0.1 us in Python 3.11


class CallInForward(Protocol):
    """Protocol for one run of a unit's forward, the `Call`, as observers see it.

    `root`: number of the outermost call, -1 in a backward. `is_dummy`: True if this rank only joins the collectives of ranks
    that call the unit. `needs_full_in_backward`: the backward gathers the unit. `may_come_back`: during the forward, True if a
    backward may reach this call. `has_begun`: the backward that runs now has reached this call. `begin_for_read`: begin the
    backward of this call, unless it has begun, and gather `fulls`, one of which is about to be read.
    """

    unit: Unit
    root: int
    is_dummy: bool
    needs_full_in_backward: bool

    @property
    def may_come_back(self) -> bool: ...

    def has_begun(self) -> bool: ...

    def begin_for_read(self, fulls: Sequence[Tensor]) -> None: ...


class Observer:
    """Base class of observers: callbacks at the moments of a step, in the order of a step; each does nothing by default.

    Attach one with `engine.observers.attach`; it is called after those attached before. An exception ends the forward or
    backward. Observers must not wait for other ranks in `unit_is_full`, `outputs_are_ready`, `full_gradients`, `memory_is_for`,
    `unit_unshards`, `unit_reshards` and `interrupted`. "Outermost": the call of a unit that is inside of no other unit's call.
    """

    def unit_is_called(self) -> None:
        """Called first in each forward of a unit; an exception prevents the forward."""

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        """Called when an outermost forward begins that is not in a backward. `differentiable`: gradients are enabled. `reduces`:
        False under no_sync."""

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        """Called before a forward, not in a backward, gathers `unit`. `differentiable`: a backward may follow. `by_read`: a
        read of a weight begins this forward."""

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """Called when the unit of `call` is gathered. Its modules see the full parameters `fulls`, except in a dummy call."""

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """Called at the end of the forward `call`. `out`: its result; None after the exception `error`; () for a dummy call.
        Return `out` or a replacement."""
        return out

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        """Called after a forward with gradients enabled and result `out`. `fulls`: the full parameters that its modules saw.
        `inputs`: (args, kwargs)."""

    def forward_ends(self, error: BaseException | None) -> None:
        """Called when the outermost forward, not in a backward, has ended with `error` or None."""

    def backward_begins(self) -> None:
        """Called when a backward reaches its first unit, unless another backward is under way."""

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        """Called when a backward reaches `call`, before `unit` is gathered, if it needs to be. `call` is None for a
        recomputation, for which this is called only if `unit` has no lease."""

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Called with this rank's full gradients of a call, one or None per trained parameter, before a reduce or sum."""

    def backward_ends(self) -> None:
        """Called when the last node of a backward has run, unless another backward is under way. Sums of earlier backwards
        (no_sync) may be reduced after this."""

    def backward_ended(self, reduced: bool) -> None:
        """Called after `backward_ends`, or in `Engine.reduce_sums`, when all gradients are written. `reduced`: False if they
        were only summed on this rank."""

    def settles(self) -> None:
        """Called before all ranks do something together between steps: a save, a load, a full state dict."""

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        """Called at the start of `clip_grad_norm_`, with its arguments."""

    def memory_is_for(self, purpose: Purpose | None) -> None:
        """Called before memory is allocated for `purpose`, and with None when that allocation has ended."""

    def unit_unshards(self, unit: Unit) -> None:
        """Called when memory of the full parameters of `unit` was allocated and their gather has begun."""

    def unit_reshards(self, unit: Unit) -> None:
        """Called when memory of the full parameters of `unit` was freed."""

    def interrupted(self) -> None:
        """Called after a forward was interrupted and torch ran no hooks, so that no end was reported."""


MOMENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Observers:
    """The observers of one model. Each method of `Observer` has an attribute of its name, the tuple of callbacks to call: `for
    notify in observers.forward_ends: notify(None)`."""

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]: ...

    def __init__(self) -> None:
        self._attached: list[Observer] = []
        self._sort()

    def attach(self, observer: Observer, *, first: bool = False) -> None:
        """Call `observer` from now on, after the observers that are attached already; with `first`, before them."""
        self._attached.insert(0 if first else len(self._attached), observer)
        self._sort()

    def detach(self, observer: Observer) -> None:
        self._attached.remove(observer)
        self._sort()

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the first observer of class `kind`, or None."""
        return next((observer for observer in self._attached if isinstance(observer, kind)), None)

    def clear(self) -> None:
        self._attached.clear()
        self._sort()

    def _sort(self) -> None:
        for name in MOMENTS:
            observers = [o for o in self._attached if getattr(type(o), name) is not getattr(Observer, name)]
            setattr(self, name, tuple([getattr(o, name) for o in observers]))
