"""Steps whose loss or gradients are NaN or inf: find the first unit that produced them, and decide if the run continues."""

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
    "it did not happen again when the step was repeated, so data and weights are not the cause: look for a faulty machine or a "
    "nondeterministic operation"
)


class Skips:
    """Counts skipped steps: all of them in `total`, and those with NaN or inf since the last finite step in `in_row`. Steps that
    the gradient scaler skips to lower its scale are in `total` only."""

    def __init__(self, most: int) -> None:
        """`most`: largest number of steps in a row that may be skipped; 0: the first nonfinite step ends the run."""
        self._most = most
        self.total, self.in_row = 0, 0

    def nonfinite(self, step: int, where: str) -> str:
        """Count a nonfinite step and return a line to report, with the text `where`. Raises `NonFiniteError` if there are more
        such steps in a row than allowed."""
        self.in_row += 1
        self.total += 1
        if not self._most:
            raise NonFiniteError(f"step {step}: {where} To skip such steps, set train.on_nonfinite skip.")
        if self.in_row > self._most:
            raise NonFiniteError(
                f"step {step} is not finite, nor are the {self._most} before it, the most that train.on_nonfinite allows: {where}"
            )
        return f"step {step} is skipped ({self.in_row} in a row, at most {self._most}): {where}"


def source_of(model: nn.Module, again: Callable[[Callable[[Tensor], Tensor]], object], figures: str) -> str | None:
    """Repeat a step, and return text that names where NaN or inf first appears; None if all values are finite this time. Equal on
    all ranks. Collective. `again(scale)`: repeats forwards and backwards with the random numbers of the step, and applies `scale`
    to each loss before its backward. `figures`: the step's loss and norm as text, with which the result begins."""
    engine = engine_of(model)
    assert engine is not None, "the main job shards its model"
    check = FiniteCheck(engine)
    engine.observers.attach(check)
    try:
        again(_finite_everywhere)
    except NonFiniteError as error:
        return f"{figures}; {error}"
    finally:
        engine.observers.detach(check)
    return None


def _finite_everywhere(loss: Tensor) -> Tensor:
    """Return `loss`. Raises `NonFiniteError` on every rank if the loss of any rank is NaN or inf. Collective."""
    losses: list[Tensor] = [torch.empty_like(loss.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    wrong = next((rank for rank, value in enumerate(losses) if not math.isfinite(float(value))), None)
    if wrong is not None:
        raise NonFiniteError(f"the model's outputs are finite and the loss is {float(losses[wrong])} on rank {wrong}.")
    return loss
