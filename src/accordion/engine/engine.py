"""What the units of one model share: the order of their calls, the backward tasks under way, and what is kept between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.config import Precision, Prefetch, Strategy
from accordion.engine.context import ShardingContext
from accordion.engine.late_gradients import UndecidedGradients
from accordion.engine.observer import GATHERED, GRADIENTS, Observers
from accordion.engine.order import BACKWARD, FORWARD, Phase, UnitOrder
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.streams import Transfer
from accordion.engine.unit import LET_GO, TrainedParams, Unit

IN_BACKWARD = -1  # the root call of what is recomputed in a backward
WAITING_ROOTS = 4  # forwards whose backward may be outstanding before their leases end and a backward gathers again


@dataclass(eq=False, slots=True)
class KeptLease:
    """A forward lease that waits for its backward. Known to its call and to the engine: neither keeps the other's graph alive."""

    unit: Unit
    root: int


class Engine:
    """Owns the bookkeeping of one sharded model; made by `shard`, reachable from each unit's module."""

    def __init__(self, context: ShardingContext, strategy: Strategy, precision: Precision, prefetch: Prefetch) -> None:
        self.context, self.strategy, self.precision, self.prefetch = context, strategy, precision, prefetch
        self.observers = Observers()
        self.units: list[Unit] = []
        self._full_bytes: list[int] = []  # of each unit
        self.hooks: list[Any] = []  # of each unit, its `Hooks`
        self.order = UnitOrder()
        self.zero = torch.zeros((), device=context.device)  # value and gradient of every token
        self.anchor = torch.zeros((), device=context.device, requires_grad=True)  # in place of a token under no_sync
        self.sync = True
        self.unfilled: set[int] = set()  # ids of the sharded parameters that `shard` found on the meta device
        self.suspended = False  # inside `full_params`: the registry holds full parameters, hooks stand aside
        # Forwards.
        self.depth = 0  # calls of units under way on the forward path
        self.root_call = 0  # the number of the outermost call
        self.kept: list[KeptLease] = []
        self.pre_backward_nodes: list[Tensor] = []  # of the calls of the outermost call under way
        self._nodes_of = _torch.NO_BACKWARD  # the backward in which that call runs
        # Backwards.
        self.reduces_under_way: list[list[PendingReduce]] = []  # those of one call of a unit together
        self.failed_reduces: list[PendingReduce] = []  # of backwards that raised; the host must wait for them
        # Each writes the gradients of a call that still travel between the nodes of a hybrid, the oldest first.
        self.delayed_writes: list[Callable[[], object]] = []
        self.undecided = UndecidedGradients()
        self.arriving: list[Transfer] = []  # gradients on their way to where they rest, off the device
        self.to_add: list[tuple[Tensor, Tensor]] = []  # those of them that are added to others: (sum, term)
        self._tasks: dict[int, list[Any]] = {}  # of each backward task the `Call`s that take part
        self._synced: set[int] = set()  # backward tasks that reduce
        self._wrote_on: set[Any] = set()  # compute streams on which gradients were written
        # A backward task, and whether the engine may write gradients in it.
        self._accumulates: tuple[int, bool] | None = None
        self._walked: set[int] = set()  # root calls that the backward under way has reached

    def add_unit(self, unit: Unit, hooks: Any) -> None:
        """Take a unit, the next one by its index, and its hooks."""
        assert unit.index == len(self.units), "units come in the order of their indices"
        self.units.append(unit)
        self._full_bytes.append(unit.full_bytes)
        self.hooks.append(hooks)

    def dismantle(self) -> None:
        """The model is gone: break the cycles between units, so that their memory goes with it and not with the collector."""
        for part in [*self.failed_reduces, *[part for parts in self.reduces_under_way for part in parts]]:
            part.abandon()
        for call in [call for calls in self._tasks.values() for call in calls]:
            call.shown.clear()
            call.drop()
        for unit in self.units:
            unit.dismantle()
        self.units, self.kept, self.pre_backward_nodes, self.hooks = [], [], [], []
        self.observers.clear()
        self._tasks.clear()
        self.reduces_under_way, self.failed_reduces = [], []
        self.delayed_writes.clear()
        self.undecided.forget()

    # -- forward

    def enter(self) -> None:
        """A unit is called. The outermost call outside a backward is a root call: leftovers of failed steps go first."""
        if self.depth:
            return
        self.pre_backward_nodes, self._nodes_of = [], _torch.current_graph_task()
        if self._nodes_of != _torch.NO_BACKWARD:
            return
        self.root_call += 1
        self.context.waiter.check()
        self.recover()
        self.order.begin(FORWARD)
        changed = False
        for unit in self.units:  # what the user has changed since the last one
            unit.module_params.check_data()
            if unit.full_params is not LET_GO:
                unit.drop_stale()
            changed |= unit.see_trained()
        if changed:
            self.root_call += 1
        for tell in self.observers.forward_begins:
            tell(torch.is_grad_enabled(), self.sync)
        if self.kept:
            stale = not all(kept.unit.is_full for kept in self.kept)
            self.drop_kept(lambda kept: stale or kept.root < self.root_call - WAITING_ROOTS)

    def collects(self) -> bool:
        """Whether calls made now are below the outermost call, and not in a backward that runs inside of it."""
        return _torch.current_graph_task() == self._nodes_of

    def take_pre_backward_nodes(self) -> list[Tensor]:
        """At the end of the outermost call: the pre-backward nodes of all calls below it."""
        if self.depth > 1 or not self.collects():
            return []
        nodes, self.pre_backward_nodes = self.pre_backward_nodes, []
        return nodes

    def leave(self, error: BaseException | None) -> None:
        """A call of a unit has ended, with an error or without."""
        self.depth -= 1
        if self.depth:
            return
        self.pre_backward_nodes = []
        if _torch.is_in_backward():
            return
        self.order.end(FORWARD)
        self.let_go(waits=error is None)
        if error is None and not torch.is_grad_enabled():
            # No backward follows in which the host waits: a step may, that writes what is read.
            self.synchronize()
        for tell in self.observers.forward_ends:
            tell(error)

    def launch(self, unit: Unit) -> None:
        """Begin to gather a unit, unless its full parameters stand or are on their way."""
        for tell in self.observers.memory_is_for:
            tell(GATHERED)
        unit.launch()
        for tell in self.observers.memory_is_for:
            tell(None)

    def acquire(self, unit: Unit) -> int:
        """`Unit.acquire`, gathering the unit if nobody has begun to."""
        if unit.full_params is LET_GO:
            self.launch(unit)
        return unit.acquire()

    def let_go(self, waits: bool = True) -> None:
        """Free what was gathered ahead and not used. `waits`: see `Unit.let_go`."""
        for unit in self.units:
            unit.let_go(waits)

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
        for hooks in self.hooks:
            hooks.forget()
        for tell in self.observers.interrupted:
            tell()
        self.recover()
        self.kept.clear()
        self.depth = 0
        for unit in self.units:
            unit.leases = 0
            unit.module_params.hide_all()
            unit.let_go(waits=False)

    def recover(self) -> None:
        """Clean up after a backward that raised, whose callbacks never ran: drop its gradients and end every lease it left.

        The host waits for nothing, as other ranks may be elsewhere; the next backward waits for the collectives.
        """
        if not self._tasks and not self.reduces_under_way:
            return
        for part in [part for parts in self.reduces_under_way for part in parts]:
            if part.lets_host_wait:
                self.failed_reduces.append(part)
            else:
                part.finish(decide=False)
        self.reduces_under_way.clear()
        self.delayed_writes.clear()
        self.undecided.forget()
        for calls in self._tasks.values():
            for call in calls:
                for task in list(call.shown):
                    call.end(task)
                call.drop()
        self._tasks.clear()
        self._synced.clear()
        self.drop_kept()
        for unit in self.units:
            unit.module_params.hide_all()
            unit.let_go(waits=False)

    # -- backward

    def join(self, task: int, call: Any) -> None:
        """`call` takes part in backward `task`."""
        self._follow(task)
        self._tasks[task].append(call)
        if call.reduces:
            self._synced.add(task)

    def _follow(self, task: int) -> None:
        if task in self._tasks:
            return
        if not self._tasks:
            while self.failed_reduces:
                self.failed_reduces.pop(0).finish(decide=False)
            self.order.begin(BACKWARD)
            for tell in self.observers.backward_begins:
                tell()
        self._tasks[task] = []
        _torch.queue_callback(partial(self._end_of, task))

    def add_outside(self, unit: Unit, i: int, grad: Tensor) -> None:
        """A full gradient of parameter `i` came in the backward that runs now, outside of any call: its end reduces it."""
        task = _torch.current_graph_task()
        self._follow(task)
        self._synced.add(task)
        # With all others that train: ranks may have such gradients for different parameters, and reduce the same ones.
        indices = tuple(sorted({*unit.trained.indices, i}))
        self.add_up(unit, indices, [grad if k == i else None for k in indices])

    # -- gradients

    def add_up(self, unit: Unit, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Under no_sync: add this rank's full gradients of the parameters `indices` to their local sums."""
        self.writes_here()
        for tell in self.observers.memory_is_for:
            tell(GRADIENTS)
        unit.local_sums.add(indices, grads)
        for tell in self.observers.memory_is_for:
            tell(None)

    def reduce(
        self, unit: Unit, trained: TrainedParams, grads: Sequence[Tensor | None] | None, ours: Sequence[bool]
    ) -> list[PendingReduce]:
        """`Unit.reduce`."""
        for tell in self.observers.memory_is_for:
            tell(GRADIENTS)
        parts = unit.reduce(trained, grads, ours)
        for tell in self.observers.memory_is_for:
            tell(None)
        return parts

    def as_gradients(
        self, unit: Unit, trained: TrainedParams, parts: Sequence[PendingReduce], adding: Sequence[bool], decide: bool
    ) -> list[DTensor | None]:
        """`Unit.as_gradients`; the copies to where gradients rest are `arriving` then."""
        for tell in self.observers.memory_is_for:
            tell(GRADIENTS)
        grads, copies = unit.as_gradients(trained, parts, adding, decide)
        for tell in self.observers.memory_is_for:
            tell(None)
        self.arriving += copies
        return grads

    def land_gradients(self) -> None:
        """Let the host wait for gradients that travel to where they rest."""
        if not self.arriving:
            return
        for transfer in self.arriving:
            transfer.synchronize()
        self.arriving.clear()
        for held, grad in self.to_add:  # none where nothing arrives
            held.add_(grad)
        self.to_add.clear()

    def synchronize(self) -> None:
        """Wait until shards, gradients and the optimizer's state are what the last step, backward and copies make of them."""
        self.land_gradients()
        for unit in self.units:
            unit.module_params.check_data()
            for group in unit.groups:
                group.shard_buffer.synchronize()

    def accumulates(self) -> bool:
        """Whether the engine may write `grad` itself: nothing is asked of the backward that autograd would have to see."""
        task = _torch.current_graph_task()
        if self._accumulates is None or self._accumulates[0] != task:  # once a backward
            self._accumulates = task, not torch.is_anomaly_enabled() and _torch.walks_everything(self.anchor)
        may = self._accumulates[1]
        if may:
            self.writes_here()
        return may

    def writes_here(self) -> None:
        """Gradients are about to be written, or added up, on the compute stream: it waits for others on which some were."""
        self._wrote_on.add(self.context.reduce_stream.compute())
        if len(self._wrote_on) > 1:
            self.context.reduce_stream.join(self._wrote_on)

    def write_delayed(self, num_left: int = 0) -> None:
        """Write the gradients that still travel, but those of the last `num_left` calls."""
        while len(self.delayed_writes) > num_left:
            self.delayed_writes.pop(0)()

    def _end_of(self, task: int) -> None:
        for call in self._tasks.pop(task):
            call.end(task)
            self._walked.add(call.root)
        if self.delayed_writes:
            self.writes_here()
            self.write_delayed()
        if self._tasks:
            return
        self.land_gradients()
        self.drop_kept(lambda kept: kept.root == IN_BACKWARD or kept.root in self._walked)
        self._walked.clear()
        self.order.end(BACKWARD)
        for tell in self.observers.backward_ends:
            tell()
        # Autograd lets the caller's stream wait for those on which it accumulated itself.
        self.context.reduce_stream.join(self._wrote_on)
        self._wrote_on.clear()
        reduced = bool(self._synced)
        if reduced:
            self._synced.clear()
        self._ended(reduced)

    def _ended(self, reduced: bool) -> None:
        if reduced:
            self._reduce_leftovers()
            self.undecided.settle()
            for unit in self.units:
                unit.mark_stale()
        self.let_go()
        for told in self.observers.backward_ended:
            told(reduced)

    def reduce_sums(self) -> None:
        """Between backwards: reduce what those before have added up, as the end of one that communicates does. All ranks do."""
        if any(unit.local_sums.any_held() for unit in self.units):
            self._ended(reduced=True)

    def _reduce_leftovers(self) -> None:
        """Reduce local sums that the synchronized backward did not visit, in unit order on all ranks.

        Also those of parameters that are frozen by now: their gradients of earlier micro-batches belong to the step.
        """
        for unit in [unit for unit in self.units if unit.local_sums.pending and unit.unit_policy.reduces]:
            trained = unit.trained_at(tuple(sorted(unit.local_sums.pending)))
            not_ours = [False] * len(trained.indices)
            parts = self.reduce(unit, trained, None, not_ours)
            decide = any(_torch.grads_of(trained.params)[1]) or bool(self.observers.gradients_arrive)
            grads = self.as_gradients(unit, trained, parts, not_ours, decide)
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
            following = self.units[index]
            if following.full_params is LET_GO and (phase is FORWARD or following.needs_full_in_backward):
                self.launch(following)

    def expected(self, unit: Unit) -> Unit | None:
        following = self.order.after(FORWARD, unit.index)
        return None if following is None else self.units[following]

    def is_among_last(self, unit: Unit) -> bool:
        """Whether the backward needs it at once: the last unit, and where that is a head alone, the block before it."""
        following = self.order.after(FORWARD, unit.index)
        if following is not None and self.units[following].is_layer:
            return self.order.ends_with(FORWARD, following)
        return self.order.ends_with(FORWARD, unit.index)
