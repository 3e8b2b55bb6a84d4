"""The learning rate of each step: from a schedule of `train.schedule`, of DeepSpeed, or from a user's scheduler."""

from __future__ import annotations

import inspect
import math
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from accordion.compat.deepspeed import Settings
from accordion.train.config import TrainConfig


class LearningRates:
    """Sets the learning rates of `optimizer`: call `before` before each step, and `after` after it. The rates are those of
    `scheduler` if it is not None, else of the scheduler of the DeepSpeed settings `theirs` if there is one, else of
    `train.schedule`. If that is "auto", rates of a user's own optimizer (`is_own`) stay."""

    def __init__(
        self, options: TrainConfig, optimizer: Optimizer, scheduler: Any, theirs: Settings | None, *, is_own: bool
    ) -> None:
        self._train, self._optimizer, self._scheduler = options, optimizer, scheduler
        self._schedule = None if theirs is None else theirs.scheduler
        self._is_fixed = scheduler is not None or (is_own and options.schedule == "auto")
        self._options = [
            {key: deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def before(self, step: int) -> float:
        """Set the rates of all groups for `step`, if they follow a schedule. Returns the rate of the first group, 0.0 if it has
        none. `step`: number of the step, from 1 on, without counting skipped steps."""
        if not self._is_fixed:
            for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
                first, theirs = float(options["lr"]), self._schedule
                group["lr"] = theirs.lr(step - 1, self._train.lr) if theirs else first * share_at(step, self._train)
        return float(self._optimizer.param_groups[0].get("lr", 0.0))

    def after(self) -> None:
        """Step the `scheduler`, if there is one. Call this after each step that was not skipped."""
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> dict[str, Any]:
        """Return name -> object with `state_dict`, for checkpoints; empty without a `scheduler`."""
        return {} if self._scheduler is None else {"scheduler": self._scheduler}

    def resume(self) -> None:
        """Set the options of the optimizer, such as weight decay, back to those of this run, after a checkpoint was loaded into
        it. Does nothing with a `scheduler`, since the loaded rates belong to its loaded state."""
        if self._scheduler is not None:
            return
        # Options are what a constructor takes. Groups may also have state, for example a count of steps.
        kinds = [kind for kind in type(self._optimizer).__mro__ if issubclass(kind, Optimizer)]
        takes = {name for kind in kinds for name in inspect.signature(kind).parameters}
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update({key: value for key, value in options.items() if key in takes})


def share_at(step: int, options: TrainConfig) -> float:
    """Return the fraction of the peak rate in step 1, 2, ...: linear warmup, then by `train.schedule`. With x = 0 at the end of
    the warmup, x = 1 at the last step, and f = `final_lr`: constant: 1; linear: `1 - (1 - f) x`; cosine and auto: `f + (1 - f)
    (1 + cos(pi x)) / 2`; wsd: 1, then linear from 1 to f in the last `decay_steps` steps (0: a fifth of all)."""
    if step <= options.warmup:
        return step / options.warmup
    done, left, final = step - options.warmup, max(1, options.steps - options.warmup), options.final_lr
    through = min(1.0, done / left)
    match options.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - (1 - final) * through
        case "wsd":
            last = min(options.decay_steps or max(1, options.steps // 5), left)
            return 1 - (1 - final) * min(1.0, max(0, step - (options.steps - last)) / last)
        case _:
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * through))
