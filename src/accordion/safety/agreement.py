"""Ranks may call different units in one forward: a rank that skips a unit makes a dummy call of it, and collectives pair up.

A dummy call is a call whose output nobody uses: it gathers with the others and leaves a pre-backward node for the backward,
which reduces with them, without gradients of its own. The common case pays nothing: if a forward goes as the last one of its
kind did, nobody asks. The first one is gone through together, step by step, and so is every one after ranks were found apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from accordion.engine.calls import Call
from accordion.engine.engine import IN_BACKWARD, Engine
from accordion.engine.hooks import ATTACHED, Hooks
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.order import BACKWARD, FORWARD
from accordion.engine.unit import Unit
from accordion.safety.divergence import DivergenceMonitor
from accordion.safety.liveness.wording import ADVICE
from accordion.safety.pass_history import PassHistory

logger = logging.getLogger("accordion")


class UnitCall(NamedTuple):
    """A unit is entered, or left by a rank that may have called others inside of it. `depth`: calls under way around the step.

    `differentiable`: whether a backward may come through the call. `reads`: it is one that a read of a parameter began.
    """

    unit: int
    differentiable: bool
    depth: int
    trained: tuple[int, ...]
    leaves: bool = False
    reads: bool = False


class CatchUp(NamedTuple):
    """Some ranks have gone on as in the last forward, and wait or ask further on: the others follow so many of its steps."""

    root: int
    num_done: int | None  # None: to the end

    def is_for(self, said: Mapping[str, Any]) -> bool:
        """Return True if a rank that `said` where it is has steps to follow."""
        here = said["num_done"] if said["root"] == self.root else None
        return here is not None and (self.num_done is None or here < self.num_done)


def choose(said: Iterable[Mapping[str, Any]]) -> UnitCall | CatchUp | None:
    """What all ranks do next, from what each of them said; None where nothing can be done.

    What is inside of a call comes before what is after it, and of several units that which comes first in the model.
    """
    said = list(said)
    at = [s for s in said if s["step"] is not None]
    if not at:
        return None if all("must" in s for s in said) else CatchUp(0, 0)  # who waits may come here yet
    root = min(s["root"] for s in at)
    if any("must" in s and s["root"] == root and s["num_done"] is not None for s in said):
        return None
    # Who is in a later forward has ended this one; who is in an earlier one will come.
    done: list[Any] = [s["num_done"] if s["root"] == root else None for s in said if s["root"] >= root]
    furthest = None if None in done else max(done)
    if len(at) < len(said) or any(here != furthest for here in done) or furthest is None:
        return CatchUp(root, furthest)
    steps = [UnitCall(*s["step"])._replace(trained=tuple(s["step"][3])) for s in at]  # JSON made lists of tuples
    depth = max(step.depth for step in steps)
    steps = [step for step in steps if step.depth == depth]
    best = min(steps, key=lambda step: (step.leaves, step.unit, not step.differentiable))
    same = [step for step in steps if step[:3] == best[:3] and step.leaves == best.leaves]
    return None if depth == 0 or any(step != best for step in same) else best


class OrderAgreement(Observer):
    """Owns how ranks come to each step of a forward, and the calls that this rank makes for others.

    `always`: each step is agreed on, whether it was expected or not; `debug="order"` begins so.
    """

    def __init__(
        self, engine: Engine, hooks: Sequence[Hooks], monitor: DivergenceMonitor, *, always: bool = False
    ) -> None:
        self._engine, self._hooks, self._watch = engine, hooks, monitor
        self._expected = PassHistory()
        self.always = self._at_once = always  # `_at_once`: passes are agreed on too
        self._silent = False  # the forward under way needs nothing of other ranks, and may be this one's alone
        self._is_new = False  # no forward of this kind was seen yet
        self._num_to_follow = 0  # steps of the last forward that others have done already
        self._is_late = False  # others have ended this forward
        self._in_backward = False  # one has begun and not ended
        self._root = 0  # number of the forward
        self.standing: list[tuple[int, Hooks, Call, Sequence[Tensor]]] = []  # dummy calls, with their depth
        monitor.listen(self.noticed)

    # -- the moments of a step

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        engine, how = self._engine, (differentiable, reduces)
        self._silent = engine.context.keeps_full and not differentiable and all(unit.is_full for unit in engine.units)
        if self._silent:
            return
        self._root += 1
        self._is_new, self._is_late, self._num_to_follow = not self._expected.knows(how), False, 0
        self.standing.clear()
        # If one had begun and not ended: an error has ended it, maybe of this rank alone.
        failed, self._in_backward = self._in_backward, False
        if not self._expected.begin(FORWARD, how) or self._at_once or failed:
            gradients = "with gradients" if differentiable else "without gradients"
            self.must(f"begins a forward {gradients}{'' if reduces else ', under no_sync'}")

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        """Where others do something else first, this rank takes part in that."""
        depth = self._engine.depth - len(self.standing)
        step = UnitCall(unit.index, differentiable, depth, unit.trained.indices, reads=by_read)
        if self._silent or (self.calm and self._expected.comes(FORWARD, step)):
            return
        training = f"training {len(step.trained)} of {len(unit.params)} parameters"
        doing = training if differentiable else "without gradients"
        self.come(step, f"enters unit {unit.index} ({unit.name or 'root'}) in its forward, {doing}")

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """The call is about to end, and others may be about to enter units inside of it."""
        if call.is_dummy or call.root == IN_BACKWARD:
            return out
        if error is None and not self._silent and call.unit.index in self._outer_units:
            self._leave(call.unit)
        self.close(0)
        return out

    def _leave(self, unit: Unit) -> None:
        depth = self._engine.depth - len(self.standing)
        step = UnitCall(unit.index, False, depth, (), leaves=True)
        following: Any = self._expected.following(FORWARD)
        if not self.calm or (following is not None and following.depth >= step.depth):
            self.come(step, f"leaves unit {unit.index} ({unit.name or 'root'}) in its forward")

    def forward_ends(self, error: BaseException | None) -> None:
        self._expected.end(FORWARD)

    def backward_begins(self) -> None:
        self._in_backward = True
        if not self._expected.begin(BACKWARD, "backward") or self._at_once:
            self.must("begins a backward")

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        """Where the unit was not needed in the last backward, ranks agree first: no collective is out of step."""
        event = (unit.index, unit.trained.indices)
        if not self._expected.comes(BACKWARD, event):
            self._expected.note(BACKWARD, event)
        elif not self._at_once:
            return
        self.must(f"enters unit {unit.index} ({unit.name or 'root'}) in its backward")

    def backward_ends(self) -> None:
        self._in_backward = False
        if not self._expected.end(BACKWARD) or self._at_once:
            self.must("ends its backward")

    def interrupted(self) -> None:
        self.standing.clear()

    # -- what ranks do next

    @property
    def calm(self) -> bool:
        """Whether what is expected needs no word."""
        return not (self.always or self._is_new or self._num_to_follow)

    @cached_property
    def _outer_units(self) -> set[int]:
        """The indices of the units that have other units inside."""
        outer = set()
        for i, hooks in enumerate(self._hooks):
            for module in (ref() for ref in hooks.modules):
                # No truth test: a container or a compiled module is asked for its length.
                inside = () if module is None else module.modules()
                if len({id(m.__dict__[ATTACHED]) for m in inside if ATTACHED in m.__dict__}) > 1:
                    outer.add(i)
        return outer

    def come(self, step: UnitCall, what: str) -> None:
        """Do what others do first, and come back when all do `step`. Raises `DivergenceError` where that cannot be."""
        while (chosen := self._next(step, what)) != step:
            self.close(chosen.depth - chosen.leaves)
            if not chosen.leaves:
                self._begin_dummy(chosen, what)
        self.close(step.depth)
        if not step.leaves:
            self._expected.note(FORWARD, step)

    def _next(self, step: UnitCall, what: str) -> UnitCall:
        while True:
            following: Any = self._expected.following(FORWARD)
            if self._num_to_follow and following is not None:
                if step.leaves and following.depth < step.depth:
                    return step
                self._num_to_follow -= 1
                return UnitCall(*following)
            if self._is_late and step.leaves:
                return step
            if self._is_late:
                self._watch.fail(f"this rank {what}, and others have ended that forward; {ADVICE}")
            said = self._watch.meet({"what": what, "step": step, **self._place()})
            if said is None:
                return step
            outcome = self._outcome(said)
            if isinstance(outcome, UnitCall):
                return outcome
            self._follow(outcome)

    def must(self, what: str) -> None:
        """Come back when all ranks are about to do `what`, which none can do in another's place."""
        while (said := self._watch.meet({"what": what, "step": None, "must": what, **self._place()})) is not None:
            if all(s.get("must") == what for s in said.values()):  # a forward that says nothing may be one rank's alone
                self._root = max(s["root"] for s in said.values())
                return
            self._outcome(said)

    def noticed(self, what: str) -> dict[int, dict[str, Any]]:
        """This rank waits in a collective, and another one asks where all are. Gives what each said."""
        said = self._watch.meet({"what": what, "step": None, **self._place()}) or {}
        outcome = self._outcome(said) if said else None
        if isinstance(outcome, CatchUp):
            self._follow(outcome)
        return said

    def _place(self) -> dict[str, Any]:
        return {"root": self._root, "num_done": self._expected.num_done(FORWARD)}

    def _outcome(self, said: Mapping[int, Mapping[str, Any]]) -> UnitCall | CatchUp:
        outcome = choose(said.values())
        if outcome is None:
            self._watch.apart(said)
        if isinstance(outcome, CatchUp) and not any(outcome.is_for(s) for s in said.values()):
            return outcome  # some are late, or slow, and that may be all
        if not self.always:
            logger.warning(
                "ranks take different ways through the model: from now on they agree on each unit before it runs."
            )
        self.always = True
        return outcome

    def _follow(self, outcome: CatchUp) -> None:
        here = self._place()
        if not outcome.is_for(here):
            return
        if outcome.num_done is None:
            self._is_late, self._num_to_follow = True, self._expected.num_left(FORWARD)
        else:
            self._num_to_follow = outcome.num_done - here["num_done"]

    # -- dummy calls

    def _begin_dummy(self, step: UnitCall, what: str) -> None:
        hooks = self._hooks[step.unit]
        if step.depth == 0 or step.depth != self._engine.depth or step.trained != hooks.unit.trained.indices:
            of = f"unit {step.unit} ({hooks.unit.name or 'root'}), training {len(step.trained)} of its parameters"
            self._watch.fail(f"this rank {what}, and others call {of}, for which it cannot stand in; {ADVICE}")
        self._expected.note(FORWARD, step)
        self.standing.append((step.depth, hooks, *hooks.begin_dummy(step.differentiable, step.reads)))

    def close(self, depth: int) -> None:
        """End the dummy calls that lie at `depth` or deeper."""
        while self.standing and self.standing[-1][0] >= depth:
            _, hooks, call, fulls = self.standing.pop()
            hooks.end_dummy(call, fulls)


def agreement_of(engine: Engine) -> OrderAgreement:
    """The one that watches a sharded model."""
    found = engine.observers.find(OrderAgreement)
    assert isinstance(found, OrderAgreement), "each engine that is built is watched by one"
    return found
