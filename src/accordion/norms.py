"""`log_norms`: norms of gradients and weights by unit or parameter, for a tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from accordion.errors import UsageError
from accordion.optimizers.grad_norm import norms
from accordion.optimizers.wrap import norm_parts, owned_by_id
from accordion.state import sharded_engine


def log_norms(model: nn.Module, *, by: Literal["unit", "parameter"] = "unit") -> dict[str, float]:
    """Return name -> norm for the gradients and the trained parameters of a sharded model, to log with any tracker.

    The names are "grad_norm", whose value equals the result of `clip_grad_norm_`; "grad_norm/" + name of a unit, for each unit,
    "(root)" for the model's own, "(not sharded)" for parameters in no unit; and "weight_norm" in the same way. Each value is
    the 2-norm of the unsharded model's tensors, equal on all ranks; NaN or inf if these have such elements. Frozen parameters
    are left out, and so are gradient norms if all the gradients are None. Call this after the backward, before `zero_grad`, and
    before `clip_grad_norm_` to see gradients that are not clipped. Gradients that `no_sync` has summed count after the backward
    that reduces them.

    Collective: one all-reduce of two numbers per unit. The host waits for the device and for optimizer steps in progress, so do
    not log every step. Offloaded gradients and parameters are read where they are.

    Args:
        by: "parameter" for norms of each parameter instead of each unit, named as in `named_parameters`.

    Raises:
        UsageError: if `model` is not sharded, or for another `by`.
    """
    engine = sharded_engine(model, "log_norms")
    if by not in ("unit", "parameter"):
        raise UsageError(f'log_norms takes by="unit" or by="parameter", not {by!r}.')
    engine.synchronize()
    owned = owned_by_id([engine])
    others = [p for p in model.parameters() if id(p) not in owned]
    # In the order of `clip_grad_norm_`, so that the sum of all rounds as there.
    groups: dict[str, list[nn.Parameter]] = {"": [*(param.sharded for _, param in owned.values()), *others]}
    if by == "unit":
        groups |= {f"/{unit.name or '(root)'}": [param.sharded for param in unit.params] for unit in engine.units}
        groups["/(not sharded)"] = others
    else:
        groups |= {f"/{name}": [p] for name, p in model.named_parameters()}
    trained = {name: [p for p in group if p.requires_grad] for name, group in groups.items()}
    trained = {name: group for name, group in trained.items() if group}
    values_of: tuple[Callable[[Tensor], Tensor | None], ...] = (lambda p: p.grad, Tensor.detach)
    rows = [norm_parts(group, owned, value_of) for group in trained.values() for value_of in values_of]
    values, result = norms(rows, 2.0, engine.context.device).tolist() if rows else [], {}
    for (name, group), grad_norm, weight_norm in zip(trained.items(), values[::2], values[1::2], strict=True):
        if any(p.grad is not None for p in group):
            result[f"grad_norm{name}"] = grad_norm
        result[f"weight_norm{name}"] = weight_norm
    return result
