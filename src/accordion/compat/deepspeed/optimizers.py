"""Translate the optimizer of a DeepSpeed configuration to a class of torch.optim and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from accordion.errors import UsageError, nearest

REFUSED = ("lamb", "lion", "muon", "onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")
"""Optimizers of DeepSpeed that torch.optim lacks, or steps otherwise."""
OURS = ("torch_adam", "adam_w_mode", "bias_correction", "max_grad_norm")


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
        """Weight decay in `params`, or else the default of `cls`; 0 if `cls` takes no weight decay."""
        return self._number("weight_decay")

    def _number(self, name: str) -> float:
        takes = inspect.signature(self.cls).parameters
        return float(self.params.get(name, takes[name].default if name in takes else 0.0))

    def __call__(self, params: Iterable[Any]) -> Optimizer:
        """Return the optimizer over `params`, without applying `accordion.wrap_optimizer`."""
        return self.cls(params, **self.params)


def optimizer_of(name: Any, params: dict[str, Any]) -> OptimizerChoice:
    """Return the optimizer class and its arguments for the section `optimizer` of a configuration. `name`, `params`: the values
    of the section's keys `type` and `params`; the dict `params` is changed. Raises `UsageError` if `name` is no text, if
    torch.optim lacks the optimizer or steps it otherwise than DeepSpeed, or if it lacks an argument in `params`."""
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
