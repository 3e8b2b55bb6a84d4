"""Apply an `auto_wrap_policy`: wrap the submodules that it chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accordion import _torch
from accordion.errors import UsageError


def auto_wrap(root: nn.Module, policy: Any, arguments: dict[str, Any], wrap: Callable[..., nn.Module]) -> None:
    """Replace the submodules of `root` that `policy` chooses by `wrap(submodule, **arguments)`, children before parents.
    `policy`: a function (module=, recurse=, nonwrapped_numel=) -> bool, or a policy object of torch. If `arguments` ask for mixed
    precision, batch norms are wrapped too, without mixed precision, as in torch. Raises `UsageError` for another `policy`."""
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
        """Add the modules in `module` that `policy` chooses to `targets`, children first. Return the number of parameter elements
        in the chosen ones."""
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
