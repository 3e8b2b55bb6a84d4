"""Activation checkpointing of units: recompute all of a unit's activations, or all but matrix products and attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accordion import _torch
from accordion.config import ActivationCheckpointing
from accordion.engine.tree import tensors_of

_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
ATTENTION = tuple(
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_attention_math",
    )
    if hasattr(_aten, name)
)
KEPT = {*PRODUCTS, *ATTENTION}


class _Choice:
    """Keeps attention and every other matrix product: called with the products of one forward in their order."""

    def __init__(self) -> None:
        self._num_products = 0

    def __call__(self, op: Any, args: Any, kwargs: Any) -> bool:
        if op in ATTENTION:
            # A kept result draws no random numbers in the recomputation, and what drops after it would drop others.
            return not kwargs.get("dropout_p") and not any(isinstance(a, float) and a > 0 for a in args)
        self._num_products += op in PRODUCTS
        return op in PRODUCTS and self._num_products % 2 == 1


Kept = list[_torch.DispatchMode | None]
"""An entry a product or attention: torch's own mode that gives the kept result, None where it is computed again."""


class _Mode(_torch.DispatchMode):
    """A mode around a recomputed region; the one of its forward and that of its recomputation share `kept`."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs that the user has compiled run as they are, as under torch's modes."""
        return True


class _Keep(_Mode):
    """The forward of a recomputed region: fills `kept`, and forgets what is written into afterwards.

    torch's own modes count every operator and refuse more of one than the forward had, but the units inside gather what is
    not gathered yet, another number each time. They also miss writes through views that count for themselves: the native GRU
    writes so into its products. So each kept result has a pair of torch's modes for itself, and nothing else meets them.
    """

    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        self._choose = _Choice()
        self._at: dict[int, int] = {}  # address of a kept result -> its entry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._at and _torch.mutates(func):
            for address in _addresses((args, kwargs)):
                if address in self._at:
                    self._kept[self._at.pop(address)] = None
        if func not in KEPT:
            return func(*args, **kwargs)
        if not self._choose(func, args, kwargs):
            self._kept.append(None)
            return func(*args, **kwargs)
        keep, give = create_selective_checkpoint_contexts([func])
        out = _torch.pass_hooks_by(keep).__torch_dispatch__(func, types, args, kwargs)
        self._at.update(dict.fromkeys(_addresses(out), len(self._kept)))
        self._kept.append(give)
        return out


class _Give(_Mode):
    """A recomputation: gives what is kept, once; a second backward (retain_graph) computes it."""

    def __enter__(self) -> Any:
        self._next = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at, give = self._next, None
        if func in KEPT:
            self._next += 1
            if at < len(self._kept):
                give, self._kept[at] = self._kept[at], None
        if give is None:
            return func(*args, **(kwargs or {}))
        return give.__torch_dispatch__(func, types, args, kwargs or {})


def _addresses(tree: Any) -> list[int]:
    """Of the memory of the plain tensors in a tree."""
    plain = [t for t in tensors_of(tree) if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    return [t.untyped_storage().data_ptr() for t in plain]


def _selective_contexts() -> Any:
    if (
        torch.compiler.is_compiling()
    ):  # the compiler asks for torch's own modes, and has neither hooks nor writes inside
        forward, again = _Choice(), _Choice()  # torch before 2.13 asks in the recomputation too

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            choose = again if ctx.is_recompute else forward
            return CheckpointPolicy.MUST_SAVE if choose(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)
    kept: Kept = []
    return _Keep(kept), _Give(kept)


def _without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers' decoders fill a cache of keys in training too, and a recomputation would fill it a second time."""
    off: dict[str, Any] = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}
    return {key: off.get(key, value) if value is not None else None for key, value in kwargs.items()}


class Waits(Protocol):
    """An input that waits elsewhere for its recomputation: `leave` says that the forward has ended."""

    def tensor(self) -> Tensor: ...
    def leave(self) -> None: ...


OffloadInput = Callable[[Tensor], Waits]


def checkpoint_forward(module: nn.Module, how: ActivationCheckpointing, offload: OffloadInput | None = None) -> None:
    """Recompute `module` in the backward. Only its `forward` is wrapped, inside the unit's hooks: the unit is gathered once.

    `offload`: takes the input that the unit before made, by convention the first with a gradient, and brings it back.
    """
    own = module.__dict__.get("forward")  # a forward that somebody put on the instance
    reference = weakref.ref(module)
    contexts: dict[str, Any] = {"context_fn": _selective_contexts} if how.selective else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        unit = reference()
        assert unit is not None, "a module's forward runs while the module lives"
        function = own if own is not None else partial(type(unit).forward, unit)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        options = {"use_reentrant": False, **contexts}
        kwargs = _without_caches(kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, **options, **kwargs)
        if offload is None:
            return _checkpoint(function, args, kwargs, options)
        return _checkpoint_offloaded(function, offload, args, kwargs, options)

    module.__dict__["forward"] = forward


def _checkpoint(function: Callable[..., Any], args: Any, kwargs: Any, options: Any) -> Any:
    """`checkpoint`, which keeps the state of the random generator of devices on which it sees tensors given by position."""
    seen = next((v for v in kwargs.values() if isinstance(v, Tensor) and v.device.type != "cpu"), None)
    if seen is None:
        return checkpoint(function, *args, **options, **kwargs)

    def run(_: Tensor, /, *rest: Any, **named: Any) -> Any:
        return function(*rest, **named)

    return checkpoint(run, seen.new_empty(0), *args, **options, **kwargs)


def _checkpoint_offloaded(
    function: Callable[..., Any], offload: OffloadInput, args: Any, kwargs: Any, options: Any
) -> Any:
    """`checkpoint` of `function`, whose first input that has a gradient to pass on waits elsewhere."""
    given = [*args, *kwargs.values()]
    which = next((i for i, v in enumerate(given) if isinstance(v, Tensor) and v.grad_fn is not None), None)
    if which is None:
        return _checkpoint(function, args, kwargs, options)
    num, names, tensor = len(args), list(kwargs), given[which]  # `run` lives as long as the graph, and holds no input
    waits, given[which] = offload(tensor), None

    def run(*rest: Any) -> Any:
        values = [*rest[:which], waits.tensor(), *rest[which + 1 : -1]]
        return function(*values[:num], **dict(zip(names, values[num:], strict=True)))

    try:
        # Of all devices on which it sees tensors it keeps the state of the random generator.
        return checkpoint(run, *given, tensor.new_empty(0), **options)
    finally:
        waits.leave()
