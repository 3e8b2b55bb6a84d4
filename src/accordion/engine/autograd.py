"""FSDP as one differentiable function in two nodes: AwaitReduce (shards -> token) and Gather (token -> full parameters).

AwaitReduce is made for the parameters and kept; Gather is made for each call. When a backward reaches Gather, every other node
of the call has run: the lease ends and the reduce begins. AwaitReduce runs one unit later, under the next unit's backward,
because its sequence number was reserved one unit earlier than Gather's; it waits for the reduce and hands the gradients over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.calls import Call, transform_error
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.unit import ReduceNode
from accordion.errors import UsageError

MOST_PUT_OFF = 2  # calls whose gradients may travel on while the backward does


@_torch.run_at_once
class AwaitReduce(torch.autograd.Function):
    """Shards to a token; its backward waits for the reduces that Gather's backward began.

    `anchor`: the engine's leaf for which nobody asks a gradient.
    """

    @staticmethod
    def forward(ctx: Any, node: weakref.ref[ReduceNode], anchor: Tensor, *shards: Tensor) -> Tensor:
        ctx.reduce_node, ctx.nothing = node, (None,) * (2 + len(shards))
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        node: ReduceNode | None = ctx.reduce_node()
        calls = node.reducing.pop(_torch.current_graph_task(), ()) if node is not None else ()
        found = ctx.nothing
        for call, parts in calls:  # none where the unit adds up since that forward
            engine = call.engine
            accumulates = engine.accumulates()
            waits = parts[0].goes_on and accumulates and not engine.observers.gradients_arrive
            if waits and not any(_torch.grads_of(call.trained.params)[1]):
                for part in parts:
                    part.arrive()
                engine.delayed_writes.append(partial(hand_over, call, parts, True))
                engine.write_delayed(MOST_PUT_OFF)
                continue
            engine.write_delayed()
            grads = hand_over(call, parts, accumulates)
            if grads is not None:
                found = grads if found is ctx.nothing else added(found, grads)
        return found


def hand_over(call: Call, parts: list[PendingReduce], accumulates: bool) -> tuple[Tensor | None, ...] | None:
    """Wait for the gradients of a call, and write them to `.grad` where nobody listens; what is left, as AwaitReduce returns it.

    Beside autograd's own accumulation, whose dispatches cost more than it.
    `accumulates`: whether the engine may write them; see `Engine.accumulates`.
    """
    engine = call.engine
    if engine.arriving:
        engine.land_gradients()
    for tell in engine.observers.gradients_arrive:
        tell(call.unit)
    params = call.trained.params
    held, listens = _torch.grads_of(params)
    if not accumulates:
        listens = [True] * len(params)
    adding = [False] * len(params)
    if [g for g in held if g is not None]:
        pairs = list(zip(listens, held, strict=True))
        listens = [heard or not (g is None or isinstance(g, DTensor)) for heard, g in pairs]
        adding = [not heard and g is not None for heard, g in zip(listens, held, strict=True)]
    heard = True in listens
    decide = heard or bool(engine.observers.gradients_arrive)  # somebody looks at gradients before the backward ends
    grads = engine.as_gradients(call.unit, call.trained, parts, adding, decide)
    if parts in engine.reduces_under_way:  # not before: if something raises, `recover` waits for what is under way
        engine.reduces_under_way.remove(parts)
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
            elif engine.arriving:  # it is added once it is there
                engine.to_add.append((_torch.local_of(standing), _torch.local_of(grad)))
            else:
                _torch.local_of(standing).add_(_torch.local_of(grad))
    if engine.undecided or (not decide and [part for part in parts if part.absent]):
        counted = [None] * len(params) if decide else [place for part in parts for place in part.counted()]
        for param, standing, grad, place in zip(params, held, grads, counted, strict=True):
            if grad is not None and (place is not None or engine.undecided):
                engine.undecided.note(param, standing, grad, place)
    return (None, None, *[grad if yes else None for yes, grad in zip(listens, grads, strict=True)]) if heard else None


def added(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple([b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)])


@_torch.run_at_once
class Gather(torch.autograd.Function):
    """A token to the full trainable parameters, which stand already; its backward begins the reduce of their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call, call.gather = call, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return (call.engine.zero.detach(), *[view.detach() for view in call.trained.views])

    @staticmethod
    def backward(ctx: Any, reached: Tensor | None, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        ours = _torch.are_ours(grads) if call.unit.takes_grads else [False] * len(grads)
        engine, unit, task = call.engine, call.unit, _torch.current_graph_task()
        if task not in call.waiting:  # this rank dropped the output: it gathers where the others do, for nothing
            call.begin(unit.views, None)
            call.waiting[task] = 0
        if call.waiting[task] == 0:
            call.end(task)
        if [g for g in grads if g is not None and g.is_sparse]:
            raise UsageError(
                f"unit {unit.name!r} got a sparse gradient; use dense ones: nn.Embedding(..., sparse=False)."
            )
        for tell in engine.observers.full_gradients:
            tell(unit, grads)
        if not call.trained.indices:
            return None, None
        if not call.reduces:
            # A parameter that was frozen since the forward gets no gradient, as in autograd's own accumulation.
            trains = _torch.which_train(call.trained.params)
            engine.add_up(unit, [call.trained.indices[k] for k in trains], [grads[k] for k in trains])
            return None, engine.zero if call.sync else None
        parts = engine.reduce(unit, call.trained, grads, ours)
        engine.reduces_under_way.append(parts)
        assert call.reduce_node is not None, "a call that reduces has its node"
        call.reduce_node.reducing.setdefault(task, []).append((call, parts))
        # Defined, never None: autograd picks the queue of a node from the gradients in its buffer.
        return None, engine.zero


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
        ctx.begin, ctx.zero, ctx.to_reach = begin, zero, tensors[num_outputs:]
        ctx.set_materialize_grads(False)
        ctx.is_plain = DTensor not in map(type, tensors[:num_outputs])
        # Not save_for_backward: in a recomputation the saved tensors must be those of the forward.
        ctx.shared = [(tensor, tensor._version) for tensor in shared]
        return tuple([tensor.detach() for tensor in tensors[:num_outputs]])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return the tangents of the outputs as outputs too: they carry a graph, and a backward may come through them alone."""
        outputs = tangents[4 : len(tangents) - len(ctx.to_reach)]
        having = [tangent for tangent in outputs if tangent is not None]
        if any(map(_torch.is_batched, having)):
            raise transform_error()
        reaching: Any = iter(OutputNode.apply(ctx.begin, ctx.zero, len(having), (), *having, *ctx.to_reach))  # type: ignore[no-untyped-call]
        return tuple([None if tangent is None else next(reaching) for tangent in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if any(tensor._version != version for tensor, version in ctx.shared):
            raise UsageError(
                "an output of the sharded model was changed in place that shares memory with an input or another output; the "
                "gradient would miss it: return a clone, or write out of place."
            )
        if ctx.is_plain and DTensor in map(type, grads):
            raise UsageError(
                "the gradient of an output of the sharded model is a DTensor: the loss has a term of sharded parameters; make it "
                "a plain tensor, as in weight.pow(2).sum().full_tensor()."
            )
        is_batched = any(map(_torch.is_batched, filter(torch.is_tensor, grads)))
        if is_batched and any(_torch.will_execute(_torch.node_of(tensor)) for tensor in ctx.to_reach):
            raise UsageError(
                "gradients of the parameters of a sharded model were asked for in one batched backward (is_grads_batched=True), "
                "and a reduce takes one gradient at a time; call torch.autograd.grad once for each, or ask for those of inputs."
            )
        ctx.begin(None)
        return None, None, None, None, *grads, *[ctx.zero] * len(ctx.to_reach)
