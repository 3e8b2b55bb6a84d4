"""One call of a unit: the lease of its forward, and that of each backward that comes through it.

A call begins for a backward when its pre-backward node runs, when an output gets its gradient, or when Gather runs; the first
of them takes the lease. It ends, and memory goes, when Gather runs; for those that `_watch_inputs` is for, when
the gradients of its inputs are there.
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

ENDS_WITH_THE_BACKWARD = -1  # no node says when the gradients of the inputs are there


def transform_error() -> UsageError:
    """Return the error to raise inside a transform of torch.func, and for batched tangents of forward-mode differentiation."""
    return UsageError(
        "a sharded model was called inside a transform of torch.func (jvp, vmap, grad, ...) or with batched tangents, and it "
        "supports neither; call it inside `accordion.full_params(model)`, or use torch.autograd.forward_ad for one tangent."
    )


class Call:
    """One call of a unit. State of a backward in flight belongs to (call, backward task): a graph may be walked twice.

    `waiting`: for each backward task, how many inputs still lack the gradient with which the lease ends; with none, Gather ends
    it. Graph nodes hold a call; a call holds nodes of its inputs only, which lie before it: no cycle keeps a graph alive.
    """

    def __init__(self, engine: Engine, unit: Unit, by_read: bool = False, is_dummy: bool = False) -> None:
        self.engine, self.unit, self.trained, self.is_dummy = engine, unit, unit.trained, is_dummy
        self.sync = engine.sync
        policy = unit.unit_policy
        # Whether its backward computes with parameters, or somebody wants them to stay.
        self.needs_full_in_backward = bool(by_read or unit.needs_full_in_backward or policy.keep or policy.keep_on)
        self.reduce_node: ReduceNode | None = None
        self.number = 0  # in autograd's sequence, of the AwaitReduce
        self.writes = unit.writes()
        self.root = IN_BACKWARD if _torch.is_in_backward() else engine.root_call
        self.kept: KeptLease | None = None
        self.reached: Tensor | None = None  # an output of its Gather, until its forward has ended
        self.version: int | None = None  # of the parameters that the forward saw
        self.gather: weakref.ref[Any] | None = None  # its node
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
        """Hook on the pre-backward node and on outputs: the backward has reached this call."""
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
            _torch.set_number(self.reduce_node.token, self.number)
        self.waiting[task] = 0
        node = self.gather and self.gather()
        if node is None or unit.views_inputs or not _torch.will_execute(node):
            self._watch_inputs(task)
        engine.join(task, self)
        for tell in engine.observers.unit_returns:
            tell(unit, self)
        if self.needs_full_in_backward:
            self._take_lease(task, fulls)
        engine.gather_ahead(BACKWARD, unit)

    def begin_for_read(self, fulls: Sequence[Tensor]) -> None:
        """A node of this call is about to read a full parameter, and perhaps nothing else said that a backward comes."""
        self.begin(fulls, None)
        task = _torch.current_graph_task()
        if task not in self.shown:  # an embedding's weight that a hook reads too
            self._take_lease(task, fulls)

    def _take_lease(self, task: int, fulls: Sequence[Tensor]) -> None:
        unit = self.unit
        version = unit.version() if self.engine.take(self.kept) else self.engine.acquire(unit)
        # The backward must see what the forward saw; on one device autograd's version counters say so.
        if self.version not in (None, version):
            unit.release()
            raise UsageError(
                f"the parameters of unit {unit.name or 'root'!r} were changed between this forward and its backward, by an "
                "optimizer step, a load or a write; run the backward before the step, or the forward again."
            )
        unit.module_params.show(fulls, registered=False)
        self.shown[task] = fulls

    def _watch_inputs(self, task: int) -> None:
        """End the lease when the gradients of the inputs are there, if no Gather says that the last node has run.

        autograd runs the newest node that is ready, Gather's node is older than all others of its call, and what they wait for is
        newer still: when Gather runs, all of them have. Unless another device's thread has one of them, one without a
        gradient for a parameter.
        """
        try:
            nodes = [node for node in dict.fromkeys(self.inputs) if _torch.will_execute(node)]
        except RuntimeError:  # autograd.grad does not say it of a leaf
            self.waiting[task] = ENDS_WITH_THE_BACKWARD
            return
        self.waiting[task] = len(nodes)
        done = partial(_input_done, weakref.ref(self))
        self.watching = [*self.watching, *[node.register_prehook(done) for node in nodes]]

    # -- it ends

    def end(self, task: int) -> None:
        """The backward of this call needs full parameters no longer."""
        fulls = self.shown.pop(task, None)
        if fulls is not None:
            for handle in self.watching:
                handle.remove()
            self.watching = ()
            self.unit.module_params.hide(fulls)
            self.unit.keep_until_stale = self.unit.unit_policy.keep_on
            self.unit.release()

    def drop(self) -> None:
        """Forget gradients that nobody will ask for."""
        if self.reduce_node is not None:
            self.reduce_node.reducing.clear()


def _input_done(reference: weakref.ref[Call], _: Any) -> None:
    call, task = reference(), _torch.current_graph_task()
    if call is not None and task in call.waiting:
        call.waiting[task] -= 1
        if call.waiting[task] == 0:
            call.end(task)
