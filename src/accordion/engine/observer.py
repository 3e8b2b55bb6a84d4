"""The seam of the engine: the moments of a step at which whatever watches a model from outside is called.

An observer overrides the moments that it needs and is attached with `engine.observers.attach`. The engine names no observer:
what agreement, divergence, checks for NaN, steps inside of a backward or the planner do lies in files of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from torch import Tensor

from accordion.engine.unit import Unit

Found = TypeVar("Found")


class Purpose(Enum):
    """What memory is taken for."""

    GATHERED = "full parameters"
    GRADIENTS = "gradients"


GATHERED, GRADIENTS = Purpose  # for the engine: through the class it takes 0.1 us in Python 3.11


class CallInForward(Protocol):
    """One call of a unit, as observers see it while its forward runs.

    `root`: the number of the outermost call around it, negative in a backward. `is_dummy`: this rank makes it for others, with
    outputs that nobody uses. `may_come_back`: a backward may reach it.
    """

    unit: Unit
    root: int
    is_dummy: bool
    needs_full_in_backward: bool

    @property
    def may_come_back(self) -> bool: ...

    def begin(self, fulls: Sequence[Tensor], grad: Tensor | None) -> None:
        """A hook on a tensor of its graph: the backward has reached the call."""

    def has_begun(self) -> bool:
        """Whether the backward that runs now has reached this call."""

    def begin_for_read(self, fulls: Sequence[Tensor]) -> None:
        """The backward that runs now reads one of the full parameters `fulls`: the call begins, if it has not."""


class Observer:
    """Every moment, in the order of a step; each of these methods does nothing.

    Observers are called in the order in which they were attached. What a moment raises ends the pass, as an error of the
    model's own does. `unit_enters` and `unit_returns` alone may wait for other ranks.
    """

    def unit_is_called(self) -> None:
        """A unit is called, and nothing has been done for it; what is raised here refuses the call."""

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        """The outermost call outside of a backward begins. `reduces`: gradients of its backward are reduced."""

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        """A unit is about to be called outside of a backward, and gathered. `by_read`: somebody reads its weight."""

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        """The full parameters of a call stand, and modules see them as `fulls`."""

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """The forward of a call has ended with `out`, or with an error; gives what takes the place of `out`."""
        return out

    def outputs_are_ready(self, call: CallInForward, fulls: Sequence[Tensor], out: Any, inputs: Any) -> None:
        """A backward will find the call through `out`; `inputs`: its arguments and keyword arguments."""

    def forward_ends(self, error: BaseException | None) -> None:
        """The outermost call outside of a backward has ended, with an error or without."""

    def backward_begins(self) -> None:
        """A backward reaches the model."""

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        """A backward is about to use a unit, which may be gathered for it. `call`: the one it comes to; None: it recomputes."""

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """The full gradients of a call are there; they are reduced or added up next."""

    def gradients_arrive(self, unit: Unit) -> None:
        """The reduced gradients of a call are about to be this rank's; those of the call before are."""

    def backward_ends(self) -> None:
        """The last node of a backward has run; what is left of gradients is reduced next."""

    def backward_ended(self, reduced: bool) -> None:
        """All gradients of a backward are there. `reduced`: they were reduced, and not only added up."""

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        """`clip_grad_norm_` is about to reduce the norm of all gradients."""

    def memory_is_for(self, purpose: Purpose | None) -> None:
        """What memory is taken for from now on; None: for nothing that has a name."""

    def interrupted(self) -> None:
        """Nothing is under way any more: after an interrupt, which torch tells no hook."""


MOMENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Observers:
    """Owns who watches one model. A moment that nobody watches costs a look at an empty tuple."""

    unit_is_called: tuple[Callable[[], None], ...]
    forward_begins: tuple[Callable[[bool, bool], None], ...]
    unit_enters: tuple[Callable[[Unit, bool, bool], None], ...]
    unit_is_full: tuple[Callable[[CallInForward, Sequence[Tensor]], None], ...]
    unit_leaves: tuple[Callable[[CallInForward, Any, BaseException | None], Any], ...]
    outputs_are_ready: tuple[Callable[[CallInForward, Sequence[Tensor], Any, Any], None], ...]
    forward_ends: tuple[Callable[[BaseException | None], None], ...]
    backward_begins: tuple[Callable[[], None], ...]
    unit_returns: tuple[Callable[[Unit, CallInForward | None], None], ...]
    full_gradients: tuple[Callable[[Unit, Sequence[Tensor | None]], None], ...]
    gradients_arrive: tuple[Callable[[Unit], None], ...]
    backward_ends: tuple[Callable[[], None], ...]
    backward_ended: tuple[Callable[[bool], None], ...]
    gradients_are_clipped: tuple[Callable[[float, float], None], ...]
    memory_is_for: tuple[Callable[[Purpose | None], None], ...]
    interrupted: tuple[Callable[[], None], ...]

    def __init__(self) -> None:
        self._attached: list[Observer] = []
        self._sort()

    def attach(self, observer: Observer) -> None:
        """Have `observer` called from the next moment on, after those that were attached before it."""
        self._attached.append(observer)
        self._sort()

    def detach(self, observer: Observer) -> None:
        self._attached.remove(observer)
        self._sort()

    def find(self, kind: type[Found]) -> Found | None:
        """The first observer of a class; None if none is attached."""
        return next((observer for observer in self._attached if isinstance(observer, kind)), None)

    def clear(self) -> None:
        self._attached.clear()
        self._sort()

    def _sort(self) -> None:
        for name in MOMENTS:
            heard = [o for o in self._attached if getattr(type(o), name) is not getattr(Observer, name)]
            setattr(self, name, tuple([getattr(o, name) for o in heard]))
