"""Apply an auto wrap policy to the modules inside the one that is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.tree import map_tensors
from accordion.errors import UsageError

Wrap = Callable[..., nn.Module]
"""(module, **arguments of the wrapper) -> wrapped module."""


def auto_wrap(root: nn.Module, policy: Any, arguments: dict[str, Any], wrap: Wrap) -> None:
    """Wrap the modules inside `root` that `policy` chooses, in place, children before parents.

    `policy`: a function (module=, recurse=, nonwrapped_numel=) -> bool, or a policy object of torch. With mixed precision, batch
    norms become units that compute in float32, as in torch.
    """
    mixed = arguments.get("mixed_precision")
    exempt = () if mixed is None else tuple(_torch.classes_without_mixed_precision(mixed))
    if _torch.is_wrap_policy(policy):
        targets = _torch.run_wrap_policy(policy, root, arguments)
    elif callable(policy):
        targets = _by_function(root, policy, arguments)
    else:
        raise UsageError(
            f"auto_wrap_policy is {policy!r}; it takes a policy of accordion.compat.fsdp1.wrap or a function."
        )
    for module in root.modules():
        if exempt and isinstance(module, exempt):
            targets[module] = {**arguments, "mixed_precision": None}
            compute_in_float32(module)
    targets.pop(root, None)
    wrapped: dict[int, nn.Module] = {}
    for parent in list(root.modules())[::-1]:
        for name, child in list(parent._modules.items()):
            if child is not None and child in targets:
                if id(child) not in wrapped:
                    wrapped[id(child)] = wrap(child, **targets[child])
                parent._modules[name] = wrapped[id(child)]


def _by_function(
    root: nn.Module, policy: Callable[..., bool], arguments: dict[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    ignored = {id(p) for p in arguments["ignored_states"]}
    targets: dict[nn.Module, dict[str, Any]] = {}

    def visit(module: nn.Module) -> int:
        """Choose wrappers in `module`, children first. Return how many elements of its parameters are in chosen wrappers."""
        num_elements = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=num_elements):
            return 0
        inside = sum(visit(child) for child in module.children())
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=num_elements - inside):
            targets[module] = arguments
            return num_elements
        return inside

    visit(root)
    return targets


def compute_in_float32(module: nn.Module) -> None:
    """Register hooks that cast floating inputs of `module` to float32, and outputs back to the dtype of the first input."""
    first_dtypes: list[torch.dtype | None] = []

    def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes: list[torch.dtype] = []

        def cast(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            dtypes.append(tensor.dtype)
            return tensor.float()

        cast_args, cast_kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
        first_dtypes.append(dtypes[0] if dtypes else None)
        return cast_args, cast_kwargs

    def narrow(_: nn.Module, __: Any, output: Any) -> Any:
        dtype = first_dtypes.pop()
        return map_tensors(lambda t: t.to(dtype) if dtype is not None and t.is_floating_point() else t, output)

    module.register_forward_pre_hook(widen, with_kwargs=True)
    module.register_forward_hook(narrow)
