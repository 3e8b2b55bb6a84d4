"""The autograd nodes of a unit: `AwaitReduce` (shards -> an edge tensor) and `Gather` (edge tensor -> full parameters).

The edge tensor is a scalar that only links the nodes. The unit's calls share one AwaitReduce; each call has its own Gather. In
a backward Gather runs after the other nodes of its call. It lets the full parameters be freed, and begins to reduce their
gradients. AwaitReduce runs one unit later, so that the reduce overlaps with that unit's backward. It waits for the reduce and
writes the gradients. (autograd runs it then, because its sequence number was reserved in the forward of the unit before.)
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
from accordion.engine.gradients import weighted
from accordion.engine.observer import GRADIENTS
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.unit import ReduceNode
from accordion.errors import UsageError

MOST_PUT_OFF = 2  # the most calls whose reduce over replicas may continue while the backward goes on


@_torch.run_at_once
class AwaitReduce(torch.autograd.Function):
    """Node that waits for the reduces of a unit's gradients, and adds the results to `.grad` of the unit's `shards`.

    Forward: return the edge tensor, a scalar with the value of the dummy `leaf`. `node`: weak reference to the record in which
    `Gather` lists the reduces that it begins. Backward: wait for the listed reduces of this backward and write their gradients.
    Return the gradients that autograd must accumulate itself, such as those of shards with hooks. With a hybrid strategy, up to
    `MOST_PUT_OFF` calls without such gradients are put off: their gradients are written later in the backward.
    """

    @staticmethod
    def forward(ctx: Any, node: weakref.ref[ReduceNode], leaf: Tensor, *shards: Tensor) -> Tensor:
        ctx.reduce_node, ctx.nothing = node, (None,) * (2 + len(shards))
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        node: ReduceNode | None = ctx.reduce_node()
        calls = node.reducing.pop(_torch.current_graph_task(), ()) if node is not None else ()
        result = ctx.nothing
        for call, parts in calls:  # empty if the unit sums locally (no_sync) since that forward
            gradients = call.engine.gradients
            may_write = gradients.may_write()
            puts_off = parts[0].goes_on and may_write
            if puts_off:
                earlier, listens = _torch.grads_of(call.trained.params)
                puts_off = not any(listens) and all(g is None or isinstance(g, DTensor) for g in earlier)
            if puts_off:
                for part in parts:
                    part.arrive()
                gradients.delayed_writes.append(partial(hand_over, call, parts, True))
                gradients.write_delayed(MOST_PUT_OFF)
                continue
            gradients.write_delayed()
            grads = hand_over(call, parts, may_write)
            if grads is not None and result is not ctx.nothing:
                pairs = zip(result, grads, strict=True)
                grads = tuple([b if a is None else a if b is None else a + b for a, b in pairs])
            result = result if grads is None else grads
        return result


def hand_over(call: Call, parts: list[PendingReduce], may_write: bool) -> tuple[Tensor | None, ...] | None:
    """Wait for the reduces `parts` of `call`, and add the sharded gradients to `.grad`, except those that are left to autograd.

    Gradients are left to autograd if the parameter has hooks, is frozen by now, or has a `.grad` that is no DTensor; if
    `may_write` is False, all are. Returns those left to autograd as the backward of AwaitReduce does: (None, None, one gradient
    or None per trained parameter). Returns None if none is left. The host waits for copies of earlier gradients off the device,
    and for copies of the new ones if some are left to autograd. Otherwise a gradient that is being copied is added to an
    earlier `.grad` only in `GradientsUnderWay.land`.
    """
    gradients, params = call.engine.gradients, call.trained.params
    gradients.land()
    earlier, listens = _torch.grads_of(params)  # the gradients so far, and True for parameters with hooks
    if not may_write:
        listens = [True] * len(params)
    adding = [False] * len(params)
    if [g for g in earlier if g is not None]:
        pairs = list(zip(listens, earlier, strict=True))
        listens = [has_hooks or not (g is None or isinstance(g, DTensor)) for has_hooks, g in pairs]
        adding = [not leave and g is not None for leave, g in zip(listens, earlier, strict=True)]
    any_listens = True in listens  # then gradients are read before the backward ends
    as_gradients = call.unit.as_gradients
    grads, copies = call.engine.allocate(GRADIENTS, as_gradients, call.trained, parts, adding, any_listens)
    gradients.copies += copies
    if parts in gradients.reduces:  # not before: after an error `recover` cleans up the reduces under way
        gradients.reduces.remove(parts)
    if any_listens:
        gradients.land()
    if not may_write:
        return None, None, *grads
    # Autograd's own accumulation detaches each gradient, which for a DTensor is a dispatch through Python: 12 of the 85 us
    # of host time per parameter, measured with collectives that do nothing.
    with _torch.plain_attributes():
        for param, grad, previous, leave in zip(params, grads, earlier, listens, strict=True):
            if grad is None or leave:
                continue
            if previous is None:
                param.grad = grad
            elif gradients.copies:  # added after its copy off the device has ended
                gradients.to_add.append((_torch.local_of(previous), _torch.local_of(grad)))
            else:
                _torch.local_of(previous).add_(_torch.local_of(grad))
    if gradients.undecided or (not any_listens and [part for part in parts if part.absent]):
        counted = [None] * len(params) if any_listens else [count for part in parts for count in part.counted()]
        gradients.note_undecided(params, earlier, grads, counted)
    if not any_listens:
        return None
    return (None, None, *[grad if leave else None for leave, grad in zip(listens, grads, strict=True)])


@_torch.run_at_once
class Gather(torch.autograd.Function):
    """Node that makes the full parameters of one `call` of a unit, which were gathered before, part of autograd's graph.

    Forward: return (dummy scalar, full parameters that are trained), and set `call.gather` to a weak reference to the node.
    `edge`: AwaitReduce's output, or a leaf if nothing is reduced. Backward: let the full parameters be freed (unless gradients
    of the call's inputs are still computed), and begin to reduce their gradients. Under no_sync, or if the unit's policy says
    so, add the gradients to sums on this rank instead. Raises `UsageError` for a sparse gradient.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, edge: Tensor) -> tuple[Tensor, ...]:
        ctx.call, call.gather = call, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return (call.engine.zero.detach(), *[view.detach() for view in call.trained.views])

    @staticmethod
    def backward(ctx: Any, reached: Tensor | None, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        ours = _torch.are_ours(grads) if call.unit.takes_grads else [False] * len(grads)
        engine, unit, task = call.engine, call.unit, _torch.current_graph_task()
        if task not in call.waiting:  # this rank dropped the output, but must take part in the gather of the others
            call.begin(unit.views, None)
            call.waiting[task] = 0
        if call.waiting[task] == 0:
            call.end(task)
        if [g for g in grads if g is not None and g.is_sparse]:
            raise UsageError(
                f"unit {unit.name!r} got a sparse gradient; use dense ones: nn.Embedding(..., sparse=False)."
            )
        for notify in engine.observers.full_gradients:
            notify(unit, grads)
        if not call.trained.indices:
            return None, None
        if not call.reduces:
            # Zeros, so that `.grad`, which ranks compare before the next backward, is None on all ranks or on none.
            own = weighted(grads, call.weight, zeros=True)
            # As in autograd's own accumulation, a parameter that was frozen since the forward gets no gradient.
            trains = _torch.which_train(call.trained.params)
            engine.add_up(unit, [call.trained.indices[k] for k in trains], [own[k] for k in trains])
            return None, engine.zero if call.sync else None
        parts = engine.allocate(GRADIENTS, unit.reduce, call.trained, weighted(grads, call.weight), ours)
        engine.gradients.reduces.append(parts)
        assert call.reduce_node is not None, "a call that reduces has its node"
        call.reduce_node.reducing.setdefault(task, []).append((call, parts))
        # Never None, because autograd picks the queue of a node by the gradients in its buffer.
        return None, engine.zero


class OutputNode(torch.autograd.Function):
    """The identity on the model's outputs; its backward calls `begin(None)`, which starts the backward of the outermost call.

    `tensors`: `num_outputs` outputs that require gradients, then for each call in this forward a view of its Gather's scalar.
    The backward gives each of these scalars the gradient `zero`. `shared`: outputs that share memory with an input or
    another output. The backward raises `UsageError` if a tensor in `shared` was modified in place, if the outputs are plain
    tensors and get a DTensor as gradient, and for batched gradients (`is_grads_batched=True`) of parameters.
    """

    # Gradients of the inner calls' tensors make the Gather of each call run, in one order on all ranks, also on a rank that
    # dropped a unit's output, so that the reduces of all ranks pair up.

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
        """Return the outputs' tangents, passed through another `OutputNode`; None for an output without one (forward-mode AD).
        Raises `UsageError` for batched tangents."""
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
                "an output of the sharded model that shares memory with an input or another output was modified in place, and "
                "its gradient would be wrong; let the model return a clone, or do not write in place."
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
