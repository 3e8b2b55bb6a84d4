"""Find the modules of a model whose experts can be sharded over ranks, and check the number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from accordion.errors import UsageError

ROUTED = 3  # arguments of the experts' forward: tokens, (n, width); chosen experts and their weights, each (n, k)
EVENLY = (
    "experts over {} ranks: every expert is assumed to get equally many tokens, none dropped and none padded; the rank with the "
    "most tokens sets the pace of all, and its time and memory grow with its tokens"
)


def experts_in(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return name -> module for modules with `num_experts` and, in each parameter, one matrix for each expert."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    count, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or count < 2 or not any(p.dim() > 2 for p in parameters):
        return False
    if any(p.shape[:1] != (count,) for p in parameters) or len(parameters) != len(list(module.parameters())):
        return False
    return len(inspect.signature(module.forward).parameters) >= ROUTED


def check_experts(model: nn.Module, name: str, ranks: int) -> None:
    """Raise `UsageError` if the model called `name` has no experts, or if `ranks` does not divide their number."""
    modules = experts_in(model)
    if not modules:
        raise UsageError(
            f"expert_parallel is {ranks}, and {name} has no experts that can be spread over ranks (modules with num_experts "
            "and one matrix for each expert in each parameter); leave expert_parallel out."
        )
    for path, module in modules.items():
        if module.num_experts % ranks:  # type: ignore[operator]
            raise UsageError(
                f"expert_parallel is {ranks}, which does not divide the {module.num_experts} experts of {path or name!r}; take "
                "a divisor."
            )
