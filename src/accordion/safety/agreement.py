"""Let ranks call different units in one forward: a rank that skips a unit makes a dummy call, so that all collectives match.

A unit is a module whose parameters are gathered and reduced together. A dummy call gathers the unit with the other ranks,
computes nothing, and leaves an autograd node, so that the backward reduces zeros for this rank. A forward that repeats the last
one of its kind (with or without gradients, under `no_sync` or not) sends no messages. Ranks exchange messages about each step
of the first forward of a kind, and of every forward after they have diverged once.
"""

from __future__ import annotations

import logging
import math
import weakref
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
    """One step of a forward: the call of the unit with index `unit` begins or, if `leaves` is True, ends.

    `differentiable`: a backward may reach the call. `depth`: number of unit calls in progress when the step is taken, including a
    call that ends, without a call that begins. `trained`: indices of the unit's parameters that require gradients. `reads`: the
    call begins because code reads the unit's weight, not because the unit's forward runs.
    """

    unit: int
    differentiable: bool
    depth: int
    trained: tuple[int, ...]
    leaves: bool = False
    reads: bool = False


class CatchUp(NamedTuple):
    """Decision that the ranks that are behind catch up first. Without messages, they repeat the steps of the last forward of
    this kind, until they have done `num_done` steps of forward number `root`, as the other ranks have."""

    root: int
    num_done: int | None  # None: to the end

    def is_for(self, report: Mapping[str, Any]) -> bool:
        """Return True if the rank that sent `report` (see `choose`) is behind in forward `root`. False for a rank that is still
        in an earlier forward, which it ends first."""
        num_done = report["num_done"] if report["root"] == self.root else None
        return num_done is not None and (self.num_done is None or num_done < self.num_done)


def choose(reports: Iterable[Mapping[str, Any]]) -> UnitCall | CatchUp | None:
    """Return the step that all ranks take next; a `CatchUp` if some ranks are behind, or may be; or None if dummy calls cannot
    bring the ranks together.

    Steps inside a call come before steps after it; ties are broken by the unit's position in the model. `reports`: one per
    rank, with `step` (fields of its next `UnitCall`, or None), `root` (number of its forward), `num_done` (number of steps
    taken in that forward, None after its end), and `must` (only if the rank next does what has no dummy call, such as a
    backward).
    """
    reports = list(reports)
    at = [report for report in reports if report["step"] is not None]
    if not at:
        # A rank that waits in a collective may still reach a step.
        return None if all("must" in report for report in reports) else CatchUp(0, 0)
    root = min(report["root"] for report in at)
    if any("must" in report and report["root"] == root and report["num_done"] is not None for report in reports):
        return None
    # A rank in a later forward has ended this one; a rank in an earlier one will reach it.
    done: list[Any] = [r["num_done"] if r["root"] == root else None for r in reports if r["root"] >= root]
    furthest = None if None in done else max(done)
    if len(at) < len(reports) or any(num_done != furthest for num_done in done) or furthest is None:
        return CatchUp(root, furthest)
    steps = [UnitCall(*s["step"])._replace(trained=tuple(s["step"][3])) for s in at]  # JSON made lists of tuples
    depth = max(step.depth for step in steps)
    steps = [step for step in steps if step.depth == depth]
    best = min(steps, key=lambda step: (step.leaves, step.unit, not step.differentiable))
    same = [step for step in steps if step[:3] == best[:3] and step.leaves == best.leaves]
    return None if depth == 0 or any(step != best for step in same) else best


