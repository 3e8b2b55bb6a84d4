"""The state that the units of one sharded model share: their recorded order, running forwards and backwards, kept leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from accordion import _torch
from accordion.config import Precision, Prefetch, Strategy
from accordion.engine.context import ShardingContext
from accordion.engine.gradients import GradientsUnderWay, weighted
from accordion.engine.observer import GATHERED, GRADIENTS, Observers, Purpose
from accordion.engine.order import BACKWARD, FORWARD, Phase, UnitOrder
from accordion.engine.params import Param
from accordion.engine.unit import Unit

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

IN_BACKWARD = -1  # `Call.root` of calls in a backward, in which activation checkpointing recomputes them
WAITING_ROOTS = 4  # the most forwards whose full parameters wait for a backward; that of an older forward gathers again


@dataclass(eq=False, slots=True)
class KeptLease:
    """A lease that keeps a unit's full parameters in memory from a forward to its backward. `root`: number of the model's
    forward, or `IN_BACKWARD` for a recomputation."""

    # Call and engine both refer to this object and not to each other, so that no reference cycle keeps the autograd graph.

    unit: Unit
    root: int


class Engine:
    """The gathers, reduces and bookkeeping of one sharded model, for all its units (modules whose parameters are gathered and
    freed together). `shard` creates one engine for each model."""

    def __init__(self, context: ShardingContext, strategy: Strategy, precision: Precision, prefetch: Prefetch) -> None:
        self.context, self.strategy, self.precision = context, strategy, precision
        self.observers = Observers()
        self.units: list[Unit] = []
        self.hooks: list[Any] = []  # the `Hooks` of each unit
        self.order = UnitOrder(prefetch.budget_bytes)
        self.zero = torch.zeros((), device=context.device)  # value and gradient of every edge tensor
        self.leaf = torch.zeros((), device=context.device, requires_grad=True)  # in place of edge tensors under no_sync
        self.sync = True
        # Factor of this rank's gradients of calls that begin now; with 0.0 the rank counts as one without any.
        self.weight = 1.0
        self.suspended = False  # True inside `full_params`: the registry holds full parameters, hooks do nothing
        # Forwards.
        self.depth = 0  # number of calls under way, each inside the one before
        self.root_call = 0  # number of the last outermost call outside of a backward
        self.kept_leases: list[KeptLease] = []
        self.pre_backward_nodes: list[Tensor] = []  # of calls inside the outermost call under way
        self.nodes_of = _torch.NO_BACKWARD  # the backward in which that call runs: calls in a later one add no nodes
        # Backwards.
        self.gradients = GradientsUnderWay(context.reduce_stream, self.leaf)
        self._tasks: dict[int, list[Any]] = {}  # id of a backward under way -> the `Call`s that it has reached
        self._reduces = False  # True if a backward under way, or ended beside one, reduces gradients
        self._walked: set[int] = set()  # root calls that the backward under way has reached

    @property
    def params(self) -> list[Param]:
        return [param for unit in self.units for param in unit.params]

    def dismantle(self) -> None:
        """Drop all units and state of a deleted model, so that its memory is freed at once. The host waits for no collective."""
        self.gradients.abandon()
        for call in [call for calls in self._tasks.values() for call in calls]:
            call.shown.clear()
            call.drop()
        for unit in self.units:
            unit.dismantle()
        self.units, self.kept_leases, self.pre_backward_nodes, self.hooks = [], [], [], []
        self.observers.clear()
        self._tasks.clear()

    # -- forward

    def enter(self) -> None:
        """Prepare for a forward of the model; called before each call of a unit. Does nothing inside another unit's call. In a
        backward it only forgets the pre-backward nodes of an earlier forward.

        Cleans up after a backward that raised, marks outdated full parameters for a new gather, notes which parameters now
        require gradients, releases leases kept for old forwards, and notifies observers. Raises `UsageError` if the user
        assigned `p.data`, and `DivergenceError` if collectives are not safe any more.
        """
        if self.depth:
            return
        self.pre_backward_nodes, self.nodes_of = [], _torch.current_graph_task()
        if self.nodes_of != _torch.NO_BACKWARD:
            return
        self.root_call += 1
        self.context.waiter.check()
        self.recover()
        self.order.begin(FORWARD)
        changed = False
        for unit in self.units:  # what the user has changed since the last root call
            unit.module_params.check_data()
            if unit.is_unsharded:
                unit.drop_stale()
            changed |= unit.see_trained()
        if changed:
            self.root_call += 1
        for notify in self.observers.forward_begins:
            notify(torch.is_grad_enabled(), self.sync)
        if self.kept_leases:
            stale = not all(lease.unit.is_full for lease in self.kept_leases)
            self.drop_kept(lambda lease: stale or lease.root < self.root_call - WAITING_ROOTS)

    def leave(self, error: BaseException | None) -> None:
        """End a call of a unit. `error`: the exception that ended it, or None. The end of the outermost call, outside of a
        backward, also frees units that were prefetched but not used, and notifies observers. Under no_grad, and without an error,
        the host then waits for running optimizer steps and copies."""
        self.depth -= 1
        if self.depth:
            return
        self.pre_backward_nodes = []
        if _torch.is_in_backward():
            return
        self.order.end(FORWARD)
        self.reshard_unused(waits=error is None)
        if error is None and not torch.is_grad_enabled():
            # A step that writes shards may follow without a backward in which the host waits for their readers.
            self.synchronize()
        for notify in self.observers.forward_ends:
            notify(error)

    def allocate(self, purpose: Purpose, function: Callable[[*Args], Result], *args: *Args) -> Result:
        """Return `function(*args)`, and tell observers that the memory allocated inside is for `purpose`."""
        for notify in self.observers.memory_is_for:
            notify(purpose)
        try:
            return function(*args)
        finally:
            for notify in self.observers.memory_is_for:
                notify(None)

    def acquire(self, unit: Unit) -> int:
        """Gather `unit` if needed, and let the compute stream wait for the gather. Takes a lease: the full parameters stay in
        memory until `unit.release()`. Returns the version of the shards that a running gather reads, else the current one."""
        if not unit.is_unsharded:
            self.allocate(GATHERED, unit.unshard)
        return unit.acquire()

    def reshard_unused(self, waits: bool = True) -> None:
        """Free the full parameters of all units without a lease, except those that the strategy or a unit's policy keeps.
        `waits`: False to skip units whose gather the host would have to wait for."""
        for unit in self.units:
            unit.reshard(waits)

    def drop_kept(self, matches: Callable[[KeptLease], bool] = lambda lease: True) -> None:
        """Release the leases in `kept_leases` for which `matches` returns True, by default all. Backwards then gather again."""
        # Never called by a destructor, because all ranks must end their leases at the same time.
        for lease in [lease for lease in self.kept_leases if matches(lease)]:
            self.kept_leases.remove(lease)
            lease.unit.release()

    def reset(self) -> None:
        """Drop all calls, leases and gradients under way, and let modules see their shards, after a forward for which torch ran
        no forward hooks, as after a KeyboardInterrupt. Also notifies observers and frees full parameters."""
        for hooks in self.hooks:
            hooks.forget()
        for notify in self.observers.interrupted:
            notify()
        self.recover()
        self.kept_leases.clear()
        self.depth = 0
        for unit in self.units:
            unit.leases = 0
            unit.module_params.hide_all()
            unit.reshard(waits=False)

    def recover(self) -> None:
        """Drop the calls and gradients of a backward that raised, and all kept leases; do nothing if no backward raised. The
        host does not wait for collectives under way, because other ranks may not have begun them; the next backward does."""
        if not self._tasks and not self.gradients.reduces:
            return
        self.gradients.drop()
        for calls in self._tasks.values():
            for call in calls:
                for task in list(call.shown):
                    call.end(task)
                call.drop()
        self._tasks.clear()
        self._reduces = False
        self.drop_kept()
        for unit in self.units:
            unit.module_params.hide_all()
            unit.reshard(waits=False)

    # -- backward

    def join(self, task: int, call: Any) -> None:
        """Record that the backward with id `task` has reached `call`, so that the end of this backward also ends the call. If
        no backward was under way, also notify observers, and let the host wait for reduces of backwards that raised."""
        self._follow(task)
        self._tasks[task].append(call)
        self._reduces |= call.reduces

    def _follow(self, task: int) -> None:
        if task in self._tasks:
            return
        if not self._tasks:
            self.gradients.finish_failed()
            self.order.begin(BACKWARD)
            for notify in self.observers.backward_begins:
                notify()
        self._tasks[task] = []
        _torch.queue_callback(partial(self._end_of, task))

    def add_outside(self, unit: Unit, i: int, grad: Tensor) -> None:
        """Add `grad`, a full gradient of parameter `i` of `unit` that no call of the unit computed (the loss read the parameter
        itself, for example), to this rank's sums. The end of this backward reduces them, also under no_sync, unless the unit's
        policy has `reduces=False`."""
        self._follow(_torch.current_graph_task())
        self._reduces = True
        # All trained parameters are added: ranks may have such gradients for different ones, and must reduce the same.
        indices = tuple(sorted({*unit.trained.indices, i}))
        grads = [grad if k == i else None for k in indices]
        self.add_up(unit, indices, weighted(grads, self.weight))

    # -- gradients

    def add_up(self, unit: Unit, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add full gradients of the unit's parameters `indices` to sums on this rank, for the unit's next reduce."""
        self.gradients.write_here()
        self.allocate(GRADIENTS, unit.local_sums.add, indices, grads)

    def synchronize(self) -> None:
        """Let the host wait for optimizer steps and copies under way, so that shards, gradients and states are current. Raises
        `UsageError` if the user assigned `p.data`."""
        self.gradients.land()
        for unit in self.units:
            unit.module_params.check_data()
            for group in unit.groups:
                group.shard_buffer.synchronize()

    def _end_of(self, task: int) -> None:
        """End the calls of the backward with id `task`, and write gradients that were put off. If no other backward runs, also
        complete all gradients, release leases that were kept for the forwards of these backwards, and notify observers."""
        for call in self._tasks.pop(task):
            call.end(task)
            self._walked.add(call.root)
        if self.gradients.delayed_writes:
            self.gradients.write_here()
            self.gradients.write_delayed()
        if self._tasks:
            return
        self.gradients.land()
        self.drop_kept(lambda lease: lease.root == IN_BACKWARD or lease.root in self._walked)
        self._walked.clear()
        self.order.end(BACKWARD)
        for notify in self.observers.backward_ends:
            notify()
        self.gradients.join_writers()
        reduced, self._reduces = self._reduces, False
        self._ended(reduced)

    def _ended(self, reduced: bool) -> None:
        """Free full parameters without a lease, and notify observers. If `reduced` (backwards reduced gradients), first reduce
        sums of no_sync that are left, set `.grad` to None if no rank had a gradient, and mark full parameters stale."""
        if reduced:
            self._reduce_leftovers()
            self.gradients.settle_undecided()
            for unit in self.units:
                unit.mark_stale()
        self.reshard_unused()
        for notify in self.observers.backward_ended:
            notify(reduced)

    def reduce_sums(self) -> None:
        """Reduce the gradients, if any, that earlier backwards under no_sync summed, and add them to `.grad`, except for units
        whose policy has `reduces=False`. Also notifies observers of `backward_ended`. A collective."""
        if any(unit.local_sums.any_held() for unit in self.units):
            self._ended(reduced=True)

    def _reduce_leftovers(self) -> None:
        """Reduce the sums of no_sync that no call of this backward has reduced, add them to `.grad`, unit by unit, and call the
        post-accumulate hooks of these parameters. Units whose policy has `reduces=False` are left out. Parameters that were
        frozen since are included: gradients of their earlier micro-batches belong to the step."""
        for unit in [unit for unit in self.units if unit.local_sums.pending and unit.unit_policy.reduces]:
            trained = unit.trained_at(tuple(sorted(unit.local_sums.pending)))
            none_ours = [False] * len(trained.indices)
            parts = self.allocate(GRADIENTS, unit.reduce, trained, None, none_ours)
            earlier, listens = _torch.grads_of(trained.params)
            decide = any(listens)
            grads, copies = self.allocate(GRADIENTS, unit.as_gradients, trained, parts, none_ours, decide)
            self.gradients.copies += copies
            self.gradients.land()
            counted = [None if decide else count for part in parts for count in part.counted()]
            self.gradients.note_undecided(trained.params, earlier, grads, counted)
            for param, grad in zip(trained.params, grads, strict=True):
                if grad is None:
                    continue
                if param.grad is None:
                    param.grad = grad
                else:
                    _torch.local_of(param.grad).add_(_torch.local_of(grad))
                for hook in _torch.post_accumulate_hooks(param):
                    hook(param)

    # -- ahead of use

    def gather_ahead(self, phase: Phase, unit: Unit) -> None:
        """Record that `unit` runs now in `phase`, and begin to gather other units: those that the policy of `unit` names, or
        else those expected next, within the prefetch budget. In a backward, units that need no full parameters are left out."""
        self.order.visit(phase, unit.index)
        chosen: Iterable[int] | None = unit.unit_policy.ahead.get(phase)
        for index in self.order.ahead(phase, unit.index) if chosen is None else chosen:
            following = self.units[index]
            if not following.is_unsharded and (phase is FORWARD or following.needs_full_in_backward):
                self.allocate(GATHERED, following.unshard)

    def is_among_last(self, unit: Unit) -> bool:
        """Return True if `unit` ran last in the last forward, or just before a last unit that is a single layer (a head)."""
        following = self.order.after(FORWARD, unit.index)
        if following is not None and self.units[following].is_layer:
            return self.order.ends_with(FORWARD, following)
        return self.order.ends_with(FORWARD, unit.index)
