"""Names of optimizers, schedulers and gradient scalers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def settle_before_unscale() -> None:
    """Make `torch.amp.GradScaler.unscale_` correct for gradients offloaded to the host; further calls change nothing.

    torch copies the scale to pinned memory without waiting, and the CPU kernel reads it at once (2.11 to 2.15), so gradients
    are multiplied by a random value. The handler that this registers waits for the copy before the kernel.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handler = handlers[operator]
    if getattr(handler, "func", None) is not _unscale_settled:
        handlers[operator] = partial(_unscale_settled, handler)


def _unscale_settled(unscale: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # `args`: gradients, overflow flag and scale; the last two are on the device of the gradients' local tensors. Only offloaded
    # gradients have local tensors on the host and a mesh of accelerators.
    grads: Sequence[DTensor] = args[0]
    if args[2].device.type == "cpu" and any(grad.device_mesh.device_type != "cpu" for grad in grads):
        torch.accelerator.current_stream().synchronize()
    return unscale(operator, args, kwargs)


def hooks_after_any_step() -> list[Any]:
    """Return the hooks that torch calls after the step of every optimizer. No public name."""
    from torch.optim import optimizer

    return list(optimizer._global_optimizer_post_hooks.values())


def has_counted_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scheduler has replaced `optimizer.step` on the instance, to count steps (all versions)."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def counts_itself(step: Callable[..., Any]) -> None:
    """Mark a method `step` that calls `count_step`, so that schedulers do not replace it (all versions)."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Count a step, which schedulers expect before their own, or they warn (all versions)."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