class OrderAgreement(Observer):
    """Observer that lets ranks agree on the next unit of a forward, and makes dummy calls of units that this rank skips. Other
    code calls only `must`, before ranks do something together. `hooks`: those of each unit, in the order of their indices.
    `always`: ranks agree on each step, even if it repeats the last forward (`debug="order"`). It is set to True once ranks have
    called different units. The constructor sets `monitor.join`."""

    def __init__(
        self, engine: Engine, hooks: Sequence[Hooks], monitor: DivergenceMonitor, *, always: bool = False
    ) -> None:
        self._engine, self._hooks, self._monitor = engine, hooks, monitor
        self._expected = PassHistory()
        self.always = self._at_once = always  # `_at_once`: ranks agree on the start of each pass too
        self._silent = False  # this forward needs no other rank, so one rank may run it alone
        self._is_new = False  # no forward of this kind was seen yet
        # Number of steps that others have done already, as the last forward did them; inf if others have ended this forward.
        self._num_to_follow: float = 0
        self._in_backward = False  # a backward has begun and not ended
        self._root = 0  # number of the forward
        self.open_dummies: list[tuple[int, Hooks, Call, Sequence[Tensor]]] = []  # dummy calls, with their depth
        monitor.join = weakref.WeakMethod(self.join_meeting)

    # -- the moments of a step

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        engine, how = self._engine, (differentiable, reduces)
        self._silent = engine.context.keeps_full and not differentiable and all(unit.is_full for unit in engine.units)
        if self._silent:
            return
        self._root += 1
        self._is_new, self._num_to_follow = not self._expected.knows(how), 0
        self.open_dummies.clear()
        # A backward that has begun and not ended was ended by an error, maybe on this rank alone.
        failed, self._in_backward = self._in_backward, False
        if not self._expected.begin(FORWARD, how) or self._at_once or failed:
            gradients = "with gradients" if differentiable else "without gradients"
            self.must(f"begins a forward {gradients}{'' if reduces else ', under no_sync'}")

    def unit_enters(self, unit: Unit, differentiable: bool, by_read: bool) -> None:
        """Wait until all ranks call `unit`, and before that make dummy calls of units that other ranks call first. Raises
        `DivergenceError` if dummy calls cannot bring the ranks together. Only records the call if `trusts_history` is True and
        the last forward of this kind called `unit` at this point too. Does nothing if this forward needs no other rank."""
        depth = self._engine.depth - len(self.open_dummies)
        step = UnitCall(unit.index, differentiable, depth, unit.trained.indices, reads=by_read)
        if self._silent or (self.trusts_history and self._expected.matches(FORWARD, step)):
            return
        training = f"training {len(step.trained)} of {len(unit.params)} parameters"
        doing = training if differentiable else "without gradients"
        self.agree(step, f"enters unit {unit.index} ({unit.name or 'root'}) in its forward, {doing}")

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        """When the forward of `call` ends, make dummy calls of inner units that other ranks still call, and end all open dummy
        calls. After an error, only end them. Does nothing for a dummy call and in a backward. Returns `out`."""
        if call.is_dummy or call.root == IN_BACKWARD:
            return out
        unit = call.unit
        if error is None and not self._silent and unit.index in self._outer_units:
            step = UnitCall(unit.index, False, self._engine.depth - len(self.open_dummies), (), leaves=True)
            following: Any = self._expected.following(FORWARD)
            if not self.trusts_history or (following is not None and following.depth >= step.depth):
                self.agree(step, f"leaves unit {unit.index} ({unit.name or 'root'}) in its forward")
        self.close(0)
        return out

    def forward_ends(self, error: BaseException | None) -> None:
        self._expected.end(FORWARD)

    def backward_begins(self) -> None:
        self._in_backward = True
        if not self._expected.begin(BACKWARD, "backward") or self._at_once:
            self.must("begins a backward")

    def unit_returns(self, unit: Unit, call: CallInForward | None) -> None:
        """Wait until all ranks are about to use `unit` in their backward, and raise `DivergenceError` if a rank will not.
        Without `debug="order"`, does nothing if the last backward used `unit` at this point too."""
        if not self._expected.note(BACKWARD, (unit.index, unit.trained.indices)) or self._at_once:
            self.must(f"enters unit {unit.index} ({unit.name or 'root'}) in its backward")

    def backward_ends(self) -> None:
        self._in_backward = False
        if not self._expected.end(BACKWARD) or self._at_once:
            self.must("ends its backward")

    def interrupted(self) -> None:
        self.open_dummies.clear()

    # -- what ranks do next

    @property
    def trusts_history(self) -> bool:
        """True if this rank may take the steps that `_expected` predicts without asking the other ranks."""
        return not (self.always or self._is_new or self._num_to_follow)

    @cached_property
    def _outer_units(self) -> set[int]:
        """Indices of the units that contain other units."""
        return {
            index
            for index, hooks in enumerate(self._hooks)
            for module in hooks.attached_modules()
            if len({id(inner.__dict__[ATTACHED]) for inner in module.modules() if ATTACHED in inner.__dict__}) > 1
        }

    def agree(self, step: UnitCall, what: str) -> None:
        """Make dummy calls of the steps that other ranks take first, and return when all ranks take `step`. `what`: text on
        `step`, such as "enters unit 3 in its forward". Raises `DivergenceError` if dummy calls cannot bring ranks together."""
        while (chosen := self._next(step, what)) != step:
            self.close(chosen.depth - chosen.leaves)
            if chosen.leaves:
                continue
            hooks = self._hooks[chosen.unit]
            trained = hooks.unit.trained.indices
            if chosen.depth == 0 or chosen.depth != self._engine.depth or chosen.trained != trained:
                of = f"unit {chosen.unit} ({hooks.unit.name or 'root'}), training {len(chosen.trained)} of its parameters"
                self._monitor.fail(
                    f"this rank {what}, and others call {of}, of which it can make no dummy call; {ADVICE}"
                )
            self._expected.note(FORWARD, chosen)
            self.open_dummies.append((chosen.depth, hooks, *hooks.begin_dummy(chosen.differentiable, chosen.reads)))
        self.close(step.depth)
        if not step.leaves:
            self._expected.note(FORWARD, step)

    def _next(self, step: UnitCall, what: str) -> UnitCall:
        """Return the step that all ranks take next: `step`, or one for which this rank makes a dummy call. Exchanges reports
        with other ranks, except while this rank repeats steps that they have done. Raises `DivergenceError` if dummy calls
        cannot bring ranks together."""
        while True:
            following: Any = self._expected.following(FORWARD)
            if self._num_to_follow and following is not None:
                if step.leaves and following.depth < step.depth:
                    return step
                self._num_to_follow -= 1
                return UnitCall(*following)
            if self._num_to_follow == math.inf:
                if step.leaves:
                    return step
                self._monitor.fail(f"this rank {what}, and others have ended that forward; {ADVICE}")
            reports = self._monitor.meet({"what": what, "step": step, **self._position()})
            chosen = step if reports is None else self._decide(reports)
            if chosen is not None:
                return chosen

    def must(self, what: str) -> None:
        """Wait until all ranks have called this with the same `what`, a verb phrase such as "begins a backward". Raises
        `DivergenceError` if a rank will not. Returns at once without other ranks."""
        while reports := self._monitor.meet({"what": what, "step": None, "must": what, **self._position()}):
            if all(r.get("must") == what for r in reports.values()):
                # One rank may have run silent forwards alone, so numbers may differ.
                self._root = max(r["root"] for r in reports.values())
                return
            self._decide(reports)

    def join_meeting(self, what: str) -> dict[int, dict[str, Any]]:
        """Join a meeting (a barrier with reports) that another rank opened while this rank waits in a collective. `what`: text
        on that wait. Return rank -> report, {} if all are equal. Raises `DivergenceError` if dummy calls cannot help."""
        reports = self._monitor.meet({"what": what, "step": None, **self._position()}) or {}
        if reports:
            self._decide(reports)
        return reports

    def _position(self) -> dict[str, Any]:
        return {"root": self._root, "num_done": self._expected.num_done(FORWARD)}

    def _decide(self, reports: Mapping[int, Mapping[str, Any]]) -> UnitCall | None:
        """Return the step that all ranks take next; None if some ranks may only be late, or must catch up first, for which this
        rank sets `_num_to_follow` if it is behind. `reports`: rank -> report, as `choose` takes them. The first time that ranks
        diverge, set `always` and log a warning. Raises `DivergenceError` if dummy calls cannot help."""
        outcome = choose(reports.values())
        if outcome is None:
            self._monitor.fail_diverged(reports)
        if isinstance(outcome, CatchUp) and not any(outcome.is_for(report) for report in reports.values()):
            return None  # some ranks may only be late
        if not self.always:
            logger.warning("ranks call different units: from now on they agree on each unit before it runs.")
        self.always = True
        if isinstance(outcome, UnitCall):
            return outcome
        position = self._position()
        if outcome.is_for(position):
            self._num_to_follow = math.inf if outcome.num_done is None else outcome.num_done - position["num_done"]
        return None

    def close(self, depth: int) -> None:
        """End the open dummy calls (calls that only match collectives of other ranks) at `depth` or deeper, innermost first."""
        while self.open_dummies and self.open_dummies[-1][0] >= depth:
            _, hooks, call, fulls = self.open_dummies.pop()
            hooks.end_dummy(call, fulls)


def agreement_of(engine: Engine) -> OrderAgreement:
    """Return the `OrderAgreement` of a sharded model."""
    agreement = engine.observers.find(OrderAgreement)
    assert isinstance(agreement, OrderAgreement), "each engine that is built has one"
    return agreement
