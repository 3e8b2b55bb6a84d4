"""Experts of a model that may be spread over ranks: which modules hold them, and whether so many ranks share them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from accordion.errors import UsageError

ROUTED = 3  # arguments of their forward: tokens (n, width), and experts and weights of each, (n, k)
EVENLY = (
    "experts over {} ranks: every expert is assumed to get as many tokens as any other, none dropped and none padded; the rank "
    "that gets most sets the pace of all, and what it takes grows with that"
)


def experts_in(model: nn.Module) -> Mapping[str, nn.Module]:
    """By name, modules whose parameters have a matrix for each of `num_experts` experts, as transformers' mixtures have them."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or count < 2 or not any(p.dim() > 2 for p in own):
        return False
    if any(p.shape[:1] != (count,) for p in own) or len(own) != len(list(module.parameters())):
        return False
    return len(inspect.signature(module.forward).parameters) >= ROUTED


def check_experts(model: nn.Module, name: str, ranks: int) -> None:
    """Raises `UsageError` where so many ranks cannot share the experts of the model called `name`."""
    found = experts_in(model)
    if not found:
        raise UsageError(
            f"expert_parallel is {ranks}, and {name} has no experts that can be spread: modules with num_experts, and parameters "
            "with a matrix for each of them; leave it out."
        )
    for where, module in found.items():
        if module.num_experts % ranks:  # type: ignore[operator]
            raise UsageError(
                f"expert_parallel is {ranks}, which does not divide the {module.num_experts} experts of {where or name!r}; take "
                "a divisor."
            )
