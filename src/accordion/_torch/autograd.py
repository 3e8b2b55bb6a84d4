"""Functions around private names of torch.autograd: the running backward, nodes and their order, hooks, reference counts."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accordion._torch.tensors import plain_attributes

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Function that returns the id of the backward that runs on this thread, -1 (`NO_BACKWARD`) outside of one. No public name."""

NO_BACKWARD = -1
"""The value that `current_graph_task()` returns outside of a backward."""


def is_in_backward() -> bool:
    """Return True if autograd runs a backward on this thread."""
    return current_graph_task() != NO_BACKWARD


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Function that returns True if the running backward will execute a given autograd node. No public name."""


def walks_everything(leaf: Tensor) -> bool:
    """Return True if the running backward computes all gradients; False in `autograd.grad` and in a backward with `inputs`.
    `leaf`: a leaf in the graph that users never see and thus cannot pass as `inputs`; only a full backward executes its node."""
    return will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)


def saving_hook() -> Callable[[Tensor], Any] | None:
    """Return the pack function of the innermost active `saved_tensors_hooks`; None if none is active. No public name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def node_of(tensor: Tensor) -> Any:
    """Return the autograd node that receives the gradient of `tensor`: its `grad_fn`, or the AccumulateGrad of a leaf."""
    return tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node


def reserve_number() -> int:
    """Return the next sequence number of autograd nodes on this thread, and skip it, for use with `set_number`. Of the nodes
    that are ready, autograd runs the one with the highest number first. No public names."""
    number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    torch._C._functions.UndefinedGrad()
    return int(number)


def set_number(tensor: Tensor, number: int) -> None:
    """Set the sequence number of the node `tensor.grad_fn`. The node must not be queued in a running backward. No public name."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]


def queue_callback(function: Callable[[], None]) -> None:
    """Make autograd call `function` at the end of the backward that runs now, unless this backward raises. No public name."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def transforms_active() -> bool:
    """Return True inside a transform of torch.func, including `linearize`, or under `make_fx`. No public names."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(proxies) is not None


def is_batched(tensor: Tensor) -> bool:
    """Return True for the wrapped tensors of torch.func transforms and of a backward with `is_grads_batched`."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_functorch_wrapped_tensor(tensor)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)` in 12 instead of 21 us, without the Python code that transforms of torch.func need."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def run_at_once(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Class decorator that makes autograd call `function.backward` directly, not through torch's wrapper. No public name."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return function


def pass_hooks_by(mode: Any) -> Any:
    """Make `mode`, a context of `create_selective_checkpoint_contexts`, keep results without saved-tensor hooks, and return it.
    Versions before torch 2.15 always do so; 2.15 warns under such hooks if this is not chosen. No public name."""
    if hasattr(mode, "respect_saved_tensors_hooks"):
        mode.respect_saved_tensors_hooks = False
    return mode


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    """Register a gradient hook as `tensor.register_hook(function)` does, but return no handle: takes 3.5 us instead of 7.8."""
    if tensor.grad_fn is None or tensor._backward_hooks is not None:
        tensor.register_hook(function)
        return
    # An OrderedDict, as in torch: handles of hooks that are registered later refer to it weakly. Their ids are not negative.
    tensor._backward_hooks = OrderedDict({-1: function})
    tensor.grad_fn._register_hook_dict(tensor)


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Replace the gradient hooks of leaf `new` by those of leaf `old`, if `old` has any, and its post-accumulate hooks
    likewise. A handle then removes its hook from both leaves."""
    if old._backward_hooks is not None:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def has_hooks(leaf: Tensor) -> bool:
    """Return True if a leaf has gradient hooks or post-accumulate hooks."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


_grad, _trains = attrgetter("grad"), attrgetter("requires_grad")


def grads_of(leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], list[bool]]:
    """Return two lists with an entry for each leaf: its `.grad`; and True if it is frozen or has gradient or post-accumulate
    hooks, so that autograd itself must write its `.grad`."""
    with plain_attributes():
        hooked = [bool(x._backward_hooks or x._post_accumulate_grad_hooks or not x.requires_grad) for x in leaves]
        return list(map(_grad, leaves)), hooked


def which_train(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the indices of those leaves that require gradients."""
    with plain_attributes():
        return tuple(compress(range(len(leaves)), map(_trains, leaves)))


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the functions that were registered on `param` by `register_post_accumulate_grad_hook`."""
    return list((param._post_accumulate_grad_hooks or {}).values())


def storages_of(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storage of each DTensor itself, which has no memory, not that of its local tensor. `p.data = x` gives `p` a new
    storage. Compare storages with `is`: torch returns the same Python object for one while there is a reference to it."""
    with plain_attributes():
        return list(map(Tensor.untyped_storage, tensors))


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which `tensor` is a view; None if it is no view, or one that autograd has not recorded."""
    return tensor._base


def are_ours(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return, for each gradient, True if nothing else refers to its memory, so that it may be overwritten; False for None and
    sparse ones. Call this first in the backward of a `run_at_once` Function, with its arguments: more references count."""
    # autograd may pass one tensor to several nodes (`x + w`) or keep it for a later node, and hooks may have stored it. The
    # reference counts of the Python object, the tensor and the storage show that, as in autograd's own `AccumulateGrad`.
    return [_references(grads, i) in _alone() for i in range(len(grads))]


def _references(grads: Sequence[Tensor | None], i: int) -> tuple[int, ...]:
    grad = grads[i]
    if grad is None or grad.layout != torch.strided:
        return ()
    base = grad._base  # a view refers to its base: the gradient of nn.Linear is the transpose of a product
    of_base = () if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), storage, *of_base  # type: ignore[attr-defined]


@cache
def _alone() -> list[tuple[int, ...]]:
    """Return `_references` of two gradients to which nothing else refers, one of them a view; measured by a small backward."""
    counts: list[tuple[int, ...]] = []

    @run_at_once  # as in the callers, since torch's code between autograd and `backward` has references too
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            counts.extend([_references(grads, i) for i in range(len(grads))])
            return grads

    with torch.enable_grad():
        both = [torch.ones(1, 1, requires_grad=True, device="cpu") for _ in range(2)]
        plain, viewed = Counts.apply(*both)  # type: ignore[no-untyped-call]
        (plain * 2 + viewed.t() * 2).backward()
    return counts


def holders_of_memory(tensor: Tensor) -> int:
    """Return the reference count of the tensor's storage; only a change of it between calls has a meaning."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage among all live ones, which torch has under a private name only."""
    return int(storage._cdata)


def forget_references() -> None:
    """Make `are_ours` measure its reference counts anew. Call this when real tensors follow fake ones or fake ones real ones."""
    _alone.cache_clear()
