"""Functions around private names of optimizers, learning rate schedulers and gradient scalers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def settle_before_unscale() -> None:
    """Make `torch.amp.GradScaler.unscale_`, in this process, wait until the scale has been copied to the host for offloaded
    gradients. torch does not wait, and its CPU kernel may read a wrong scale (2.11 to 2.15). Further calls change nothing."""
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
    """Return the functions that torch calls after each step of any optimizer in this process. No public name."""
    from torch.optim import optimizer

    return list(optimizer._global_optimizer_post_hooks.values())


def has_counted_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a learning rate scheduler has wrapped `optimizer.step` on the instance, to count steps."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def counts_itself(step: Callable[..., Any]) -> None:
    """Mark the function `step` of an optimizer so that learning rate schedulers do not wrap it; it must call `count_step`."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Record that `optimizer` has stepped; otherwise a learning rate scheduler warns at its own first step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def muon_rate(lr: float | Tensor, adjust_lr_fn: str | None, shape: Sequence[int]) -> float | Tensor:
    """Return the learning rate that torch.optim.Muon uses for a matrix of `shape`; no public name (2.11 to 2.15)."""
    from torch.optim import _muon

    rate: float | Tensor = _muon._adjust_lr(lr, adjust_lr_fn, torch.Size(shape))  # type: ignore[arg-type]
    return rate
