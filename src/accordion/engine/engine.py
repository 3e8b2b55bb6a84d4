"""What the units of one model share: the order of their calls, the backward tasks under way, and what is kept between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.config import Precision, Prefetch, Strategy
from accordion.engine.finite import FiniteCheck, spread
from accordion.engine.group import ShardingContext
from accordion.engine.late_gradients import DelayedWrites, UndecidedGradients
from accordion.engine.order import PassHistory, Phase, UnitOrder
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.reads import WeightReads
from accordion.engine.streams import Transfer
from accordion.engine.together import OrderAgreement, UnitCall
from accordion.engine.unit import TrainedParams, Unit
from accordion.errors import DivergenceError

if TYPE_CHECKING:
    from accordion.engine.autograd import Call
    from accordion.engine.hooks import Hooks

IN_BACKWARD = -1  # the root call of what is recomputed in a backward
WAITING_ROOTS = 4  # forwards whose backward may be outstanding before their leases end and a backward gathers again


@dataclass(eq=False, slots=True)
class KeptLease:
    """A forward lease that waits for its backward. Known to its call and to the engine: neither keeps the other's graph alive."""

    unit: Unit
    root: int


class Engine:
    """Owns the bookkeeping of one sharded model; made by `shard`, reachable from each unit's module."""

    def __init__(
        self,
        context: ShardingContext,
        strategy: Strategy,
        precision: Precision,
        prefetch: Prefetch,
        *,
        announce: bool = False,
    ) -> None:
        self.context, self.strategy, self.precision, self.prefetch = context, strategy, precision, prefetch
        self.units: list[Unit] = []
        self.hooks_by_unit: dict[int, Hooks] = {}  # the hooks of each unit, by index
        self.order = UnitOrder()
        self.zero = torch.zeros((), device=context.device)  # value and gradient of every token
        self.anchor = torch.zeros((), device=context.device, requires_grad=True)  # in place of a token under no_sync
        self.announced = PassHistory()
        self.announce = announce  # ranks agree on everything, and not only on what is new
        self.silent = False  # the forward under way needs nothing of other ranks, and may be this one's alone
        self.together = OrderAgreement(context.watch, self.announced, self.hooks_by_unit, always=announce)
        self.finite: FiniteCheck | None = None  # looks for NaN and inf
        self.after_backward: list[Callable[[], None]] = []
        self.after_unit: Callable[[Unit], None] | None = None  # its gradients come; those of the one before are there
        self.sync = True
        self.unfilled: set[int] = set()  # ids of the sharded parameters that `shard` found on the meta device
        self.suspended = False  # inside `full_params`: the registry holds full parameters, hooks stand aside
        self.pre_backward_nodes: list[Tensor] = []  # marks of the calls of the outermost call under way
        self.saving: list[Callable[[Tensor], Any]] = []  # hooks of calls under way on what autograd saves
        self._marks_of = -1  # the backward in which that call runs
        self.reads = WeightReads()
        self.depth = 0  # calls of units under way on the forward path
        self.root_call = 0
        self.kept: list[KeptLease] = []
        self.flying: dict[int, list[PendingReduce]] = {}  # reduces under way, by id of their list
        self.put_off = DelayedWrites()
        self.undecided = UndecidedGradients()
        self.arriving: list[Transfer] = []  # gradients on their way to where they rest, off the device
        self._to_add: list[tuple[Tensor, Tensor]] = []  # those of them that are added to others: (sum, term)
        self._tasks: dict[int, list[Call]] = {}
        self._synced: set[int] = set()  # backward tasks that reduce
        self._wrote_on: set[Any] = set()  # compute streams on which gradients were written
        self._asked = -1, False  # a backward task, and whether it accumulates
        self._walked: set[int] = set()  # root calls that the backward under way has reached

    def dismantle(self) -> None:
        """The model is gone: break the cycles between units, so that their memory goes with it and not with the collector."""
        for part in [part for parts in self.flying.values() for part in parts if self.context.watch.broken is None]:
            part.finish()
        for call in [call for calls in self._tasks.values() for call in calls]:
            call.shown.clear()
            call.drop()
        for unit in self.units:
            unit.window.hide_all()
            unit.dismantle()
        self.units, self.kept, self.pre_backward_nodes = [], [], []
        self.reads.clear()
        self.hooks_by_unit.clear()
        self._tasks.clear()
        self.flying.clear()
        self.put_off.clear()
        self.undecided.forget()

    # -- forward

    def enter(self) -> None:
        """A unit is called. The outermost call outside a backward is a root call: leftovers of failed steps go first."""
        if self.depth == 0:
            self.reads.clear()
            self.pre_backward_nodes, self._marks_of = [], _torch.current_graph_task()
        if self.depth == 0 and _torch.current_graph_task() == -1:
            self.root_call += 1
            self.context.watch.num_calm += 1
            self.context.watch.check()
            self.recover()
            self.context.watch.forget()
            self.order.begin(Phase.FORWARD)
            changed = [unit.refresh() for unit in self.units]
            if any(changed):
                self.root_call += 1
            how = (torch.is_grad_enabled(), self.sync)
            self.silent = self.context.resident and not how[0] and all(unit.resident for unit in self.units)
            if not self.silent:
                self.together.begin(is_new=not self.announced.knows(how))
                if not self.announced.begin(Phase.FORWARD, how) or self.announce:
                    self.together.must("begins a forward with gradients {}, communicating {}".format(*how))
            if self.kept:
                stale = not all(kept.unit.resident for kept in self.kept)
                self.drop_kept(lambda kept: stale or kept.root < self.root_call - WAITING_ROOTS)

    def collects(self) -> bool:
        """Whether calls made now are below the outermost call, and not in a backward that runs inside of it."""
        return _torch.current_graph_task() == self._marks_of

    def take_marks(self) -> list[Tensor]:
        """At the end of the outermost call: the marks of all calls below it."""
        if self.depth > 1 or not self.collects():
            return []
        marks, self.pre_backward_nodes = self.pre_backward_nodes, []
        return marks

    def leave(self, error: BaseException | None) -> None:
        self.together.close(0)
        self.depth -= 1
        if self.depth == 0:
            self.pre_backward_nodes = []
        if self.depth == 0 and _torch.current_graph_task() == -1:
            self.order.end(Phase.FORWARD)
            self.announced.end(Phase.FORWARD)
            self.let_go()
            if not torch.is_grad_enabled():
                # No backward follows in which the host waits: a step may, that writes what is read.
                self.synchronize()
            if isinstance(error, DivergenceError):
                return  # every rank knows
            if error is not None:
                self.context.watch.tell(f"{type(error).__name__}: {error}")
            else:
                self.report_non_finite()

    def enters(self, unit: Unit, differentiable: bool, reads: bool = False) -> None:
        """`unit` is about to be called outside a backward. Where others do something else, this rank takes part in that first."""
        depth = self.depth - len(self.together.standing)
        step = UnitCall(unit.index, differentiable, depth, unit.trained.indices, reads=reads)
        if not (self.silent or (self.together.calm and self.announced.comes(Phase.FORWARD, step))):
            training = f"training {len(step.trained)} of {len(unit.params)} parameters"
            doing = training if differentiable else "without gradients"
            self.together.come(step, f"enters unit {unit.index} ({unit.name or 'root'}) in its forward, {doing}")

    def leaves(self, unit: Unit) -> None:
        """The call of `unit` outside a backward is about to end, and others may be about to enter units inside of it."""
        if self.silent or not self.together.has_inner(unit.index):
            return
        step = UnitCall(unit.index, False, self.depth - len(self.together.standing), (), leaves=True)
        following: Any = self.announced.following(Phase.FORWARD)
        if not self.together.calm or (following is not None and following.depth >= step.depth):
            self.together.come(step, f"leaves unit {unit.index} ({unit.name or 'root'}) in its forward")

    def comes_back(self, unit: Unit) -> None:
        """`unit` is needed in a backward. Where it was not in the last one, ranks agree first: no collective is out of step."""
        event = (unit.index, unit.trained.indices)
        if not self.announced.comes(Phase.BACKWARD, event):
            self.announced.note(Phase.BACKWARD, event)
        elif not self.announce:
            return
        self.together.must(f"enters unit {unit.index} ({unit.name or 'root'}) in its backward")

    def finder(self) -> FiniteCheck:
        """A new one for `finite`."""
        return FiniteCheck([self.context.shard.gather, self.context.replicate.gather], self.context.device)

    def report_non_finite(self) -> None:
        if self.finite is not None:
            self.finite.report([unit.name for unit in self.units])

    def let_go(self) -> None:
        """Free what was gathered ahead and not used."""
        for unit in self.units:
            unit.let_go()

    def keep(self, unit: Unit, root: int) -> KeptLease:
        """Turn a forward lease into one that waits for the backward."""
        self.kept.append(KeptLease(unit, root))
        return self.kept[-1]

    def take(self, kept: KeptLease | None) -> bool:
        """The backward has come: its lease is the caller's now, unless it has ended."""
        if kept is None or kept not in self.kept:
            return False
        self.kept.remove(kept)
        return True

    def drop_kept(self, which: Callable[[KeptLease], bool] = lambda kept: True) -> None:
        """End leases that wait for a backward. By rules alone, never by a destructor: all ranks must do it at the same time."""
        for kept in [kept for kept in self.kept if which(kept)]:
            self.kept.remove(kept)
            kept.unit.release()

    def reset(self) -> None:
        """After a forward that was interrupted (torch runs no hooks then): nothing is under way."""
        for hooks in self.hooks_by_unit.values():
            hooks.forget()
        self.together.forget()
        self.recover()
        self.kept.clear()
        self.reads.clear()
        self.depth = 0
        for unit in self.units:
            unit.leases = 0
            unit.window.hide_all()
            unit.let_go()

    def recover(self) -> None:
        """After a backward that raised (its callbacks never ran): wait for what flies, then end every lease it left."""
        self.land_gradients()
        if not self._tasks and not self.flying:
            return
        for parts in self.flying.values():
            for part in parts:
                part.finish()
        self.flying.clear()
        self.put_off.clear()
        self.undecided.forget()
        for calls in self._tasks.values():
            for call in calls:
                call.end_all()
                call.drop()
        self._tasks.clear()
        self._synced.clear()
        self.drop_kept()
        for unit in self.units:
            unit.window.hide_all()
            unit.let_go()

    # -- backward

    def join(self, task: int, call: Call) -> None:
        """`call` takes part in backward `task`."""
        self._follow(task)
        self._tasks[task].append(call)
        if call.reduces:
            self._synced.add(task)

    def _follow(self, task: int) -> None:
        if task in self._tasks:
            return
        if not self._tasks:
            self.order.begin(Phase.BACKWARD)
            if not self.announced.begin(Phase.BACKWARD, "backward") or self.announce:
                self.together.must("begins a backward")
        self._tasks[task] = []
        _torch.queue_callback(partial(self._end_of, task))

    def add_outside(self, unit: Unit, i: int, grad: Tensor) -> None:
        """A full gradient of parameter `i` came in the backward that runs now, outside of any call: its end reduces it."""
        task = _torch.current_graph_task()
        self._follow(task)
        self._synced.add(task)
        unit.add_up(TrainedParams((i,), [unit.params[i].sharded], [unit.views[i]]), [grad])

    def add(self, held: Tensor, grad: Tensor) -> None:
        """Add a gradient to what stands in `grad` already, once it is there."""
        if self.arriving:
            self._to_add.append((held, grad))
        else:
            held.add_(grad)

    def land_gradients(self) -> None:
        """Let the host wait for gradients that travel to where they rest."""
        if not self.arriving:
            return
        for flight in self.arriving:
            flight.synchronize()
        self.arriving.clear()
        for held, grad in self._to_add:  # none where nothing arrives
            held.add_(grad)
        self._to_add.clear()

    def synchronize(self) -> None:
        """Wait until shards, gradients and the optimizer's state are what the last step, backward and copies make of them."""
        self.land_gradients()
        for unit in self.units:
            for group in unit.groups:
                group.home.synchronize()

    def accumulates(self) -> bool:
        """Whether the engine may write `grad` itself: nothing is asked of the backward that autograd would have to see."""
        task = _torch.current_graph_task()
        if self._asked[0] != task:  # once a backward
            self._asked = task, not torch.is_anomaly_enabled() and _torch.walks_everything(self.anchor)
        if self._asked[1]:
            self.writes_here()
        return self._asked[1]

    def writes_here(self) -> None:
        """Gradients are about to be written, or added up, on the compute stream: it waits for others on which some were."""
        self._wrote_on.add(self.context.reduce_stream.compute())
        if len(self._wrote_on) > 1:
            self.context.reduce_stream.join(self._wrote_on)

    def _end_of(self, task: int) -> None:
        for call in self._tasks.pop(task):
            call.end(task)
            self._walked.add(call.root)
        if self.put_off:
            self.writes_here()
            self.put_off.write()
        if self._tasks:
            return
        self.land_gradients()
        self.drop_kept(lambda kept: kept.root == IN_BACKWARD or kept.root in self._walked)
        self._walked.clear()
        self.order.end(Phase.BACKWARD)
        if not self.announced.end(Phase.BACKWARD) or self.announce:
            self.together.must("ends its backward")
        # Autograd lets the caller's stream wait for those on which it accumulated itself.
        self.context.reduce_stream.join(self._wrote_on)
        self._wrote_on.clear()
        if self._synced:
            self._synced.clear()
            self._reduce_leftovers()
            self.undecided.settle()
            params = [p for u in self.units if any(g.dtype == torch.float16 for g in u.groups) for p in u.params]
            spread(
                [(p.cut.dim is None, p.sharded.grad) for p in params],
                self.context.cut_communicators,
                self.context.device,
            )
            for unit in self.units:
                unit.mark_stale()
        self.let_go()
        for function in self.after_backward:
            function()
        self.report_non_finite()

    def _reduce_leftovers(self) -> None:
        """Units that added up under no_sync and were not visited by the synchronised backward, in unit order on all ranks."""
        for unit in [unit for unit in self.units if unit.adding_up and unit.unit_policy.reduces]:
            trained = unit.trained
            nothing = [None] * len(trained.indices)
            parts = unit.reduce(trained, nothing, [False] * len(nothing))
            decide = any(_torch.have_hooks(trained.params)) or self.after_unit is not None
            grads = unit.as_gradients(trained, parts, [False] * len(nothing), decide)
            self.land_gradients()
            counted = [place for part in parts for place in part.counted()]
            for param, grad, place in zip(trained.params, grads, counted, strict=True):
                if grad is None:
                    continue
                self.undecided.note(param, param.grad, grad, None if decide else place)
                if param.grad is None:
                    param.grad = grad
                else:
                    _torch.local_of(param.grad).add_(_torch.local_of(grad))
                for hook in _torch.post_accumulate_hooks(param):
                    hook(param)

    # -- ahead of use

    def gather_ahead(self, phase: Phase, unit: Unit) -> None:
        self.order.visit(phase, unit.index)
        chosen: Iterable[int] | None = unit.unit_policy.ahead.get(phase)
        if chosen is None:
            chosen = self.order.ahead(phase, unit.index, self._full_bytes, self.prefetch.budget_bytes)
        for index in chosen:
            if phase is Phase.FORWARD or self.units[index].needs_full_in_backward:
                self.units[index].launch()

    def _full_bytes(self, index: int) -> int:
        return self.units[index].full_bytes

    def expected(self, unit: Unit) -> Unit | None:
        following = self.order.after(Phase.FORWARD, unit.index)
        return None if following is None else self.units[following]

    def is_among_last(self, unit: Unit) -> bool:
        """Whether the backward needs it at once: the last unit, and where that is a head alone, the block before it."""
        following = self.order.after(Phase.FORWARD, unit.index)
        if following is not None and self.units[following].is_layer:
            return self.order.ends_with(Phase.FORWARD, following)
        return self.order.ends_with(Phase.FORWARD, unit.index)

    def token(self) -> Tensor:
        return self.zero.detach()
