"""FSDP as one differentiable function in two nodes: Stage (shards -> token) and Gather (token -> full parameters).

What happens in one call of a unit:
1. forward, before: the unit is gathered, the next one is gathered ahead and staged, the full parameters are shown.
2. forward, after: they are hidden and let go; a mark, made last, and hooks on outputs wait for the backward.
3. backward, its mark or an output is reached: the unit is gathered again, the one before it ahead.
4. Gather.backward, the last of the unit's nodes: the lease ends, the reduce begins.
5. Stage.backward waits for the reduce and hands the sharded gradients to autograd. Its sequence number was reserved one
   unit earlier than Gather's, so it is lower than those of the unit before, and autograd runs it after that unit's backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.engine import IN_BACKWARD, Engine, KeptLease
from accordion.engine.finite import Moment
from accordion.engine.order import Phase
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.unit import Unit
from accordion.errors import UsageError


class Call:
    """One call of a unit. State in flight belongs to (call, backward task): a graph may be walked twice.

    `waiting`: for each backward task, how many inputs still lack the gradient with which the lease ends; with none, Gather ends
    it. Graph nodes hold a call; a call holds nodes of its inputs only, which lie before it: no cycle keeps a graph alive.
    """

    __slots__ = (
        *("__weakref__", "gather", "inputs", "kept", "number", "reached", "needs_full_in_backward", "root", "shown"),
        *("staged", "sync", "trained", "unit", "version", "waiting", "watching", "writes"),
    )

    def __init__(self, unit: Unit, sync: bool, reads: bool = False) -> None:
        self.unit, self.sync, self.trained = unit, sync, unit.trained
        # Whether its backward computes with parameters, or somebody wants them to stay.
        policy = unit.unit_policy
        self.needs_full_in_backward = bool(reads or unit.needs_full_in_backward or policy.keep or policy.keep_on)
        self.staged: ReduceNode | None = None
        self.number = 0  # in autograd's sequence, of the Stage
        self.writes = unit.writes()
        self.root = unit.engine.root_call if _torch.current_graph_task() == -1 else IN_BACKWARD
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

    def begin(self, fulls: Sequence[Tensor], grad: Tensor | None) -> None:
        """Hook on the mark and on outputs: the backward has reached this call."""
        if self.unit.begins_at_reads is None:
            self.unit.begins_at_reads = False
        if _torch.current_graph_task() not in self.waiting:
            self._begin(fulls)

    def begin_unseen(self, fulls: Sequence[Tensor]) -> None:
        """A node of this call is about to read a full parameter; no mark and no output said that a backward comes."""
        task = _torch.current_graph_task()
        if self.reached is not None:  # in its own forward
            return
        if task not in self.waiting:
            self.unit.begins_at_reads = True
            self._begin(fulls)
        if task not in self.shown:  # an embedding's weight that a hook reads too
            self._stand(task, fulls)

    def _begin(self, fulls: Sequence[Tensor]) -> None:
        task, engine = _torch.current_graph_task(), self.unit.engine
        if not engine.units:
            raise UsageError(
                "the sharded model was deleted between this forward and its backward, and its memory went with it; keep a "
                "reference to the model until the backward has run."
            )
        self.refuse_double_backward()
        if self.staged is not None:
            _torch.set_number(self.staged.token, self.number)
        self.waiting[task] = 0
        node = self.gather and self.gather()
        if node is None or self.unit.views_inputs or not _torch.will_execute(node):
            self._watch_inputs(task)
        engine.join(task, self)
        engine.comes_back(self.unit)
        if self.needs_full_in_backward:
            self._stand(task, fulls)
        engine.gather_ahead(Phase.BACKWARD, self.unit)

    def _stand(self, task: int, fulls: Sequence[Tensor]) -> None:
        """Take the lease of backward `task`."""
        unit = self.unit
        version = unit.version() if unit.engine.take(self.kept) else unit.acquire()
        self.refuse_newer_weights(version)
        unit.window.show(fulls, registered=False)
        self.shown[task] = fulls

    def refuse_newer_weights(self, version: int) -> None:
        """The backward must see what the forward saw; on one device autograd's version counters say so."""
        if self.version not in (None, version):
            self.unit.release()
            raise UsageError(
                f"the parameters of unit {self.unit.name or 'root'!r} were changed between this forward and its backward, by an "
                "optimizer step, a load or a write; run the backward before the step, or the forward again."
            )

    def refuse_double_backward(self) -> None:
        if torch.is_grad_enabled():  # create_graph=True
            raise UsageError(
                f"unit {self.unit.name or 'root'!r} was asked for a double backward (create_graph=True), and gradients of a "
                "sharded model carry no graph; compute the second derivative inside of one unit's forward, or unsharded."
            )

    def _watch_inputs(self, task: int) -> None:
        """End the lease when the gradients of the inputs are there, where no Gather says that the last node has run.

        autograd runs the newest node that is ready, Gather's node is older than all others of its call, and what they wait for is
        newer still: when Gather runs, all of them have. Unless another device's thread has one of them, one without a
        gradient for a parameter.
        """
        try:
            nodes = [node for node in dict.fromkeys(self.inputs) if _torch.will_execute(node)]
        except RuntimeError:  # autograd.grad does not say it of a leaf: then the lease ends with the backward
            self.waiting[task] = -1
            return
        self.waiting[task] = len(nodes)
        done = partial(_input_done, weakref.ref(self))
        self.watching = [*self.watching, *[node.register_prehook(done) for node in nodes]]

    def input_done(self) -> None:
        task = _torch.current_graph_task()
        if task in self.waiting:
            self.waiting[task] -= 1
            if self.waiting[task] == 0:
                self.end(task)

    def end(self, task: int) -> None:
        """The backward of this call needs full parameters no longer."""
        fulls = self.shown.pop(task, None)
        if fulls is not None:
            for handle in self.watching:
                handle.remove()
            self.watching = ()
            self.unit.window.hide(fulls)
            self.unit.stays = self.unit.unit_policy.keep_on
            self.unit.release()

    def drop(self) -> None:
        """Forget gradients that nobody will ask for."""
        if self.staged is not None:
            self.staged.reducing.clear()

    def end_all(self) -> None:
        for task in list(self.shown):
            self.end(task)


