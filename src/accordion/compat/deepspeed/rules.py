"""DeepSpeed's rules: its optimizers as classes of torch.optim, its learning rate schedules, and its loss scaling under fp16."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accordion.errors import AccordionError, UsageError, nearest

REFUSED = ("lamb", "lion", "muon", "onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")
"""Optimizers of DeepSpeed that torch.optim lacks, or steps otherwise."""
OURS = ("torch_adam", "adam_w_mode", "bias_correction", "max_grad_norm")
WARMUP = ("warmup_num_steps", "warmup_type")
TAKES: Mapping[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *WARMUP),
}


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """A class of torch.optim and its arguments. Call it with parameters, after `shard`, to create the optimizer."""

    cls: type[Optimizer]
    params: Mapping[str, Any]

    @property
    def lr(self) -> float:
        return self._number("lr")

    @property
    def weight_decay(self) -> float:
        """Weight decay in `params`; if not there, the default of `cls`, or 0 if `cls` has no weight decay."""
        return self._number("weight_decay")

    def _number(self, name: str) -> float:
        takes = inspect.signature(self.cls).parameters
        return float(self.params.get(name, takes[name].default if name in takes else 0.0))

    def __call__(self, params: Iterable[Any]) -> Optimizer:
        """Create and return the optimizer over `params`. Does not apply `accordion.wrap_optimizer`."""
        return self.cls(params, **self.params)


def optimizer_of(name: Any, params: dict[str, Any]) -> OptimizerChoice:
    """Return the optimizer class and its arguments for the section `optimizer` of a configuration. `name`, `params`: the values
    of the section's keys `type` and `params`; the dict `params` is changed. Raises `UsageError` if `name` is no text, if
    torch.optim lacks that optimizer or steps it otherwise than DeepSpeed, or if it does not take an argument in `params`."""
    if not isinstance(name, str):
        raise UsageError(f"optimizer.type is {name!r}; it takes a name, AdamW for example.")
    ours = {key: params.pop(key) for key in OURS if key in params}
    kinds = {key: value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    classes = {key: kind for key, kind in kinds.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
    natively = {"adam": "AdamW" if ours.get("adam_w_mode", True) else "Adam", "adamw": "AdamW", "adagrad": "Adagrad"}
    cls = classes.get(natively.get(name.lower(), name))  # DeepSpeed ignores case in its own names only
    if name.lower() in REFUSED or cls is None:
        raise UsageError(
            f"optimizer.type {name!r} is not supported: torch.optim lacks it, or steps it otherwise than DeepSpeed. Name a class "
            f"of torch.optim, or leave the optimizer out of the file and create your own; {nearest(name, list(classes))}"
        )
    if name.lower() in ("adam", "adamw"):
        params.setdefault("fused", True)
        if not ours.get("torch_adam", False):
            params.setdefault("weight_decay", 0.0)
    takes = [key for key in inspect.signature(cls).parameters if key != "params"]
    for key in params:
        if key not in takes:
            raise UsageError(f"optimizer.params.{key} is not an argument of {cls.__name__}; {nearest(key, takes)}")
    return OptimizerChoice(cls, {key: tuple(v) if isinstance(v, list) else v for key, v in params.items()})


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule of a `ds_config.json`. Call it with an optimizer to create a scheduler of torch. Rates are
    DeepSpeed's, step for step: the first two steps both count as the beginning of the warmup. The constructor raises
    `UsageError` for a type or parameter that is not supported, and if a type that needs `total_num_steps` lacks it."""

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
        """Return a scheduler of torch, which sets the first rates of `optimizer` at once. Step it after each optimizer step."""
        return Scheduled(optimizer, self)

    @property
    def warmup(self) -> int:
        """Number of warmup steps, at least 2."""
        return max(2, int(self.params.get("warmup_num_steps", 1000)))

    def lr(self, done: int, first_rate: float) -> float:
        """Return the learning rate after `done` steps for a param group whose rate in the optimizer was `first_rate`."""
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


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with DeepSpeed's fixed and least scale. `fp16`: that section of a `ds_config.json`; {}: off."""

    def __init__(self, fp16: Mapping[str, Any], device_type: str) -> None:
        self._fixed = float(fp16.get("loss_scale", 0)) or None
        self._least = float(fp16.get("min_loss_scale", 1))
        super().__init__(
            device_type,
            init_scale=self._fixed or 2.0 ** fp16.get("initial_scale_power", 16),
            growth_interval=fp16.get("loss_scale_window", 1000),
            enabled=fp16.get("enabled", False),
        )

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale after a step, not below `min_loss_scale`; a fixed scale stays. `new_scale`: set this scale instead.
        Raises `AccordionError`, on all ranks, if gradients overflow at `min_loss_scale`, unless the scale is fixed."""
        before = self.get_scale()
        super().update(self._fixed if new_scale is None else new_scale)
        if not self.is_enabled() or new_scale is not None or self.get_scale() >= min(before, self._least):
            return
        if before <= self._least:
            raise AccordionError(
                f"gradients overflow at the least loss scale, {before}. Lower the learning rate, or train in bf16."
            )
        super().update(self._least)
