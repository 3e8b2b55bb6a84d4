"""Steps whose loss or gradients are NaN or inf: where that came up first, and whether the run goes on without them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion.engine.hooks import engine_of
from accordion.errors import NonFiniteError
from accordion.safety.finite import FiniteCheck

FLEETING = (
    "it did not come up when the step was done again, so it is no matter of data or weights: look for a faulty machine or an "
    "operation that is not deterministic"
)


class Skips:
    """Owns how many steps of a run were left out: in all, and the last ones in a row that no gradient scale explains."""

    def __init__(self, most: int) -> None:
        """`most`: steps in a row that may be left out; 0: the first one that is not finite ends the run."""
        self._most = most
        self.total, self._in_row = 0, 0

    def passed(self) -> None:
        """A step was finite."""
        self._in_row = 0

    def overflowed(self) -> None:
        """A step's gradients were too large for their scale, which is the gradient scaler's business."""
        self.total += 1

    def found(self, step: int, where: str) -> str:
        """A step was not finite in itself. What to say of it; raises `NonFiniteError` where the run ends."""
        self._in_row += 1
        self.total += 1
        if not self._most:
            raise NonFiniteError(f"step {step}: {where} train.on_nonfinite skip leaves such steps out.")
        if self._in_row > self._most:
            raise NonFiniteError(
                f"step {step} is not finite, as the {self._most} before it, which is what train.on_nonfinite allows: {where}"
            )
        return f"step {step} is left out ({self._in_row} in a row, at most {self._most}): {where}"


def came_up_in(model: nn.Module, again: Callable[[Callable[[Tensor], Tensor]], object], found: str) -> str | None:
    """Do a step's forwards and backwards again, looking into each unit. By all ranks together; the same on all.

    `again(scale)`: does them, each loss going through `scale` on its way into the backward; it must draw the random numbers
    that the step drew. `found`: what was not finite. Returns where it came up first, or None where all is finite now.
    """
    engine = engine_of(model)
    assert engine is not None, "the main job shards its model"
    check = FiniteCheck(engine)
    engine.observers.attach(check)
    try:
        again(_finite_everywhere)
    except NonFiniteError as error:
        return f"{found}; {error}"
    finally:
        engine.observers.detach(check)
    return None


def _finite_everywhere(loss: Tensor) -> Tensor:
    """`loss` as it is. Raises `NonFiniteError` on every rank where it is NaN or inf on one; what the model returned was not."""
    held: list[Tensor] = [torch.empty_like(loss.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(held, loss.detach())
    wrong = next((rank for rank, value in enumerate(held) if not math.isfinite(float(value))), None)
    if wrong is not None:
        raise NonFiniteError(f"the model's outputs are finite and the loss is {float(held[wrong])} on rank {wrong}.")
    return loss
