"""The seam between the engine and code that watches a model: callbacks at the moments of a step.

An observer overrides the callbacks it needs and is attached with `engine.observers.attach`. The engine names no observer:
agreement, divergence, checks for NaN, steps inside a backward and the planner are in files of their own.
"""

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
    """Protocol for one call of a unit during its forward.

    `root`: number of the outermost call, negative in a backward. `is_dummy`: made for the collectives of other ranks.
    `may_come_back`: True if a backward may reach it.
    """

    unit: Unit
    root: int
    is_dummy: bool
    needs_full_in_backward: bool

    @property
    def may_come_back(self) -> bool: ...

    def begin(self, fulls: Sequence[Tensor], grad: Tensor | None) -> None:
        """Record that the backward has reached the call; a hook for a tensor of its graph."""

    def has_begun(self) -> bool:
        """Return True if the backward that runs now has reached this call."""

    def begin_for_read(self, fulls: Sequence[Tensor]) -> None:
        """Begin the call in the backward that runs now, if it has not begun, because one of `fulls` is read."""


class Observer:
    """Callbacks at the moments of a step, in the order of a step; each does nothing by default.

    Observers are called in the order in which they were attached. An exception ends the pass. Only `unit_enters` and
    `unit_returns` may wait for other ranks.
    """

    def unit_is_called(self) -> None:
        """Called before anything is done for a call of a unit; an exception refuses the call."""

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        """Called when the outermost call outside of a backward begins. `reduces`: its backward reduces gradients."""

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        """Called before a unit is gathered for a call outside of a backward. `by_read`: a read of its weight begins it."""

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """Called when the full parameters of a call are gathered, and modules see them as `fulls`."""

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """Called when the forward of a call has ended with `out` or `error`; return `out` or its replacement."""
        return out

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        """Called when a backward can find the call through `out`. `inputs`: its (args, kwargs)."""

    def forward_ends(self, error: BaseException | None) -> None:
        """Called when the outermost call outside of a backward has ended, with `error` or None."""

    def backward_begins(self) -> None:
        """Called when a backward reaches the model."""

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        """Called before a backward uses a unit, perhaps gathering it. `call`: that of the backward; None to recompute."""

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Called with the full gradients of a call, before they are reduced or summed locally."""

    def gradients_arrive(self, unit: Unit) -> None:
        """Called before the reduced gradients of a call are written; those of the previous call have been."""

    def backward_ends(self) -> None:
        """Called when the last node of a backward has run; local sums may be reduced after that."""

    def backward_ended(self, reduced: bool) -> None:
        """Called when all gradients of a backward are written. `reduced`: they were reduced, and not only summed locally."""

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        """Called before `clip_grad_norm_` reduces the norm of all gradients."""

    def memory_is_for(self, purpose: Purpose | None) -> None:
        """Called with the purpose of memory allocated from now on; None for other memory."""

    def interrupted(self) -> None:
        """Called after an interrupt, for which torch runs no hooks: nothing is under way any more."""


MOMENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Observers:
    """The observers of one model: for each of `MOMENTS` a tuple of callbacks, so that one without costs the check of a tuple."""

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]: ...

    def __init__(self) -> None:
        self._attached: list[Observer] = []
        self._sort()

    def attach(self, observer: Observer) -> None:
        """Call `observer` from the next moment on, after those that were attached before."""
        self._attached.append(observer)
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
