"""Names of optimizers, schedulers and gradient scalers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from accordion._torch.dtensors import as_dtensor, local_of


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


class WholeVectors:
    """Mixin for `torch.optim.LBFGS` that computes with full vectors, equal on every rank.

    DTensor cannot flatten rows that do not divide by the ranks. The overridden methods have no public name (2.11 to 2.15).
    """

    _params: list[Tensor]

    def _gather_flat_grad(self) -> Tensor:
        return torch.cat([_whole(p, p.grad).flatten() for p in self._params])

    def _add_grad(self, step_size: Any, vector: Tensor) -> None:
        chunks = vector.split([p.numel() for p in self._params])
        for p, chunk in zip(self._params, chunks, strict=True):
            change = chunk.view(p.shape)
            if isinstance(p, DTensor):
                rows = distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None)
                assert local_of(rows).shape == local_of(p).shape, "each rank has the rows of distribute_tensor"
                change = as_dtensor(local_of(rows).to(local_of(p).device), p)
            p.add_(change, alpha=step_size)


def _whole(p: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    if not isinstance(grad, DTensor):
        return grad
    # The rows may be on the host, where the mesh does not communicate.
    rows = local_of(grad).to(grad.device_mesh.device_type)
    return as_dtensor(rows, grad).full_tensor()


def has_counted_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scheduler has replaced `optimizer.step` on the instance, to count steps (all versions)."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Replace `optimizer.step` on the instance as a scheduler does, for an optimizer whose class has changed since."""
    owner = ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        instance: Any = owner()
        instance._opt_called = True
        return type(instance).step(instance, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step