def _input_done(reference: weakref.ref[Call], _: Any) -> None:
    call = reference()
    if call is not None:
        call.input_done()


class ReduceNode:
    """Owns the Stage of some parameters: one node for all their calls, since the nodes of nine parameters take 40 us to make.

    `reducing`: by backward task, the calls whose gradients are being reduced. A node runs on the `stream` on which it was made.
    """

    __slots__ = ("__weakref__", "reducing", "stream", "token")

    def __init__(self, engine: Engine, params: Sequence[nn.Parameter], stream: Any) -> None:
        self.reducing: dict[int, list[tuple[Call, list[PendingReduce]]]] = {}
        self.stream = stream
        self.token: Tensor = _torch.apply(AwaitReduce, weakref.ref(self), engine.anchor, *params)

    @staticmethod
    def of(call: Call) -> ReduceNode:
        """The one of a call's parameters on the stream that computes now."""
        trained, engine = call.trained, call.unit.engine
        now = engine.context.reduce_stream.compute()
        staged: ReduceNode | None = trained.staged
        if staged is None or staged.stream != now:
            staged = trained.staged = ReduceNode(engine, trained.params, now)
        return staged


@_torch.run_at_once
class AwaitReduce(torch.autograd.Function):
    """Shards to a token; its backward waits for the reduces that Gather's backward began.

    `anchor`: the engine's leaf for which nobody asks a gradient.
    """

    @staticmethod
    def forward(ctx: Any, staged: weakref.ref[ReduceNode], anchor: Tensor, *shards: Tensor) -> Tensor:
        ctx.staged, ctx.nothing = staged, (None,) * (2 + len(shards))
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        staged: ReduceNode | None = ctx.staged()
        calls = staged.reducing.pop(_torch.current_graph_task(), ()) if staged is not None else ()
        found = ctx.nothing
        for call, parts in calls:  # none where the unit adds up since that forward
            engine = call.unit.engine
            accumulates = engine.accumulates()
            waits = parts[0].goes_on and accumulates and engine.after_unit is None
            if waits and not any(_torch.have_hooks(call.trained.params)):
                for part in parts:
                    part.arrive()
                engine.put_off.add(partial(landed, call, parts, True))
                continue
            engine.put_off.write()
            grads = landed(call, parts, accumulates)
            if grads is not None:
                found = grads if found is ctx.nothing else _sums(found, grads)
        return found


