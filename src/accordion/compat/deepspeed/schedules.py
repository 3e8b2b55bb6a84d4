"""DeepSpeed's learning rate schedules as functions of the step, and as schedulers of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accordion.errors import UsageError, nearest

WARMUP = ("warmup_num_steps", "warmup_type")
TAKES: Mapping[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *WARMUP),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule of a `ds_config.json`. Call it with an optimizer to create a scheduler of torch. Rates are
    DeepSpeed's, step for step: the first two steps both count as the beginning of the warmup. The constructor raises `UsageError`
    for a type or parameter that is not supported, and if a type that needs `total_num_steps` lacks it."""

    type: str
    params: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.type not in TAKES:
            raise UsageError(
                f"scheduler.type {self.type!r} is not supported; {nearest(str(self.type), dict.fromkeys(TAKES))}"
            )
        for name in self.params:
            if name not in TAKES[self.type]:
                raise UsageError(
                    f"scheduler.params.{name} is not a parameter of {self.type}; {nearest(name, list(TAKES[self.type]))}"
                )
        if "total_num_steps" in TAKES[self.type] and "total_num_steps" not in self.params:
            raise UsageError(f"{self.type} needs scheduler.params.total_num_steps; add it.")

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Return a scheduler of torch that has set the first rates of `optimizer`. Step it after each optimizer step."""
        return Scheduled(optimizer, self)

    @property
    def warmup(self) -> int:
        """Number of warmup steps, at least 2."""
        return max(2, int(self.params.get("warmup_num_steps", 1000)))

    def lr(self, done: int, first_rate: float) -> float:
        """Return the learning rate after `done` steps for a parameter group whose rate in the optimizer was `first_rate`."""
        at = done - 1
        if at < 0:
            rise = 0.0
        elif at >= self.warmup:
            rise = 1.0
        elif self.params.get("warmup_type", "log") == "log":
            rise = math.log(at + 1) / math.log(self.warmup)
        else:
            rise = at / self.warmup
        if self.type == "WarmupCosineLR":
            if at < self.warmup:
                first = float(self.params.get("warmup_min_ratio", 0.0))
                return first_rate * (first + (1 - first) * rise) if at >= 0 else 0.0
            last = float(self.params.get("cos_min_ratio", 1e-4))
            along = min(1.0, (at - self.warmup + 1) / max(1, self.params["total_num_steps"] - self.warmup))
            return first_rate * (last + (1 - last) * (1 + math.cos(math.pi * along)) / 2)
        least = float(self.params.get("warmup_min_lr", 0.0))
        most = float(self.params.get("warmup_max_lr", first_rate if self.type == "WarmupLR" else 1e-3))
        if at >= self.warmup and self.type == "WarmupDecayLR":
            total = int(self.params["total_num_steps"])
            rise = max(0.0, (total - at) / max(1.0, total - self.warmup))
        return least + (most - least) * rise


class Scheduled(LRScheduler):
    """A scheduler of torch that sets the rates of a `Schedule` for one optimizer."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule) -> None:
        self._schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        first_rates = [float(lr) for lr in self.base_lrs]
        if self._schedule.type == "WarmupLR":  # all groups warm up to the rate of the first one
            first_rates = [first_rates[0]] * len(first_rates)
        return [self._schedule.lr(self.last_epoch, lr) for lr in first_rates]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_schedule"}
