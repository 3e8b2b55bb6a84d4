"""One call of a unit: when a backward reaches it, and how long each backward keeps the unit's full parameters in memory.

The backward of a call begins when its pre-backward node (made at the end of the forward) runs, when an output gets its
gradient, or when its Gather node runs, whichever is first. It ends when Gather runs. If Gather will not run, or may run too
early, the call's backward ends when the gradients of its inputs are computed, or, if that is unknown, with the whole backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.engine import IN_BACKWARD, Engine, KeptLease
from accordion.engine.order import BACKWARD
from accordion.engine.unit import ReduceNode, Unit
from accordion.errors import UsageError

ENDS_WITH_THE_BACKWARD = -1  # value in `Call.waiting`: no node shows when the gradients of the inputs are computed


def transform_error() -> UsageError:
    return UsageError(
        "a sharded model was called inside a transform of torch.func (jvp, vmap, grad, ...) or with batched tangents, and it "
        "supports neither; call it inside `accordion.full_params(model)`, or use torch.autograd.forward_ad for one tangent."
    )


def changed_error(unit: Unit) -> UsageError:
    return UsageError(
        f"the parameters of unit {unit.name or 'root'!r} were changed between this forward and its backward, by an optimizer "
        "step, a load or a write; run the backward before the step, or the forward again."
    )


class Call:
    """One run of a unit's forward, and its state in each backward that reaches it (several with `retain_graph`).

    `by_read`: a read of a weight began this call, instead of a forward. `is_dummy`: this rank skipped the unit, and only joins
    the collectives of ranks that call it. `waiting`: id of a backward -> number of inputs whose gradients must still be
    computed before the full parameters are freed; 0 if the Gather node frees them, -1 if the end of the backward does. `shown`:
    id of a backward -> the full parameters that modules see in it.
    """

    # Graph nodes refer to a call, and a call only to nodes of its inputs, which are earlier: no cycle keeps a graph alive.

    def __init__(self, engine: Engine, unit: Unit, by_read: bool = False, is_dummy: bool = False) -> None:
        self.engine, self.unit, self.trained, self.is_dummy = engine, unit, unit.trained, is_dummy
        self.sync, self.weight = engine.sync, engine.weight
        policy = unit.unit_policy
        # True if its backward computes with parameters, or if the policy keeps them in memory.
        self.needs_full_in_backward = bool(by_read or unit.needs_full_in_backward or policy.keep or policy.keep_on)
        self.reduce_node: ReduceNode | None = None
        self.number = 0  # sequence number of the AwaitReduce in autograd's order
        self.writes = unit.writes()
        self.root = IN_BACKWARD if _torch.is_in_backward() else engine.root_call
        self.kept_lease: KeptLease | None = None
        self.reached: Tensor | None = None  # an output of its Gather, until its forward has ended
        self.version: int | None = None  # version of the parameters in the forward
        self.gather: weakref.ref[Any] | None = None  # the Gather node
        self.inputs: Sequence[Any] = ()
        self.waiting: dict[int, int] = {}
        self.watching: Sequence[Any] = ()  # handles of hooks on nodes of inputs
        self.shown: dict[int, Sequence[Tensor]] = {}

    @property
    def reduces(self) -> bool:
        return self.sync and self.unit.unit_policy.reduces

    @property
    def may_come_back(self) -> bool:
        return self.reached is not None

    # -- the backward reaches it

    def has_begun(self) -> bool:
        return _torch.current_graph_task() in self.waiting

    def begin(self, fulls: Sequence[Tensor], grad: Tensor | None) -> None:
        """Begin the backward of this call, unless it has begun. If `needs_full_in_backward`, gather the unit, and let its
        modules see `fulls`, the full parameters that they saw in the forward. Also notify observers, and begin to gather the
        units expected next. `grad`: not used; autograd passes it to hooks on gradients. Raises `UsageError` for
        `create_graph=True`, for a deleted model, and, if the unit is gathered, for parameters changed since the forward."""
        task, engine, unit = _torch.current_graph_task(), self.engine, self.unit
        if task in self.waiting:
            return
        if not engine.units:
            raise UsageError(
                "the sharded model was deleted between this forward and its backward, and its memory went with it; keep a "
                "reference to the model until the backward has run."
            )
        if torch.is_grad_enabled():  # create_graph=True
            raise UsageError(
                f"unit {unit.name or 'root'!r} was asked for a double backward (create_graph=True), and gradients of a "
                "sharded model carry no graph; compute the second derivative inside of one unit's forward, or unsharded."
            )
        if self.reduce_node is not None:
            _torch.set_number(self.reduce_node.edge, self.number)
        self.waiting[task] = 0
        node = self.gather and self.gather()
        if node is None or unit.views_inputs or not _torch.will_execute(node):
            self._watch_inputs(task)
        engine.join(task, self)
        for notify in engine.observers.unit_returns:
            notify(unit, self)
        if self.needs_full_in_backward:
            self._take_lease(task, fulls)
        engine.gather_ahead(BACKWARD, unit)

    def begin_for_read(self, fulls: Sequence[Tensor]) -> None:
        """Call `begin`, and gather the unit even if its backward needs no full parameters, because code is about to read one of
        `fulls`. Raises `UsageError` for `create_graph=True`, a deleted model, and parameters changed since the forward."""
        self.begin(fulls, None)
        task = _torch.current_graph_task()
        if task not in self.shown:  # an embedding's backward has no lease, but a hook reads its weight
            self._take_lease(task, fulls)

    def _take_lease(self, task: int, fulls: Sequence[Tensor]) -> None:
        unit = self.unit
        kept_leases = self.engine.kept_leases
        if self.kept_lease in kept_leases:
            kept_leases.remove(self.kept_lease)
            version = unit.version()
        else:
            version = self.engine.acquire(unit)
        # The backward must see the parameters of the forward; without sharding, autograd's version counters check this.
        if self.version not in (None, version):
            unit.release()
            raise changed_error(unit)
        unit.module_params.show(fulls, registered=False)
        self.shown[task] = fulls

    def _watch_inputs(self, task: int) -> None:
        """Register hooks that call `end(task)` when the gradients of all inputs of this call are computed, and set
        `waiting[task]` to the number of these inputs. `task`: id of the running backward. If autograd cannot tell which inputs
        get gradients, register none; the call then ends with the whole backward."""
        # autograd runs the newest ready node first; Gather is older than all nodes of its call, which have thus run before it.
        # The exception is a node on another device's thread that has no gradient for a parameter.
        try:
            nodes = [node for node in dict.fromkeys(self.inputs) if _torch.will_execute(node)]
        except RuntimeError:  # unknown for a leaf in autograd.grad
            self.waiting[task] = ENDS_WITH_THE_BACKWARD
            return
        self.waiting[task] = len(nodes)
        done = partial(_input_done, weakref.ref(self))
        self.watching = [*self.watching, *[node.register_prehook(done) for node in nodes]]

    # -- it ends

    def end(self, task: int) -> None:
        """End this call in the backward with id `task`: modules no longer see its full parameters, and its lease is released,
        so that memory without other leases may be freed. Do nothing if this backward uses no full parameters of the call."""
        fulls = self.shown.pop(task, None)
        if fulls is not None:
            for handle in self.watching:
                handle.remove()
            self.watching = ()
            self.unit.module_params.hide(fulls)
            self.unit.keep_until_stale = self.unit.unit_policy.keep_on
            self.unit.release()

    def drop(self) -> None:
        """Forget the reduces that the unit's AwaitReduce would await, because their backward failed or the model is deleted."""
        if self.reduce_node is not None:
            self.reduce_node.reducing.clear()


def _input_done(reference: weakref.ref[Call], _: Any) -> None:
    call, task = reference(), _torch.current_graph_task()
    if call is not None and task in call.waiting:
        call.waiting[task] -= 1
        if call.waiting[task] == 0:
            call.end(task)
