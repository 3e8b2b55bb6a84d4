"""The learning rate of each step: a cosine, a DeepSpeed schedule, or a scheduler of the user's."""

from __future__ import annotations

import math
from typing import Any, Protocol

from torch.optim import Optimizer

from accordion.compat.deepspeed import Schedule, Settings
from accordion.train.config import TrainConfig

LAST_LR = 0.1  # the cosine ends at this share of the peak


class LearningRates(Protocol):
    """Sets the rates of an optimizer. A step that was left out is no step of it."""

    def before(self, step: int) -> float:
        """Set the rate of step 1, 2, ... that is not left out, and return it."""
        ...

    def after(self) -> None:
        """A step was made."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        ...


class Prescribed:
    """Rates that the number of the step alone decides."""

    def __init__(self, optimizer: Optimizer, options: TrainConfig, schedule: Schedule | None) -> None:
        self._optimizer, self._options, self._schedule = optimizer, options, schedule

    def before(self, step: int) -> float:
        lr = lr_at(step, self._options, self._schedule)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def after(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}


class OfOptimizer:
    """The rates that an optimizer of the user's has, and its scheduler where there is one."""

    def __init__(self, optimizer: Optimizer, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler

    def before(self, step: int) -> float:
        return float(self._optimizer.param_groups[0].get("lr", 0.0))

    def after(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> dict[str, Any]:
        return {} if self._scheduler is None else {"scheduler": self._scheduler}


def rates_of(
    options: TrainConfig, optimizer: Optimizer, scheduler: Any, theirs: Settings | None, *, is_own: bool
) -> LearningRates:
    """`is_own`: the optimizer is the user's, whose rate stays as it was made unless `scheduler` changes it."""
    if is_own or scheduler is not None:
        return OfOptimizer(optimizer, scheduler)
    return Prescribed(optimizer, options, theirs.scheduler if theirs else None)


def lr_at(step: int, options: TrainConfig, schedule: Schedule | None = None) -> float:
    """The learning rate of step 1, 2, ...: that of `schedule`, else linear warmup, then a cosine down to a tenth."""
    if schedule is not None:
        return schedule.lr(step - 1, options.lr)
    if step <= options.warmup:
        return options.lr * step / options.warmup
    left = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, left))))
