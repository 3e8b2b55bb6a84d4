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

from accordion import _torch
from accordion.engine.calls import Call
from accordion.engine.gradients import hand_over, sums_of
from accordion.engine.unit import ReduceNode
from accordion.errors import UsageError


def reduce_node_of(call: Call) -> ReduceNode:
    """The node that waits for the reduces of a call's parameters, on the stream that computes now; made once."""
    trained, engine = call.trained, call.engine
    now = engine.context.reduce_stream.compute()
    node: ReduceNode | None = trained.reduce_node
    if node is None or node.stream != now:
        node = trained.reduce_node = ReduceNode(engine.anchor, now, {})
        node.token = _torch.apply(AwaitReduce, weakref.ref(node), engine.anchor, *trained.params)
    return node


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
            if waits and not any(_torch.have_hooks(call.trained.params)):
                for part in parts:
                    part.arrive()
                engine.delayed_writes.add(partial(hand_over, call, parts, True))
                continue
            engine.delayed_writes.write()
            grads = hand_over(call, parts, accumulates)
            if grads is not None:
                found = grads if found is ctx.nothing else sums_of(found, grads)
        return found


@_torch.run_at_once
class Gather(torch.autograd.Function):
    """A token to the full trainable parameters, which stand already; its backward begins the reduce of their gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor) -> tuple[Tensor, ...]:
        ctx.call, call.gather = call, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return (call.engine.token(), *[view.detach() for view in call.trained.views])

    @staticmethod
    def backward(ctx: Any, reached: Tensor | None, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        ours = _torch.are_ours(grads) if call.unit.takes_grads else [False] * len(grads)
        engine, unit, task = call.engine, call.unit, _torch.current_graph_task()
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
        for tell in engine.observers.full_gradients:
            tell(unit, grads)
        if not call.trained.indices:
            return None, None
        if not call.reduces:
            engine.add_up(unit, call.trained, grads)
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
