"""`log_norms`: norms of gradients and weights by unit or parameter, for a tracker."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from accordion.errors import UsageError
from accordion.optimizers.grad_norm import norms
from accordion.optimizers.wrap import norm_parts
from accordion.state import sharded_engine


def log_norms(model: nn.Module, *, by: Literal["unit", "parameter"] = "unit") -> dict[str, float]:
    """Return the norms of the gradients and of the trained parameters of a sharded model, as numbers for any tracker.

    Call this after the backward, before `zero_grad`, and before `clip_grad_norm_` to see gradients that are not clipped. Each
    number is the 2-norm over the rows of all ranks, as of the unsharded model, and the same on all ranks: "grad_norm", which
    equals the result of `clip_grad_norm_`; "grad_norm/" + name of a unit; and "weight_norm" in the same way. If gradients have
    NaN or inf, the numbers of their units have too. Frozen parameters are left out, and "grad_norm/" + name if there is no
    gradient. Gradients that `no_sync` has summed count after the backward that reduces them.

    Collective: one all-reduce of a few numbers per unit. The host waits for the device, and for optimizer steps in progress;
    offloaded parameters are read where they are. To log every 50 steps costs less than to log each.

    Args:
        by: "parameter" for a number for each parameter instead, named as in `named_parameters`.

    Raises:
        UsageError: if `model` is not sharded, or for another `by`.
    """
    engine = sharded_engine(model, "log_norms")
    if by not in ("unit", "parameter"):
        raise UsageError(f'log_norms takes by="unit" or by="parameter", not {by!r}.')
    engine.synchronize()
    owned = {id(param.sharded): param for param in engine.params}
    names = {id(p): name for name, p in model.named_parameters()}
    whole = [p for p in model.parameters() if id(p) not in owned]
    # In the order of `clip_grad_norm_`, so that the sums are rounded in the same way.
    groups: dict[str, list[Tensor]] = {"": [*(param.sharded for param in engine.params), *whole]}
    if by == "unit":
        groups |= {f"/{unit.name or '(root)'}": [param.sharded for param in unit.params] for unit in engine.units}
        groups["/(not sharded)"] = whole
    else:
        groups |= {f"/{names[id(p)]}": [p] for p in groups[""]}
    groups = {name: [p for p in params if p.requires_grad] for name, params in groups.items()}
    groups = {name: params for name, params in groups.items() if params}
    rows = []
    for params in groups.values():
        pairs = [(engine, owned[id(p)]) for p in params if id(p) in owned]
        others = [p for p in params if id(p) not in owned]
        rows += [norm_parts(pairs, others, _grad), norm_parts(pairs, others, Tensor.detach)]
    values = norms(rows, 2.0, engine.context.device).tolist() if rows else []
    result = {}
    for (name, params), grad_norm, weight_norm in zip(groups.items(), values[::2], values[1::2], strict=True):
        if any(p.grad is not None for p in params):
            result[f"grad_norm{name}"] = grad_norm
        result[f"weight_norm{name}"] = weight_norm
    return result


def _grad(param: Tensor) -> Tensor | None:
    return param.grad
