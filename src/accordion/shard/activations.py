"""Activation checkpointing of units: recompute all activations, or all except attention and every second matrix product."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accordion import _torch
from accordion.config import ActivationCheckpointing
from accordion.engine.tree import tensors_of
from accordion.offload.activations import OffloadedInput

_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_attention_math.default,
)
CANDIDATES = {*PRODUCTS, *ATTENTION}
# Values for transformers' arguments of cached keys and values, because a recomputation would fill a cache twice.
NO_CACHES: dict[str, Any] = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


class _Choice:
    """Callback (op, args, kwargs) for the operators of one forward, in their order: returns True if a result is kept, so that
    the backward does not compute it again: for the first, third, ... matrix product, and for attention without dropout."""

    def __init__(self) -> None:
        self._num_products = 0

    def __call__(self, op: Any, args: Any, kwargs: Any) -> bool:
        if op in ATTENTION:
            # A kept result draws no random numbers in the recomputation, so later dropouts would draw other ones.
            return not kwargs.get("dropout_p") and not any(isinstance(a, float) and a > 0 for a in args)
        self._num_products += op in PRODUCTS
        return op in PRODUCTS and self._num_products % 2 == 1


Results = list[_torch.DispatchMode | None]
"""For each matrix product and attention of a forward: torch's mode that returns the kept result, or None to compute it again."""


class _Mode(_torch.DispatchMode):
    """Base of `_Keep` and `_Give`, the dispatch modes of one recomputed region, which share the list `results`."""

    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's modes do, so that graphs compiled by the user run as they are


class _Keep(_Mode):
    """Dispatch mode of a region's forward: appends an entry to `results` for each matrix product and attention. The entry is
    torch's mode that returns the kept result in the recomputation. It is None if the result is not kept, and becomes None if a
    later operator writes into the result."""

    # Each kept result has its own pair of torch's modes for selective checkpointing. A single pair counts the operators of the
    # region, so it would fail if the recomputation gathers more or fewer inner units. It also misses some writes (GRU's views).

    def __init__(self, results: Results) -> None:
        super().__init__(results)
        self._choose = _Choice()
        self._entry_at: dict[int, int] = {}  # address of a kept result -> its entry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._entry_at and _torch.mutates(func):
            for address in _addresses((args, kwargs)):
                if address in self._entry_at:
                    self._results[self._entry_at.pop(address)] = None
        if func not in CANDIDATES:
            return func(*args, **kwargs)
        if not self._choose(func, args, kwargs):
            self._results.append(None)
            return func(*args, **kwargs)
        keep, give = create_selective_checkpoint_contexts([func])
        out = _torch.pass_hooks_by(keep).__torch_dispatch__(func, types, args, kwargs)
        self._entry_at.update(dict.fromkeys(_addresses(out), len(self._results)))
        self._results.append(give)
        return out


class _Give(_Mode):
    """Dispatch mode of a region's recomputation: returns each kept result once, and does not run its operator then. In a second
    backward (retain_graph) all operators run."""

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index, give = self._next, None
        if func in CANDIDATES:
            self._next += 1
            if index < len(self._results):
                give, self._results[index] = self._results[index], None
        if give is None:
            return func(*args, **(kwargs or {}))
        return give.__torch_dispatch__(func, types, args, kwargs or {})


def _addresses(tree: Any) -> list[int]:
    plain = [t for t in tensors_of(tree) if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    return [t.untyped_storage().data_ptr() for t in plain]


def _selective_contexts() -> Any:
    if torch.compiler.is_compiling():  # the compiler requires torch's modes; its graphs have no hooks or writes inside
        forward, again = _Choice(), _Choice()  # torch before 2.13 also asks in the recomputation

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            choose = again if ctx.is_recompute else forward
            return CheckpointPolicy.MUST_SAVE if choose(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)
    results: Results = []
    return _Keep(results), _Give(results)


OffloadInput = Callable[[Tensor], OffloadedInput]


def checkpoint_forward(module: nn.Module, how: ActivationCheckpointing, offload: OffloadInput | None = None) -> None:
    """Replace the forward of `module` by one that the backward recomputes. With gradients disabled it runs as before. With them
    enabled, transformers' caches of keys and values are not passed on, and the keyword argument `use_cache` becomes False.

    `how`: if `selective`, the results that `_Choice` chooses are kept. `offload`: called with the first input that has a
    `grad_fn`, usually the previous unit's output, and stores it until the recomputation; None to keep the input; not used in
    compiled code. The unit's hooks stay outside of the wrapper, so that the backward gathers the unit once.
    """
    instance_forward = module.__dict__.get("forward")  # assigned to the instance
    reference = weakref.ref(module)
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if how.selective else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        unit = reference()
        assert unit is not None, "a module's forward runs while the module lives"
        function = instance_forward if instance_forward is not None else partial(type(unit).forward, unit)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        options = {"use_reentrant": False, **contexts}
        kwargs = {key: NO_CACHES.get(key, value) if value is not None else None for key, value in kwargs.items()}
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, **options, **kwargs)
        return _checkpoint(function, offload, args, kwargs, options)

    module.__dict__["forward"] = forward


def _checkpoint(
    function: Callable[..., Any], offload: OffloadInput | None, args: Any, kwargs: Any, options: Any
) -> Any:
    """Return `function(*args, **kwargs)`, run by torch's `checkpoint` with `options`. `offload`, unless None, stores the first
    input with a `grad_fn`, if there is one, until the recomputation."""
    values = [*args, *kwargs.values()]
    index = next((i for i, v in enumerate(values) if isinstance(v, Tensor) and v.grad_fn is not None), None)
    if offload is None or index is None:
        # `checkpoint` saves the random states of devices of positional tensors only, so an empty tensor represents the others.
        example = next((v for v in kwargs.values() if isinstance(v, Tensor) and v.device.type != "cpu"), None)
        if example is None:
            return checkpoint(function, *args, **options, **kwargs)

        def after_example(_: Tensor, /, *rest: Any, **named: Any) -> Any:
            return function(*rest, **named)

        return checkpoint(after_example, example.new_empty(0), *args, **options, **kwargs)
    num, names, tensor = len(args), list(kwargs), values[index]  # `run` lives as long as the graph and has no input
    stored, values[index] = offload(tensor), None

    def run(*rest: Any) -> Any:
        inputs = [*rest[:index], stored.tensor(), *rest[index + 1 : -1]]
        return function(*inputs[:num], **dict(zip(names, inputs[num:], strict=True)))

    try:
        # The empty tensor makes checkpoint save the random state of its device.
        return checkpoint(run, *values, tensor.new_empty(0), **options)
    finally:
        stored.leave()
