"""How many floating point operations an operator takes: torch's counts, and matrix products that torch counts as none."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from accordion import _torch

GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")
GROUPED_BACKWARD = "grouped_mm_fallback_backward"


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Two for each product of two numbers; 0 for what has none."""
    name = func._schema.name.partition("::")[2]
    if name in GROUPED:
        return _grouped(args[0], args[1])
    if name == GROUPED_BACKWARD:  # as many for each of the two gradients
        return 2 * _grouped(args[0], args[1])
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
    if flops and "attention" in name and _torch.argument_of(func, "is_causal", args, kwargs):
        flops /= 2  # torch counts it whole
    return flops


def _grouped(left: Any, right: Any) -> float:
    """Of experts: where one side is 2-D its rows, or columns, are dealt out to the groups of the other, and so each is used once.

    (rows, k) x (groups, k, n), (groups, m, k) x (k, columns), (m, rows) x (rows, n), (groups, m, k) x (groups, k, n).
    """
    if left.dim() == 3 and right.dim() == 2:
        return float(2 * right.numel() * left.shape[-2])
    return float(2 * left.numel() * right.shape[-1])
