"""Hand the reduced gradients of a call to `.grad`, beside autograd's own accumulation, whose dispatches cost more than it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.calls import Call
from accordion.engine.pending_reduce import PendingReduce


def hand_over(call: Call, parts: list[PendingReduce], accumulates: bool) -> tuple[Tensor | None, ...] | None:
    """Wait for the gradients of a call, and write them where nobody listens; what is left, as AwaitReduce returns it.

    `accumulates`: whether the engine may write them; see `Engine.accumulates`.
    """
    engine = call.engine
    engine.land_gradients()
    for tell in engine.observers.gradients_arrive:
        tell(call.unit)
    params = call.trained.params
    held = _torch.grads_of(params)
    listens = _torch.have_hooks(params) if accumulates else [True] * len(params)
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
            else:
                engine.add_to_gradient(_torch.local_of(standing), _torch.local_of(grad))
    if engine.undecided or (not decide and any(part.lacks_some for part in parts)):
        counted = [None] * len(params) if decide else [place for part in parts for place in part.counted()]
        for param, standing, grad, place in zip(params, held, grads, counted, strict=True):
            if grad is not None and (place is not None or engine.undecided):
                engine.undecided.note(param, standing, grad, place)
    return (None, None, *[grad if yes else None for yes, grad in zip(listens, grads, strict=True)]) if heard else None


def sums_of(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple([b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)])