def landed(call: Call, parts: list[PendingReduce], accumulates: bool) -> tuple[Tensor | None, ...] | None:
    """Wait for the gradients of a call, and write them where nobody listens; what is left, as Stage returns it.

    `accumulates`: whether the engine may write them; see `Engine.accumulates`.
    """
    engine = call.unit.engine
    engine.land_gradients()
    if engine.after_unit is not None:
        engine.after_unit(call.unit)
    params = call.trained.params
    held = _torch.grads_of(params)
    listens = _torch.have_hooks(params) if accumulates else [True] * len(params)
    if [g for g in held if g is not None]:
        pairs = zip(listens, held, strict=True)
        listens = [heard or not (g is None or isinstance(g, DTensor)) for heard, g in pairs]
    adding = [not heard and g is not None for heard, g in zip(listens, held, strict=True)]
    heard = True in listens
    decide = heard or engine.after_unit is not None  # somebody looks at gradients before the backward ends
    grads = call.unit.as_gradients(call.trained, parts, adding, decide)
    engine.flying.pop(id(parts), None)  # not before: where something raises, `recover` waits for what flies
    if heard:
        engine.land_gradients()
    if not accumulates:
        return None, None, *grads
    # Autograd's own accumulation detaches each gradient, for a DTensor a dispatch through Python: 12 us in 85 of a
    # parameter's host time, with collectives that do nothing.
    with _torch.plain_attributes():
        for param, grad, standing, heard_one in zip(params, grads, held, listens, strict=True):
            if grad is None or heard_one:
                continue
            if standing is None:
                param.grad = grad
            else:
                engine.add(_torch.local_of(standing), _torch.local_of(grad))
    if engine.undecided or not decide:
        counted = [None] * len(params) if decide else [place for part in parts for place in part.counted()]
        for param, standing, grad, place in zip(params, held, grads, counted, strict=True):
            if grad is not None and (place is not None or engine.undecided):
                engine.undecided.note(param, standing, grad, place)
    return (None, None, *[grad if yes else None for yes, grad in zip(listens, grads, strict=True)]) if heard else None


def _sums(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple([b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)])


@_torch.run_at_once
class Gather(torch.autograd.Function):
    """A token to the full trainable parameters, which stand already; its backward begins the reduce of their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call, call.gather = call, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return (call.unit.engine.token(), *[view.detach() for view in call.trained.views])

    @staticmethod
    def backward(ctx: Any, reached: Tensor | None, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        ours = _torch.are_ours(grads) if call.unit.takes_grads else [False] * len(grads)
        unit, task = call.unit, _torch.current_graph_task()
        call.refuse_double_backward()
        if task not in call.waiting:  # this rank dropped the output: it gathers where the others do, for nothing
            call.begin(unit.views, None)
            call.waiting[task] = 0
        if call.waiting.get(task) == 0:
            call.end(task)
        if [g for g in grads if g is not None and g.is_sparse]:
            raise UsageError(
                f"unit {unit.name!r} got a sparse gradient; use dense ones: nn.Embedding(..., sparse=False)."
            )
        if unit.engine.finite is not None:
            unit.engine.finite.look(unit.index, Moment.BACKWARD, grads)
        if not call.trained.indices:
            return None, None
        if not call.reduces:
            unit.add_up(call.trained, grads)
            return None, unit.engine.zero if call.sync else None
        parts = unit.reduce(call.trained, grads, ours)
        unit.engine.flying[id(parts)] = parts
        assert call.staged is not None, "a call that reduces has a Stage"
        call.staged.reducing.setdefault(task, []).append((call, parts))
        # Defined, never None: autograd picks the queue of a node from the gradients in its buffer.
        return None, unit.engine.zero


class OutputNode(torch.autograd.Function):
    """The identity on the outputs of an outermost call, whose backward says first that it was reached.

    `pre_backward_nodes`: one of every call below it, whose gradient makes it and its Gather run their backward, each at its
    place in the order, also where this rank alone dropped a unit's output: the reduces of all ranks pair up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        begin: Callable[[Tensor | None], None],
        zero: Tensor,
        num_outputs: int,
        shared: Sequence[Tensor],
        *tensors: Tensor,
    ) -> Any:
        ctx.begin, ctx.zero, ctx.num_to_reach = begin, zero, len(tensors) - num_outputs
        ctx.set_materialize_grads(False)
        # Not save_for_backward: in a recomputation the saved tensors must be those of the forward.
        ctx.shared = [(tensor, tensor._version) for tensor in shared]
        return tuple([tensor.detach() for tensor in tensors[:num_outputs]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if any(tensor._version != version for tensor, version in ctx.shared):
            raise UsageError(
                "an output of the sharded model was changed in place that shares memory with an input or another output; the "
                "gradient would miss it: return a clone, or write out of place."
            )
        ctx.begin(None)
        return None, None, None, None, *grads, *[ctx.zero] * ctx.num_to_reach


def units_of(modules: Iterator[nn.Module]) -> list[Unit]:
    """The units whose modules are among `modules`."""
    return [m.__dict__["_accordion"] for m in modules if "_accordion" in m.__dict__]


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that shards `model` or a part of it; None where nothing is sharded."""
    units = units_of(model.modules())
    return units[0].engine if units else None
